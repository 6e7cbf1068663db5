"""An oracle that grows trees: the continuation that it knows runs along some path of a random tree."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from slipstream.draft.oracle import OracleDrafter
from slipstream.draft.protocol import Drafts, DraftView, FirstDraft
from slipstream.draft.tree import DraftTree, TreeShape

TREES = 64


def random_tree(rng: random.Random, nodes: int, depth: int) -> tuple[list[int], list[int], set[int]]:
    """Parents of a tree in breadth-first order, the nodes' depths, and the nodes of one path from the root."""
    parents, depths = [-1], [0]
    for node in range(1, nodes):
        parent = rng.choice([p for p in range(max(0, parents[-1]), node) if depths[p] < depth])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    path, at = set[int](), 0
    while children := [n for n in range(nodes) if parents[n] == at]:
        if rng.random() < 0.1:
            break
        at = rng.choice(children)
        path.add(at)
    return parents, depths, path


class TreeOracle:
    """A round's tree is one of TREES, chosen by position. Nodes off the path are wrong; the path is as right as the
    chain oracle `known`."""

    taps: tuple[int, ...] = ()
    reads_hidden, rereads, lookahead = False, 0, False
    draft_vocab: int | None = None

    def __init__(self, known: OracleDrafter, *, shape: TreeShape, device: Any) -> None:
        self.known, self.max_drafts = known, known.max_drafts
        trees = [random_tree(random.Random(i), shape.total, shape.depth) for i in range(TREES)]
        self.parent_TN = torch.tensor([t[0] for t in trees], device=device)
        self.depth_TN = torch.tensor([t[1] for t in trees], device=device)
        self.right_TN = torch.tensor([[n in t[2] for n in range(shape.total)] for t in trees], device=device)
        self.node_N = torch.arange(shape.total, device=device)
        self.admit, self.prefill, self.extend = known.admit, known.prefill, known.extend
        self.clear_pages, self.weight_bytes = known.clear_pages, known.weight_bytes

    def propose(self, first: FirstDraft, view: DraftView) -> Drafts:
        del first
        tree_B = (view.committed_B * 7 + view.slot_B) % TREES
        depth_BN, parent_BN = self.depth_TN[tree_B], self.parent_TN[tree_B]
        table_SL = self.known.table_SL
        at_BN = (view.committed_B[:, None] + depth_BN).clamp(max=table_SL.shape[1] - 1)
        token_BN = table_SL[view.slot_B[:, None], at_BN].clamp(min=0)
        token_BN = torch.where(self.right_TN[tree_B], token_BN, (token_BN - 1 - self.node_N).clamp(min=0))
        count_B = torch.full_like(tree_B, self.max_drafts)
        tree = DraftTree(token_BN=token_BN, parent_BN=parent_BN, depth_BN=depth_BN, score_BN=depth_BN)
        return Drafts(token_BK=token_BN[:, 1:], count_B=count_B, tree=tree)


def oracle_tree(known: Callable[..., OracleDrafter]) -> Callable[..., TreeOracle]:
    """A drafter factory from that of a chain oracle."""
    return lambda *, shape, **kw: TreeOracle(known(**kw), shape=shape, device=kw["device"])
