"""Growing a draft tree by top-k expansion and reranking (EAGLE-2: Li et al. 2024, arXiv 2406.16858, section 4).

A node's score is the sum of log-probabilities on its path. Each level expands the `topk` best nodes of the level
before it, each into its `topk` most likely tokens; all of these are candidates, and the tree keeps the best of all
levels. A parent never scores below its child and comes before it, so what is kept is a tree. Pure functions of
tensors of fixed shape: B slots, K = topk, C candidates of a level, N = total nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.types import MAX_TREE_NODES


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """topk: children of an expanded node, and nodes expanded per level. levels: depth of the deepest node.
    total: nodes that are kept, the root (the bonus token) included."""

    topk: int
    levels: int
    total: int

    def __post_init__(self) -> None:
        most = MAX_TREE_NODES
        for name, low, high in (("topk", 1, most), ("levels", 1, most - 1), ("total", 2, most)):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"draft_tree {name}={value!r} must be a whole number from {low} to {high}")
        if self.total - 1 > self.candidates:
            raise ConfigError(
                f"draft_tree total={self.total} keeps {self.total - 1} drafts, but topk={self.topk} and "
                f"levels={self.levels} give only {self.candidates}"
            )
        if self.expanded > MAX_TREE_NODES:
            raise ConfigError(
                f"draft_tree topk={self.topk} and levels={self.levels} expand {self.expanded} nodes, "
                f"(levels - 1) * topk; the limit is {MAX_TREE_NODES}"
            )

    @classmethod
    def of(cls, values: Mapping[str, int]) -> TreeShape:
        """From the option `draft_tree`. Raises ConfigError that names the key that is missing or unknown."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(f"draft_tree has no {name!r}; it takes {', '.join(known)}")
        for name in known:
            if name not in values:
                raise ConfigError(f"draft_tree={dict(values)} lacks {name!r}; it takes {', '.join(known)}")
        return cls(**values)

    @property
    def depth(self) -> int:
        """Levels that a node which is kept can lie below the root."""
        return min(self.levels, self.total - 1)

    @property
    def expanded(self) -> int:
        """Nodes that a drafter feeds to itself: `topk` of every level but the last."""
        return (self.levels - 1) * self.topk

    @property
    def candidates(self) -> int:
        """Nodes of all levels together, the root not counted."""
        return self.topk + (self.levels - 1) * self.topk**2


@dataclass(frozen=True, kw_only=True)
class Level:
    """Candidates of one level. draft_BC: tokens, in the drafter's vocabulary. score_BC: their paths' log-probabilities.

    parent_BC: index of the parent among the candidates of all levels, -1 for the root. frontier_BK: those of C that
    the next level expands, best first. first: index of this level's first candidate among those of all levels.
    """

    draft_BC: Tensor
    score_BC: Tensor
    parent_BC: Tensor
    frontier_BK: Tensor
    first: int

    def frontier(self, of_BC: Tensor) -> Tensor:
        """Entries [B, K] of the nodes that are expanded next."""
        return of_BC.gather(1, self.frontier_BK)


@dataclass(frozen=True, kw_only=True)
class DraftTree:
    """N nodes of each slot, breadth first; node 0 is the root. int64 [B, N] but score (the root's is 0).

    parent: -1 at the root. depth: 0 at the root; a node's token stands depth positions behind the bonus token.
    """

    token_BN: Tensor
    parent_BN: Tensor
    depth_BN: Tensor
    score_BN: Tensor


def expand_root(logp_BD: Tensor, topk: int) -> Level:
    """The first level, from the log-probabilities of the token after the root."""
    score_BK, draft_BK = logp_BD.topk(topk, dim=1)
    frontier_BK = torch.arange(topk, device=logp_BD.device).expand_as(draft_BK)
    return Level(
        draft_BC=draft_BK, score_BC=score_BK, parent_BC=torch.full_like(draft_BK, -1), frontier_BK=frontier_BK, first=0
    )


def expand(logp_BKD: Tensor, level: Level) -> Level:
    """The next level, from the log-probabilities after each node that `level.frontier` names, in its order."""
    slots, topk = logp_BKD.shape[:2]
    logp_BKK, draft_BKK = logp_BKD.topk(topk, dim=2)
    score_BC = (level.frontier(level.score_BC)[:, :, None] + logp_BKK).view(slots, -1)
    parent_BKK = (level.first + level.frontier_BK)[:, :, None].expand_as(draft_BKK)
    return Level(
        draft_BC=draft_BKK.reshape(slots, -1), score_BC=score_BC, parent_BC=parent_BKK.reshape(slots, -1),
        frontier_BK=score_BC.topk(topk, dim=1).indices, first=level.first + level.draft_BC.shape[1],
    )  # fmt: skip


def rerank(levels: Sequence[Level], total: int, root_B: Tensor, id_D: Tensor | None = None) -> DraftTree:
    """The root and the total - 1 candidates with the best scores; of equal ones the earlier, so a parent always.

    root_B: the bonus tokens. id_D: the target's ids of the drafter's vocabulary, where that is a part of it.
    """
    draft_BP = torch.cat([level.draft_BC for level in levels], 1)
    score_BP = torch.cat([level.score_BC for level in levels], 1)
    parent_BP = torch.cat([level.parent_BC for level in levels], 1)
    depth_P = torch.cat([torch.full_like(level.draft_BC[0], i + 1) for i, level in enumerate(levels)])
    best_BP = score_BP.sort(dim=1, descending=True, stable=True).indices
    kept_BM = best_BP[:, : total - 1].sort(dim=1).values
    # Node of each candidate that is kept; the last place stands for the root, where -1 leads.
    node_BP = torch.zeros(kept_BM.shape[0], score_BP.shape[1] + 1, dtype=torch.int64, device=kept_BM.device)
    node_BP.scatter_(1, kept_BM, torch.arange(1, total, device=kept_BM.device).expand_as(kept_BM))
    parent_BM = node_BP.gather(1, parent_BP.gather(1, kept_BM) % node_BP.shape[1])
    token_BM = draft_BP.gather(1, kept_BM)
    token_BM = token_BM if id_D is None else id_D[token_BM]
    zero_B1 = torch.zeros_like(root_B[:, None])
    return DraftTree(
        token_BN=torch.cat([root_B[:, None], token_BM], 1),
        parent_BN=torch.cat([zero_B1 - 1, parent_BM], 1),
        depth_BN=torch.cat([zero_B1, depth_P[kept_BM]], 1),
        score_BN=torch.cat([zero_B1.to(score_BP.dtype), score_BP.gather(1, kept_BM)], 1),
    )


def seen_bits(parent_BN: Tensor, levels: int) -> Tensor:
    """Which nodes a node sees, itself and its ancestors: bit j of an int64 [B, N] for node j. levels: deepest node."""
    nodes = parent_BN.shape[1]
    own_N = torch.ones((), dtype=torch.int64, device=parent_BN.device) << torch.arange(nodes, device=parent_BN.device)
    up_BN = parent_BN.clamp(min=0)
    bits_BN = own_N.expand_as(parent_BN)
    for _ in range(levels):
        bits_BN = own_N | torch.where(parent_BN < 0, 0, bits_BN.gather(1, up_BN))
    return bits_BN


def seen_mask(parent_BN: Tensor, levels: int) -> Tensor:
    """`seen_bits` as bool [B, N, N]: row attends column."""
    at_N = torch.arange(parent_BN.shape[1], device=parent_BN.device)
    return (seen_bits(parent_BN, levels)[:, :, None] >> at_N) & 1 == 1
