# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; train/unrolled.py is typed.)
"""The own keys of train/unrolled.py: a few keys per row that only this row sees, beside a causal part."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    part_ptr, logsum_ptr, q_ptr, k_ptr, v_ptr, out_ptr, all_ptr, rows, T, scale,
    S: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """One program per (row, key head): softmax over the causal part, known by its output and log sum, and S scores."""
    r, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    n, some, here = h * G + g, g < G, (g < G)[:, None] & (d < D)[None, :]
    at = (r * K * G + n)[:, None] * D + d[None, :]
    own = (r * K + h) * D + d
    q = tl.load(q_ptr + at, mask=here, other=0.0).to(tl.float32)
    # flash's log sums are [B, N, T]
    first = tl.load(logsum_ptr + (r // T * K * G + n) * T + r % T, mask=some, other=0.0)
    top = first
    for s in tl.static_range(S):
        k = tl.load(k_ptr + s * rows * K * D + own, mask=d < D, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.sum(q * k[None, :], axis=1) * scale)
    weight = tl.exp(first - top)
    total, out = weight, tl.load(part_ptr + at, mask=here, other=0.0).to(tl.float32) * weight[:, None]
    for s in tl.static_range(S):
        k = tl.load(k_ptr + s * rows * K * D + own, mask=d < D, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + s * rows * K * D + own, mask=d < D, other=0.0).to(tl.float32)
        p = tl.exp(tl.sum(q * k[None, :], axis=1) * scale - top)
        total += p
        out += p[:, None] * v[None, :]
    tl.store(out_ptr + at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=here)
    tl.store(all_ptr + (r // T * K * G + n) * T + r % T, top + tl.log(total), mask=some)


@triton.jit
def own_gradient_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, out_ptr, all_ptr, dq_ptr, dk_ptr, dv_ptr, rows, T, scale,
    S: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Gradients of the own keys and values; what they give the query is added to dq."""
    r, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    n, some, here = h * G + g, g < G, (g < G)[:, None] & (d < D)[None, :]
    at = (r * K * G + n)[:, None] * D + d[None, :]
    own = (r * K + h) * D + d
    q = tl.load(q_ptr + at, mask=here, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=here, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + at, mask=here, other=0.0).to(tl.float32)
    dq = tl.load(dq_ptr + at, mask=here, other=0.0).to(tl.float32)
    whole = tl.load(all_ptr + (r // T * K * G + n) * T + r % T, mask=some, other=float("inf"))
    through = tl.sum(grad * out, axis=1)  # what the softmax takes from every score's gradient
    for s in tl.static_range(S):
        k = tl.load(k_ptr + s * rows * K * D + own, mask=d < D, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + s * rows * K * D + own, mask=d < D, other=0.0).to(tl.float32)
        p = tl.exp(tl.sum(q * k[None, :], axis=1) * scale - whole)
        ds = p * (tl.sum(grad * v[None, :], axis=1) - through) * scale
        dq += ds[:, None] * k[None, :]
        element = dk_ptr.dtype.element_ty
        tl.store(dk_ptr + s * rows * K * D + own, tl.sum(ds[:, None] * q, axis=0).to(element), mask=d < D)
        tl.store(dv_ptr + s * rows * K * D + own, tl.sum(p[:, None] * grad, axis=0).to(element), mask=d < D)
    tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=here)


def _sizes(q, own_k):
    (b, t, n, d), (s, kv) = q.shape, (own_k.shape[0], own_k.shape[3])
    sizes = {"S": s, "K": kv, "G": n // kv, "GP": triton.next_power_of_2(n // kv), "D": d}
    return (b * t, kv), {**sizes, "DP": triton.next_power_of_2(d)}


def merge(part, logsum, q, own_k, own_v, scale):
    """out [B, T, N, D] in q's dtype and the log sums of all scores [B, N, T] float32; see unrolled.py."""
    part, logsum, q, own_k, own_v = (x.contiguous() for x in (part, logsum, q, own_k, own_v))
    out, whole = torch.empty_like(q), torch.empty_like(logsum)
    grid, sizes = _sizes(q, own_k)
    merge_kernel[grid](
        part, logsum, q, own_k, own_v, out, whole, grid[0], q.shape[1], scale, **sizes, num_warps=1
    )  # fmt: skip
    return out, whole


def own_gradients(grad, q, own_k, own_v, out, whole, dq, scale):
    """dq with the own keys' part, and the gradients of own_k and own_v. dq, contiguous, is changed in place."""
    grad, q, own_k, own_v, out, whole = (x.contiguous() for x in (grad, q, own_k, own_v, out, whole))
    dk, dv = torch.empty_like(own_k), torch.empty_like(own_v)
    grid, sizes = _sizes(q, own_k)
    own_gradient_kernel[grid](
        grad, q, own_k, own_v, out, whole, dq, dk, dv, grid[0], q.shape[1], scale, **sizes, num_warps=1
    )  # fmt: skip
    return dq, dk, dv
