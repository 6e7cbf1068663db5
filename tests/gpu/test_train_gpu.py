"""Training on a GPU: the fused loss and the flash form of the training-time test agree with their references."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.train.block_loss import TeacherLaws, block_terms, block_terms_reference, teacher_laws
from slipstream.train.corpus import Corpus
from slipstream.train.dspark import DSparkHead
from slipstream.train.eagle3 import Eagle3Head
from slipstream.train.layers import DraftHead
from slipstream.train.ranks import Ranks
from slipstream.train.soft_ce import soft_cross_entropy, soft_cross_entropy_reference
from slipstream.train.step import LENGTHS, CapturedStep, EagerStep, Step
from slipstream.train.teacher import Teacher
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_terms_of_a_block_at_full_width(dtype: torch.dtype) -> None:
    """Against float64 torch, at SmolLM2's vocabulary and beside it; a row without weight has no gradient."""
    for vocab in (49_152, 5_003):
        torch.manual_seed(vocab)
        logits_RV = (torch.randn(65, vocab, device="cuda") * 4).to(dtype).requires_grad_()
        laws = teacher_laws((torch.randn(40, vocab, device="cuda") * 4).to(dtype))
        row_R, target_R = (torch.randint(0, n, (65,), device="cuda") for n in (40, vocab))
        weight_3R = torch.randn(3, 65, device="cuda")
        weight_3R[:, 7] = 0.0
        wide_RV = logits_RV.detach().double().requires_grad_()
        wide_laws = teacher_laws_of(laws.logits_NV.double())
        results = []
        for leaf, terms in (
            (logits_RV, block_terms(logits_RV, laws, row_R, target_R)),
            (wide_RV, block_terms_reference(wide_RV, wide_laws, row_R, target_R)),
        ):
            (grad_RV,) = torch.autograd.grad((torch.stack(terms[:3]) * weight_3R).sum(), leaf)
            results.append((*terms, grad_RV))
        (hard, soft, distance, best, grad), (*wanted, want_best, want_grad) = results
        for made, want in zip((hard, soft, distance), wanted, strict=True):
            torch.testing.assert_close(made.double(), want, rtol=1e-4, atol=1e-4)
        assert torch.equal(best, want_best) and torch.equal(laws.best_N, wide_laws.best_N)
        assert not grad[7].any()
        error = (grad.double() - want_grad).norm() / want_grad.norm()
        assert error < (1e-4 if dtype == torch.float32 else 5e-3), f"relative error {error:.5f}"
        # The control: the neighbour's teacher.
        other = block_terms(logits_RV, laws, row_R.roll(1), target_R)
        assert (other.soft_R - soft).abs().max() > 0.1


def teacher_laws_of(logits_NV: torch.Tensor) -> TeacherLaws:
    """In torch, also on a GPU."""
    return TeacherLaws(logits_NV, logits_NV.logsumexp(-1), logits_NV.argmax(-1))


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


class _EveryAnchor(DSparkHead):
    """The same anchors, padded or not."""

    def pick_anchors(self, answer_BT: torch.Tensor) -> torch.Tensor:
        return torch.arange(16, device=answer_BT.device).expand(len(answer_BT), -1).contiguous()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_captured_step_is_an_eager_one(kind: str, dtype: str, golden_dir: Path, exact_float32: None) -> None:
    """The same batches, of two lengths and both again: losses and weights, with the padding and without."""
    torch.manual_seed(0)
    teacher = Teacher.load(str(golden_dir / "e2e_target"), taps=(0, 1, 1), device="cuda", dtype=dtype)
    vocab = teacher.model_config.vocab_size
    ends = [(list(range(5)), [(3 * i * i + k) % vocab for i in range(20 + 9 * k)]) for k in range(12)]
    corpus = Corpus.pack(ends, 160)
    results = []
    for captured in (True, False):
        torch.manual_seed(1)
        head: DraftHead = (
            Eagle3Head(teacher, torch.arange(vocab), steps=3)
            if kind == "eagle3"
            else _EveryAnchor(teacher, mask_token_id=0, block=4, layers=1, rank=8, anchors=LENGTHS - 1)
        ).to("cuda")
        lr = torch.tensor(1e-3, device="cuda") if captured else 1e-3
        optimizer = torch.optim.AdamW(head.parameters(), lr=lr, fused=True, capturable=captured)
        step: Step = EagerStep(head, teacher, optimizer, 1.0, Ranks())
        if captured:
            step = CapturedStep(head, teacher, optimizer, 1.0, room=512)
        losses = []
        for i, index in enumerate(([0, 1, 2], [9, 10, 11], [2, 1, 0], [10, 11], [3, 4, 5], [0, 1, 2], [5, 4, 3])):
            head.overlap = i >= 5  # the late loss has graphs of its own
            losses.append(float(step(corpus.take(torch.tensor(index)), 1e-3 / (1 + i)).loss))
        results.append((losses, [p.detach().clone() for p in head.parameters()]))
    (losses, weights), (want_losses, want_weights) = results
    assert losses == pytest.approx(want_losses, rel=2e-5 if dtype == "float32" else 2e-2)
    assert want_losses[2] < want_losses[0]
    if dtype == "float32":
        for got, want in zip(weights, want_weights, strict=True):
            assert float((got - want).abs().mean()) < 1e-5  # where a gradient is rounding, AdamW makes it a step
