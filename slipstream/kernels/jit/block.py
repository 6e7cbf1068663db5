# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the ops in kernels/block.py are typed.)
"""A block drafter's rows, the keys and values of its context, and one step of its Markov chain."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tlx

from slipstream.kernels.jit.gemm_parts import cache_cell
from slipstream.kernels.jit.norm import row_rstd
from slipstream.kernels.jit.sample import best_of_tiles

HEADS = 8
"""Heads of a row that share a program."""


@triton.jit
def block_rows_kernel(
    slot_ptr, committed_ptr, history_ptr, table_ptr, token_ptr, out_slot_ptr, pos_ptr, last_ptr, anchor_ptr,
    L, table_width, page_size, mask_token, T: tl.constexpr, TP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B,). T: rows of a block."""
    b = tl.program_id(0)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    base = tl.load(committed_ptr + b).to(tl.int64)
    anchor = tl.load(history_ptr + slot * L + base)
    owned = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, table_width, BLOCK):
        i = first + tl.arange(0, BLOCK)
        owned += (tl.load(table_ptr + slot * table_width + i, mask=i < table_width, other=0) > 0).to(tl.int32)
    end = tl.sum(owned, axis=0).to(tl.int64) * page_size - 1
    last = tl.maximum(tl.minimum(base + T - 1, end), 0)
    t = tl.arange(0, TP)
    at = b * T + t
    ok = t < T
    tl.store(anchor_ptr + b, anchor)
    tl.store(token_ptr + at, tl.where(t == 0, anchor, mask_token), mask=ok)
    tl.store(out_slot_ptr + at, tl.where(ok, slot, 0), mask=ok)
    tl.store(pos_ptr + at, base + t, mask=ok)
    tl.store(last_ptr + at, tl.where(ok, last, 0), mask=ok)


@triton.jit(do_not_specialize=["R"])
def context_write_kernel(
    kv_ptr, cache_ptr, cos_ptr, sin_ptr, gain_ptr, bias_ptr, sq_ptr, table_ptr, slot_ptr, pos_ptr,
    R, table_width, page_size, rope_len, plane, eps, width, norm_eps,
    E: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, HB: tl.constexpr, BIAS: tl.constexpr,
    SQ_TILES: tl.constexpr, SQ_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, E, cdiv(2 * KH, HB)): HB heads of one row of one layer, keys first. plane: numbers of a layer's keys."""
    row = tl.program_id(0)
    layer = tl.program_id(1)
    head = tl.program_id(2) * HB + tl.arange(0, HB)
    half: tl.constexpr = D // 2
    i = tl.arange(0, HP)
    if PDL:
        tlx.gdc_launch_dependents()
        tlx.gdc_wait()
    slot = tl.load(slot_ptr + row)
    pos = tl.load(pos_ptr + row)
    cell = cache_cell(table_ptr, slot, pos, table_width, page_size, row >= 0) * (KH * D)
    ok = (head < 2 * KH)[:, None] & (i < half)[None, :]
    place = head[:, None] * D + i[None, :]
    base = kv_ptr + row.to(tl.int64) * (E * 2 * KH * D) + layer * (2 * KH * D)
    a = tl.load(base + place, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(base + half + place, mask=ok, other=0.0).to(tl.float32)
    if SQ_TILES > 0:
        scale = row_rstd(sq_ptr, row, R, width, norm_eps, SQ_TILES, SQ_PAD)
        a = a * scale
        b = b * scale
    if BIAS:
        bias = bias_ptr + layer * (2 * KH * D)
        a = a + tl.load(bias + place, mask=ok, other=0.0).to(tl.float32)
        b = b + tl.load(bias + half + place, mask=ok, other=0.0).to(tl.float32)
    rstd = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D + eps)[:, None]
    gain = gain_ptr + layer * D + i
    ka = a * rstd * tl.load(gain, mask=i < half, other=0.0).to(tl.float32)[None, :]
    kb = b * rstd * tl.load(gain + half, mask=i < half, other=0.0).to(tl.float32)[None, :]
    angle = tl.minimum(tl.maximum(pos, 0), rope_len - 1).to(tl.int64) * half + i
    cos = tl.load(cos_ptr + angle, mask=i < half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=i < half, other=0.0)[None, :]
    is_v = (head >= KH)[:, None]
    ya = tl.where(is_v, a, ka * cos - kb * sin).to(cache_ptr.dtype.element_ty)
    yb = tl.where(is_v, b, kb * cos + ka * sin).to(cache_ptr.dtype.element_ty)
    first = cache_ptr + layer.to(tl.int64) * 2 * plane + cell
    to = first + place.to(tl.int64) + tl.where(is_v, plane - KH * D, 0)
    tl.store(to, ya, mask=ok)
    tl.store(to + half, yb, mask=ok)


@triton.jit(do_not_specialize=["R", "tiles", "K", "step"])
def markov_next_kernel(
    best_ptr, where_ptr, w_ptr, token_ptr, out_ptr, R, tiles, V, K, step, rank,
    TB: tl.constexpr, RP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B,): the best of the tiles, among equals the lowest id, and its row of w [V, rank]."""
    row = tl.program_id(0)
    if PDL:
        tlx.gdc_launch_dependents()
        tlx.gdc_wait()
    _, token = best_of_tiles(best_ptr, where_ptr, row, R, tiles, TB)
    token = tl.minimum(token, V - 1).to(tl.int64)
    tl.store(token_ptr + row * K + step, token)
    i = tl.arange(0, RP)
    tl.store(out_ptr + row * rank + i, tl.load(w_ptr + token * rank + i, mask=i < rank, other=0.0), mask=i < rank)


def launch_block_rows(
    slot, committed, history, table, token, out_slot, pos, last, anchor, *, page_size, mask_token
):  # fmt: skip
    rows = token.shape[0] // slot.shape[0]
    block_rows_kernel[(slot.shape[0],)](
        slot, committed, history, table, token, out_slot, pos, last, anchor, history.shape[1], table.shape[1],
        page_size, mask_token, T=rows, TP=triton.next_power_of_2(rows), BLOCK=512, num_warps=4,
    )  # fmt: skip


def launch_context_write(
    kv, cache, cos, sin, gain, table, slot, pos, *, eps, bias=None, sq=None, width=1, norm_eps=0.0, pdl=False
):  # fmt: skip
    """Launch; see kernels/block.py for the shapes."""
    layers, _, pages, page_size, kv_heads, dim = cache.shape
    tiles = 0 if sq is None else sq.shape[0]
    context_write_kernel[(kv.shape[0], layers, triton.cdiv(2 * kv_heads, HEADS))](
        kv, cache, cos, sin, gain, bias, sq, table, slot, pos,
        kv.shape[0], table.shape[1], page_size, cos.shape[0], pages * page_size * kv_heads * dim, eps, width, norm_eps,
        E=layers, KH=kv_heads, D=dim, HP=triton.next_power_of_2(dim // 2), HB=HEADS, BIAS=bias is not None,
        SQ_TILES=tiles, SQ_PAD=triton.next_power_of_2(max(tiles, 1)), PDL=pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip


def launch_markov_next(best, where, w, token, out, *, step, pdl=False):
    tiles, rows = best.shape
    markov_next_kernel[(rows,)](
        best, where, w, token, out, rows, tiles, w.shape[0], token.shape[1], step, w.shape[1],
        TB=triton.next_power_of_2(tiles), RP=triton.next_power_of_2(w.shape[1]), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
