"""Speculative output equals plain output, token for token, in float64 on tiny models.

The reference is a recomputation without cache, engine or drafts: one dense pass per token, the target token
chosen by argmax or by the seeded race. Every cell runs the whole engine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.equality_cells import FACTORS, run_cell
from tests.support.pairwise import all_cells, pairwise
from tests.support.reference import DenseReference

FULL = os.environ.get("SLIPSTREAM_FULL") == "1"
CELLS = all_cells(FACTORS) if FULL else pairwise(FACTORS, seed=7)


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_speculative_equals_plain(cell: dict[str, Any], dirs: dict[str, Path], reference: DenseReference) -> None:
    run_cell(cell, dirs, reference, dtype="float64")
