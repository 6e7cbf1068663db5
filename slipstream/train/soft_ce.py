"""Soft cross entropy between two tables of logits, read once forward and once backward.

On CUDA a Triton kernel per direction (train/jit.py): the laws, [rows, Vd] each, are never written down. Elsewhere, and
for the tests, plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def soft_cross_entropy(logits_RD: Tensor, teacher_ND: Tensor, row_R: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy [R] float32 of softmax(logits) to softmax(teacher[row]), and the most likely draft id [R] int64.

    logits_RD [R, Vd] with gradient; teacher_ND [N, Vd] without; row_R int64: the teacher's row of each.
    """
    if not logits_RD.is_cuda:
        return soft_cross_entropy_reference(logits_RD, teacher_ND, row_R)
    ce_R, best_R = _Fused.apply(logits_RD, teacher_ND, row_R)
    return ce_R, best_R


def soft_cross_entropy_reference(logits_RD: Tensor, teacher_ND: Tensor, row_R: Tensor) -> tuple[Tensor, Tensor]:
    """The same in torch."""
    p_RD = teacher_ND[row_R].float().softmax(-1)
    wide_RD = logits_RD.float()
    ce_R = wide_RD.logsumexp(-1) - (p_RD * wide_RD).sum(-1)
    return ce_R, wide_RD.detach().argmax(-1)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_RD: Tensor, teacher_ND: Tensor, row_R: Tensor) -> tuple[Tensor, Tensor]:
        from slipstream.train.jit import launch_forward

        logits_RD = logits_RD.contiguous()
        ce_R, best_R, sums_R2 = launch_forward(logits_RD, teacher_ND, row_R)
        ctx.save_for_backward(logits_RD, teacher_ND, row_R, sums_R2)
        ctx.mark_non_differentiable(best_R)
        return ce_R, best_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from slipstream.train.jit import launch_backward

        logits_RD, teacher_ND, row_R, sums_R2 = ctx.saved_tensors
        return launch_backward(logits_RD, teacher_ND, row_R, sums_R2, grads[0].contiguous()), None, None
