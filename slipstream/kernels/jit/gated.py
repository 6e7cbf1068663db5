# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the ops in kernels/gated.py are typed.)
"""Gated norm, partial rotation with KV write, and the gate of attention."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tlx

from slipstream.kernels.jit.gemm_parts import cache_cell

HEADS = 4
"""Heads of a row that share a program."""


@triton.jit
def gated_norm_kernel(
    o_ptr, z_ptr, gain_ptr, out_ptr, z_stride, eps, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    HB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, cdiv(N, HB))."""
    row = tl.program_id(0).to(tl.int64)
    n, i = tl.program_id(1) * HB + tl.arange(0, HB), tl.arange(0, DP)
    ok = (n < N)[:, None] & (i < D)[None, :]
    place = n[:, None] * D + i[None, :]
    if PDL:
        tlx.gdc_launch_dependents()
        tlx.gdc_wait()
    o = tl.load(o_ptr + row * (N * D) + place, mask=ok, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row * z_stride + place, mask=ok, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + i, mask=i < D, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    normed = (o * tl.rsqrt(tl.sum(o * o, axis=1) / D + eps)[:, None]).to(kind).to(tl.float32)
    normed = (normed * gain[None, :]).to(kind).to(tl.float32)
    tl.store(out_ptr + row * (N * D) + place, (normed * z * tl.sigmoid(z)).to(kind), mask=ok)


@triton.jit
def gated_rope_write_kernel(
    qkv_ptr, q_out_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, qn_ptr, kn_ptr, table_ptr, slot_ptr, rope_pos_ptr, kv_pos_ptr,
    table_width, page_size, rope_len, eps,
    N: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, QD: tl.constexpr,
    HB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, cdiv(N + 2 * KH, HB)): HB heads of one row. T: half of what turns; QD: a query and its gate."""
    row = tl.program_id(0).to(tl.int64)
    head, i = tl.program_id(1) * HB + tl.arange(0, HB), tl.arange(0, DP)
    if PDL:
        tlx.gdc_launch_dependents()
        tlx.gdc_wait()
    slot, at, pos = tl.load(slot_ptr + row), tl.load(kv_pos_ptr + row), tl.load(rope_pos_ptr + row)
    cell = cache_cell(table_ptr, slot, at, table_width, page_size, row >= 0) * (KH * D)
    ok = (head < N + 2 * KH)[:, None] & (i < D)[None, :]
    start = tl.where(head < N, head * QD, N * QD + (head - N) * D)[:, None]
    base = qkv_ptr + row * (N * QD + 2 * KH * D) + start
    x = tl.load(base + i[None, :], mask=ok, other=0.0).to(tl.float32)
    is_v = ok & (head >= N + KH)[:, None]
    tl.store(v_ptr + cell + (head[:, None] - N - KH) * D + i[None, :], x.to(v_ptr.dtype.element_ty), mask=is_v)
    # What turns with i: the other half of the part that turns.
    other = tl.where(i < T, i + T, i - T)
    turns = i < 2 * T
    y = tl.load(base + other[None, :], mask=ok & turns[None, :], other=0.0).to(tl.float32)
    is_q = (head < N)[:, None]
    gain = tl.where(is_q, _gain(qn_ptr, i, i < D)[None, :], _gain(kn_ptr, i, i < D)[None, :])
    gain_y = tl.where(is_q, _gain(qn_ptr, other, turns)[None, :], _gain(kn_ptr, other, turns)[None, :])
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    x, y = x * rstd * gain, y * rstd * gain_y
    angle = tl.minimum(tl.maximum(pos, 0), rope_len - 1).to(tl.int64) * T + i % T
    cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)[None, :]
    out = x * cos + tl.where(i < T, -y, y) * sin
    q_to = q_out_ptr + row * (N * D) + head[:, None] * D + i[None, :]
    tl.store(q_to, out.to(q_out_ptr.dtype.element_ty), mask=ok & is_q)
    is_k = ok & ((head >= N) & (head < N + KH))[:, None]
    tl.store(k_ptr + cell + (head[:, None] - N) * D + i[None, :], out.to(k_ptr.dtype.element_ty), mask=is_k)


@triton.jit
def _gain(ptr, i, ok):
    return tl.load(ptr + i, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def gate_mul_kernel(
    o_ptr, qkv_ptr, out_ptr, qkv_stride, M: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Grid (R, cdiv(M, BLOCK)); M = N * D."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tlx.gdc_launch_dependents()
        tlx.gdc_wait()
    o = tl.load(o_ptr + row * M + m, mask=m < M, other=0.0).to(tl.float32)
    gate = tl.load(qkv_ptr + row * qkv_stride + (m // D) * (2 * D) + D + m % D, mask=m < M, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * M + m, (o * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty), mask=m < M)


def launch_gated_norm(o, z, gain, out, *, eps, pdl=False):
    rows, heads, dim = o.shape
    gated_norm_kernel[(rows, triton.cdiv(heads, HEADS))](
        o, z, gain, out, z.stride(0), eps, N=heads, D=dim, DP=triton.next_power_of_2(dim), HB=HEADS, PDL=pdl,
        num_warps=2, launch_pdl=pdl,
    )  # fmt: skip


def launch_gated_rope_write(
    qkv, q_out, k, v, cos, sin, q_gain, k_gain, table, slot, rope_pos, kv_pos, *, heads, eps, gated, pdl=False
):
    kv_heads, dim = k.shape[2], k.shape[3]
    gated_rope_write_kernel[(qkv.shape[0], triton.cdiv(heads + 2 * kv_heads, HEADS))](
        qkv, q_out, k, v, cos, sin, q_gain, k_gain, table, slot, rope_pos, kv_pos, table.shape[1], k.shape[1],
        cos.shape[0], eps, N=heads, KH=kv_heads, D=dim, DP=triton.next_power_of_2(dim), T=cos.shape[1],
        QD=dim * (2 if gated else 1), HB=HEADS, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def launch_gate_mul(o, qkv, out, *, pdl=False):
    rows, heads, dim = o.shape
    gate_mul_kernel[(rows, triton.cdiv(heads * dim, 1024))](
        o, qkv, out, qkv.stride(0), M=heads * dim, D=dim, BLOCK=1024, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
