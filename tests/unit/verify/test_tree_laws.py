"""Losslessness of tree verification by exact enumeration of the real `verify_tree`, with controls that must fail."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from slipstream.sampling.rng import PURPOSE_COUPLED, race, race_noise
from slipstream.types import VerifyMode
from slipstream.verify import Siblings, TreeQ, verify_tree
from slipstream.verify.tree import node_depths
from tests.support.verify_kit import random_tables, sequence_law, total_variation, tree_law, tree_rows

VOCAB = 3
SHAPES = {"fork": [-1, 0, 0], "two levels": [-1, 0, 0, 1, 1], "three children": [-1, 0, 0, 0, 2]}


def prefix_of(parents: list[int], tokens: tuple[int, ...], node: int) -> tuple[int, ...]:
    """Tokens from below the root to `node`."""
    return () if node == 0 else (*prefix_of(parents, tokens, parents[node]), tokens[node])


def law_of_sequences(parents: list[int], target: list[Tensor], draws: list[tuple[tuple[int, ...], float, object]]):
    """Law of the first depth + 1 tokens: one tree round, then plain sampling. draws: (tokens, probability, TreeQ)."""
    total = torch.zeros_like(target[-1])
    for tokens, weight, q in draws:
        p_NV = torch.stack([target[len(x)][x] for x in (prefix_of(parents, tokens, n) for n in range(len(parents)))])
        law_NV = tree_law(p_NV, torch.tensor(parents), torch.tensor(tokens), q)
        for n in range(len(parents)):
            x = prefix_of(parents, tokens, n)
            part = law_NV[n]
            for level in range(len(x) + 1, len(target)):
                part = part.unsqueeze(-1) * target[level][x]
            total[x] += weight * part
    return total


def sampled_trees(parents: list[int], draft: list[Tensor], siblings: Siblings):
    """Every tree that the drafter can draw, with its probability and the q of each node."""
    draws = []
    for tokens in product(range(VOCAB), repeat=len(parents) - 1):
        tokens = (0, *tokens)
        q_NV = torch.stack([draft[len(x)][x] for x in (prefix_of(parents, tokens, n) for n in range(len(parents)))])
        weight = 1.0
        for n in range(1, len(parents)):
            left = q_NV[parents[n]].clone()
            if siblings is Siblings.WITHOUT_REPLACEMENT:
                for m in range(1, n):
                    if parents[m] == parents[n]:
                        left[tokens[m]] = 0
            weight *= float(left[tokens[n]] / left.sum()) if left.sum() > 0 else 0.0
        if weight > 0:
            draws.append((tokens, weight, TreeQ(q_NV.unsqueeze(0), siblings)))
    assert sum(w for _, w, _ in draws) == pytest.approx(1)
    return draws


def distance(shape: str, seed: int, siblings: Siblings) -> float:
    parents = SHAPES[shape]
    levels = int(node_depths(torch.tensor([parents]), len(parents)).max())
    target, draft = random_tables(VOCAB, levels, seed), random_tables(VOCAB, levels, seed + 1)
    law = law_of_sequences(parents, target, sampled_trees(parents, draft, siblings))
    return total_variation(law, sequence_law(target))


@pytest.mark.parametrize("siblings", list(Siblings))
@pytest.mark.parametrize("shape", ["fork", "two levels"])
def test_multi_round_is_exact(shape: str, siblings: Siblings) -> None:
    assert distance(shape, 10, siblings) < 1e-12


@pytest.mark.parametrize("seed", [10, 20])
def test_control_q_not_renormalised(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.verify.tree.without", lambda q, x: q.scatter(2, x, 0.0))
    assert distance("fork", seed, Siblings.WITHOUT_REPLACEMENT) > 1e-3


def test_control_iid_siblings_judged_as_distinct_ones() -> None:
    parents = SHAPES["fork"]
    target, draft = random_tables(VOCAB, 1, 10), random_tables(VOCAB, 1, 11)
    wrong = [
        (tokens, w, TreeQ(q.q_BNV, Siblings.WITHOUT_REPLACEMENT))
        for tokens, w, q in sampled_trees(parents, draft, Siblings.IID)
    ]
    assert total_variation(law_of_sequences(parents, target, wrong), sequence_law(target)) > 1e-3


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("zeros", [False, True])
def test_target_only_is_exact_for_any_fixed_tree(shape: str, zeros: bool) -> None:
    parents = SHAPES[shape]
    levels = int(node_depths(torch.tensor([parents]), len(parents)).max())
    target = random_tables(VOCAB, levels, 30, zeros)
    for tokens in [(0, 1, 2, 0, 2), (0, 0, 1, 2, 1), (0, 2, 2, 1, 1)]:  # the last one repeats a sibling's token
        tokens = tokens[: len(parents)]
        law = law_of_sequences(parents, target, [(tokens, 1.0, None)])
        assert total_variation(law, sequence_law(target)) < 1e-12


def test_control_sampled_tree_with_the_target_only_rule_is_exact_but_best_of_both_is_not() -> None:
    """A sampled tree is independent of the coins, so target-only stays exact; p / q with top-k children is not."""
    parents = SHAPES["fork"]
    target, draft = random_tables(VOCAB, 1, 10), random_tables(VOCAB, 1, 11)
    drawn = [(t, w, None) for t, w, _ in sampled_trees(parents, draft, Siblings.WITHOUT_REPLACEMENT)]
    assert total_variation(law_of_sequences(parents, target, drawn), sequence_law(target)) < 1e-12
    best = tuple(draft[0].topk(2).indices.tolist())
    q_NV = torch.stack([draft[0], draft[1][best[0]], draft[1][best[1]]])
    wrong = [((0, *best), 1.0, TreeQ(q_NV.unsqueeze(0), Siblings.WITHOUT_REPLACEMENT))]
    assert total_variation(law_of_sequences(parents, target, wrong), sequence_law(target)) > 0.01


@pytest.mark.parametrize("mode", [VerifyMode.GREEDY, VerifyMode.COUPLED])
def test_greedy_and_seeded_trees_give_the_plain_sequence(mode: VerifyMode) -> None:
    """Random trees over a first-order chain: what a round emits is how plain decoding goes on, and it is as long as
    the tree allows."""
    g = torch.Generator().manual_seed(3)
    batch, vocab, parents = 400, 5, torch.tensor([-1, 0, 0, 0, 1, 1, 2, 4, 4])
    p_VV = torch.rand(vocab, vocab, generator=g, dtype=torch.float64) ** 2
    p_VV = p_VV / p_VV.sum(1, keepdim=True)
    token_BN = torch.randint(0, vocab, (batch, len(parents)), generator=g)
    key_B = torch.randint(-(2**62), 2**62, (batch,), generator=g)
    base_B = torch.randint(0, 1000, (batch,), generator=g)
    rows = tree_rows(parents, token_BN, mode=mode, key_B=key_B, base_B=base_B)
    verdict = verify_tree(p_VV[token_BN.flatten()].log(), rows, sampled=True, coupled=True, rejection=False)
    last_B, plain = token_BN[:, 0], []
    for step in range(rows.depth + 1):
        noise = race_noise(key_B, key_B * 0, base_B + step + 1, PURPOSE_COUPLED, vocab, torch.float64)
        last_B = p_VV[last_B].argmax(1) if mode == VerifyMode.GREEDY else race(p_VV[last_B], noise)
        plain.append(last_B)
    plain_BW = torch.stack(plain, 1)
    for b in range(batch):
        n = int(verdict.n_emitted_B[b])
        assert verdict.tokens_BW[b, :n].tolist() == plain_BW[b, :n].tolist()
        assert not verdict.tokens_BW[b, n:].any()
        # No child of the last node carries the emitted token.
        at = int(verdict.path_BK[b, n - 2]) if n > 1 else 0
        children = [c for c in range(len(parents)) if int(parents[c]) == at]
        assert all(int(token_BN[b, c]) != int(plain_BW[b, n - 1]) for c in children)
    assert set(verdict.accepted_B.tolist()) == {0, 1, 2, 3}


def test_unused_nodes_and_inactive_slots_do_not_matter() -> None:
    parents = torch.tensor([-1, 0, 0, 1, 1])
    g = torch.Generator().manual_seed(4)
    p_RV = torch.rand(15, VOCAB, generator=g, dtype=torch.float64)
    token_BN = torch.randint(0, VOCAB, (3, 5), generator=g)
    full = tree_rows(parents, token_BN)
    cut = tree_rows(parents, token_BN)
    object.__setattr__(cut, "nodes_B", torch.tensor([0, 3, 5]))
    object.__setattr__(cut, "token_BN", token_BN.index_put((torch.tensor([1]), torch.tensor([4])), torch.tensor(99)))
    u_BN = torch.full((3, 5), 1e-9, dtype=torch.float64)
    seen = {}
    for name, rows in {"full": full, "cut": cut}.items():
        args = {"sampled": True, "coupled": False, "rejection": True, "u_BN": u_BN}
        seen[name] = verify_tree(p_RV.log(), rows, **args)
    assert seen["full"].accepted_B.tolist() == [2, 2, 2]
    assert seen["cut"].accepted_B[1:].tolist() == [1, 2]
    assert seen["cut"].n_emitted_B.tolist() == [0, 2, 3]
    assert torch.equal(seen["cut"].tokens_BW[2], seen["full"].tokens_BW[2])
    assert not seen["cut"].tokens_BW[0].any()
