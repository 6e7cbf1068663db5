# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the ops in kernels/schedule.py are typed.)
"""Which drafts a frame's rows go to, and offering drafts with their survivals."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.types import RECORD_COLUMNS, SURVIVAL_ONE

_COLUMNS = tl.constexpr(RECORD_COLUMNS)
_ONE = tl.constexpr(SURVIVAL_ONE)
_PLACES = tl.constexpr(1 << 15)
_KEY_BITS = tl.constexpr(15 + SURVIVAL_ONE.bit_length())
_TOP_BIT = tl.constexpr(1 << (14 + SURVIVAL_ONE.bit_length()))


@triton.jit(do_not_specialize=["B", "R"])
def allot_kernel(
    active_ptr, count_ptr, survival_ptr, slot_ptr, B, R,
    W: tl.constexpr, K: tl.constexpr, BP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """One program. A draft's key is its survival, then its place, so that no two are equal; the key of the last one
    that fits is found bit by bit, from the top."""
    i = tl.arange(0, BP)
    j = tl.arange(0, KP)
    known = i < B
    slots = tl.load(slot_ptr + i, mask=known, other=0)
    active = tl.load(active_ptr + slots, mask=known, other=0)
    count = tl.minimum(tl.load(count_ptr + slots, mask=known, other=0), W - 1) * active
    offered = (j[None, :] < count[:, None]) & (j[None, :] < K) & known[:, None]
    survival = tl.load(survival_ptr + slots[:, None] * K + j[None, :], mask=offered, other=0)
    place = j[None, :] * B + i[:, None]
    key = tl.where(survival > 0, survival * _PLACES + (_PLACES - 1 - place), 0)
    total = tl.sum(active, axis=0)
    budget = R - total
    last = total * 0
    bit = last + _TOP_BIT
    for _ in tl.range(0, _KEY_BITS):
        more = last + bit
        reach = tl.sum(tl.sum((key >= more).to(tl.int32), axis=1), axis=0)
        last = tl.where(reach >= budget, more, last)
        bit = bit // 2
    taken = (key >= last) & (key > 0)
    tl.store(count_ptr + slots, tl.sum(taken.to(tl.int64), axis=1), mask=known)


@triton.jit
def offer_kernel(
    token_ptr, wish_ptr, logit_ptr, record_ptr, slot_ptr, active_ptr, committed_ptr, max_len_ptr, max_drafts_ptr,
    pending_ptr, count_ptr, survival_ptr, out_ptr, C, PW,
    D: tl.constexpr, DP: tl.constexpr, K: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Grid (B,). D drafts of at most K."""
    b = tl.program_id(0)
    slot = tl.load(slot_ptr + b)
    d = tl.arange(0, DP)
    tl.store(pending_ptr + slot * PW + 1 + d, tl.load(token_ptr + b * D + d, mask=d < D, other=0), mask=d < D)
    fits = tl.maximum(tl.load(max_len_ptr + slot) - tl.load(committed_ptr + slot) - 2, 0)
    count = tl.minimum(tl.minimum(tl.load(wish_ptr + b), tl.load(max_drafts_ptr + slot)), fits)
    count = tl.where(tl.load(active_ptr + slot) > 0, count, 0)
    tl.store(count_ptr + slot, count)
    own = record_ptr + b * C
    out = out_ptr + b * (C + K)
    c = tl.arange(0, CP)
    column = tl.load(own + c, mask=c < C, other=0)
    column = tl.where(c == _COLUMNS - 1, count, column)
    tl.store(out + c + tl.where(c < _COLUMNS, 0, K), column, mask=c < C)
    chance = 1.0
    for k in tl.static_range(K):
        unit = tl.zeros_like(count)
        if k < D:
            chance = chance / (1.0 + tl.exp(-tl.load(logit_ptr + b * D + k)))
            chance = tl.where(chance == chance, chance, 0.0)  # NaN
            unit = tl.where(k < count, tl.maximum((chance * _ONE).to(tl.int64), 1), 0)
        tl.store(survival_ptr + slot * K + k, unit)
        tl.store(out + _COLUMNS + k, unit)


def launch_allot(active, count, survival, slot, *, rows, width):
    slots, drafts = slot.shape[0], survival.shape[1]
    wide = max(4, triton.next_power_of_2(drafts))
    padded = max(32, triton.next_power_of_2(slots))
    allot_kernel[(1,)](
        active, count, survival, slot, slots, rows, W=width, K=drafts, BP=padded, KP=wide,
        num_warps=min(8, max(1, padded * wide // 1024)),
    )  # fmt: skip


def launch_offer(
    token, wish, logit, record, slot, active, committed, max_len, max_drafts, pending, count, survival, out
):
    drafts, columns = token.shape[1], record.shape[1]
    offer_kernel[(slot.shape[0],)](
        token, wish, logit, record, slot, active, committed, max_len, max_drafts, pending, count, survival, out,
        columns, pending.shape[1], D=drafts, DP=triton.next_power_of_2(drafts), K=survival.shape[1],
        CP=triton.next_power_of_2(columns), num_warps=1,
    )  # fmt: skip
