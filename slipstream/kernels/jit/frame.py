# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the ops in kernels/frame.py are typed.)
"""Packing a frame's rows, and closing its round: greedy verification, finish test, commit and record in one."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.frame import RECORD_COLUMNS
from slipstream.kernels.jit.numbers import coin53, stream_word
from slipstream.sampling.rng import PURPOSE_ACCEPT, PURPOSE_SYNTHETIC
from slipstream.types import NO_TOKEN, FinishCode, VerifyMode

_COLUMNS = tl.constexpr(RECORD_COLUMNS)
_NONE = tl.constexpr(int(FinishCode.NONE))
_STOP = tl.constexpr(int(FinishCode.STOP))
_LENGTH = tl.constexpr(int(FinishCode.LENGTH))
_INVALID = tl.constexpr(int(FinishCode.INVALID))
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_REJECTION = tl.constexpr(int(VerifyMode.REJECTION))
_FOR_SYNTHETIC = tl.constexpr(PURPOSE_SYNTHETIC)
_FOR_ACCEPT = tl.constexpr(PURPOSE_ACCEPT)


@triton.jit(do_not_specialize=["B", "R"])
def pack_rows_kernel(
    active_ptr, committed_ptr, count_ptr, pending_ptr, slot_ptr,
    slot_out, pos_out, token_out, owner_out, rows_out, row_of_out,
    B, R, W: tl.constexpr, PW: tl.constexpr, LONE: tl.constexpr, BP: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """Grid (B,): each program counts the rows of all slots, then writes its own and its share of the padding."""
    b = tl.program_id(0)
    i = tl.arange(0, BP)
    known = i < B
    slots = tl.load(slot_ptr + i, mask=known, other=0)
    active = tl.load(active_ptr + slots, mask=known, other=0).to(tl.int32)
    extra = tl.minimum(tl.load(count_ptr + slots, mask=known, other=0).to(tl.int32), W - 1) * active
    room = R - tl.sum(active, axis=0) - (tl.cumsum(extra, axis=0) - extra)
    rows = active + tl.minimum(tl.maximum(room, 0), extra)
    start = tl.sum(tl.where(i < b, rows, 0), axis=0)
    mine = tl.sum(tl.where(i == b, rows, 0), axis=0)
    total = tl.sum(rows, axis=0)
    slot = tl.load(slot_ptr + b)
    base = tl.load(committed_ptr + slot)
    w = tl.arange(0, WP)
    live = w < mine
    r = start + w
    zero = tl.zeros([WP], tl.int64)
    tl.store(slot_out + r, zero + slot, mask=live)
    tl.store(pos_out + r, base + w, mask=live)
    tl.store(token_out + r, tl.load(pending_ptr + slot * PW + w, mask=live, other=0), mask=live)
    tl.store(owner_out + r, zero + b, mask=live)
    tl.store(rows_out + b, mine.to(tl.int64))
    last = tl.maximum(mine - 1, 0)
    if LONE:
        last = last * 0 + (W - 1)
    row_of = tl.minimum(start + tl.minimum(w, last), R - 1)
    tl.store(row_of_out + b * W + w, row_of.to(tl.int64), mask=w < W)
    for first in tl.range(total + b * WP, R, B * WP):
        pad = first + w
        spare = pad < R
        tl.store(slot_out + pad, zero, mask=spare)
        tl.store(pos_out + pad, zero, mask=spare)
        tl.store(token_out + pad, zero, mask=spare)
        tl.store(owner_out + pad, zero + (B - 1), mask=spare)


@triton.jit
def _drawn(key, child, base, rows, whole, share):
    """Accepted drafts by lot; see `kernels.frame.synthetic_parts`."""
    more = coin53(stream_word(key, child, base, rows * 0, _FOR_SYNTHETIC)) < share
    return tl.minimum(more.to(tl.int32) + whole, tl.maximum(rows - 1, 0)).to(tl.int32)


@triton.jit
def _close(
    b, w, slot, base, rows, token, accepted, emitted, generation_ptr, active_ptr, committed_ptr, max_len_ptr,
    stop_ptr, history_ptr, pending_ptr, record_ptr, L,
    W: tl.constexpr, PW: tl.constexpr, T: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    """Finish test, commit and record of one slot. token [WP]; rows, accepted, emitted int32."""
    inside = w < W
    t = tl.arange(0, TP)
    stops = tl.load(stop_ptr + slot * T + t, mask=t < T, other=-1)
    none = (token == _NO_TOKEN).to(tl.int32)
    stop = tl.max((token[:, None] == stops[None, :]).to(tl.int32), axis=1) * (1 - none)
    full = base + w + 2 >= tl.load(max_len_ptr + slot)
    end = ((stop > 0) | full | (none > 0)) & (w < emitted) & inside
    cut = tl.min(tl.where(end, w, W), axis=0)
    ended = cut < W
    stopped = tl.sum(tl.where(w == cut, stop, 0), axis=0) > 0
    missing = tl.sum(tl.where(w == cut, none, 0), axis=0)
    finish = tl.where(ended, tl.where(missing > 0, _INVALID, tl.where(stopped, _STOP, _LENGTH)), _NONE)
    count = tl.where(ended, cut + 1 - missing, emitted)
    tl.store(history_ptr + slot * L + base + 1 + w, token, mask=(w < count) & inside)
    # A slot that emits nothing may be the sink, which several programs share: then nothing is written.
    tl.store(pending_ptr + slot * PW, tl.sum(tl.where(w == count - 1, token, 0), axis=0), mask=count > 0)
    tl.store(committed_ptr + slot, base + count, mask=count > 0)
    tl.store(active_ptr + slot, tl.zeros_like(slot), mask=ended)
    own = record_ptr + b * (_COLUMNS + W)
    tl.store(own, tl.load(generation_ptr + slot))
    tl.store(own + 1, count.to(tl.int64))
    tl.store(own + 2, tl.minimum(accepted, count).to(tl.int64))
    tl.store(own + 3, tl.maximum(rows - 1, 0).to(tl.int64))
    tl.store(own + 4, finish.to(tl.int64))
    tl.store(own + 5, tl.zeros_like(slot))
    tl.store(own + _COLUMNS + w, token, mask=inside)


@triton.jit
def close_round_kernel(
    token_ptr, accepted_ptr, emitted_ptr, rows_ptr, slot_ptr, generation_ptr, active_ptr, committed_ptr, max_len_ptr,
    stop_ptr, history_ptr, pending_ptr, record_ptr, L,
    W: tl.constexpr, PW: tl.constexpr, WP: tl.constexpr, T: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    """Grid (B,)."""
    b = tl.program_id(0)
    w = tl.arange(0, WP)
    slot = tl.load(slot_ptr + b)
    base = tl.load(committed_ptr + slot)
    token = tl.load(token_ptr + b * W + w, mask=w < W, other=0)
    rows = tl.load(rows_ptr + b).to(tl.int32)
    accepted = tl.load(accepted_ptr + b).to(tl.int32)
    emitted = tl.load(emitted_ptr + b).to(tl.int32)
    _close(
        b, w, slot, base, rows, token, accepted, emitted, generation_ptr, active_ptr, committed_ptr, max_len_ptr,
        stop_ptr, history_ptr, pending_ptr, record_ptr, L, W, PW, T, TP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["whole", "share"])
def close_greedy_kernel(
    target_ptr, row_of_ptr, rows_ptr, slot_ptr, generation_ptr, active_ptr, committed_ptr, max_len_ptr,
    stop_ptr, history_ptr, pending_ptr, key_ptr, child_ptr, record_ptr, L, whole, share,
    W: tl.constexpr, PW: tl.constexpr, WP: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, SYNTHETIC: tl.constexpr,
):  # fmt: skip
    """Grid (B,): the leading drafts that equal their row's target (or the drawn count), then the target's own token."""
    b = tl.program_id(0)
    w = tl.arange(0, WP)
    inside = w < W
    slot = tl.load(slot_ptr + b)
    base = tl.load(committed_ptr + slot)
    rows = tl.load(rows_ptr + b).to(tl.int32)
    target = tl.load(target_ptr + tl.load(row_of_ptr + b * W + w, mask=inside, other=0), mask=inside, other=0)
    draft = tl.load(pending_ptr + slot * PW + 1 + w, mask=w < W - 1, other=-1)
    if SYNTHETIC:
        accepted = _drawn(tl.load(key_ptr + slot), tl.load(child_ptr + slot), base, rows, whole, share)
    else:
        good = (target == draft) & (w < rows - 1) & (w < W - 1)
        accepted = tl.min(tl.where(good, WP, w), axis=0)
    emitted = tl.where(rows > 0, accepted + 1, 0)
    own = tl.sum(tl.where(w == accepted, target, 0), axis=0)
    token = tl.where(w < accepted, draft, own)
    token = tl.where(w < emitted, token, 0)
    _close(
        b, w, slot, base, rows, token, accepted, emitted, generation_ptr, active_ptr, committed_ptr, max_len_ptr,
        stop_ptr, history_ptr, pending_ptr, record_ptr, L, W, PW, T, TP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["whole", "share"])
def close_sampled_kernel(
    target_ptr, residual_ptr, p_ptr, row_of_ptr, rows_ptr, slot_ptr, generation_ptr, active_ptr, committed_ptr,
    max_len_ptr, stop_ptr, history_ptr, pending_ptr, mode_ptr, key_ptr, child_ptr, q_ptr, record_ptr, L, K, V,
    whole, share,
    W: tl.constexpr, PW: tl.constexpr, WP: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, DENSE: tl.constexpr,
    SYNTHETIC: tl.constexpr,
):  # fmt: skip
    """Grid (B,): as close_greedy; slots under rejection accept by coin and end with the row's residual token."""
    b = tl.program_id(0)
    w = tl.arange(0, WP)
    inside = w < W
    judged = w < W - 1
    slot = tl.load(slot_ptr + b)
    base = tl.load(committed_ptr + slot)
    rows = tl.load(rows_ptr + b).to(tl.int32)
    key = tl.load(key_ptr + slot)
    child = tl.load(child_ptr + slot)
    by_coin = tl.load(mode_ptr + slot) == _REJECTION
    row = tl.load(row_of_ptr + b * W + w, mask=inside, other=0)
    target = tl.load(target_ptr + row, mask=inside, other=0)
    draft = tl.load(pending_ptr + slot * PW + 1 + w, mask=judged, other=-1)
    if SYNTHETIC:
        accepted = _drawn(key, child, base, rows, whole, share)
    else:
        p = tl.load(p_ptr + row, mask=inside, other=0.0).to(tl.float64)
        u = coin53(stream_word(key, child, base, w, _FOR_ACCEPT)).to(tl.float64) * 2.0**-53
        if DENSE:
            at = (slot * K + w) * V + tl.minimum(tl.maximum(draft, 0), V - 1)
            u = u * tl.load(q_ptr + at, mask=judged & (w < K), other=0.0).to(tl.float64)
        good = tl.where(by_coin, u < p, target == draft) & (w < rows - 1) & judged
        accepted = tl.min(tl.where(good, WP, w), axis=0)
    emitted = tl.where(rows > 0, accepted + 1, 0)
    refused = by_coin & (accepted < rows - 1)
    last = tl.where(refused, tl.load(residual_ptr + row, mask=inside, other=0), target)
    own = tl.sum(tl.where(w == accepted, last, 0), axis=0)
    token = tl.where(w < accepted, draft, own)
    token = tl.where(w < emitted, token, 0)
    _close(
        b, w, slot, base, rows, token, accepted, emitted, generation_ptr, active_ptr, committed_ptr, max_len_ptr,
        stop_ptr, history_ptr, pending_ptr, record_ptr, L, W, PW, T, TP,
    )  # fmt: skip


def _pad(n, least=4):
    return max(least, triton.next_power_of_2(n))


def launch_pack_rows(
    active, committed, count, pending, slot, slot_out, pos_out, token_out, owner_out, rows_out, row_of
):
    slots, width = row_of.shape
    rows = slot_out.shape[0]
    pack_rows_kernel[(slots,)](
        active, committed, count, pending, slot, slot_out, pos_out, token_out, owner_out, rows_out, row_of,
        slots, rows, W=width, PW=pending.shape[1], LONE=slots == 1 and rows == width, BP=_pad(slots, 32),
        WP=_pad(width), num_warps=1 if slots <= 64 else 4,
    )  # fmt: skip


def launch_close_round(
    token, accepted, emitted, rows, slot, generation, active, committed, max_len, stops, history, pending, record
):
    slots, width = token.shape
    close_round_kernel[(slots,)](
        token, accepted, emitted, rows, slot, generation, active, committed, max_len, stops, history, pending, record,
        history.shape[1], W=width, PW=pending.shape[1], WP=_pad(width), T=stops.shape[1], TP=_pad(stops.shape[1]),
        num_warps=1,
    )  # fmt: skip


def launch_close_greedy(
    target, row_of, rows, slot, generation, active, committed, max_len, stops, history, pending, key, child, record,
    synthetic,
):  # fmt: skip
    """synthetic: None, or `kernels.frame.synthetic_parts`."""
    slots, width = row_of.shape
    whole, share = synthetic or (0, 0)
    close_greedy_kernel[(slots,)](
        target, row_of, rows, slot, generation, active, committed, max_len, stops, history, pending, key, child,
        record, history.shape[1], whole, share, W=width, PW=pending.shape[1], WP=_pad(width), T=stops.shape[1],
        TP=_pad(stops.shape[1]), SYNTHETIC=synthetic is not None, num_warps=1,
    )  # fmt: skip


def launch_close_sampled(
    target, residual, p, row_of, rows, slot, generation, active, committed, max_len, stops, history, pending, mode, key,
    child, q, record, synthetic,
):  # fmt: skip
    """q: [S, K, V] or None. synthetic: None, or `kernels.frame.synthetic_parts`."""
    slots, width = row_of.shape
    whole, share = synthetic or (0, 0)
    _, drafts, vocab = (0, 0, 0) if q is None else q.shape
    close_sampled_kernel[(slots,)](
        target, residual, p, row_of, rows, slot, generation, active, committed, max_len, stops, history, pending, mode,
        key, child, q, record, history.shape[1], drafts, vocab, whole, share, W=width, PW=pending.shape[1],
        WP=_pad(width), T=stops.shape[1], TP=_pad(stops.shape[1]), DENSE=q is not None,
        SYNTHETIC=synthetic is not None, num_warps=1,
    )  # fmt: skip
