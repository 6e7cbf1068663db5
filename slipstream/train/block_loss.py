"""What a block drafter's loss reads of two tables of logits: cross entropies, distance and most likely ids of each row.

On CUDA Triton kernels (train/jit_block.py) read each table once or twice forward and once backward and write the
gradient's only; laws, [rows, V] each, are never written down. Elsewhere, and for the tests, plain torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TeacherLaws(NamedTuple):
    """The target's logits [N, V], without gradient; log sums of their exponentials and most likely ids (int64) [N]."""

    logits_NV: Tensor
    log_N: Tensor
    best_N: Tensor


class Terms(NamedTuple):
    """Of each row [R], q the draft's law, p the target's: hard = -log q[target], soft = -sum p log q, distance =
    sum |q - p|, with gradient; best int64: the draft's most likely id, the lowest of equals."""

    hard_R: Tensor
    soft_R: Tensor
    distance_R: Tensor
    best_R: Tensor


@torch.no_grad()
def teacher_laws(logits_NV: Tensor) -> TeacherLaws:
    """Read once, however many rows look at each of them."""
    if logits_NV.is_cuda:
        from slipstream.train.jit_block import launch_teacher

        logits_NV = logits_NV.contiguous()
        return TeacherLaws(logits_NV, *launch_teacher(logits_NV))
    wide_NV = _wide(logits_NV)
    return TeacherLaws(logits_NV, wide_NV.logsumexp(-1), wide_NV.argmax(-1))


def block_terms(logits_RV: Tensor, teacher: TeacherLaws, row_R: Tensor, target_R: Tensor) -> Terms:
    """logits_RV: the draft's, with gradient. row_R int64: the teacher's row of each; target_R int64: the next token.

    The gradient of the distance is q_i (s_i - sum_j q_j s_j), s = sign(q - p), 0 where both are equal.
    """
    if not logits_RV.is_cuda:
        return block_terms_reference(logits_RV, teacher, row_R, target_R)
    return Terms(*_Fused.apply(logits_RV, teacher.logits_NV, teacher.log_N, row_R, target_R))


def block_terms_reference(logits_RV: Tensor, teacher: TeacherLaws, row_R: Tensor, target_R: Tensor) -> Terms:
    """The same in torch."""
    log_q_RV = _wide(logits_RV).log_softmax(-1)
    p_RV = (_wide(teacher.logits_NV[row_R]) - teacher.log_N[row_R, None]).exp()
    return Terms(
        hard_R=-log_q_RV.gather(1, target_R[:, None]).squeeze(1),
        soft_R=-(p_RV * log_q_RV).sum(-1),
        distance_R=(log_q_RV.exp() - p_RV).abs().sum(-1),
        best_R=log_q_RV.detach().argmax(-1),
    )


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_RV: Tensor, teacher_NV: Tensor, log_N: Tensor, row_R: Tensor, target_R: Tensor
    ) -> tuple[Tensor, ...]:
        from slipstream.train.jit_block import launch_terms

        logits_RV = logits_RV.contiguous()
        hard_R, soft_R, distance_R, best_R, log_R, lean_R = launch_terms(logits_RV, teacher_NV, row_R, target_R, log_N)
        ctx.save_for_backward(logits_RV, teacher_NV, row_R, target_R, log_N, log_R, lean_R)
        ctx.mark_non_differentiable(best_R)
        return hard_R, soft_R, distance_R, best_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from slipstream.train.jit_block import launch_gradient

        made: Tensor = launch_gradient(*ctx.saved_tensors, *(g.contiguous() for g in grads[:3]))
        return made, None, None, None, None


def draft_logits(hidden_RH: Tensor, before_RE: Tensor, head_VH: Tensor, bias_VE: Tensor) -> Tensor:
    """hidden @ head^T + before @ bias^T, [R, V] in hidden's dtype, as one product: no table for the bias.

    before_RE: W1 of the token before each row; bias_VE: W2 of a Markov head. The head is frozen: no gradient for it.
    """
    logits_RV: Tensor = _Logits.apply(hidden_RH, before_RE, head_VH, bias_VE)
    return logits_RV


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, before_RE: Tensor, head_VH: Tensor, bias_VE: Tensor) -> Tensor:
        dtype = hidden_RH.dtype
        ctx.dtypes = dtype, before_RE.dtype, bias_VE.dtype
        before_RE = before_RE.to(dtype)
        weight_VK = torch.cat((head_VH.to(dtype), bias_VE.to(dtype)), 1)
        ctx.save_for_backward(before_RE, weight_VK)
        with torch.autocast(hidden_RH.device.type, enabled=False):
            return torch.cat((hidden_RH, before_RE), 1) @ weight_VK.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_RV,), (before_RE, weight_VK) = grads, ctx.saved_tensors
        made_RK = grad_RV @ weight_VK
        rank = before_RE.shape[1]
        hidden, before, bias = ctx.dtypes
        return (
            made_RK[:, :-rank].to(hidden), made_RK[:, -rank:].to(before), None, (grad_RV.T @ before_RE).to(bias)
        )  # fmt: skip


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
