"""Training on a GPU: the fused loss and the flash form of the training-time test agree with their references."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
        losses = [
            float(step(corpus.take(torch.tensor(index)), 1e-3 / (1 + i)).loss)
            for i, index in enumerate(([0, 1, 2], [9, 10, 11], [2, 1, 0], [10, 11], [3, 4, 5]))
        ]
        results.append((losses, [p.detach().clone() for p in head.parameters()]))
    (losses, weights), (want_losses, want_weights) = results
    assert losses == pytest.approx(want_losses, rel=2e-5 if dtype == "float32" else 2e-2)
    assert want_losses[2] < want_losses[0]
    if dtype == "float32":
        for got, want in zip(weights, want_weights, strict=True):
            assert float((got - want).abs().mean()) < 1e-5  # where a gradient is rounding, AdamW makes it a step
