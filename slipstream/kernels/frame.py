"""What a decode frame does around the target's pass, one launch each: pack the rows; close the round.

Slot state is int64, S slots (slot 0 is the sink); see device/state.py for the fields. Slots of one call are distinct
but for the sink. The references are the definition; a frame on the CPU calls them, without the op around them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.sampling.rng import PURPOSE_ACCEPT, PURPOSE_SYNTHETIC, coin
from slipstream.types import NO_TOKEN, RECORD_COLUMNS, FinishCode, VerifyMode

OP = "slipstream::"

MAX_PACK_SLOTS = 1024
"""Most slots of `pack_rows` on a GPU: each program counts the rows of all slots by itself."""

Packed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def packed_rows(
    active_S: Tensor, committed_S: Tensor, draft_count_S: Tensor, pending_SW: Tensor, slot_B: Tensor, rows: int,
    width: int,
) -> Packed:  # fmt: skip
    """slot, position, token, owner [R]; rows [B]; row of each grid cell [B, W]: at most `rows` rows in slot order.

    Every active slot gets its bonus row, then drafts while there is room. What is left out depends on how many
    drafts there are, never on which tokens they are, so truncation cannot bias the output. Rows that are left over
    stand at slot 0, position 0, and belong to the last owner. Cells past a slot's rows name its last row; a lone
    slot's cells are its rows in order.
    """
    device, slots = slot_B.device, slot_B.shape[0]
    active_B = active_S[slot_B]
    extra_B = draft_count_S[slot_B].clamp(max=width - 1) * active_B
    room_B = rows - active_B.sum() - (extra_B.cumsum(0) - extra_B)
    rows_B = active_B + torch.minimum(room_B.clamp(min=0), extra_B)
    end_B = rows_B.cumsum(0)
    start_B = end_B - rows_B
    row_R = torch.arange(rows, device=device)
    owner_R = torch.searchsorted(end_B, row_R, right=True).clamp(max=slots - 1)
    live_R = row_R < end_B[-1]
    depth_R = torch.where(live_R, row_R - start_B[owner_R], 0)
    slot_R = torch.where(live_R, slot_B[owner_R], 0)
    pos_R = torch.where(live_R, committed_S[slot_B][owner_R] + depth_R, 0)
    token_R = torch.where(live_R, pending_SW[slot_R, depth_R], 0)
    if slots == 1 and rows == width:
        return slot_R, pos_R, token_R, owner_R, rows_B, torch.arange(width, device=device).view(1, -1)
    depth_W = torch.arange(width, device=device)
    last_B1 = (rows_B - 1).clamp(min=0)[:, None]
    row_of_BW = (start_B[:, None] + torch.minimum(depth_W, last_B1)).clamp(max=rows - 1)
    return slot_R, pos_R, token_R, owner_R, rows_B, row_of_BW


def closed_round(
    token_BW: Tensor, accepted_B: Tensor, n_emitted_B: Tensor, rows_B: Tensor, slot_B: Tensor, generation_S: Tensor,
    active_S: Tensor, committed_S: Tensor, max_len_S: Tensor, stop_ids_ST: Tensor, history_SL: Tensor,
    pending_SW: Tensor,
) -> Tensor:  # fmt: skip
    """Finish test and commit of a verdict; the frame's record [B, RECORD_COLUMNS + W], next drafts 0.

    Cuts at the earliest stop token or at max_len. Tokens go to history behind the committed length, the last of them
    to pending[:, 0]; committed grows, an ended slot's active becomes 0. The record's tokens stand uncut.
    NO_TOKEN ends a slot before it.
    """
    width = token_BW.shape[1]
    base_B = committed_S[slot_B]
    depth_W = torch.arange(width, device=slot_B.device)
    none_BW = token_BW == NO_TOKEN
    stop_BW = (token_BW[:, :, None] == stop_ids_ST[slot_B][:, None, :]).any(2) & ~none_BW
    full_BW = base_B[:, None] + depth_W + 2 >= max_len_S[slot_B][:, None]
    end_BW = (stop_BW | full_BW | none_BW) & (depth_W < n_emitted_B[:, None])
    cut_B = torch.where(end_BW, depth_W, width).amin(1)
    ended_B = cut_B < width
    at_B1 = cut_B.clamp(max=width - 1)[:, None]
    code_B = torch.where(stop_BW.gather(1, at_B1)[:, 0], int(FinishCode.STOP), int(FinishCode.LENGTH))
    none_B = none_BW.gather(1, at_B1)[:, 0]
    code_B = torch.where(none_B, int(FinishCode.INVALID), code_B)
    finish_B = torch.where(ended_B, code_B, int(FinishCode.NONE))
    count_B = torch.where(ended_B, cut_B + 1 - none_B.to(cut_B.dtype), n_emitted_B)

    emitted_BW = depth_W < count_B[:, None]
    target_BW = torch.where(emitted_BW, slot_B[:, None], 0)
    at_BW = torch.where(emitted_BW, base_B[:, None] + 1 + depth_W, 0)
    history_SL.index_put_((target_BW, at_BW), torch.where(emitted_BW, token_BW, 0))  # the rest goes to the sink
    last_B1 = (count_B - 1).clamp(min=0)[:, None]
    pending_SW[slot_B, 0] = torch.where(count_B > 0, token_BW.gather(1, last_B1)[:, 0], pending_SW[slot_B, 0])
    committed_S[slot_B] = base_B + count_B
    active_S[slot_B] *= finish_B == int(FinishCode.NONE)

    accepted_B = torch.minimum(accepted_B, count_B)
    drafted_B = (rows_B - 1).clamp(min=0)
    counts = (generation_S[slot_B], count_B, accepted_B, drafted_B, finish_B, torch.zeros_like(count_B))
    return torch.cat([torch.stack(counts, 1), token_BW], 1)


@torch.library.custom_op(OP + "pack_rows", mutates_args=())
def pack_rows(
    active_S: Tensor, committed_S: Tensor, draft_count_S: Tensor, pending_SW: Tensor, slot_B: Tensor, rows: int,
    width: int,
) -> Packed:  # fmt: skip
    """`packed_rows` in one launch, at most MAX_PACK_SLOTS slots."""
    return packed_rows(active_S, committed_S, draft_count_S, pending_SW, slot_B, rows, width)


@torch.library.custom_op(OP + "close_round", mutates_args=("active_S", "committed_S", "history_SL", "pending_SW"))
def close_round(
    token_BW: Tensor, accepted_B: Tensor, n_emitted_B: Tensor, rows_B: Tensor, slot_B: Tensor, generation_S: Tensor,
    active_S: Tensor, committed_S: Tensor, max_len_S: Tensor, stop_ids_ST: Tensor, history_SL: Tensor,
    pending_SW: Tensor,
) -> Tensor:  # fmt: skip
    """`closed_round` in one launch."""
    return closed_round(
        token_BW, accepted_B, n_emitted_B, rows_B, slot_B, generation_S, active_S, committed_S, max_len_S, stop_ids_ST,
        history_SL, pending_SW,
    )  # fmt: skip


@torch.library.custom_op(OP + "close_greedy", mutates_args=("active_S", "committed_S", "history_SL", "pending_SW"))
def close_greedy(
    target_R: Tensor, row_of_BW: Tensor, rows_B: Tensor, slot_B: Tensor, generation_S: Tensor, active_S: Tensor,
    committed_S: Tensor, max_len_S: Tensor, stop_ids_ST: Tensor, history_SL: Tensor, pending_SW: Tensor,
    key_S: Tensor, child_S: Tensor, synthetic: float | None,
) -> Tensor:  # fmt: skip
    """Greedy verification of the pending drafts by target_R, each row's argmax, then `closed_round`: one launch.

    synthetic: mean acceptance length that replaces the accept decision, as in verify/synthetic.py.
    """
    width = row_of_BW.shape[1]
    depth_W = torch.arange(width, device=slot_B.device)
    target_BW = target_R[row_of_BW]
    draft_BW = torch.nn.functional.pad(pending_SW[slot_B, 1:width], (0, 1))
    if synthetic is None:
        judged_BW = depth_W < (rows_B - 1)[:, None]
        accepted_B = ((target_BW == draft_BW) & judged_BW).to(torch.int64).cumprod(1).sum(1)
    else:
        accepted_B = _by_lot(synthetic, key_S[slot_B], child_S[slot_B], committed_S[slot_B], rows_B)
    return closed_round(
        *_emitted(accepted_B, rows_B, draft_BW, target_BW), rows_B, slot_B, generation_S, active_S, committed_S,
        max_len_S, stop_ids_ST, history_SL, pending_SW,
    )  # fmt: skip


@torch.library.custom_op(OP + "close_sampled", mutates_args=("active_S", "committed_S", "history_SL", "pending_SW"))
def close_sampled(
    target_R: Tensor, residual_R: Tensor, p_R: Tensor, row_of_BW: Tensor, rows_B: Tensor, slot_B: Tensor,
    generation_S: Tensor, active_S: Tensor, committed_S: Tensor, max_len_S: Tensor, stop_ids_ST: Tensor,
    history_SL: Tensor, pending_SW: Tensor, mode_S: Tensor, key_S: Tensor, child_S: Tensor, q_SKV: Tensor | None,
    synthetic: float | None,
) -> Tensor:  # fmt: skip
    """Verification of the pending drafts by `race_rows`, each slot by its own mode, then `closed_round`: one launch.

    Under rejection a draft is accepted when its coin times q is below its p_R, and the round's last token is the
    residual after a refusal, else the target; in other modes a draft is accepted when it equals the target.
    q_SKV: the drafters' law, None when drafts are certain. synthetic: as in `close_greedy`.
    """
    width = row_of_BW.shape[1]
    depth_W = torch.arange(width, device=slot_B.device)
    target_BW = target_R[row_of_BW]
    draft_BW = torch.nn.functional.pad(pending_SW[slot_B, 1:width], (0, 1))
    key_B, child_B, base_B = key_S[slot_B], child_S[slot_B], committed_S[slot_B]
    by_coin_B = mode_S[slot_B] == VerifyMode.REJECTION
    if synthetic is None:
        u_BW = coin(key_B[:, None], child_B[:, None], base_B[:, None], depth_W, PURPOSE_ACCEPT)
        if q_SKV is not None:
            at_BW = draft_BW.clamp(0, q_SKV.shape[2] - 1)
            u_BW = u_BW * q_SKV[slot_B[:, None], depth_W.clamp(max=q_SKV.shape[1] - 1), at_BW].to(u_BW.dtype)
        passes_BW = u_BW < p_R[row_of_BW].to(u_BW.dtype)
        good_BW = torch.where(by_coin_B[:, None], passes_BW, target_BW == draft_BW)
        accepted_B = (good_BW & (depth_W < (rows_B - 1)[:, None])).to(torch.int64).cumprod(1).sum(1)
    else:
        accepted_B = _by_lot(synthetic, key_B, child_B, base_B, rows_B)
    refused_B = by_coin_B & (accepted_B < rows_B - 1)
    last_BW = torch.where(refused_B[:, None], residual_R[row_of_BW], target_BW)
    return closed_round(
        *_emitted(accepted_B, rows_B, draft_BW, last_BW), rows_B, slot_B, generation_S, active_S, committed_S,
        max_len_S, stop_ids_ST, history_SL, pending_SW,
    )  # fmt: skip


def _by_lot(synthetic: float, key_B: Tensor, child_B: Tensor, base_B: Tensor, rows_B: Tensor) -> Tensor:
    whole, share = synthetic_parts(synthetic)
    u_B = coin(key_B, child_B, base_B, 0, PURPOSE_SYNTHETIC)
    return torch.minimum(whole + (u_B * 2.0**53 < share), (rows_B - 1).clamp(min=0))


def _emitted(accepted_B: Tensor, rows_B: Tensor, draft_BW: Tensor, last_BW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tokens [B, W], accepted, emitted [B]: the accepted drafts, then what the row behind them gives."""
    depth_W = torch.arange(draft_BW.shape[1], device=rows_B.device)
    n_emitted_B = torch.where(rows_B > 0, accepted_B + 1, 0)
    token_BW = torch.where(depth_W < accepted_B[:, None], draft_BW, last_BW.gather(1, accepted_B[:, None]))
    return torch.where(depth_W < n_emitted_B[:, None], token_BW, 0), accepted_B, n_emitted_B


def synthetic_parts(mean_length: float) -> tuple[int, int]:
    """Drafts that are always accepted; of 2**53 values of a coin, how many (the lowest) accept one more."""
    whole = math.floor(mean_length - 1.0)
    return whole, math.ceil((mean_length - 1.0 - whole) * 2.0**53)


@pack_rows.register_fake
def _(
    active_S: Tensor, committed_S: Tensor, draft_count_S: Tensor, pending_SW: Tensor, slot_B: Tensor, rows: int,
    width: int,
) -> Packed:  # fmt: skip
    r = [slot_B.new_empty(rows, dtype=torch.int64) for _ in range(4)]
    rows_B = slot_B.new_empty(slot_B.shape[0], dtype=torch.int64)
    return r[0], r[1], r[2], r[3], rows_B, slot_B.new_empty(slot_B.shape[0], width, dtype=torch.int64)


@close_round.register_fake
def _(
    token_BW: Tensor, accepted_B: Tensor, n_emitted_B: Tensor, rows_B: Tensor, slot_B: Tensor, generation_S: Tensor,
    active_S: Tensor, committed_S: Tensor, max_len_S: Tensor, stop_ids_ST: Tensor, history_SL: Tensor,
    pending_SW: Tensor,
) -> Tensor:  # fmt: skip
    return token_BW.new_empty(token_BW.shape[0], RECORD_COLUMNS + token_BW.shape[1])


@close_greedy.register_fake
def _(
    target_R: Tensor, row_of_BW: Tensor, rows_B: Tensor, slot_B: Tensor, generation_S: Tensor, active_S: Tensor,
    committed_S: Tensor, max_len_S: Tensor, stop_ids_ST: Tensor, history_SL: Tensor, pending_SW: Tensor,
    key_S: Tensor, child_S: Tensor, synthetic: float | None,
) -> Tensor:  # fmt: skip
    return row_of_BW.new_empty(row_of_BW.shape[0], RECORD_COLUMNS + row_of_BW.shape[1])


@close_sampled.register_fake
def _(
    target_R: Tensor, residual_R: Tensor, p_R: Tensor, row_of_BW: Tensor, rows_B: Tensor, slot_B: Tensor,
    generation_S: Tensor, active_S: Tensor, committed_S: Tensor, max_len_S: Tensor, stop_ids_ST: Tensor,
    history_SL: Tensor, pending_SW: Tensor, mode_S: Tensor, key_S: Tensor, child_S: Tensor, q_SKV: Tensor | None,
    synthetic: float | None,
) -> Tensor:  # fmt: skip
    return row_of_BW.new_empty(row_of_BW.shape[0], RECORD_COLUMNS + row_of_BW.shape[1])


@pack_rows.register_kernel("cuda")
def _(
    active_S: Tensor, committed_S: Tensor, draft_count_S: Tensor, pending_SW: Tensor, slot_B: Tensor, rows: int,
    width: int,
) -> Packed:  # fmt: skip
    from slipstream.kernels.jit import frame

    slots = slot_B.shape[0]
    assert slots <= MAX_PACK_SLOTS, f"{slots} slots in a frame; at most {MAX_PACK_SLOTS}"
    slot_R, pos_R, token_R, owner_R = (slot_B.new_empty(rows) for _ in range(4))
    rows_B, row_of_BW = slot_B.new_empty(slots), slot_B.new_empty(slots, width)
    frame.launch_pack_rows(
        active_S, committed_S, draft_count_S, pending_SW, slot_B, slot_R, pos_R, token_R, owner_R, rows_B, row_of_BW
    )
    return slot_R, pos_R, token_R, owner_R, rows_B, row_of_BW


@close_round.register_kernel("cuda")
def _(
    token_BW: Tensor, accepted_B: Tensor, n_emitted_B: Tensor, rows_B: Tensor, slot_B: Tensor, generation_S: Tensor,
    active_S: Tensor, committed_S: Tensor, max_len_S: Tensor, stop_ids_ST: Tensor, history_SL: Tensor,
    pending_SW: Tensor,
) -> Tensor:  # fmt: skip
    from slipstream.kernels.jit import frame

    record_BC = token_BW.new_empty(token_BW.shape[0], RECORD_COLUMNS + token_BW.shape[1])
    frame.launch_close_round(
        token_BW.contiguous(), accepted_B, n_emitted_B, rows_B, slot_B, generation_S, active_S, committed_S, max_len_S,
        stop_ids_ST, history_SL, pending_SW, record_BC,
    )  # fmt: skip
    return record_BC


@close_greedy.register_kernel("cuda")
def _(
    target_R: Tensor, row_of_BW: Tensor, rows_B: Tensor, slot_B: Tensor, generation_S: Tensor, active_S: Tensor,
    committed_S: Tensor, max_len_S: Tensor, stop_ids_ST: Tensor, history_SL: Tensor, pending_SW: Tensor,
    key_S: Tensor, child_S: Tensor, synthetic: float | None,
) -> Tensor:  # fmt: skip
    from slipstream.kernels.jit import frame

    record_BC = row_of_BW.new_empty(row_of_BW.shape[0], RECORD_COLUMNS + row_of_BW.shape[1])
    frame.launch_close_greedy(
        target_R, row_of_BW.contiguous(), rows_B, slot_B, generation_S, active_S, committed_S, max_len_S, stop_ids_ST,
        history_SL, pending_SW, key_S, child_S, record_BC, None if synthetic is None else synthetic_parts(synthetic),
    )  # fmt: skip
    return record_BC


@close_sampled.register_kernel("cuda")
def _(
    target_R: Tensor, residual_R: Tensor, p_R: Tensor, row_of_BW: Tensor, rows_B: Tensor, slot_B: Tensor,
    generation_S: Tensor, active_S: Tensor, committed_S: Tensor, max_len_S: Tensor, stop_ids_ST: Tensor,
    history_SL: Tensor, pending_SW: Tensor, mode_S: Tensor, key_S: Tensor, child_S: Tensor, q_SKV: Tensor | None,
    synthetic: float | None,
) -> Tensor:  # fmt: skip
    from slipstream.kernels.jit import frame

    record_BC = row_of_BW.new_empty(row_of_BW.shape[0], RECORD_COLUMNS + row_of_BW.shape[1])
    frame.launch_close_sampled(
        target_R, residual_R, p_R, row_of_BW.contiguous(), rows_B, slot_B, generation_S, active_S, committed_S,
        max_len_S, stop_ids_ST, history_SL, pending_SW, mode_S, key_S, child_S, q_SKV, record_BC,
        None if synthetic is None else synthetic_parts(synthetic),
    )  # fmt: skip
    return record_BC
