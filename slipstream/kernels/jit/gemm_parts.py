# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the ops in kernels/gemm.py are typed.)
"""Pieces of the weight-streaming product: the epilogues."""

from __future__ import annotations

import triton
import triton.language as tl

STORE, SILU, RESIDUAL, HEAD, ROPE = 0, 1, 2, 3, 4
_NOWHERE = tl.constexpr(2147483647)


@triton.jit
def store_residual(a, tile, n, r, out_ptr, res_ptr, gain_ptr, scaled_ptr, sq_ptr, R, N):
    """h = res + a; also h * gain, and this tile's share of each row's sum of squares, for the next RMSNorm."""
    inside = (n[:, None] < N) & (r[None, :] < R)
    at = r[None, :].to(tl.int64) * N + n[:, None]
    h = (a + tl.load(res_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, h, mask=inside)
    h = h.to(tl.float32)
    gain = tl.load(gain_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(scaled_ptr + at, (h * gain[:, None]).to(scaled_ptr.dtype.element_ty), mask=inside)
    # Padding is zero, so it adds nothing to the row's sum of squares.
    tl.store(sq_ptr + tile * R + r, tl.sum(tl.where(inside, h * h, 0.0), axis=0), mask=r < R)


@triton.jit
def store_head(a, tile, n, r, out_ptr, best_ptr, where_ptr, R, N, STORE_OUT: tl.constexpr):
    """Logits (if wanted) and the best logit of this tile with the lowest index that has it."""
    if STORE_OUT:
        inside = (n[:, None] < N) & (r[None, :] < R)
        at = r[None, :].to(tl.int64) * N + n[:, None]
        tl.store(out_ptr + at, a.to(out_ptr.dtype.element_ty), mask=inside)
    a = tl.where(n[:, None] < N, a, float("-inf"))
    top = tl.max(a, axis=0)
    first = tl.min(tl.where(a == top[None, :], n[:, None], _NOWHERE), axis=0)
    tl.store(best_ptr + tile * R + r, top, mask=r < R)
    tl.store(where_ptr + tile * R + r, first, mask=r < R)


@triton.jit
def cache_cell(table_ptr, slot, at, table_width, page_size, ok):
    """Index of the cached token that position `at` of `slot` lives in; the sink's where there is none."""
    inside = ok & (slot > 0) & (at >= 0) & (at < table_width * page_size)
    page = tl.load(table_ptr + slot.to(tl.int64) * table_width + at // page_size, mask=inside, other=0)
    return page.to(tl.int64) * page_size + tl.where(inside, at % page_size, 0)


@triton.jit
def sum_squares(sq_ptr, r, R, TILES: tl.constexpr, PAD: tl.constexpr):
    """Each row's sum of squares from the tiles' shares [TILES, R]."""
    t = tl.arange(0, PAD)
    shares = tl.load(sq_ptr + t[:, None] * R + r[None, :], mask=(t[:, None] < TILES) & (r[None, :] < R), other=0.0)
    return tl.sum(shares, axis=0)


@triton.jit
def rope_cells(table_ptr, slot_ptr, kv_pos_ptr, rope_pos_ptr, r, R, table_width, page_size, rope_len):
    """Cache cell and angle row of each row."""
    ok = r < R
    slot = tl.load(slot_ptr + r, mask=ok, other=0)
    at = tl.load(kv_pos_ptr + r, mask=ok, other=0)
    pos = tl.load(rope_pos_ptr + r, mask=ok, other=0)
    cell = cache_cell(table_ptr, slot, at, table_width, page_size, ok)
    return cell, tl.minimum(tl.maximum(pos, 0), rope_len - 1).to(tl.int64)


@triton.jit
def store_rope(
    a, b, n, r, out_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, pos, cell, q_gain_ptr, k_gain_ptr, R, rows, eps,
    HEADS: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, RB: tl.constexpr,
    QK_NORM: tl.constexpr,
):  # fmt: skip
    """a, b: first and second halves of heads. q is rotated into out, k and v go to cache cell [RB]."""
    half: tl.constexpr = D // 2
    head = n // D
    if QK_NORM:
        heads: tl.constexpr = BN // half
        squares = tl.sum(tl.reshape(a * a + b * b, [heads, half, RB]), axis=1) / D
        rstd = tl.rsqrt(squares + eps)
        rstd = tl.reshape(tl.broadcast_to(rstd[:, None, :], [heads, half, RB]), [BN, RB])
        i = n % D
        ga = tl.where(head < HEADS, tl.load(q_gain_ptr + i).to(tl.float32), tl.load(k_gain_ptr + i).to(tl.float32))
        i = i + half
        gb = tl.where(head < HEADS, tl.load(q_gain_ptr + i).to(tl.float32), tl.load(k_gain_ptr + i).to(tl.float32))
        plain = (head >= HEADS + KH)[:, None]
        a = tl.where(plain, a, a * rstd * ga[:, None])
        b = tl.where(plain, b, b * rstd * gb[:, None])
    angle = pos[None, :] * half + (n % D)[:, None]
    cos = tl.load(cos_ptr + angle, mask=(r < R)[None, :], other=0.0)
    sin = tl.load(sin_ptr + angle, mask=(r < R)[None, :], other=0.0)
    ya = (a * cos - b * sin).to(out_ptr.dtype.element_ty)
    yb = (b * cos + a * sin).to(out_ptr.dtype.element_ty)
    ok = (n < rows)[:, None] & (r < R)[None, :]
    is_q = ok & (head < HEADS)[:, None]
    is_k = ok & ((head >= HEADS) & (head < HEADS + KH))[:, None]
    is_v = ok & (head >= HEADS + KH)[:, None]
    q_at = r[None, :].to(tl.int64) * (HEADS * D) + n[:, None]
    tl.store(out_ptr + q_at, ya, mask=is_q)
    tl.store(out_ptr + q_at + half, yb, mask=is_q)
    k_at = cell[None, :] * (KH * D) + n[:, None] - HEADS * D
    tl.store(k_ptr + k_at, ya, mask=is_k)
    tl.store(k_ptr + k_at + half, yb, mask=is_k)
    v_at = k_at - KH * D
    tl.store(v_ptr + v_at, a.to(v_ptr.dtype.element_ty), mask=is_v)
    tl.store(v_ptr + v_at + half, b.to(v_ptr.dtype.element_ty), mask=is_v)
