"""Trees and accepted paths for the kernels of kernels/tree.py, on any device."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.tree_oracle import random_tree


class Paths(NamedTuple):
    """What `compact_path` takes, in order. The sink page is NaN; committed of the sink slot is 0."""

    data: Tensor
    table: Tensor
    slot: Tensor
    committed: Tensor
    path: Tensor
    accepted: Tensor

    def to(self, device: str) -> Paths:
        return Paths(*(t.to(device) for t in self))


def random_trees(slots: int, nodes: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """committed [S], depth and seen bits [S, W] of `slots` slots and the sink: any numbers will do."""
    g = torch.Generator().manual_seed(seed)
    committed = torch.randint(1, 5000, (slots + 1,), generator=g)
    committed[0] = 0
    depth = torch.randint(0, nodes, (slots + 1, nodes), generator=g)
    return committed, depth, torch.randint(-(2**62), 2**62, (slots + 1, nodes), generator=g)


def random_paths(
    slots: int,
    padding: int,
    depth: int,
    *,
    page: int = 3,
    shape: tuple[int, int] = (2, 4),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Paths:
    """Paths of increasing nodes, short steps and long ones; pages in no order; two layers."""
    g = torch.Generator().manual_seed(seed)
    most = 40
    pages = -(-(most + 3 * depth + 2) // page)
    ids = torch.randperm(slots * pages, generator=g).view(slots, pages) + 1
    table = torch.cat([torch.zeros(1, pages, dtype=torch.int64), ids])
    data = torch.randn(2, 2, slots * pages + 1, page, *shape, generator=g).to(dtype)
    data[:, :, 0] = float("nan")
    slot = torch.cat([torch.arange(1, slots + 1), torch.zeros(padding, dtype=torch.int64)])
    slot = slot[torch.randperm(slots + padding, generator=g)]
    committed = torch.randint(1, most, (slots + 1,), generator=g)
    committed[0] = 0
    path = torch.randint(1, 4, (slots + padding, depth), generator=g).cumsum(1)
    accepted = torch.randint(0, depth + 1, (slots + padding,), generator=g)
    accepted[torch.randint(0, slots + padding, (1,), generator=g)] = depth
    return Paths(data, table, slot, committed, torch.where(torch.arange(depth) < accepted[:, None], path, 0), accepted)


def random_rounds(
    slots: int, padding: int, nodes: int, depth: int, width: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    """What `walk_trees` takes, in order: trees of `nodes` nodes in state, of which a frame has up to `width`.

    Two tokens only, so that drafts are often right and siblings often equal.
    """
    g, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    parent = torch.tensor([random_tree(rng, nodes, depth)[0] for _ in range(slots + 1)])
    pending = torch.randint(0, 2, (slots + 1, nodes), generator=g)
    slot = torch.cat([torch.randperm(slots, generator=g) + 1, torch.zeros(padding, dtype=torch.int64)])
    used = torch.randint(0, width + 1, slot.shape, generator=g) * (slot > 0)
    target = torch.randint(0, 2, (len(slot) * width,), generator=g)
    row_of = torch.randperm(len(slot) * width, generator=g).view(-1, width)
    return target, row_of, used, slot, parent, pending, min(depth, width - 1)
