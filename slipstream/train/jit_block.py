# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; train/block_loss.py is typed.)
"""The kernels of train/block_loss.py. One program per row; running values are kept per lane and joined at the end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _law(own, V, BLOCK: tl.constexpr):
    """Log of the sum of exponentials, and the place of the largest (the first of equals), of V values at `own`."""
    lane = tl.arange(0, BLOCK)
    # Not -inf: a lane that has seen nothing must not subtract infinities.
    top, total = tl.full([BLOCK], -1e30, tl.float32), tl.zeros([BLOCK], tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for at in range(0, V, BLOCK):
        i = at + lane
        x = tl.load(own + i, mask=i < V, other=float("-inf")).to(tl.float32)
        place = tl.where(x > top, i, place)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    peak = tl.max(top, axis=0)
    log = peak + tl.log(tl.sum(total * tl.exp(top - peak), axis=0))
    return log, tl.min(tl.where(top == peak, place, 2147483647), axis=0)


@triton.jit
def teacher_kernel(teacher_ptr, log_ptr, best_ptr, V, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    log, best = _law(teacher_ptr + n * V, V, BLOCK)
    tl.store(log_ptr + n, log)
    tl.store(best_ptr + n, best.to(tl.int64))


@triton.jit
def terms_kernel(
    logits_ptr, teacher_ptr, row_ptr, target_ptr, teacher_log_ptr, hard_ptr, soft_ptr, distance_ptr, best_ptr, log_ptr,
    lean_ptr, V, BLOCK: tl.constexpr,
):  # fmt: skip
    """The draft's law, then both tables at once; the second reading of the draft's row comes from the cache."""
    r = tl.program_id(0).to(tl.int64)
    own, n = logits_ptr + r * V, tl.load(row_ptr + r).to(tl.int64)
    other, t_log = teacher_ptr + n * V, tl.load(teacher_log_ptr + n)
    s_log, best = _law(own, V, BLOCK)
    lane = tl.arange(0, BLOCK)
    soft, apart, lean = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for at in range(0, V, BLOCK):
        i = at + lane
        s = tl.load(own + i, mask=i < V, other=float("-inf")).to(tl.float32)
        t = tl.load(other + i, mask=i < V, other=float("-inf")).to(tl.float32)
        q, p = tl.exp(s - s_log), tl.exp(t - t_log)
        soft += p * tl.where(i < V, s_log - s, 0.0)
        apart += tl.abs(q - p)
        lean += tl.where(q > p, q, tl.where(q < p, -q, 0.0))
    tl.store(hard_ptr + r, s_log - tl.load(own + tl.load(target_ptr + r)).to(tl.float32))
    tl.store(soft_ptr + r, tl.sum(soft, axis=0))
    tl.store(distance_ptr + r, tl.sum(apart, axis=0))
    tl.store(lean_ptr + r, tl.sum(lean, axis=0))
    tl.store(log_ptr + r, s_log)
    tl.store(best_ptr + r, best.to(tl.int64))


@triton.jit
def gradient_kernel(
    logits_ptr, teacher_ptr, row_ptr, target_ptr, teacher_log_ptr, log_ptr, lean_ptr, hard_ptr, soft_ptr, distance_ptr,
    out_ptr, V, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks). hard, soft and distance are gradients here. A row that counts nothing is not read."""
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    hard, soft, distance = tl.load(hard_ptr + r), tl.load(soft_ptr + r), tl.load(distance_ptr + r)
    here = i < V
    counts = tl.zeros([BLOCK], tl.float32) + (tl.abs(hard) + tl.abs(soft) + tl.abs(distance))
    read = here & (counts > 0.0)
    n = tl.load(row_ptr + r).to(tl.int64)
    s = tl.load(logits_ptr + r * V + i, mask=read, other=float("-inf")).to(tl.float32)
    t = tl.load(teacher_ptr + n * V + i, mask=read, other=float("-inf")).to(tl.float32)
    q, p = tl.exp(s - tl.load(log_ptr + r)), tl.exp(t - tl.load(teacher_log_ptr + n))
    sign = tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))
    d = q * (hard + soft + distance * (sign - tl.load(lean_ptr + r))) - soft * p
    d -= tl.where(i == tl.load(target_ptr + r), hard, 0.0)
    tl.store(out_ptr + r * V + i, d.to(out_ptr.dtype.element_ty), mask=here)


def launch_teacher(teacher_NV):
    """Log sums [N] float32 and most likely ids [N] int64."""
    rows, vocab = teacher_NV.shape
    log_N = teacher_NV.new_empty(rows, dtype=torch.float32)
    best_N = teacher_NV.new_empty(rows, dtype=torch.int64)
    if rows:
        teacher_kernel[(rows,)](teacher_NV, log_N, best_N, vocab, BLOCK=BLOCK, num_warps=8)
    return log_N, best_N


def launch_terms(logits_RV, teacher_NV, row_R, target_R, teacher_log_N):
    """hard, soft and distance [R] float32, best [R] int64; for the gradient: log sums and leanings [R] float32."""
    rows, vocab = logits_RV.shape
    hard_R, soft_R, distance_R, log_R, lean_R = (logits_RV.new_empty(rows, dtype=torch.float32) for _ in range(5))
    best_R = logits_RV.new_empty(rows, dtype=torch.int64)
    if rows:
        terms_kernel[(rows,)](
            logits_RV, teacher_NV, row_R, target_R, teacher_log_N, hard_R, soft_R, distance_R, best_R, log_R, lean_R,
            vocab, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return hard_R, soft_R, distance_R, best_R, log_R, lean_R


def launch_gradient(logits_RV, teacher_NV, row_R, target_R, teacher_log_N, log_R, lean_R, hard_R, soft_R, distance_R):
    """The logits' gradient [R, V] in their dtype, from those of hard, soft and distance [R] float32."""
    rows, vocab = logits_RV.shape
    out_RV = torch.empty_like(logits_RV)
    if rows:
        gradient_kernel[(rows, triton.cdiv(vocab, BLOCK))](
            logits_RV, teacher_NV, row_R, target_R, teacher_log_N, log_R, lean_R, hard_R, soft_R, distance_R, out_RV,
            vocab, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out_RV
