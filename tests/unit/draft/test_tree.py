"""Tree growth against a plain reading of the algorithm over explicit paths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.draft.tree import TreeShape, expand, expand_root, rerank, seen_bits, seen_mask
from slipstream.errors import ConfigError

Path = tuple[int, ...]
V = 7


def law(seed: int, path: Path) -> torch.Tensor:
    """Log-probabilities after a path, none equal to another."""
    g = torch.Generator().manual_seed(hash((seed, path)) % 2**31)
    return (torch.randn(V, generator=g, dtype=torch.float64) * 2).log_softmax(0)


def by_hand(seed: int, shape: TreeShape) -> dict[Path, float]:
    """The paths that are kept, with their scores."""
    score: dict[Path, float] = {(): 0.0}
    frontier: list[Path] = [()]
    for _ in range(shape.levels):
        grown: dict[Path, float] = {}
        for path in frontier:
            logp = law(seed, path)
            grown |= {(*path, int(t)): score[path] + float(logp[t]) for t in logp.topk(shape.topk).indices}
        score |= grown
        frontier = sorted(grown, key=lambda p: -grown[p])[: shape.topk]
    del score[()]
    return {p: score[p] for p in sorted(score, key=lambda p: -score[p])[: shape.total - 1]}


def grow(seed: int, shape: TreeShape, slots: int = 2) -> tuple[list[list[Path]], object]:
    """The tree of `slots` slots (slot b with seed + b), and the path of each node."""
    logp_BD = torch.stack([law(seed + b, ()) for b in range(slots)])
    levels, paths = [expand_root(logp_BD, shape.topk)], [[() for _ in range(shape.topk)] for _ in range(slots)]
    known: list[list[Path]] = [[] for _ in range(slots)]
    for i in range(shape.levels):
        level = levels[-1]
        for b in range(slots):
            parents = level.parent_BC[b].tolist()
            known[b] += [
                (*(known[b][p] if p >= 0 else ()), t) for p, t in zip(parents, level.draft_BC[b].tolist(), strict=True)
            ]
            paths[b] = [known[b][level.first + c] for c in level.frontier_BK[b].tolist()]
        if i + 1 < shape.levels:
            levels.append(
                expand(torch.stack([torch.stack([law(seed + b, p) for p in paths[b]]) for b in range(slots)]), level)
            )
    tree = rerank(levels, shape.total, torch.arange(100, 100 + slots))
    nodes = []
    for b in range(slots):
        mine: list[Path] = []
        for token, parent in zip(tree.token_BN[b].tolist(), tree.parent_BN[b].tolist(), strict=True):
            mine.append(() if parent < 0 else (*mine[parent], token))
        nodes.append(mine)
    return nodes, tree


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 4), st.integers(2, 30))
def test_growth(seed: int, topk: int, levels: int, total: int) -> None:
    total = min(total, 1 + topk + (levels - 1) * topk**2)
    shape = TreeShape(topk=topk, levels=levels, total=total)
    nodes, tree = grow(seed, shape)
    for b, paths in enumerate(nodes):
        assert len(set(paths)) == total and paths[0] == ()  # parents come first, or `grow` had failed
        assert [len(p) for p in paths] == tree.depth_BN[b].tolist() == sorted(len(p) for p in paths)
        assert int(tree.token_BN[b, 0]) == 100 + b
        want = by_hand(seed + b, shape)
        assert set(paths[1:]) == set(want)
        torch.testing.assert_close(tree.score_BN[b, 1:].tolist(), [want[p] for p in paths[1:]])
        mask = seen_mask(tree.parent_BN, levels)[b]
        for n, path in enumerate(paths):
            assert [m for m in range(total) if mask[n, m]] == [m for m, q in enumerate(paths) if path[: len(q)] == q]
        bits = seen_bits(tree.parent_BN, levels)[b].tolist()
        assert [b_ % 2**64 for b_ in bits] == [sum(1 << m for m in range(total) if mask[n, m]) for n in range(total)]


def test_equal_scores_keep_the_parent() -> None:
    """Certain tokens score 0 like their parents; whatever is cut, no child stays without its parent."""
    sure = torch.full((1, V), float("-inf"))
    sure[0, 3] = 0.0
    levels = [expand_root(sure, 2)]
    for _ in range(3):
        levels.append(expand(sure[:, None].expand(1, 2, V), levels[-1]))
    for total in range(2, 5):
        tree = rerank(levels, total, torch.tensor([9]))
        assert tree.token_BN.tolist() == [[9] + [3] * (total - 1)]
        assert tree.parent_BN.tolist() == [list(range(-1, total - 1))]


def test_ids_of_a_part_of_the_vocabulary() -> None:
    level = expand_root(torch.tensor([[0.1, 0.2, 0.7]]).log(), 2)
    tree = rerank([level], 3, torch.tensor([5]), id_D=torch.tensor([10, 20, 30]))
    assert tree.token_BN.tolist() == [[5, 30, 20]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"topk": 0, "levels": 2, "total": 4}, "topk=0 must be"),
        ({"topk": 2, "levels": 0, "total": 4}, "levels=0 must be"),
        ({"topk": 2, "levels": 2, "total": 65}, "total=65 must be a whole number from 2 to 64"),
        ({"topk": 2, "levels": 2, "total": 8}, "keeps 7 drafts, but topk=2 and levels=2 give only 6"),
    ],
)
def test_shapes_that_cannot_be(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TreeShape(**values)
