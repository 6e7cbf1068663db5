"""Confidence-scheduled verification on the device: survivals of drafts, and which drafts a frame's rows go to.

Source: DSpark report, confidence-scheduled verification. A draft's survival is the calibrated chance that it and all
drafts before it are accepted, prod_{i<=k} sigmoid(z_i / T_i). Here it is a whole number in units of 1 / SURVIVAL_ONE,
so that device and host order drafts alike. Slot state is int64, S slots (slot 0 is the sink); see device/state.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.draft import offer
from slipstream.kernels.frame import MAX_PACK_SLOTS
from slipstream.types import MAX_DRAFTS, RECORD_COLUMNS, SURVIVAL_ONE

OP = "slipstream::"

assert MAX_PACK_SLOTS * (MAX_DRAFTS + 1) <= 1 << 15, "the kernel's keys hold a draft's place in 15 bits"


def survivals(logit_BK: Tensor, count_B: Tensor) -> Tensor:
    """int64 [B, K] from calibrated confidence logits z / T: the first count_B of a slot, at least 1 each, then 0.

    They never increase over a slot's drafts.
    """
    survival_BK = torch.sigmoid(logit_BK.float()).cumprod(1).nan_to_num(0.0)
    unit_BK = (survival_BK * SURVIVAL_ONE).to(torch.int64).clamp(min=1)
    offered_BK = torch.arange(logit_BK.shape[1], device=logit_BK.device) < count_B[:, None]
    return torch.where(offered_BK, unit_BK, 0)


def draft_lengths(survival_BK: Tensor, budget: Tensor | int) -> Tensor:
    """Drafts verified per slot, int64 [B]: the `budget` largest survivals, ties by position, then by slot.

    survival_BK must not increase over a slot's drafts; with that tie rule every slot keeps a prefix, whose length
    depends on survivals up to its last draft only once the budget is given. A draft of survival 0 is never taken.
    budget: an int, or int64 [] on the device; nothing here has a shape that depends on it.
    """
    slots, drafts = survival_BK.shape
    by_position = survival_BK.t().reshape(-1)
    order = torch.sort(by_position, descending=True, stable=True).indices
    place = torch.empty_like(order).scatter_(0, order, torch.arange(slots * drafts, device=order.device))
    taken = (place < budget) & (by_position > 0)
    return taken.view(drafts, slots).to(torch.int64).sum(0)


def allot(
    active_S: Tensor, draft_count_S: Tensor, survival_SK: Tensor, slot_B: Tensor, rows: int, width: int
) -> None:  # fmt: skip
    """Cut draft_count of slots [B] so that they take `rows` rows at most, one each besides: `draft_lengths`.

    The rows, and so the budget, are the host's and older than these drafts: DSpark's report shows that a budget which
    looks at them is biased. width: most rows of a slot.
    """
    active_B = active_S[slot_B]
    count_B = draft_count_S[slot_B].clamp(max=width - 1) * active_B
    offered_BK = torch.arange(survival_SK.shape[1], device=slot_B.device) < count_B[:, None]
    survival_BK = torch.where(offered_BK, survival_SK[slot_B], 0)
    draft_count_S[slot_B] = draft_lengths(survival_BK, rows - active_B.sum())


def offer_with_survivals(
    token_BK: Tensor, count_B: Tensor, logit_BK: Tensor, record_BC: Tensor, slot_B: Tensor, active_S: Tensor,
    committed_S: Tensor, max_len_S: Tensor, max_drafts_S: Tensor, pending_SW: Tensor, draft_count_S: Tensor,
    survival_SK: Tensor,
) -> Tensor:  # fmt: skip
    """`kernels.draft.offer`, and the drafts' survivals to slot state; the record with them in front of its tokens.

    logit_BK: calibrated confidence logits z / T, real; record_BC [B, RECORD_COLUMNS + W] -> [B, RECORD_COLUMNS + K + W]
    with K of survival_SK [S, K].
    """
    record_BC = record_BC.clone()
    offer(
        token_BK, count_B, record_BC, slot_B, active_S, committed_S, max_len_S, max_drafts_S, pending_SW, draft_count_S
    )
    unit_BK = survivals(logit_BK, record_BC[:, 5])
    unit_BK = torch.nn.functional.pad(unit_BK, (0, survival_SK.shape[1] - unit_BK.shape[1]))
    survival_SK[slot_B] = unit_BK
    return torch.cat([record_BC[:, :RECORD_COLUMNS], unit_BK, record_BC[:, RECORD_COLUMNS:]], 1)


@torch.library.custom_op(OP + "allot_drafts", mutates_args=("draft_count_S",))
def allot_drafts(
    active_S: Tensor, draft_count_S: Tensor, survival_SK: Tensor, slot_B: Tensor, rows: int, width: int
) -> None:  # fmt: skip
    """`allot` in one launch, at most MAX_PACK_SLOTS slots."""
    allot(active_S, draft_count_S, survival_SK, slot_B, rows, width)


@torch.library.custom_op(OP + "offer_scheduled", mutates_args=("pending_SW", "draft_count_S", "survival_SK"))
def offer_scheduled(
    token_BK: Tensor, count_B: Tensor, logit_BK: Tensor, record_BC: Tensor, slot_B: Tensor, active_S: Tensor,
    committed_S: Tensor, max_len_S: Tensor, max_drafts_S: Tensor, pending_SW: Tensor, draft_count_S: Tensor,
    survival_SK: Tensor,
) -> Tensor:  # fmt: skip
    """`offer_with_survivals` in one launch."""
    return offer_with_survivals(
        token_BK, count_B, logit_BK, record_BC, slot_B, active_S, committed_S, max_len_S, max_drafts_S, pending_SW,
        draft_count_S, survival_SK,
    )  # fmt: skip


@allot_drafts.register_fake
def _(
    active_S: Tensor, draft_count_S: Tensor, survival_SK: Tensor, slot_B: Tensor, rows: int, width: int
) -> None:  # fmt: skip
    return None


@offer_scheduled.register_fake
def _(
    token_BK: Tensor, count_B: Tensor, logit_BK: Tensor, record_BC: Tensor, slot_B: Tensor, active_S: Tensor,
    committed_S: Tensor, max_len_S: Tensor, max_drafts_S: Tensor, pending_SW: Tensor, draft_count_S: Tensor,
    survival_SK: Tensor,
) -> Tensor:  # fmt: skip
    return record_BC.new_empty(record_BC.shape[0], record_BC.shape[1] + survival_SK.shape[1])


@allot_drafts.register_kernel("cuda")
def _(
    active_S: Tensor, draft_count_S: Tensor, survival_SK: Tensor, slot_B: Tensor, rows: int, width: int
) -> None:  # fmt: skip
    from slipstream.kernels.jit import schedule

    assert slot_B.shape[0] <= MAX_PACK_SLOTS, f"{slot_B.shape[0]} slots in a frame; at most {MAX_PACK_SLOTS}"
    schedule.launch_allot(active_S, draft_count_S, survival_SK, slot_B, rows=rows, width=width)


@offer_scheduled.register_kernel("cuda")
def _(
    token_BK: Tensor, count_B: Tensor, logit_BK: Tensor, record_BC: Tensor, slot_B: Tensor, active_S: Tensor,
    committed_S: Tensor, max_len_S: Tensor, max_drafts_S: Tensor, pending_SW: Tensor, draft_count_S: Tensor,
    survival_SK: Tensor,
) -> Tensor:  # fmt: skip
    from slipstream.kernels.jit import schedule

    record_BD = record_BC.new_empty(record_BC.shape[0], record_BC.shape[1] + survival_SK.shape[1])
    schedule.launch_offer(
        token_BK.contiguous(), count_B.contiguous(), logit_BK.float().contiguous(), record_BC, slot_B, active_S,
        committed_S, max_len_S, max_drafts_S, pending_SW, draft_count_S, survival_SK, record_BD,
    )  # fmt: skip
    return record_BD
