"""Confidence-scheduled rounds, enumerated exactly: lengths by the frame's own op keep the target's law, and what looks
at a draft's successors does not.

One slot drafts three tokens of a three-token vocabulary from tables; a confidence depends on the drafts before its own.
Another slot takes part in the frame with confidences of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from slipstream.engine.budget import CostTable, best_budget
from slipstream.kernels.schedule import allot, survivals
from slipstream.types import SURVIVAL_ONE
from slipstream.verify import DenseQ, VerifyRows, verify
from slipstream.verify.block import block_tests
from tests.support.verify_kit import continued, random_tables, sequence_law, total_variation

VOCAB, DRAFTS = 3, 3
PATHS = list(itertools.product(range(VOCAB), repeat=DRAFTS))
OTHER = [0.7, 0.45, 0.2]
"""Survivals of the other slot's drafts."""

Lengths = Callable[[Sequence[float]], int]
"""Drafts of the slot that are verified, from the survivals of this round's."""


def confidence(seed: int) -> Callable[[tuple[int, ...]], float]:
    """A chance for the draft after each prefix. Seed 0: the first draft says how sure the later ones are."""
    if seed == 0:
        return lambda prefix: 0.3 if not prefix else 0.98 if prefix[0] == 0 else 0.02
    tables = random_tables(VOCAB, DRAFTS, seed + 99)
    return lambda prefix: 0.05 + 0.9 * float(tables[len(prefix)][(*prefix, 0)])


def by_the_op(own: Sequence[float], budget: int) -> int:
    logits = torch.tensor([_logits(own), _logits(OTHER)], dtype=torch.float64)
    unit_BK = survivals(logits, torch.tensor([DRAFTS, DRAFTS]))
    count_S = torch.tensor([0, DRAFTS, DRAFTS])
    allot(torch.tensor([0, 1, 1]), count_S, torch.cat([unit_BK[:1] * 0, unit_BK]), torch.tensor([1, 2]), 2 + budget, 4)
    return int(count_S[1])


def _logits(survival: Sequence[float]) -> list[float]:
    chances = torch.tensor([b / a for a, b in itertools.pairwise([1.0, *survival])], dtype=torch.float64)
    return torch.logit(chances).tolist()


def law(lengths: Lengths, seed: int, *, block: bool) -> tuple[Tensor, Tensor]:
    """The law of DRAFTS + 1 tokens when one such round is followed by plain sampling, and the target's."""
    target, q = random_tables(VOCAB, DRAFTS, seed), random_tables(VOCAB, DRAFTS - 1, seed + 50)
    sure = confidence(seed)
    chance, rows, own_q = [], [], []
    for path in PATHS:
        own = list(itertools.accumulate((sure(path[:j]) for j in range(DRAFTS)), lambda a, b: a * b))
        rows.append(1 + lengths(own))
        own_q.append(torch.stack([q[d][path[:d]] for d in range(DRAFTS)]))
        chance.append(float(torch.stack([q[d][path[: d + 1]] for d in range(DRAFTS)]).prod()))
    p_NWV = torch.stack([torch.stack([target[d][path[:d]] for d in range(DRAFTS + 1)]) for path in PATHS])
    n = len(PATHS)
    x_NK, q_NKV, zero_N = torch.tensor(PATHS), torch.stack(own_q), torch.zeros(n, dtype=torch.int64)
    round_ = VerifyRows(
        mode_B=zero_N + 2, key_B=zero_N, child_B=zero_N, base_B=zero_N, rows_B=torch.tensor(rows), draft_BK=x_NK,
        row_of_BW=torch.arange(n * (DRAFTS + 1)).view(n, -1), q=DenseQ(q_NKV),
    )  # fmt: skip
    flat_RV = p_NWV.flatten(0, 1)
    p_x, q_x = (t[:, :DRAFTS].gather(2, x_NK[:, :, None])[:, :, 0] for t in (p_NWV, q_NKV))
    pass_NK = block_tests(flat_RV, round_).pass_BK if block else (p_x / q_x).clamp(max=1)
    out = [torch.zeros([VOCAB] * (a + 1), dtype=torch.float64) for a in range(DRAFTS + 1)]
    for inside in itertools.product((True, False), repeat=DRAFTS):
        inside_K = torch.tensor(inside)
        weight_N = torch.where(inside_K, pass_NK, 1 - pass_NK).prod(1)
        u_NK = torch.where(inside_K, pass_NK / 2, (1 + pass_NK) / 2)
        seen: list[Tensor] = []

        def pick(weights_BV: Tensor, accepted_B: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(weights_BV.clone())
            return torch.zeros_like(accepted_B)

        verdict = verify(
            flat_RV.log(), round_, sampled=True, coupled=False, rejection=True, u_BK=u_NK, pick=pick, block=block
        )
        for i, (path, a) in enumerate(zip(PATHS, verdict.accepted_B.tolist(), strict=True)):
            out[a][path[:a]] += chance[i] * weight_N[i] * seen[0][i] / seen[0][i].sum()
    return continued(out, target), sequence_law(target)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 4, 6])
def test_the_frames_lengths_keep_the_law(budget: int, block: bool) -> None:
    seen = set()

    def lengths(own: Sequence[float]) -> int:
        seen.add(by_the_op(own, budget))
        return by_the_op(own, budget)

    for seed in range(3):
        got, want = law(lengths, seed, block=block)
        assert total_variation(got, want) < 1e-12
    assert len(seen) > 1 or budget in (0, 6), "this budget should have to choose"


CLIFF = CostTable(rows=(1, 5), frames_per_second=(10.0, 8.2))


def budget_from_current(own: Sequence[float]) -> int:
    """The budget that the scheduler would give if it knew this round's own confidences."""
    return by_the_op(own, best_budget([list(own), OTHER], CLIFF)[0])


def last_decides(own: Sequence[float]) -> int:
    """All drafts where the last one looks good, else the first only."""
    return DRAFTS if own[-1] > 0.05 else 1


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("rule", [budget_from_current, last_decides])
def test_a_rule_that_looks_ahead_is_biased(rule: Lengths, block: bool) -> None:
    """Negative controls: the same enumeration with lengths that depend on what comes after a draft."""
    worst = max(total_variation(*law(rule, seed, block=block)) for seed in range(3))
    assert worst > 0.01, worst


def test_a_unit_is_small_enough_not_to_matter() -> None:
    assert SURVIVAL_ONE >= 1 << 24
