"""bench/README.md lists every script there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path

BENCH = Path(__file__).resolve().parents[3] / "bench"


def test_every_script_is_listed() -> None:
    text = (BENCH / "README.md").read_text()
    scripts = {p.name for p in BENCH.glob("*.py")}
    assert len(scripts) > 5
    assert {name for name in scripts if name not in text} == set()
    packages = {p.parent.name for p in BENCH.glob("*/__main__.py")}
    assert {name for name in packages if f"python -m bench.{name}" not in text} == set()


def test_every_script_that_is_named_exists() -> None:
    named = re.findall(r"python bench/(\w+\.py)", (BENCH / "README.md").read_text())
    assert named and all((BENCH / name).exists() for name in named)
