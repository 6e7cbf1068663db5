"""Losslessness of chain rejection by exact enumeration of the real `verify`, with controls that must fail."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import slipstream.verify.rejection as rejection
from slipstream.verify.rejection import chain_accept_prob, chain_accepts, chain_residual
from tests.support.verify_kit import (
    continued,
    grid_rows,
    random_tables,
    round_law,
    sequence_law,
    total_variation,
    verify_rejection,
)

SHAPES = [(3, 2, False), (3, 2, True), (4, 2, False), (4, 2, True), (2, 3, False), (3, 3, True)]
"""vocabulary, drafts, tables with zeros"""


def sampled_path(draft: list[Tensor], path: tuple[int, ...]) -> float:
    return math.prod(float(draft[d][path[: d + 1]]) for d in range(len(path)))


def argmax_path(draft: list[Tensor], path: tuple[int, ...]) -> float:
    return float(all(path[d] == int(draft[d][path[:d]].argmax()) for d in range(len(path))))


def distance(vocab: int, depth: int, zeros: bool, seed: int, *, draft_rule: str, soft_q: bool, **kw: bool) -> float:
    target, draft = random_tables(vocab, depth, seed, zeros), random_tables(vocab, depth, seed + 1, zeros)
    path = sampled_path if draft_rule == "sampled" else argmax_path
    law = round_law(
        target,
        lambda x: path(draft, x),
        (lambda prefix: draft[len(prefix)][prefix]) if soft_q else None,
        depth,
        **kw,
    )
    return total_variation(continued(law, target), sequence_law(target))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [10, 20, 30])
def test_dense_q_is_exact(shape: tuple[int, int, bool], seed: int) -> None:
    assert distance(*shape, seed, draft_rule="sampled", soft_q=True) < 1e-12


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [10, 20, 30])
def test_one_hot_q_is_exact_for_any_draft(shape: tuple[int, int, bool], seed: int) -> None:
    assert distance(*shape, seed, draft_rule="argmax", soft_q=False) < 1e-12
    # Also for drafts sampled from anything: a point mass is right for whatever was proposed.
    assert distance(*shape, seed, draft_rule="sampled", soft_q=False) < 1e-12


@pytest.mark.parametrize("seed", [10, 20, 30])
def test_control_argmax_draft_judged_with_softmax_q(seed: int) -> None:
    assert distance(3, 2, False, seed, draft_rule="argmax", soft_q=True) > 0.01


@pytest.mark.parametrize("seed", [10, 20, 30])
def test_control_residual_not_renormalised(seed: int) -> None:
    assert distance(3, 2, False, seed, draft_rule="sampled", soft_q=True, normalise=False) > 0.01


@pytest.mark.parametrize("seed", [10, 20, 30])
def test_control_no_residual(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "chain_residual", lambda p, q: p)
    assert distance(3, 2, False, seed, draft_rule="sampled", soft_q=True) > 0.01


def coin_grid_law(p_V: Tensor, x: int) -> Tensor:
    """Law of the first token for a one-hot draft x, over eight coins and the whole closing law."""
    # 0, 1/8, ... 7/8, all but the first moved off the edge by more than softmax rounds.
    coins = torch.arange(8, dtype=torch.float64).view(8, 1)
    coins = torch.where(coins > 0, coins / 8 + 1e-6, 0.0)
    seen: list[Tensor] = []

    def pick(weights_BV: Tensor, accepted_B: Tensor) -> Tensor:
        seen.append(weights_BV)
        return torch.zeros_like(accepted_B)

    verdict = verify_rejection(p_V.expand(8, 2, -1), grid_rows(8, 2, torch.full((8, 1), x)), coins, pick)
    accepted_B1 = (verdict.accepted_B == 1).unsqueeze(1)
    first_BV = torch.where(accepted_B1, torch.eye(len(p_V), dtype=p_V.dtype)[x], seen[0] / seen[0].sum(1, True))
    return first_BV.mean(0)


def test_coins_on_a_grid_and_control_zero_coin(monkeypatch: pytest.MonkeyPatch) -> None:
    """All masses are eighths, so eight coins give the exact law, if the coin 0 refuses a token without mass."""
    tables = [torch.tensor(t, dtype=torch.float64) / 8 for t in ([0, 3, 5], [8, 0, 0], [1, 0, 7], [2, 2, 4])]
    for p_V in tables:
        for x in range(3):
            assert total_variation(coin_grid_law(p_V, x), p_V) < 1e-12, (p_V, x)
    monkeypatch.setattr(rejection, "chain_accepts", lambda u, p_x, q_x: u * q_x <= p_x)
    assert total_variation(coin_grid_law(tables[0], 0), tables[0]) > 0.1


def test_coins_split_at_the_acceptance_probability() -> None:
    """The measure used by the enumeration is that of the comparison: coins flip at min(1, p / q)."""
    g = torch.Generator().manual_seed(0)
    p, q = (torch.rand(4000, 5, generator=g, dtype=torch.float64) for _ in range(2))
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    x = torch.randint(0, 5, (4000,), generator=g)
    edge = chain_accept_prob(p, q, x)
    p_x, q_x = p.gather(1, x[:, None])[:, 0], q.gather(1, x[:, None])[:, 0]
    assert 0.3 < (edge < 1).double().mean() < 0.7
    assert chain_accepts(edge * (1 - 1e-12), p_x, q_x).all()
    assert not chain_accepts((edge * (1 + 1e-12))[edge < 1], p_x[edge < 1], q_x[edge < 1]).any()
    zero = torch.zeros(1, dtype=torch.float64)
    assert not chain_accepts(zero, zero, torch.ones(1, dtype=torch.float64)).any()
    assert not chain_accepts(zero, zero, zero).any()
    one_p = torch.tensor([[0.0, 1.0]])
    assert chain_accept_prob(one_p, torch.tensor([[1.0, 0.0]]), torch.tensor([0])).item() == 0


def test_residual_edges() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    assert torch.equal(chain_residual(p, p), p)  # nothing left: p itself
    q = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.3, 0.2]], dtype=torch.float64)
    torch.testing.assert_close(chain_residual(p, q), torch.tensor([[0, 0.5, 0], [0, 0, 0.3]], dtype=torch.float64))
