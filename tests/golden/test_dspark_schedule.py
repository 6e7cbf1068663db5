"""Confidence-scheduled verification against recorded cases: the budget on the host, the lengths on the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine.budget import CostTable, best_budget
from slipstream.kernels.schedule import draft_lengths


@pytest.fixture(scope="module")
def cases(golden_dir: Path) -> list[dict[str, Any]]:
    return json.loads((golden_dir / "dspark_schedule" / "expected.json").read_text())["cases"]


def table_of(case: dict[str, Any]) -> CostTable:
    table = case["table"]
    return CostTable(rows=tuple(table["batch_tokens"]), frames_per_second=tuple(table["steps_per_sec"]))


def test_budget_and_lengths(cases: list[dict[str, Any]]) -> None:
    assert len(cases) > 10
    for case in cases:
        budget, theta = best_budget(case["survival"], table_of(case))
        assert budget == case["budget"], case["name"]
        assert theta == pytest.approx(case["theta"], rel=1e-12, abs=1e-12)
        a_BK = torch.tensor(case["survival"], dtype=torch.float64)
        for k in (budget, torch.tensor(budget)):
            assert draft_lengths(a_BK, k).tolist() == case["lengths"], case["name"]


def test_stale_budget_orders_current_rows(cases: list[dict[str, Any]]) -> None:
    lagged = [case for case in cases if "history_survival" in case]
    assert lagged
    for case in lagged:
        budget, _ = best_budget(case["history_survival"], table_of(case))
        assert budget == case["lagged_budget"], case["name"]
        a_BK = torch.tensor(case["survival"], dtype=torch.float64)
        assert draft_lengths(a_BK, budget).tolist() == case["lagged_lengths"], case["name"]


def test_stopping_early_would_be_worse_somewhere(cases: list[dict[str, Any]]) -> None:
    """The control: the cases tell the two rules apart."""
    assert any(case["early_stop_theta"] < case["theta"] * (1 - 1e-9) for case in cases)
