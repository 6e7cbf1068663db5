# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the ops in kernels/sample.py are typed.)
"""Two-stage argmax, the exponential race with noise made in registers, and greedy verification."""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra import cuda as tlx
from triton.language.extra import libdevice

_NOWHERE = tl.constexpr(2147483647)
_M31 = tl.constexpr(2147483647)
# The constants of sampling/rng.py: the same bits on every device.
_GOLDEN31 = tl.constexpr(0x1E3779B9)
_MIX_A = tl.constexpr(0x6D0F27BD)
_MIX_B = tl.constexpr(0x2C1B3C6D)
_MIX_C = tl.constexpr(0x297A2D39)
_SCALE = tl.constexpr(-(2.0**-31) * (1.0 - 2.0**-23))
_INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")

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
def _best(best_ptr, where_ptr, row, R, tiles, TB: tl.constexpr):
    """Best value over the tiles and the lowest index that has it."""
    t = tl.arange(0, TB)
    best = tl.load(best_ptr + t * R + row, mask=t < tiles, other=float("-inf"))
    where = tl.load(where_ptr + t * R + row, mask=t < tiles, other=2147483647)
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, where, _NOWHERE), axis=0)


@triton.jit(do_not_specialize=["R", "tiles"])
def argmax_finish_kernel(best_ptr, where_ptr, out_ptr, R, tiles, V, TB: tl.constexpr, PDL: tl.constexpr):
    """Grid (R,): the best of the tiles; among equals the lowest index."""
    row = tl.program_id(0)
    if PDL:
        tlx.gdc_launch_dependents()
        tlx.gdc_wait()
    _, token = _best(best_ptr, where_ptr, row, R, tiles, TB)
    # A row of NaN has no maximum; any id inside the vocabulary is as good.
    tl.store(out_ptr + row, tl.minimum(token, V - 1).to(tl.int64))


@triton.jit
def _log1p(x):
    if _INTERPRET:
        # libdevice does not run there. Kahan's form keeps full precision near 0.
        w = 1.0 + x
        return tl.where(w == 1.0, x, tl.log(w) * (x / tl.where(w == 1.0, 1.0, w - 1.0)))
    return libdevice.log1p(x)


@triton.jit
def exponential(word, ids):
    """Exp(1) variate of each token id: `sampling.rng.noise_from_words` in float32, bit for bit."""
    a = (word & _M31).to(tl.int32)
    b = ((word >> 31) & _M31).to(tl.int32)
    x = (ids * _GOLDEN31 + a) & _M31
    x = ((x ^ (x >> 16)) * _MIX_A) & _M31
    low = x | 1
    x = x ^ b
    x = ((x ^ (x >> 15)) * _MIX_B) & _M31
    x = ((x ^ (x >> 16)) * _MIX_C) & _M31
    x = x ^ (x >> 15)
    u = (x.to(tl.float32) + low.to(tl.float32) * (2.0**-31)) * _SCALE
    return -_log1p(u)


@triton.jit(do_not_specialize=["B", "K"])
def race_tiles_kernel(
    p_ptr, row_ptr, word_ptr, refused_ptr, judged_ptr, draft_ptr, q_ptr, best_ptr, where_ptr, B, K, V,
    BLOCK: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(V, BLOCK), B). Two races in one pass: over what p has beyond q (plane 0), and over p (plane 1)."""
    tile = tl.program_id(0)
    b = tl.program_id(1)
    i = tile * BLOCK + tl.arange(0, BLOCK)
    ok = i < V
    row = tl.load(row_ptr + b)
    refused = tl.load(refused_ptr + b).to(tl.int32) != 0
    p = tl.load(p_ptr + row.to(tl.int64) * V + i, mask=ok, other=0.0)
    if DENSE:
        judged = tl.load(judged_ptr + b)
        q = tl.load(q_ptr + (b.to(tl.int64) * K + judged) * V + i, mask=i < tl.where(refused, V, 0), other=0.0)
        rest = tl.maximum(p - q.to(tl.float32), 0.0)
    else:
        rest = tl.where((i == tl.load(draft_ptr + b)) & refused, 0.0, p)
    noise = exponential(tl.load(word_ptr + b), i)
    tiles = tl.num_programs(0)
    for plane in tl.static_range(2):
        # Division as IEEE has it: an approximate one could turn a near tie.
        score = tl.where(ok, tl.div_rn(rest if plane == 0 else p, noise), -1.0)
        top = tl.max(score, axis=0)
        at = (plane * tiles + tile) * B + b
        tl.store(best_ptr + at, top)
        tl.store(where_ptr + at, tl.min(tl.where(score == top, i, _NOWHERE), axis=0))


@triton.jit(do_not_specialize=["B", "tiles"])
def race_finish_kernel(best_ptr, where_ptr, out_ptr, B, tiles, V, TB: tl.constexpr):
    """Grid (B,): the winner over p beyond q, or over p where q leaves nothing."""
    b = tl.program_id(0)
    top, token = _best(best_ptr, where_ptr, b, B, tiles, TB)
    _, plain = _best(best_ptr + tiles * B, where_ptr + tiles * B, b, B, tiles, TB)
    token = tl.where(top > 0.0, token, plain)
    tl.store(out_ptr + b, tl.minimum(token, V - 1).to(tl.int64))


@triton.jit
def greedy_verify_kernel(
    target_ptr, row_of_ptr, rows_ptr, draft_ptr, accepted_ptr, tokens_ptr, emitted_ptr, W, K, WP: tl.constexpr
):
    """Grid (B,): the leading drafts that equal their row's target, then the target's own token."""
    b = tl.program_id(0)
    w = tl.arange(0, WP)
    rows = tl.load(rows_ptr + b).to(tl.int32)
    target = tl.load(target_ptr + tl.load(row_of_ptr + b * W + w, mask=w < W, other=0), mask=w < W, other=0)
    draft = tl.load(draft_ptr + b * K + w, mask=(w < W - 1) & (w < K), other=-1)
    good = (target == draft) & (w < rows - 1) & (w < W - 1)
    accepted = tl.min(tl.where(good, WP, w), axis=0)
    last = tl.sum(tl.where(w == accepted, target, 0), axis=0)
    emitted = tl.where(rows > 0, accepted + 1, 0)
    tokens = tl.where(w < accepted, draft, last)
    tl.store(tokens_ptr + b * W + w, tl.where(w < emitted, tokens, 0), mask=w < W)
    tl.store(accepted_ptr + b, accepted.to(tl.int64))
    tl.store(emitted_ptr + b, emitted.to(tl.int64))


def launch_argmax_tiles(x, best, where, *, pdl):
    rows, vocab = x.shape
    argmax_tiles_kernel[(best.shape[0], rows)](
        x, best, where, rows, vocab, BLOCK=TILE, PDL=pdl, num_warps=4, launch_pdl=pdl
    )


def launch_argmax_finish(best, where, out, *, vocab, pdl):
    tiles, rows = best.shape
    argmax_finish_kernel[(rows,)](
        best, where, out, rows, tiles, vocab, TB=triton.next_power_of_2(tiles), PDL=pdl, num_warps=4, launch_pdl=pdl
    )


def launch_race(p, row, words, refused, judged, draft, q, best, where, out):
    """best, where: [2, tiles, B] scratch."""
    tiles, slots = best.shape[1:]
    vocab = p.shape[1]
    race_tiles_kernel[(tiles, slots)](
        p, row, words, refused, judged, draft, q, best, where, slots, 1 if q is None else q.shape[1], vocab,
        BLOCK=TILE, DENSE=q is not None, num_warps=4,
    )  # fmt: skip
    race_finish_kernel[(slots,)](best, where, out, slots, tiles, vocab, TB=triton.next_power_of_2(tiles))


def launch_greedy_verify(target, row_of, rows, draft, accepted, tokens, emitted):
    slots, width = row_of.shape
    greedy_verify_kernel[(slots,)](
        target, row_of, rows, draft, accepted, tokens, emitted, width, draft.shape[1],
        WP=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
