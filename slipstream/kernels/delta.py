"""The gated delta rule (arXiv 2412.06464) in torch: chunked for prompts, step by step for decoding.

A head's state S [dk, dv] maps keys to values. A token scales it by exp(g), then moves what it answers to the token's
key k towards its value v: S <- exp(g) S + k (beta (v - k^T exp(g) S))^T. Its output is q^T S. q, k and v come from a
short causal convolution over the layer's inputs, so a position's state needs the last `taps - 1` inputs beside S.

Inputs are rows x [X]: the convolution's channels (all queries, all keys, all values), then a and b of each value head,
the logits of decay and of beta.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.memory.states import DeltaMemory

CHUNK = 64
"""Tokens that the chunked scan treats at once."""


class DeltaWeights(NamedTuple):
    """A layer's small weights, float32 or wider: taps of each channel, oldest first; decay_N: -exp(A_log); dt_N."""

    conv_CT: Tensor
    decay_N: Tensor
    dt_N: Tensor
    key_heads: int
    key_dim: int

    @property
    def history(self) -> int:
        """Inputs before a token that its convolution reads."""
        return self.conv_CT.shape[1] - 1


class DeltaInputs(NamedTuple):
    """q, k [..., N, dk], normed and for each value head; v [..., N, dv]; g, beta [..., N]; all float32 or wider."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def delta_inputs(x_BLX: Tensor, w: DeltaWeights) -> DeltaInputs:
    """Of rows [B, history + L, X], the first `history` of which only feed the convolution: [B, L, ...]."""
    channels, heads = w.conv_CT.shape[0], w.decay_N.shape[0]
    wide_BLX = x_BLX.to(w.conv_CT.dtype)
    mixed_BLC = F.silu((wide_BLX[..., :channels].unfold(1, w.history + 1, 1) * w.conv_CT).sum(-1))
    keys = w.key_heads * w.key_dim
    q, k, v = mixed_BLC.split((keys, keys, channels - 2 * keys), -1)
    a_BLN, b_BLN = wide_BLX[:, w.history :, channels:].chunk(2, -1)
    share = heads // w.key_heads
    return DeltaInputs(
        q=_unit(q.unflatten(-1, (w.key_heads, w.key_dim))).repeat_interleave(share, -2) * w.key_dim**-0.5,
        k=_unit(k.unflatten(-1, (w.key_heads, w.key_dim))).repeat_interleave(share, -2),
        v=v.unflatten(-1, (heads, -1)),
        g=w.decay_N * F.softplus(a_BLN + w.dt_N),
        beta=b_BLN.sigmoid(),
    )


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_step(state_BNKV: Tensor, at: DeltaInputs) -> tuple[Tensor, Tensor]:
    """One token: inputs without the L dimension. The new states, and outputs [B, N, dv]."""
    decayed = state_BNKV * at.g.exp()[..., None, None]
    told_BNV = (decayed * at.k[..., None]).sum(-2)
    change_BNV = at.beta[..., None] * (at.v - told_BNV)
    state = decayed + at.k[..., None] * change_BNV[..., None, :]
    return state, (state * at.q[..., None]).sum(-2)


def delta_chunk(state_NKV: Tensor, inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """Up to CHUNK tokens of one sequence [L, ...]: the state after them, and outputs [L, N, dv].

    The WY form (arXiv 2412.06464, section 3.3): what each token writes solves a unit lower triangular system in what
    the tokens before it wrote.
    """
    q_NLK, k_NLK, v_NLV = (x.transpose(0, 1) for x in inputs[:3])
    sum_NL, beta_NL1 = inputs.g.T.cumsum(-1), inputs.beta.T[..., None]
    # exp of what lies between two tokens; never of a positive number, which could overflow.
    between_NLL = (sum_NL[:, :, None] - sum_NL[:, None, :]).tril().exp().tril()
    from_start_NL1 = sum_NL.exp()[..., None]
    system_NLL = (beta_NL1 * k_NLK @ k_NLK.mT) * between_NLL
    told_NLV = (k_NLK * from_start_NL1) @ state_NKV
    written_NLV = torch.linalg.solve_triangular(
        system_NLL, beta_NL1 * (v_NLV - told_NLV), upper=False, unitriangular=True
    )
    out_NLV = (q_NLK * from_start_NL1) @ state_NKV + (q_NLK @ k_NLK.mT * between_NLL) @ written_NLV
    to_end_NL1 = between_NLL[:, -1, :, None]
    state_NKV = state_NKV * from_start_NL1[:, -1:] + (k_NLK * to_end_NL1).mT @ written_NLV
    return state_NKV, out_NLV.transpose(0, 1)


def delta_scan(state_NKV: Tensor, inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """All tokens of one sequence [L, ...], chunk by chunk: the state after them, and outputs [L, N, dv]."""
    outputs = []
    for chunk in zip(*(x.split(CHUNK) for x in inputs), strict=True):
        state_NKV, out_LNV = delta_chunk(state_NKV, DeltaInputs(*chunk))
        outputs.append(out_LNV)
    return state_NKV, torch.cat(outputs)


def replays_of(recent_SMX: Tensor, w: DeltaWeights) -> int:
    """Most tokens that a state can lack: the accepted drafts of one frame."""
    return (recent_SMX.shape[1] - w.history - 1) // 2


def delta_rows(
    x_RX: Tensor, memory: DeltaMemory, w: DeltaWeights, committed_S: Tensor, slot_B: Tensor, rows_B: Tensor,
    owner_R: Tensor, row_of_BW: Tensor,
) -> Tensor:  # fmt: skip
    """Outputs [R, N, dv] of a decode frame's rows, each slot's in order behind its committed tokens; padding gives 0.

    What was committed since a slot's state was written, drafts that the last round accepted, is replayed from
    `recent`; then comes row 0, the bonus token, which every round commits, and the state is written back: once per
    frame, with as many bytes as plain decoding, whatever is drafted. The drafts' rows go on from there, and only their
    inputs stay. Rejected ones are overwritten by the next frame. A slot without rows stays as it is.
    """
    device, interval, width = x_RX.device, memory.interval, row_of_BW.shape[1]
    size, history, replays = memory.recent_SMX.shape[1], w.history, replays_of(memory.recent_SMX, w)
    base_B1, absorbed_B1 = committed_S[slot_B][:, None], memory.absorbed_S[slot_B][:, None]
    past_BL = base_B1 + torch.arange(-history - replays, 0, device=device)
    past_BLX = memory.recent_SMX[slot_B[:, None], past_BL % size].masked_fill((past_BL < 0)[:, :, None], 0)
    row_BWX = x_RX[row_of_BW]
    window_BLX = torch.cat((past_BLX, row_BWX), 1)
    inputs = delta_inputs(window_BLX, w)
    state, live_B1, outputs = memory.state_SNKV[slot_B], (rows_B > 0)[:, None], []
    saved, saved_BHX, saved_to_B = state, past_BLX[:, :history], torch.zeros_like(slot_B)
    for i in range(replays + width):
        stepped, out_BNV = delta_step(state, DeltaInputs(*(x[:, i] for x in inputs)))
        if i >= replays:
            outputs.append(out_BNV)
        if i > replays:
            state = stepped
            continue
        count_B1 = base_B1 - replays + i + 1
        takes_B1 = live_B1 & (count_B1 > absorbed_B1)
        state = torch.where(takes_B1[..., None, None], stepped, state)
        if interval:
            count_B1 = count_B1 + memory.early
            due_B1 = takes_B1 & (count_B1 % interval == 0)
            place_B = torch.div(count_B1[:, 0], interval, rounding_mode="floor").clamp(0, memory.saved_SC.shape[1] - 1)
            saved_to_B = torch.where(due_B1[:, 0], memory.saved_SC[slot_B, place_B], saved_to_B)
            saved = torch.where(due_B1[..., None, None], state, saved)
            saved_BHX = torch.where(due_B1[..., None], window_BLX[:, i + 1 : i + 1 + history], saved_BHX)
        if i == replays:
            memory.state_SNKV[slot_B] = state
    if interval:
        memory.saved_ZNKV[saved_to_B], memory.saved_ZHX[saved_to_B] = saved, saved_BHX
    depth_W = torch.arange(width, device=device)
    to_BW = torch.where(depth_W < rows_B[:, None], slot_B[:, None], 0)
    memory.recent_SMX.index_put_((to_BW, (base_B1 + depth_W) % size), row_BWX)
    depth_R = torch.arange(x_RX.shape[0], device=device) - row_of_BW[owner_R, 0]
    out_RNV = torch.stack(outputs, 1)[owner_R, depth_R.clamp(0, width - 1)]
    return out_RNV.masked_fill((depth_R >= rows_B[owner_R])[:, None, None], 0).to(x_RX.dtype)


def absorbed_rows(absorbed_S: Tensor, committed_S: Tensor, slot_B: Tensor, rows_B: Tensor) -> None:
    """After all layers have seen a decode frame's rows: each slot's state includes its bonus token too."""
    absorbed_S[slot_B] = torch.where(rows_B > 0, committed_S[slot_B] + 1, absorbed_S[slot_B])


Span = tuple[int, int, int]
"""Slot, first position, rows."""


def delta_spans(x_RX: Tensor, memory: DeltaMemory, w: DeltaWeights, spans: Sequence[Span]) -> Tensor:
    """Outputs [R, N, dv] of prompt rows, span by span; rows behind the spans are padding and give 0.

    Each span goes on from its slot's state, which includes all tokens before it, or from nothing at position 0.
    """
    out_RNV = x_RX.new_zeros(x_RX.shape[0], w.decay_N.shape[0], memory.state_SNKV.shape[-1])
    history, size, interval = w.history, memory.recent_SMX.shape[1], memory.interval
    at = 0
    for slot, start, length in spans:
        past_H = torch.arange(start - history, start, device=x_RX.device)
        past_HX = memory.recent_SMX[slot, past_H % size].masked_fill((past_H < 0)[:, None], 0)
        window_LX = torch.cat((past_HX, x_RX[at : at + length]))
        inputs = DeltaInputs(*(x[0] for x in delta_inputs(window_LX[None], w)))
        state_NKV = memory.state_SNKV[slot] if start else torch.zeros_like(memory.state_SNKV[slot])
        done = 0
        while done < length:
            count = start + done + memory.early
            piece = min(length - done, interval - count % interval) if interval else length
            part = DeltaInputs(*(x[done : done + piece] for x in inputs))
            state_NKV, out_LNV = delta_scan(state_NKV, part)
            out_RNV[at + done : at + done + piece] = out_LNV
            done, count = done + piece, count + piece
            if interval and count % interval == 0:
                place = min(count // interval, memory.saved_SC.shape[1] - 1)
                to_1 = memory.saved_SC[slot, place : place + 1]
                memory.saved_ZNKV.index_copy_(0, to_1, state_NKV[None])
                memory.saved_ZHX.index_copy_(0, to_1, window_LX[None, done : done + history])
        memory.state_SNKV[slot] = state_NKV
        kept = min(history, length)
        end_H = torch.arange(start + length - kept, start + length, device=x_RX.device)
        memory.recent_SMX[slot, end_H % size] = x_RX[at + length - kept : at + length]
        at += length
    return out_RNV


def spans_of(slot_R: Tensor, pos_R: Tensor) -> list[Span]:
    """The spans of packed prompt rows; rows of slot 0 stand behind them. Reads the tensors: for references only."""
    spans: list[list[int]] = []
    for slot, pos in zip(slot_R.tolist(), pos_R.tolist(), strict=True):
        if slot and spans and spans[-1][0] == slot:
            spans[-1][2] += 1
        elif slot:
            spans.append([slot, pos, 1])
    return [(slot, start, length) for slot, start, length in spans]


def delta_tiles(slot_R: Tensor, pos_R: Tensor, rows_per_tile: int, slots: int, early: int = 0) -> Tensor:
    """Tiles of packed prompt rows, int32 [3, T]: the first row of each, the first row of its slot, and its rows.

    T = ceil(R / rows_per_tile) + 2 min(slots, R); where there is no such tile, rows is 0. A tile opens where the slot
    changes and where position + early is a multiple of rows_per_tile. Rows of slot 0 are padding behind all others.
    Once per pass; the layers share it.
    """
    rows, device = slot_R.shape[0], slot_R.device
    tiles = -(-rows // rows_per_tile) + 2 * min(slots, rows)
    row_R = torch.arange(rows, device=device)
    begins_R = slot_R != torch.cat([slot_R.new_full((1,), -1), slot_R[:-1]])
    run_R = torch.where(begins_R, row_R, 0).cummax(0).values
    real_R = slot_R > 0
    opens_R = real_R & (begins_R | ((pos_R + early) % rows_per_tile == 0))
    # Padding, and rows that open nothing, write to one more cell, which is cut off.
    mine_R = torch.where(real_R, opens_R.cumsum(0) - 1, tiles)
    to_R = torch.where(opens_R, mine_R, tiles)
    tile = torch.zeros(3, tiles + 1, dtype=torch.int64, device=device)
    tile[0].scatter_(0, to_R, row_R)
    tile[1].scatter_(0, to_R, run_R)
    tile[2].scatter_add_(0, mine_R, torch.ones_like(row_R))
    return tile[:, :tiles].to(torch.int32)
