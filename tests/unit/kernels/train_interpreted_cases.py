"""The training kernels on the CPU, in Triton's interpreter. Collected by test_kernels_interpreted.py only."""

from __future__ import annotations

import pytest
import torch

from slipstream.train import jit, jit_block, jit_own
from slipstream.train.block_loss import block_terms_reference, teacher_laws
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


@pytest.mark.parametrize("width", [61, 517])
def test_losses_of_a_blocks_rows(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_block, "BLOCK", 128)
    for seed in range(3):
        torch.manual_seed(seed)
        logits_RV, teacher_NV = (torch.randn(7, width) * 6).requires_grad_(), torch.randn(4, width) * 6
        row_R, target_R = torch.tensor([3, 0, 3, 2, 0, 1, 3]), torch.randint(width, (7,))
        logits_RV.data[2, 40] = logits_RV.data[2, 9] = 50.0  # the lower id of equals
        teacher_NV[1, 50] = teacher_NV[1, 31] = 60.0
        logits_RV.data[5] = teacher_NV[1]  # the same law
        weight_3R = torch.randn(3, 7)
        weight_3R[:, 4] = weight_3R[2, 5] = 0.0
        laws = teacher_laws(teacher_NV)
        want = block_terms_reference(logits_RV, laws, row_R, target_R)
        total = (torch.stack(want[:3]) * weight_3R).sum()
        (want_RV,) = torch.autograd.grad(total, logits_RV)
        own = logits_RV.detach()
        log_N, best_N = jit_block.launch_teacher(teacher_NV)
        *got, log_R, lean_R = jit_block.launch_terms(own, teacher_NV, row_R, target_R, log_N)
        for made, wanted in zip((*got, log_N, best_N), (*want, laws.log_N, laws.best_N), strict=True):
            torch.testing.assert_close(made, wanted.detach(), rtol=1e-5, atol=2e-5)
        assert got[3][2] == 9 and best_N[1] == 31
        sums = log_N, log_R, lean_R
        got_RV = jit_block.launch_gradient(own, teacher_NV, row_R, target_R, *sums, *weight_3R)
        torch.testing.assert_close(got_RV, want_RV, rtol=1e-4, atol=1e-5)
        assert not got_RV[4].any()
        only_3R = torch.tensor([0.0, 0.0, 1.0])[:, None].expand(3, 7).contiguous()
        assert not jit_block.launch_gradient(own, teacher_NV, row_R, target_R, *sums, *only_3R)[5].any()
        # The control: another row of the teacher's is another gradient.
        other_RV = jit_block.launch_gradient(own, teacher_NV, row_R.roll(1), target_R, *sums, *weight_3R)
        assert (other_RV - want_RV).abs().max() > 0.01
