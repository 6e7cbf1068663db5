"""Attention of the training-time test: causal over step 0's keys, and each index's own keys of the later steps.

The causal part is torch's flash kernel; the own keys, a handful per query, are merged by the log sums of both parts.
Backward rests on flash's own, which computes p = exp(score - logsum): given the merged logsum and output, the gradients
of its keys are those of the whole softmax (as in ring attention, arXiv 2310.01889, section 3). There is no [T, T].
On CUDA the own keys are two Triton kernels (train/jit_own.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_flash = torch.ops.aten


def unrolled_attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """q [B, T, N, D]; keys, values: [B, T, K, D] per step, K divides N. Returns [B, T, N, D] in q's dtype.

    Query i sees keys[0] up to i, and of keys[1:] only index i. On CUDA the dtype has to be float16 or bfloat16.
    """
    b, t, kv, d = keys[0].shape
    own = [torch.stack(x[1:], 0) if len(x) > 1 else x[0].new_empty(0, b, t, kv, d) for x in (keys, values)]
    out: Tensor = _Unrolled.apply(q, keys[0], values[0], *own)
    return out


def unrolled_attention_reference(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """The same with all scores at once."""
    groups, length = q.shape[2] // keys[0].shape[2], q.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    q = q.unflatten(2, (-1, groups)) * q.shape[-1] ** -0.5
    scores = torch.einsum("btkgd,bskd->bkgts", q, keys[0])
    scores = scores.masked_fill(~causal, float("-inf"))
    own = [torch.einsum("btkgd,btkd->bkgt", q, k).unsqueeze(-1) for k in keys[1:]]
    p = torch.cat((scores, *own), -1).softmax(-1)
    out = torch.einsum("bkgts,bskd->btkgd", p[..., :length], values[0])
    for i, v in enumerate(values[1:]):
        out = out + p[..., length + i].permute(0, 3, 1, 2).unsqueeze(-1) * v.unsqueeze(3)
    flat: Tensor = out.flatten(2, 3)
    return flat


class _Unrolled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
        """q [B, T, N, D]; k, v [B, T, K, D]; own_k, own_v [S, B, T, K, D]."""
        groups, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
        heads = [x.transpose(1, 2) for x in (q, _wide(k, groups), _wide(v, groups))]
        if q.is_cuda:
            part, logsum, *rest = _flash._scaled_dot_product_flash_attention(*heads, 0.0, True, scale=scale)
            ctx.flash = rest[:6]  # cumulated lengths (none here), the longest ones, the generator's state
        else:
            part, logsum = _flash._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True, scale=scale)
        merge = _kernels().merge if q.is_cuda else merge_reference
        result, whole = merge(part.transpose(1, 2), logsum, q, own_k, own_v, scale)
        ctx.save_for_backward(q, k, v, own_k, own_v, result, whole)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        (grad,) = grads
        q, k, v, own_k, own_v, out, whole = ctx.saved_tensors
        groups, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
        heads = [x.transpose(1, 2) for x in (grad, q, _wide(k, groups), _wide(v, groups), out)]
        if q.is_cuda:
            *lengths, seed, offset = ctx.flash
            dq, dk, dv = _flash._scaled_dot_product_flash_attention_backward(
                *heads, whole, *lengths, 0.0, True, seed, offset, scale=scale
            )
        else:
            dq, dk, dv = _flash._scaled_dot_product_flash_attention_for_cpu_backward(
                *heads, whole, 0.0, True, scale=scale
            )
        own = _kernels().own_gradients if q.is_cuda else own_gradients_reference
        dq, own_dk, own_dv = own(grad, q, own_k, own_v, out, whole, dq.transpose(1, 2).contiguous(), scale)
        narrow = [_narrow(x.transpose(1, 2).to(whole.dtype), groups).to(q.dtype) for x in (dk, dv)]
        return dq, *narrow, own_dk, own_dv


def _kernels() -> Any:
    from slipstream.train import jit_own

    return jit_own


def merge_reference(
    part: Tensor, logsum: Tensor, q: Tensor, own_k: Tensor, own_v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax over a causal part, known by its output and log sums, and S keys of each row's own.

    part, q [B, T, N, D]; logsum [B, N, T]; own_k, own_v [S, B, T, K, D]. Returns the output in q's dtype, and the log
    sums of all scores [B, N, T].
    """
    groups = q.shape[2] // own_k.shape[3]
    logsum = logsum.to(torch.promote_types(q.dtype, torch.float32))
    own_SBTN = _own_scores(q, own_k, scale)
    all_BTN = torch.cat((logsum.transpose(1, 2).unsqueeze(0), own_SBTN)).logsumexp(0)
    out = part * (logsum.transpose(1, 2) - all_BTN).exp().unsqueeze(-1)
    for score_BTN, v_BTKD in zip(own_SBTN, own_v, strict=True):
        out = out + (score_BTN - all_BTN).exp().unsqueeze(-1) * _wide(v_BTKD, groups)
    return out.to(q.dtype), all_BTN.transpose(1, 2).contiguous()


def own_gradients_reference(
    grad: Tensor, q: Tensor, own_k: Tensor, own_v: Tensor, out: Tensor, whole: Tensor, dq: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What `merge_reference` gives back to q, beside dq of the causal part, and to own_k and own_v. whole: its log
    sums, out: its output."""
    groups, all_BTN = q.shape[2] // own_k.shape[3], whole.transpose(1, 2)
    dq_BTND, wide = dq.to(all_BTN.dtype), grad.to(all_BTN.dtype)
    through_BTN = (wide * out).sum(-1)  # what the softmax takes from every score's gradient
    own_dk, own_dv = [], []
    for score_BTN, k_BTKD, v_BTKD in zip(_own_scores(q, own_k, scale), own_k, own_v, strict=True):
        p_BTN = (score_BTN - all_BTN).exp()
        ds_BTN = p_BTN * ((wide * _wide(v_BTKD, groups)).sum(-1) - through_BTN) * scale
        dq_BTND = dq_BTND + ds_BTN.unsqueeze(-1) * _wide(k_BTKD, groups)
        own_dk.append(_narrow(ds_BTN.unsqueeze(-1) * q, groups))
        own_dv.append(_narrow(p_BTN.unsqueeze(-1) * wide, groups))
    stacked = [torch.stack(x).to(q.dtype) if x else torch.zeros_like(own_k) for x in (own_dk, own_dv)]
    return dq_BTND.to(q.dtype), stacked[0], stacked[1]


def _own_scores(q: Tensor, own_k: Tensor, scale: float) -> Tensor:
    """[S, B, T, N], at least float32: each query with the keys of its own index."""
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[2] // own_k.shape[3]
    scores: Tensor = (q.to(wide).unflatten(2, (-1, groups)) * own_k.to(wide).unsqueeze(4)).sum(-1).flatten(3)
    return scores * scale


def _wide(x: Tensor, groups: int) -> Tensor:
    """[B, T, K, D] to [B, T, K * groups, D]."""
    return x if groups == 1 else x.repeat_interleave(groups, 2)


def _narrow(x: Tensor, groups: int) -> Tensor:
    """The gradient of `_wide`."""
    return x if groups == 1 else x.unflatten(2, (-1, groups)).sum(3)
