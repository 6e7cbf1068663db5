# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the op in kernels/choice.py is typed.)
"""A drafter's race over its vocabulary, and its law written to slot state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels.jit import sample
from slipstream.kernels.jit.filters import row_scale
from slipstream.kernels.jit.numbers import exp, exponential, stream_word
from slipstream.kernels.jit.sample import best_of_tiles, store_best, sum_of_tiles, weights_kernel
from slipstream.sampling.rng import PURPOSE_COUPLED, PURPOSE_DRAFT
from slipstream.types import MAX_DRAFTS, VerifyMode

_GREEDY = tl.constexpr(int(VerifyMode.GREEDY))
_COUPLED = tl.constexpr(int(VerifyMode.COUPLED))
_REJECTION = tl.constexpr(int(VerifyMode.REJECTION))
_FOR_COUPLED = tl.constexpr(PURPOSE_COUPLED)
_FOR_DRAFT = tl.constexpr(PURPOSE_DRAFT)
_NODES = tl.constexpr(MAX_DRAFTS + 1)


@triton.jit(do_not_specialize=["R", "tiles"])
def choice_kernel(
    logits_ptr, id_ptr, peak_ptr, threshold_ptr, slot_ptr, temperature_ptr, mode_ptr, key_ptr, child_ptr,
    committed_ptr, q_ptr, best_ptr, where_ptr, sum_ptr, R, D, V, K, tiles, step,
    BLOCK: tl.constexpr, TB: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, R)."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    mode = tl.load(mode_ptr + slot)
    if mode != _GREEDY:
        base = tl.load(committed_ptr + slot)
        key = tl.load(key_ptr + slot)
        child = tl.load(child_ptr + slot)
        word = tl.where(
            mode == _COUPLED,
            stream_word(key, child, base + step + 1, tile * 0, _FOR_COUPLED),
            stream_word(key, child, base * _NODES + step, tile * 0, _FOR_DRAFT),
        )
        i = tile * BLOCK + tl.arange(0, BLOCK)
        ok = i < D
        token = i
        if IDS:
            token = tl.load(id_ptr + i, mask=ok, other=0).to(tl.int32)
        x = tl.load(logits_ptr + row.to(tl.int64) * D + i, mask=ok, other=float("-inf"))
        x = tl.div_rn(x, row_scale(temperature_ptr, slot))
        weight = tl.where(x >= tl.load(threshold_ptr + row), exp(x - tl.load(peak_ptr + row)), 0.0)
        if DENSE:
            if mode == _REJECTION:
                total = sum_of_tiles(sum_ptr, row, R, tiles, TB)
                law = tl.div_rn(weight, tl.where(total > 0, total, 1.0))
                weight = tl.where(total > 0, law, tl.where(i == 0, 1.0, 0.0))
                tl.store(q_ptr + (slot * K + step) * V + token, weight.to(q_ptr.dtype.element_ty), mask=ok)
        store_best(
            tl.where(ok, tl.div_rn(weight, exponential(word, token)), -1.0), i, tile * R + row, best_ptr, where_ptr
        )


@triton.jit(do_not_specialize=["R", "tiles"])
def choice_finish_kernel(
    id_ptr, greedy_ptr, slot_ptr, mode_ptr, best_ptr, where_ptr, out_ptr, R, D, tiles,
    TB: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Grid (R,)."""
    row = tl.program_id(0)
    won = tl.load(greedy_ptr + row).to(tl.int32)
    if tl.load(mode_ptr + tl.load(slot_ptr + row)) != _GREEDY:
        _top, won = best_of_tiles(best_ptr, where_ptr, row, R, tiles, TB)
    won = tl.minimum(won, D - 1).to(tl.int64)  # a row of NaN has no winner
    if IDS:
        won = tl.load(id_ptr + won)
    tl.store(out_ptr + row, won)


def launch_draft_choice(
    logits, ids, peak, threshold, greedy, slot, temperature, mode, key, child, committed, q, out, *, step, vocab
):  # fmt: skip
    """ids [D] and q [S, K, V], or None."""
    rows, drafts = logits.shape
    tiles = triton.cdiv(drafts, sample.TILE)
    best, part = logits.new_empty(tiles, rows), logits.new_empty(tiles, rows)
    where = torch.empty_like(best, dtype=torch.int32)
    tb = triton.next_power_of_2(tiles)
    if q is not None:
        weights_kernel[(tiles, rows)](
            logits, peak, threshold, slot, temperature, mode, part, rows, drafts, BLOCK=sample.TILE, num_warps=4
        )
    choice_kernel[(tiles, rows)](
        logits, ids, peak, threshold, slot, temperature, mode, key, child, committed, q, best, where, part, rows,
        drafts, vocab, 0 if q is None else q.shape[1], tiles, step, BLOCK=sample.TILE, TB=tb, IDS=ids is not None,
        DENSE=q is not None, num_warps=4,
    )  # fmt: skip
    choice_finish_kernel[(rows,)](
        ids, greedy, slot, mode, best, where, out, rows, drafts, tiles, TB=tb, IDS=ids is not None, num_warps=1
    )
