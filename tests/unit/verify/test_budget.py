"""Budgets, lengths and calibration tables."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from slipstream.draft.confidence import load_temperatures
from slipstream.engine.budget import CostTable, best_budget
from slipstream.errors import ConfigError
from slipstream.kernels.schedule import draft_lengths, survivals
from slipstream.types import SURVIVAL_ONE


def test_a_flat_table_verifies_all_and_a_cliff_is_not_climbed() -> None:
    a = [[0.9, 0.5, 0.1], [0.8, 0.3, 0.0]]
    assert best_budget(a, CostTable(rows=(1,), frames_per_second=(50.0,)))[0] == 5  # all but the hopeless one
    cliff = CostTable(rows=(1, 5), frames_per_second=(100.0, 10.0))
    assert best_budget(a, cliff)[0] == 2
    assert best_budget([], cliff) == (0, 0.0)


def test_the_best_of_all_length_vectors() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        a = torch.rand(3, 4, generator=g, dtype=torch.float64).cumprod(1)
        speeds = (torch.rand(16, generator=g) * 100 + 1).tolist()
        table = CostTable(rows=tuple(range(1, 17)), frames_per_second=tuple(speeds))
        budget, theta = best_budget(a.tolist(), table)
        every = [
            (3 + sum(float(a[r, :n].sum()) for r, n in enumerate(lengths))) * table.at(3 + sum(lengths))
            for lengths in itertools.product(range(5), repeat=3)
        ]
        assert theta == pytest.approx(max(every), rel=1e-12)
        lengths = draft_lengths(a, budget).tolist()
        assert sum(lengths) == budget


def test_lengths_are_prefixes_under_ties() -> None:
    a_BK = torch.tensor([[1.0, 0.5, 0.5], [0.5, 0.5, 0.5], [0.5, 0.0, 0.0]])
    got = [draft_lengths(a_BK, k).tolist() for k in range(10)]
    assert got[:8] == [
        [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [3, 2, 1], [3, 3, 1],
    ]  # fmt: skip
    assert got[8] == got[9] == [3, 3, 1]


def test_survivals_are_products_of_confidences_and_never_rise() -> None:
    z_BK = torch.tensor([[1.0, -2.0, 40.0], [-200.0, 5.0, 5.0], [float("nan"), 1.0, 1.0], [9.0, 9.0, 9.0]])
    got = survivals(z_BK, torch.tensor([3, 3, 2, 0]))
    want = torch.sigmoid(z_BK[0].double()).cumprod(0)
    assert torch.allclose(got[0].double() / SURVIVAL_ONE, want, rtol=1e-6)
    # What is offered is never hopeless: with room for all of it a frame is one of fixed length.
    assert got[1:].tolist() == [[1, 1, 1], [1, 1, 0], [0, 0, 0]]
    g = torch.Generator().manual_seed(0)
    many = survivals(4 * torch.randn(4000, 15, generator=g), torch.full((4000,), 15))
    assert bool((many[:, 1:] <= many[:, :-1]).all()) and bool((many >= 1).all())


@pytest.mark.parametrize(
    ("rows", "speeds", "words"),
    [((), (), "0 row counts"), ((1, 2), (1.0,), "2 row counts and 1"), ((2, 1), (1.0, 1.0), "must rise"),
     ((1,), (0.0,), "above 0")],
)  # fmt: skip
def test_bad_tables(rows: tuple[int, ...], speeds: tuple[float, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CostTable(rows=rows, frames_per_second=speeds)


def test_temperatures(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"temperatures": [1, 0.5], "dataset": "held out", "num_samples": 9}))
    assert load_temperatures(path, 2) == [1.0, 0.5]
    assert load_temperatures([2.0], 1) == [2.0]
    for source, words in (
        (path, "has 2 values; the draft has 3"), ([1.0, 0.0, 1.0], "value 1 is 0.0"),
        ([1.0, float("nan"), 1.0], "value 1 is nan"), ([1.0, -2.0, 1.0], "value 1 is -2.0"), (3.0, "must be a list"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            load_temperatures(source, 3)  # type: ignore[arg-type]
