"""The training kernels on the CPU, in Triton's interpreter. Collected by test_kernels_interpreted.py only."""

from __future__ import annotations

import pytest
import torch

from slipstream.train import jit, jit_own
from slipstream.train.soft_ce import soft_cross_entropy_reference
from slipstream.train.unrolled import merge_reference, own_gradients_reference


@pytest.mark.parametrize("width", [61, 517])
def test_soft_cross_entropy(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "BLOCK", 128)
    torch.manual_seed(width)
    logits_RD = (torch.randn(7, width) * 6).requires_grad_()
    teacher_ND, row_R = torch.randn(9, width) * 6, torch.tensor([8, 0, 3, 3, 5, 1, 7])
    logits_RD.data[2, 40] = logits_RD.data[2, 9] = 50.0  # the lower id of equals
    weight_R = torch.randn(7)
    want_R, best_R = soft_cross_entropy_reference(logits_RD, teacher_ND, row_R)
    (want_RD,) = torch.autograd.grad((want_R * weight_R).sum(), logits_RD)
    got_R, got_best_R, sums_R2 = jit.launch_forward(logits_RD.detach(), teacher_ND, row_R)
    torch.testing.assert_close(got_R, want_R.detach(), rtol=1e-5, atol=1e-4)
    assert torch.equal(got_best_R, best_R) and got_best_R[2] == 9
    got_RD = jit.launch_backward(logits_RD.detach(), teacher_ND, row_R, sums_R2, weight_R)
    torch.testing.assert_close(got_RD, want_RD, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("steps", "heads", "kv_heads", "size"), [(1, 4, 4, 16), (3, 9, 3, 24)])
def test_own_keys_and_their_gradients(steps: int, heads: int, kv_heads: int, size: int) -> None:
    torch.manual_seed(0)
    b, t, scale = 2, 5, size**-0.5
    part, q, grad, dq = (torch.randn(b, t, heads, size) for _ in range(4))
    own_k, own_v = torch.randn(steps, b, t, kv_heads, size), torch.randn(steps, b, t, kv_heads, size)
    logsum = torch.randn(b, heads, t)
    want, whole = merge_reference(part, logsum, q, own_k, own_v, scale)
    got, got_whole = jit_own.merge(part, logsum, q, own_k, own_v, scale)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_whole, whole)
    wanted = own_gradients_reference(grad, q, own_k, own_v, want, whole, dq, scale)
    made = jit_own.own_gradients(grad, q, own_k, own_v, want, whole, dq.clone(), scale)
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
