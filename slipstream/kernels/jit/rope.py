# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the ops in kernels/rope.py are typed.)
"""qk-norm, rotary embedding and KV write in one launch, from the output of the qkv product."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tlx


@triton.jit(do_not_specialize=["R"])
def rope_kv_write_kernel(
    qkv_ptr, q_out_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, qn_ptr, kn_ptr, table_ptr, slot_ptr, rope_pos_ptr,
    kv_pos_ptr,
    R, table_width, page_size, rope_len, eps,
    N: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, N + 2 * KH): one head of one row. HP: power of two at or above D / 2."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    half: tl.constexpr = D // 2
    i = tl.arange(0, HP)
    ok = i < half
    if PDL:
        tlx.gdc_launch_dependents()
        tlx.gdc_wait()
    base = qkv_ptr + row.to(tl.int64) * ((N + 2 * KH) * D) + head * D
    x1 = tl.load(base + i, mask=ok, other=0.0)
    x2 = tl.load(base + half + i, mask=ok, other=0.0)
    at = tl.load(kv_pos_ptr + row)
    slot = tl.load(slot_ptr + row)
    pos = tl.load(rope_pos_ptr + row)
    index = tl.minimum(tl.maximum(at // page_size, 0), table_width - 1)
    page = tl.load(table_ptr + slot.to(tl.int64) * table_width + index)
    # Padded rows and rows past the limit go to the sink page.
    inside = (at >= 0) & (at < table_width * page_size) & (slot > 0)
    page = tl.where(inside, page, 0).to(tl.int64)
    cell = (page * page_size + tl.where(inside, at % page_size, 0)) * (KH * D)
    if head >= N + KH:
        v_to = v_ptr + cell + (head - N - KH) * D
        tl.store(v_to + i, x1, mask=ok)
        tl.store(v_to + half + i, x2, mask=ok)
    else:
        angle = tl.minimum(tl.maximum(pos, 0), rope_len - 1).to(tl.int64) * half + i
        cos = tl.load(cos_ptr + angle, mask=ok, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=ok, other=0.0)
        f1 = x1.to(tl.float32)
        f2 = x2.to(tl.float32)
        if QK_NORM:
            rstd = tl.rsqrt((tl.sum(f1 * f1, axis=0) + tl.sum(f2 * f2, axis=0)) / D + eps)
            gain = kn_ptr if head >= N else qn_ptr
            f1 = f1 * rstd * tl.load(gain + i, mask=ok, other=0.0).to(tl.float32)
            f2 = f2 * rstd * tl.load(gain + half + i, mask=ok, other=0.0).to(tl.float32)
        y1 = (f1 * cos - f2 * sin).to(q_out_ptr.dtype.element_ty)
        y2 = (f2 * cos + f1 * sin).to(q_out_ptr.dtype.element_ty)
        if head < N:
            q_to = q_out_ptr + (row.to(tl.int64) * N + head) * D
            tl.store(q_to + i, y1, mask=ok)
            tl.store(q_to + half + i, y2, mask=ok)
        else:
            k_to = k_ptr + cell + (head - N) * D
            tl.store(k_to + i, y1, mask=ok)
            tl.store(k_to + half + i, y2, mask=ok)


def launch_rope_kv_write(
    qkv, q_out, k, v, cos, sin, q_gain, k_gain, table, slot, rope_pos, kv_pos, *, heads, eps, pdl
):  # fmt: skip
    """Launch; see kernels/rope.py for the shapes."""
    kv_heads, dim = k.shape[2], k.shape[3]
    rope_kv_write_kernel[(qkv.shape[0], heads + 2 * kv_heads)](
        qkv, q_out, k, v, cos, sin, q_gain, k_gain, table, slot, rope_pos, kv_pos,
        qkv.shape[0], table.shape[1], k.shape[1], cos.shape[0], eps,
        N=heads, KH=kv_heads, D=dim, HP=triton.next_power_of_2(dim // 2), QK_NORM=q_gain is not None, PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
