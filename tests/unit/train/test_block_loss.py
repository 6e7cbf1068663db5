"""The loss of a block drafter: its parts against their formulas, and the whole against one that writes every table."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.train import dspark
from slipstream.train.block_loss import block_terms_reference, draft_logits, teacher_laws
from slipstream.train.dspark import DSparkHead
from slipstream.train.teacher import Features, Teacher
from tests.support.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    folder = write_tiny_checkpoint(
        tmp_path_factory.mktemp("target"), num_hidden_layers=4, vocab_size=43, hidden_size=48, spread=3.0
    )
    return Teacher.load(str(folder), taps=(1, 2, 3), device="cpu", dtype="float64")


def plain_loss(head: DSparkHead, token_BT: Tensor, answer_BT: Tensor, anchor_BA: Tensor, features: Features) -> Tensor:
    """0.1 CE + 0.9 L1 (soft CE before `overlap`) + BCE, slot by slot: no row is shared, every law is written down."""
    hidden_BAKH = head.backbone(token_BT, features.tap_BTF, anchor_BA)
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for b in range(token_BT.shape[0]):
        for a, anchor in enumerate(anchor_BA[b].tolist()):
            for k in range(head.block):
                at = anchor + k
                if at + 1 >= token_BT.shape[1] or not answer_BT[b, at + 1]:
                    break
                before, target, hidden_H = token_BT[b, at], token_BT[b, at + 1], hidden_BAKH[b, a, k]
                own_E = head.markov_head.markov_w1(before)
                q_V = (head.head_VH @ hidden_H + head.markov_head.markov_w2(own_E)).softmax(-1)
                p_V = (head.head_VH @ features.hidden_BTH[b, at]).softmax(-1)
                distance = (q_V - p_V).abs().sum()
                hard, soft = -q_V[target].log(), -(p_V * q_V.log()).sum()
                z = head.confidence_head.proj(torch.cat((hidden_H, own_E)))
                sure = F.binary_cross_entropy_with_logits(z, (1 - distance.detach() / 2).view(1))
                weight = float(torch.exp(torch.tensor(-k / 4, dtype=torch.float64)))
                total = total + weight * ((0.1 * hard + 0.9 * distance if head.overlap else soft) + sure)
                weights += weight
    return total / weights


@pytest.mark.parametrize(
    ("seed", "overlap", "anchors", "entries"), [(0, True, 3, 10**6), (1, False, 7, 10**6), (2, True, 7, 1)]
)
def test_the_loss_is_its_formula(
    seed: int, overlap: bool, anchors: int, entries: int, teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and the gradients of every parameter; fewer and more slots than positions, one part and several."""
    monkeypatch.setattr(dspark, "_HOST_TABLE", entries)
    torch.manual_seed(seed)
    head = DSparkHead(teacher, mask_token_id=0, block=4, layers=1, rank=8, anchors=anchors, seed=seed).double()
    head.overlap = overlap
    torch.nn.init.normal_(head.markov_head.markov_w2.weight)
    token_BT = torch.randint(1, 43, (3, 16))
    answer_BT = torch.rand(3, 16) < 0.8
    answer_BT[:, :3], answer_BT[2, 9:] = False, False
    features = teacher.features(token_BT)
    inputs = head.inputs(token_BT, answer_BT)
    loss, _ = head.loss_of(inputs, features)
    want = plain_loss(head, token_BT, answer_BT, inputs[2], features)
    names, parameters = zip(*head.named_parameters(), strict=True)
    made, wanted = (torch.autograd.grad(x, parameters) for x in (loss, want))
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)  # the weights are float32
    for name, got, grad in zip(names, made, wanted, strict=True):
        torch.testing.assert_close(got, grad, rtol=1e-5, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")
    # The control: one answer less is another loss.
    kept = answer_BT.clone()
    kept[0, int(inputs[2][0, 0]) + 1] = False
    assert (head.loss_of([token_BT, kept, inputs[2]], features)[0] - want).abs() > 1e-4


def test_one_product_is_the_head_and_the_bias() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(n, k, dtype=torch.float64) for n, k in ((9, 12), (9, 5), (31, 12), (31, 5))]
    results = []
    for joined in (True, False):
        hidden, before, head, markov = (x.clone().requires_grad_(i != 2) for i, x in enumerate(leaves))
        logits = draft_logits(hidden, before, head, markov) if joined else hidden @ head.T + before @ markov.T
        results.append([logits, *torch.autograd.grad(logits.sin().sum(), (hidden, before, markov))])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_gradients_of_the_rows_by_differences() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 11, dtype=torch.float64, requires_grad=True)
    teacher, row, target = torch.randn(2, 11, dtype=torch.float64), torch.tensor([1, 0, 1, 1]), torch.arange(4)
    assert torch.autograd.gradcheck(lambda x: block_terms_reference(x, teacher_laws(teacher), row, target)[:3], logits)
