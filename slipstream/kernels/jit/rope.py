# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the ops in kernels/rope.py are typed.)
"""Bias, qk-norm, rotary embedding and KV write in one launch, from the output of the qkv product."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tlx

from slipstream.kernels.jit.gemm_parts import cache_cell
from slipstream.kernels.jit.norm import row_rstd

HEADS = 8
"""Heads of a row that share a program."""


@triton.jit(do_not_specialize=["R"])
def rope_kv_write_kernel(
    qkv_ptr, q_out_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, qn_ptr, kn_ptr, bias_ptr, sq_ptr, table_ptr, slot_ptr,
    rope_pos_ptr, kv_pos_ptr,
    R, table_width, page_size, rope_len, eps, width, norm_eps,
    N: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, HB: tl.constexpr, QK_NORM: tl.constexpr,
    BIAS: tl.constexpr, SQ_TILES: tl.constexpr, SQ_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, cdiv(N + 2 * KH, HB)): HB heads of one row. HP: power of two at or above D / 2."""
    row = tl.program_id(0)
    head = tl.program_id(1) * HB + tl.arange(0, HB)
    half: tl.constexpr = D // 2
    i = tl.arange(0, HP)
    if PDL:
        tlx.gdc_launch_dependents()
        tlx.gdc_wait()
    slot = tl.load(slot_ptr + row)
    at = tl.load(kv_pos_ptr + row)
    pos = tl.load(rope_pos_ptr + row)
    # Padded rows and rows past the limit go to the sink page.
    cell = cache_cell(table_ptr, slot, at, table_width, page_size, row >= 0) * (KH * D)
    ok = (head < N + 2 * KH)[:, None] & (i < half)[None, :]
    place = head[:, None] * D + i[None, :]
    base = qkv_ptr + row.to(tl.int64) * ((N + 2 * KH) * D)
    a = tl.load(base + place, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(base + half + place, mask=ok, other=0.0).to(tl.float32)
    if SQ_TILES > 0:
        scale = row_rstd(sq_ptr, row, R, width, norm_eps, SQ_TILES, SQ_PAD)
        a = a * scale
        b = b * scale
    if BIAS:
        a = a + tl.load(bias_ptr + place, mask=ok, other=0.0).to(tl.float32)
        b = b + tl.load(bias_ptr + half + place, mask=ok, other=0.0).to(tl.float32)
    is_v = ok & (head >= N + KH)[:, None]
    v_to = v_ptr + cell + place - (N + KH) * D
    tl.store(v_to, a.to(v_ptr.dtype.element_ty), mask=is_v)
    tl.store(v_to + half, b.to(v_ptr.dtype.element_ty), mask=is_v)
    if QK_NORM:
        rstd = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D + eps)
        is_q = (head < N)[:, None]
        in_half = (i < half)[None, :]
        a = a * rstd[:, None] * tl.where(is_q, _gain(qn_ptr, i[None, :], in_half), _gain(kn_ptr, i[None, :], in_half))
        i = i + half
        b = b * rstd[:, None] * tl.where(is_q, _gain(qn_ptr, i[None, :], in_half), _gain(kn_ptr, i[None, :], in_half))
        i = i - half
    angle = tl.minimum(tl.maximum(pos, 0), rope_len - 1).to(tl.int64) * half + i
    cos = tl.load(cos_ptr + angle, mask=i < half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=i < half, other=0.0)[None, :]
    ya = (a * cos - b * sin).to(q_out_ptr.dtype.element_ty)
    yb = (b * cos + a * sin).to(q_out_ptr.dtype.element_ty)
    q_to = q_out_ptr + row.to(tl.int64) * (N * D) + place
    tl.store(q_to, ya, mask=ok & (head < N)[:, None])
    tl.store(q_to + half, yb, mask=ok & (head < N)[:, None])
    is_k = ok & ((head >= N) & (head < N + KH))[:, None]
    k_to = k_ptr + cell + place - N * D
    tl.store(k_to, ya, mask=is_k)
    tl.store(k_to + half, yb, mask=is_k)


@triton.jit
def _gain(ptr, i, ok):
    return tl.load(ptr + i, mask=ok, other=0.0).to(tl.float32)


def launch_rope_kv_write(
    qkv, q_out, k, v, cos, sin, q_gain, k_gain, table, slot, rope_pos, kv_pos, *, heads, eps, bias=None, sq=None,
    width=1, norm_eps=0.0, pdl=False,
):  # fmt: skip
    """Launch; see kernels/rope.py for the shapes."""
    kv_heads, dim = k.shape[2], k.shape[3]
    tiles = 0 if sq is None else sq.shape[0]
    rope_kv_write_kernel[(qkv.shape[0], triton.cdiv(heads + 2 * kv_heads, HEADS))](
        qkv, q_out, k, v, cos, sin, q_gain, k_gain, bias, sq, table, slot, rope_pos, kv_pos,
        qkv.shape[0], table.shape[1], k.shape[1], cos.shape[0], eps, width, norm_eps,
        N=heads, KH=kv_heads, D=dim, HP=triton.next_power_of_2(dim // 2), HB=HEADS, QK_NORM=q_gain is not None,
        BIAS=bias is not None, SQ_TILES=tiles, SQ_PAD=triton.next_power_of_2(max(tiles, 1)), PDL=pdl,
        num_warps=2, launch_pdl=pdl,
    )  # fmt: skip
