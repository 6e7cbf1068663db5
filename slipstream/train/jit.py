# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; train/soft_ce.py is typed.)
"""The kernels of train/soft_ce.py. One program per row; both tables are walked in blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def forward_kernel(logits_ptr, teacher_ptr, row_ptr, ce_ptr, best_ptr, sums_ptr, D, BLOCK: tl.constexpr):
    """Running maxima and sums (Milakov & Gimelshein, arXiv 1805.02867) of both laws, and of the teacher's with the
    draft's logits as weights."""
    r = tl.program_id(0).to(tl.int64)
    own = logits_ptr + r * D
    other = teacher_ptr + tl.load(row_ptr + r).to(tl.int64) * D
    s_max, t_max = float("-inf"), float("-inf")
    s_sum, t_sum, dot = 0.0, 0.0, 0.0
    best = 0
    for at in range(0, D, BLOCK):
        i = at + tl.arange(0, BLOCK)
        s = tl.load(own + i, mask=i < D, other=float("-inf")).to(tl.float32)
        t = tl.load(other + i, mask=i < D, other=float("-inf")).to(tl.float32)
        s_top, t_top = tl.max(s, axis=0), tl.max(t, axis=0)
        first = tl.min(tl.where(s == s_top, i, 2147483647), axis=0)
        best = tl.where(s_top > s_max, first, best)
        s_new, t_new = tl.maximum(s_max, s_top), tl.maximum(t_max, t_top)
        p = tl.exp(t - t_new)
        s_sum = s_sum * tl.exp(s_max - s_new) + tl.sum(tl.exp(s - s_new), axis=0)
        shrink = tl.exp(t_max - t_new)
        t_sum = t_sum * shrink + tl.sum(p, axis=0)
        dot = dot * shrink + tl.sum(p * tl.where(i < D, s, 0.0), axis=0)
        s_max, t_max = s_new, t_new
    s_log, t_log = s_max + tl.log(s_sum), t_max + tl.log(t_sum)
    tl.store(ce_ptr + r, s_log - dot / t_sum)
    tl.store(best_ptr + r, best.to(tl.int64))
    tl.store(sums_ptr + 2 * r, s_log)
    tl.store(sums_ptr + 2 * r + 1, t_log)


@triton.jit
def backward_kernel(logits_ptr, teacher_ptr, row_ptr, sums_ptr, grad_ptr, out_ptr, D, BLOCK: tl.constexpr):
    """(softmax(logits) - softmax(teacher)) * grad. Grid (rows, blocks)."""
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(grad_ptr + r)
    s = tl.load(logits_ptr + r * D + i, mask=i < D, other=float("-inf")).to(tl.float32)
    t_row = tl.load(row_ptr + r).to(tl.int64)
    t = tl.load(teacher_ptr + t_row * D + i, mask=i < D, other=float("-inf")).to(tl.float32)
    d = tl.exp(s - tl.load(sums_ptr + 2 * r)) - tl.exp(t - tl.load(sums_ptr + 2 * r + 1))
    tl.store(out_ptr + r * D + i, (d * g).to(out_ptr.dtype.element_ty), mask=i < D)


def launch_forward(logits_RD, teacher_ND, row_R):
    """Cross entropy [R] float32, argmax [R] int64, log sums of both laws [R, 2] float32."""
    rows, width = logits_RD.shape
    ce_R, sums_R2 = logits_RD.new_empty(rows, dtype=torch.float32), logits_RD.new_empty(rows, 2, dtype=torch.float32)
    best_R = row_R.new_empty(rows)
    if rows:
        forward_kernel[(rows,)](logits_RD, teacher_ND, row_R, ce_R, best_R, sums_R2, width, BLOCK=BLOCK, num_warps=8)
    return ce_R, best_R, sums_R2


def launch_backward(logits_RD, teacher_ND, row_R, sums_R2, grad_R):
    rows, width = logits_RD.shape
    out_RD = torch.empty_like(logits_RD)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        backward_kernel[grid](logits_RD, teacher_ND, row_R, sums_R2, grad_R, out_RD, width, BLOCK=BLOCK, num_warps=4)
    return out_RD
