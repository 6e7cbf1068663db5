"""Training on a GPU: the fused loss and the flash form of the training-time test agree with their references."""

from __future__ import annotations

import pytest
import torch

from slipstream.train.soft_ce import soft_cross_entropy, soft_cross_entropy_reference
from slipstream.train.unrolled import unrolled_attention, unrolled_attention_reference

pytestmark = pytest.mark.gpu


def test_fused_soft_cross_entropy() -> None:
    torch.manual_seed(0)
    logits_RD = (torch.randn(65, 5003, device="cuda") * 5).bfloat16().requires_grad_()
    teacher_ND = (torch.randn(40, 5003, device="cuda") * 5).bfloat16()
    row_R = torch.randint(0, 40, (65,), device="cuda")
    results = []
    for form in (soft_cross_entropy, soft_cross_entropy_reference):
        ce_R, best_R = form(logits_RD, teacher_ND, row_R)
        results.append((ce_R, best_R, torch.autograd.grad(ce_R.sum(), logits_RD)[0]))
    (ce, best, grad), (want_ce, want_best, want_grad) = results
    torch.testing.assert_close(ce, want_ce, rtol=1e-4, atol=1e-3)
    assert torch.equal(best, want_best)
    torch.testing.assert_close(grad, want_grad, rtol=2e-2, atol=1e-5)


def test_flash_form_of_the_unrolled_steps() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(2, 133, n, 64, device="cuda") for n in (9, 3, 3, 3, 3, 3, 3)]
    results = []
    for dtype, form in ((torch.bfloat16, unrolled_attention), (torch.float64, unrolled_attention_reference)):
        q, *kv = (x.to(dtype).requires_grad_() for x in leaves)
        out = form(q, kv[:3], kv[3:])
        results.append([out, *torch.autograd.grad(out.square().sum(), [q, *kv])])
    for got, want in zip(*results, strict=True):
        error = (got.double() - want).norm() / want.norm()
        assert error < 0.02, f"relative error {error:.4f}"
