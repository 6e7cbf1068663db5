"""tests/scenarios.toml: every report has its test, or the reason why it cannot happen here."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
TABLE = tomllib.loads((REPO / "tests" / "scenarios.toml").read_text())
NUMBERS = [f"S{i:02}" for i in range(1, 54)]


def wrong(table: dict[str, dict[str, Any]]) -> list[str]:
    """What is the matter with the table: numbers, rows without an answer, tests that are not there."""
    found = [f"{number} is missing" for number in NUMBERS if number not in table]
    found += [f"{number} is no number of a report" for number in table if number not in NUMBERS]
    for number, row in table.items():
        if extra := row.keys() - {"report", "tests", "not_here", "missing"}:
            found.append(f"{number} has {extra}")
        if "#" not in row.get("report", ""):
            found.append(f"{number} names no report")
        if bool(row.get("tests")) == ("not_here" in row):
            found.append(f"{number} needs tests or not_here, one of the two")
        for reason in ("not_here", "missing"):
            if reason in row and len(row[reason]) < 20:
                found.append(f"{number}: {reason} says nothing")
        found += [f"{number}: no test {name}" for name in row.get("tests", []) if not exists(name)]
    return found


def exists(name: str) -> bool:
    path, _, function = name.partition("::")
    if not (REPO / path).is_file():
        return False
    tree = ast.parse((REPO / path).read_text())
    return function.startswith("test_") and any(
        isinstance(n, ast.FunctionDef) and n.name == function for n in tree.body
    )


def test_every_report_has_an_answer() -> None:
    assert wrong(TABLE) == []
    assert list(TABLE) == NUMBERS


@pytest.mark.parametrize(
    ("number", "row", "says"),
    [
        ("S01", {"report": "a#1", "tests": ["tests/e2e/test_equality.py::test_nowhere"]}, "no test"),
        ("S01", {"report": "a#1", "tests": ["tests/e2e/nowhere.py::test_x"]}, "no test"),
        ("S01", {"report": "a#1"}, "needs tests or not_here"),
        ("S01", {"report": "a#1", "tests": [], "missing": "all of it, to be honest"}, "needs tests or not_here"),
        ("S01", {"report": "a#1", "not_here": "no"}, "says nothing"),
        ("S54", {"report": "a#1", "not_here": "there is no such report at all"}, "is no number"),
        ("S01", {"report": "a", "not_here": "there is no such report at all"}, "names no report"),
    ],
)
def test_a_wrong_row_is_found(number: str, row: dict[str, Any], says: str) -> None:
    assert [line for line in wrong({**TABLE, number: row}) if says in line and number in line]
    assert "S07 is missing" in wrong({n: r for n, r in TABLE.items() if n != "S07"})
