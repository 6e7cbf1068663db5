# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the op in kernels/draft.py is typed.)
"""N-gram drafting: one program per slot walks the slot's history in blocks. Drafts of other drafters: their limits."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.draft import FORGET, MEMORY, PRIOR_ACCEPTANCE, PRIOR_WEIGHT

_FORGET = tl.constexpr(FORGET)
_FADE = tl.constexpr(1.0 - MEMORY)
_PRIOR_HITS = tl.constexpr(PRIOR_ACCEPTANCE * PRIOR_WEIGHT)
_PRIOR_TRIES = tl.constexpr(PRIOR_WEIGHT)

BLOCK, WARPS = 2048, 8


@triton.jit
def ngram_draft_kernel(
    record_ptr, slot_ptr, active_ptr, committed_ptr, max_len_ptr, max_drafts_ptr, history_ptr, pending_ptr, count_ptr,
    hits_ptr, tries_ptr, matched_ptr, cost_ptr, C, L, PW, min_n,
    K: tl.constexpr, KP: tl.constexpr, MAX_N: tl.constexpr, NP: tl.constexpr, GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B,). Ranks (length, column) are length * L + column: below 2**31 for histories of 33 million tokens."""
    b = tl.program_id(0)
    slot = tl.load(slot_ptr + b)
    record = record_ptr + b * C
    if tl.load(active_ptr + slot) > 0:
        end = tl.load(committed_ptr + slot).to(tl.int32)
        own = history_ptr + slot * L
        best = tl.full([BLOCK], -1, tl.int32)
        for first in tl.range(0, end, BLOCK):
            j = first + tl.arange(0, BLOCK)
            alive = j < end
            length = tl.zeros([BLOCK], tl.int32)
            for i in tl.static_range(MAX_N):
                last = tl.load(own + tl.maximum(end - i, 0))
                token = tl.load(own + j - i, mask=(j >= i) & (j < end), other=-1)
                alive = alive & (token == last)
                length += alive.to(tl.int32)
            best = tl.maximum(best, tl.where(length >= min_n, length * L + j, -1))
        top = tl.max(best, axis=0)
        found = top >= 0
        at = tl.where(found, top % L, 0)
        matched = tl.where(found, top // L, 0)
        k = tl.arange(0, KP)
        period = tl.maximum(end - at, 1)
        draft = tl.load(own + at + 1 + k % period, mask=k < K, other=0)
        tl.store(pending_ptr + slot * PW + 1 + k, draft, mask=k < K)
        count = tl.where(found, K, 0)
        if GATE:
            n = tl.arange(0, NP)
            inside = n < MAX_N + 1
            one = n == tl.load(matched_ptr + slot)
            accepted = tl.load(record + 2)
            judged = tl.minimum(accepted + 1, tl.load(record + 3))
            keep = tl.where(one & (judged > 0), 1.0 - _FADE, 1.0)
            place = slot * (MAX_N + 1) + n
            hits = tl.load(hits_ptr + place, mask=inside, other=0.0) * _FORGET
            hits = hits * keep + tl.where(one, accepted.to(tl.float32), 0.0)
            tries = tl.load(tries_ptr + place, mask=inside, other=0.0) * _FORGET
            tries = tries * keep + tl.where(one, judged.to(tl.float32), 0.0)
            tl.store(hits_ptr + place, hits, mask=inside)
            tl.store(tries_ptr + place, tries, mask=inside)
            tl.store(matched_ptr + slot, matched.to(tl.int64))
            good = tl.sum(tl.where(n == matched, hits, 0.0), axis=0) + _PRIOR_HITS
            accept = tl.div_rn(good, tl.sum(tl.where(n == matched, tries, 0.0), axis=0) + _PRIOR_TRIES)
            power = accept * 0.0 + 1.0
            total = power
            gain = tl.div_rn(total, tl.load(cost_ptr))
            pays = count * 0
            for i in tl.static_range(1, K + 1):
                power *= accept
                total += power
                now = tl.div_rn(total, tl.load(cost_ptr + i))
                pays = tl.where(now > gain, i, pays)
                gain = tl.maximum(gain, now)
            count = tl.where(found, pays, 0)
        fits = tl.maximum(tl.load(max_len_ptr + slot) - end - 2, 0)
        offer = tl.minimum(tl.minimum(count.to(tl.int64), tl.load(max_drafts_ptr + slot)), fits)
        tl.store(count_ptr + slot, offer)
        tl.store(record + 5, offer)
    else:
        tl.store(count_ptr + slot, tl.zeros_like(slot))
        tl.store(record + 5, tl.zeros_like(slot))


@triton.jit
def offer_kernel(
    token_ptr, wish_ptr, record_ptr, slot_ptr, active_ptr, committed_ptr, max_len_ptr, max_drafts_ptr, pending_ptr,
    count_ptr, C, PW, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Grid (B,)."""
    b = tl.program_id(0)
    slot = tl.load(slot_ptr + b)
    k = tl.arange(0, KP)
    tl.store(pending_ptr + slot * PW + 1 + k, tl.load(token_ptr + b * K + k, mask=k < K, other=0), mask=k < K)
    fits = tl.maximum(tl.load(max_len_ptr + slot) - tl.load(committed_ptr + slot) - 2, 0)
    count = tl.minimum(tl.minimum(tl.load(wish_ptr + b), tl.load(max_drafts_ptr + slot)), fits)
    count = tl.where(tl.load(active_ptr + slot) > 0, count, 0)
    tl.store(count_ptr + slot, count)
    tl.store(record_ptr + b * C + 5, count)


def launch_offer(token, wish, record, slot, active, committed, max_len, max_drafts, pending, count):
    drafts = token.shape[1]
    offer_kernel[(slot.shape[0],)](
        token, wish, record, slot, active, committed, max_len, max_drafts, pending, count, record.shape[1],
        pending.shape[1], K=drafts, KP=triton.next_power_of_2(drafts), num_warps=1,
    )  # fmt: skip


def launch_ngram_draft(
    record, slot, active, committed, max_len, max_drafts, history, pending, count, hits, tries, matched, cost, *,
    min_n, gate,
):  # fmt: skip
    drafts, lengths = cost.shape[0] - 1, hits.shape[1]
    ngram_draft_kernel[(slot.shape[0],)](
        record, slot, active, committed, max_len, max_drafts, history, pending, count, hits, tries, matched, cost,
        record.shape[1], history.shape[1], pending.shape[1], min_n, K=drafts, KP=max(4, triton.next_power_of_2(drafts)),
        MAX_N=lengths - 1, NP=max(4, triton.next_power_of_2(lengths)), GATE=gate, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
