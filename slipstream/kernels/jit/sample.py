# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the ops in kernels/sample.py are typed.)
"""Two-stage argmax, and the exponential race of sampled rows with noise made in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tlx

from slipstream.kernels.jit.filters import row_scale
from slipstream.kernels.jit.numbers import exp, exponential, stream_word
from slipstream.sampling.rng import PURPOSE_COUPLED, PURPOSE_EMIT
from slipstream.types import NO_TOKEN, VerifyMode

_NOWHERE = tl.constexpr(2147483647)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_GREEDY = tl.constexpr(int(VerifyMode.GREEDY))
_COUPLED = tl.constexpr(int(VerifyMode.COUPLED))
_REJECTION = tl.constexpr(int(VerifyMode.REJECTION))
_FOR_COUPLED = tl.constexpr(PURPOSE_COUPLED)
_FOR_EMIT = tl.constexpr(PURPOSE_EMIT)

TILE = 4096


@triton.jit(do_not_specialize=["R"])
def argmax_tiles_kernel(x_ptr, best_ptr, where_ptr, R, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (cdiv(V, BLOCK), R): the best value of each tile and its lowest index."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    i = tile * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tlx.gdc_launch_dependents()
        tlx.gdc_wait()
    x = tl.load(x_ptr + row.to(tl.int64) * V + i, mask=i < V, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    tl.store(best_ptr + tile * R + row, top)
    tl.store(where_ptr + tile * R + row, tl.min(tl.where(x == top, i, _NOWHERE), axis=0))


@triton.jit
def best_of_tiles(best_ptr, where_ptr, row, R, tiles, TB: tl.constexpr):
    """Best value over the tiles and the lowest index that has it."""
    t = tl.arange(0, TB)
    best = tl.load(best_ptr + t * R + row, mask=t < tiles, other=float("-inf"))
    where = tl.load(where_ptr + t * R + row, mask=t < tiles, other=2147483647)
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, where, _NOWHERE), axis=0)


@triton.jit
def finite(x):
    """Whether it is neither NaN nor infinite."""
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit(do_not_specialize=["R", "tiles", "none"])
def argmax_finish_kernel(best_ptr, where_ptr, out_ptr, R, tiles, V, none, TB: tl.constexpr, PDL: tl.constexpr):
    """Grid (R,): the best of the tiles; among equals the lowest index; `none` where it is not finite."""
    row = tl.program_id(0)
    if PDL:
        tlx.gdc_launch_dependents()
        tlx.gdc_wait()
    top, token = best_of_tiles(best_ptr, where_ptr, row, R, tiles, TB)
    tl.store(out_ptr + row, tl.where(finite(top), tl.minimum(token, V - 1), none).to(tl.int64))


@triton.jit
def _depth_and_draft(slot, pos, committed_ptr, pending_ptr, PW):
    """The row's place in its slot's round, and the draft that it judges; -1 where it judges none."""
    depth = (pos - tl.load(committed_ptr + slot)).to(tl.int32)
    judges = (depth >= 0) & (depth < PW - 1)
    return depth, tl.load(pending_ptr + slot * PW + depth + 1, mask=judges, other=-1)


@triton.jit(do_not_specialize=["R"])
def weights_kernel(
    logits_ptr, peak_ptr, threshold_ptr, slot_ptr, temperature_ptr, mode_ptr, sum_ptr, R, V, BLOCK: tl.constexpr
):
    """Grid (tiles, R): each tile's share of the sum of weights, for rows judged by rejection."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    if tl.load(mode_ptr + slot) == _REJECTION:
        i = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row.to(tl.int64) * V + i, mask=i < V, other=float("-inf"))
        x = tl.div_rn(x, row_scale(temperature_ptr, slot))
        weight = tl.where(x >= tl.load(threshold_ptr + row), exp(x - tl.load(peak_ptr + row)), 0.0)
        tl.store(sum_ptr + tile * R + row, tl.sum(weight, axis=0))


@triton.jit
def store_best(score, i, at, best_ptr, where_ptr):
    top = tl.max(score, axis=0)
    tl.store(best_ptr + at, top)
    tl.store(where_ptr + at, tl.min(tl.where(score == top, i, _NOWHERE), axis=0))


@triton.jit
def sum_of_tiles(sum_ptr, row, R, tiles, TB: tl.constexpr):
    t = tl.arange(0, TB)
    return tl.sum(tl.load(sum_ptr + t * R + row, mask=t < tiles, other=0.0), axis=0)


@triton.jit(do_not_specialize=["R", "tiles"])
def race_kernel(
    logits_ptr, peak_ptr, threshold_ptr, slot_ptr, pos_ptr, temperature_ptr, mode_ptr, key_ptr, child_ptr,
    committed_ptr, pending_ptr, q_ptr, best_ptr, where_ptr, sum_ptr, R, V, tiles, PW, K,
    BLOCK: tl.constexpr, TB: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, R). Plane 0: the race over the weights; plane 1, under rejection: over what they have beyond q."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    mode = tl.load(mode_ptr + slot)
    if mode != _GREEDY:
        pos = tl.load(pos_ptr + row)
        key = tl.load(key_ptr + slot)
        child = tl.load(child_ptr + slot)
        depth, draft = _depth_and_draft(slot, pos, committed_ptr, pending_ptr, PW)
        word = tl.where(
            mode == _COUPLED,
            stream_word(key, child, pos + 1, depth * 0, _FOR_COUPLED),
            stream_word(key, child, pos - depth, depth, _FOR_EMIT),
        )
        i = tile * BLOCK + tl.arange(0, BLOCK)
        ok = i < V
        x = tl.load(logits_ptr + row.to(tl.int64) * V + i, mask=ok, other=float("-inf"))
        x = tl.div_rn(x, row_scale(temperature_ptr, slot))
        weight = tl.where(x >= tl.load(threshold_ptr + row), exp(x - tl.load(peak_ptr + row)), 0.0)
        noise = exponential(word, i)
        at = tile * R + row
        # Division as IEEE has it: an approximate one could turn a near tie.
        store_best(tl.where(ok, tl.div_rn(weight, noise), -1.0), i, at, best_ptr, where_ptr)
        if mode == _REJECTION:
            if DENSE:
                held = (depth >= 0) & (depth < K)
                q = tl.load(q_ptr + (slot * K + depth) * V + i, mask=ok & held, other=0.0).to(tl.float32)
                rest = tl.maximum(tl.div_rn(weight, sum_of_tiles(sum_ptr, row, R, tiles, TB)) - q, 0.0)
            else:
                tl.store(sum_ptr + at, tl.sum(weight, axis=0))
                rest = tl.where(i == draft, 0.0, weight)
            score = tl.where(ok, tl.div_rn(rest, noise), -1.0)
            store_best(score, i, tiles * R + at, best_ptr, where_ptr)


@triton.jit(do_not_specialize=["R", "tiles"])
def race_finish_kernel(
    logits_ptr, peak_ptr, threshold_ptr, greedy_ptr, slot_ptr, pos_ptr, temperature_ptr, mode_ptr, committed_ptr,
    pending_ptr, best_ptr, where_ptr, sum_ptr, target_out, residual_out, p_out, R, V, tiles, PW, TB: tl.constexpr,
):  # fmt: skip
    """Grid (R,): the row's token, the one instead of a refused draft, and the draft's probability."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    mode = tl.load(mode_ptr + slot)
    token = tl.load(greedy_ptr + row).to(tl.int32)
    other = token
    p = tl.load(peak_ptr + row) * 0.0
    if mode != _GREEDY:
        _won, token = best_of_tiles(best_ptr, where_ptr, row, R, tiles, TB)
        other = token
        if mode == _REJECTION:
            top, beyond = best_of_tiles(best_ptr + tiles * R, where_ptr + tiles * R, row, R, tiles, TB)
            other = tl.where(top > 0.0, beyond, token)  # nothing left: q = p up to rounding
            _depth, draft = _depth_and_draft(slot, tl.load(pos_ptr + row), committed_ptr, pending_ptr, PW)
            draft = tl.minimum(tl.maximum(draft, 0), V - 1)
            x = tl.div_rn(tl.load(logits_ptr + row.to(tl.int64) * V + draft), row_scale(temperature_ptr, slot))
            weight = tl.where(x >= tl.load(threshold_ptr + row), exp(x - tl.load(peak_ptr + row)), 0.0)
            p = tl.div_rn(weight, sum_of_tiles(sum_ptr, row, R, tiles, TB))
    some = finite(tl.load(peak_ptr + row))
    tl.store(target_out + row, tl.where(some, tl.minimum(token, V - 1), _NO_TOKEN).to(tl.int64))
    tl.store(residual_out + row, tl.where(some, tl.minimum(other, V - 1), _NO_TOKEN).to(tl.int64))
    tl.store(p_out + row, tl.where(some, p, 0.0))


def launch_argmax_tiles(x, best, where, *, pdl):
    rows, vocab = x.shape
    argmax_tiles_kernel[(best.shape[0], rows)](
        x, best, where, rows, vocab, BLOCK=TILE, PDL=pdl, num_warps=4, launch_pdl=pdl
    )


def launch_argmax_finish(best, where, out, *, vocab, pdl, none=0):
    tiles, rows = best.shape
    argmax_finish_kernel[(rows,)](
        best,
        where,
        out,
        rows,
        tiles,
        vocab,
        none,
        TB=triton.next_power_of_2(tiles),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def launch_race_rows(
    logits, peak, threshold, greedy, slot, pos, temperature, mode, key, child, committed, pending, q, target, residual,
    p,
):  # fmt: skip
    """q [S, K, V] or None."""
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE)
    best, part = logits.new_empty(2, tiles, rows), logits.new_empty(tiles, rows)
    where = torch.empty_like(best, dtype=torch.int32)
    tb, width = triton.next_power_of_2(tiles), pending.shape[1]
    if q is not None:
        weights_kernel[(tiles, rows)](
            logits, peak, threshold, slot, temperature, mode, part, rows, vocab, BLOCK=TILE, num_warps=4
        )
    race_kernel[(tiles, rows)](
        logits, peak, threshold, slot, pos, temperature, mode, key, child, committed, pending, q, best, where, part,
        rows, vocab, tiles, width, 0 if q is None else q.shape[1], BLOCK=TILE, TB=tb, DENSE=q is not None, num_warps=4,
    )  # fmt: skip
    race_finish_kernel[(rows,)](
        logits, peak, threshold, greedy, slot, pos, temperature, mode, committed, pending, best, where, part, target,
        residual, p, rows, vocab, tiles, width, TB=tb, num_warps=1,
    )  # fmt: skip
