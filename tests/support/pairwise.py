"""Covering arrays: few cells in which every pair of factor values stands together at least once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def all_cells(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The full cross product."""
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def pairwise(factors: Mapping[str, Sequence[Any]], *, seed: int = 0, tries: int = 40) -> list[dict[str, Any]]:
    """Greedy pairwise cells: each round keeps the random candidate that covers most uncovered pairs."""
    rng = random.Random(seed)
    names = list(factors)
    index = {n: list(range(len(factors[n]))) for n in names}
    left = {((a, i), (b, j)) for a, b in itertools.combinations(names, 2) for i in index[a] for j in index[b]}
    cells = []
    while left:
        best: dict[str, int] = {}
        best_new = -1
        for t in range(tries):
            cell = {n: rng.choice(index[n]) for n in names}
            if t < tries // 2:  # start from a pair that is still missing
                (a, i), (b, j) = rng.choice(sorted(left))
                cell[a], cell[b] = i, j
            new = sum(1 for a, b in itertools.combinations(names, 2) if ((a, cell[a]), (b, cell[b])) in left)
            if new > best_new:
                best, best_new = cell, new
        left -= {((a, best[a]), (b, best[b])) for a, b in itertools.combinations(names, 2)}
        cells.append({n: factors[n][best[n]] for n in names})
    return cells
