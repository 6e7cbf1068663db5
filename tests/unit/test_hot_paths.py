"""The table of hot paths in pyproject.toml: nothing in it waits, nothing in it is out of date, and it bites."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.audit import lint_paths, lint_source
from slipstream.audit.lint import read_hot_table

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "slipstream"
HOT = read_hot_table(REPO / "pyproject.toml")


def test_no_hot_path_waits() -> None:
    report = lint_paths([PACKAGE], hot=HOT)
    assert report.ok, report.table()
    assert [a.file.rsplit("/", 1)[1] for a in report.allowed] == ["staging.py"], "the one wait of the loop"


@pytest.mark.parametrize("pattern", HOT)
def test_every_pattern_names_a_function(pattern: str) -> None:
    files = sorted(PACKAGE.rglob(pattern.split("::", maxsplit=1)[0].rsplit("/", 1)[1]))
    assert sum(lint_paths([f], hot=[pattern]).counters["hot_functions"] for f in files) > 0


@pytest.mark.parametrize(
    ("file", "line", "fault", "rule"),
    [
        ("device/frame.py", "        state = self.state\n", "        int(self.state.committed_S.max())\n", "host-read"),
        ("device/staging.py", "        n = len(cells_np)\n", "        torch.cuda.synchronize()\n", "explicit-sync"),
        ("verify/core.py", "    width_W = ", "    p_RV[p_RV > 0].sum()\n", "boolean-index"),
        (
            "models/fused.py",
            "        stream = ",
            "        torch.tensor(1, device=self.decoder.device)\n",
            "tensor-literal",
        ),
    ],
)
def test_a_fault_in_a_hot_path_is_found(file: str, line: str, fault: str, rule: str) -> None:
    source = (PACKAGE / file).read_text(encoding="utf-8")
    assert line in source
    report = lint_source(source.replace(line, fault + line, 1), f"slipstream/{file}", hot=HOT)
    assert [f.rule for f in report.findings] == [rule]
