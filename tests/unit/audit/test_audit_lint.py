"""The linter: planted source forms, clean source, and what makes a function hot."""

import shutil
from pathlib import Path

import pytest

from slipstream.audit import AuditError, lint_paths, lint_source
from slipstream.audit.lint import read_hot_table

HERE = Path(__file__).parent
BAD = (HERE / "lint_bad.py.txt").read_text()
GOOD = (HERE / "lint_good.py.txt").read_text()
MARKS = [
    (number, line.split("# plant:")[1].strip()) for number, line in enumerate(BAD.splitlines(), 1) if "# plant:" in line
]


@pytest.fixture(scope="module")
def bad():
    return lint_source(BAD, "bad.py")


def test_enough_forms():
    assert len(MARKS) >= 40 and len({rule for _, rule in MARKS}) >= 16


@pytest.mark.parametrize(("line", "rule"), MARKS)
def test_planted_form_is_found(line, rule, bad):
    assert [f.rule for f in bad.findings if f.line == line] == [rule]


def test_nothing_else_is_found(bad):
    assert sorted({f.line for f in bad.findings}) == [line for line, _ in MARKS]
    nested = bad.findings[-1]
    assert nested.site.function == "Engine.step.<locals>.inner" and bad.counters["hot_functions"] == 1


def test_clean_source_raises_no_alarm():
    report = lint_source(GOOD, "good.py")
    assert report.ok, report.table()
    assert report.counters["hot_functions"] == 1  # `cold` is not hot


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):  # audit: hot\n    x.item()\n",
        "# audit: hot\ndef f(x):\n    x.item()\n",
        "# audit: hot\n@decorated\ndef f(x):\n    x.item()\n",
        "@audit.hot\ndef f(x):\n    x.item()\n",
        "class A:\n    async def f(self, x):  # audit: hot\n        return x.item()\n",
    ],
)
def test_ways_to_mark_a_function(source):
    assert [f.rule for f in lint_source(source).findings] == ["host-read"]
    plain = source.replace("audit: hot", "").replace("@audit.hot\n", "")
    assert lint_source(plain).ok
    assert len(lint_source(plain, every=True).findings) == 1


@pytest.mark.parametrize(
    ("pattern", "hit"),
    [
        ("engine/loop.py::Engine.step", True),
        ("loop.py::*.step", True),
        ("Engine.st*", True),
        ("other.py::Engine.step", False),
        ("engine/loop.py::step", False),
    ],
)
def test_patterns(pattern, hit):
    source = "class Engine:\n    def step(self, x):\n        return x.item()\n"
    report = lint_source(source, "pkg/engine/loop.py", hot=[pattern])
    assert bool(report.findings) == hit and report.counters["hot_functions"] == hit


def test_exceptions_are_listed():
    source = """
from slipstream.audit import allow_sync
def f(x):  # audit: hot
    with allow_sync("first token"):
        x.item()
    x.tolist()  # audit: ok the client asked for it
    x.cpu()  # audit: ok
@allow_sync("whole function")
def g(x):  # audit: hot
    x.item()
"""
    report = lint_source(source)
    assert [(f.rule, f.line) for f in report.findings] == [("host-copy", 7)]  # an exception without a reason is none
    assert {a.reason: a.hits for a in report.allowed} == {
        "first token": {"host-read": 1},
        "the client asked for it": {"host-copy": 1},
        "whole function": {"host-read": 1},
    }


def test_folders_and_errors(tmp_path):
    (tmp_path / "pkg").mkdir()
    shutil.copy(HERE / "lint_bad.py.txt", tmp_path / "pkg" / "bad.py")
    shutil.copy(HERE / "lint_good.py.txt", tmp_path / "pkg" / "good.py")
    report = lint_paths([tmp_path])
    assert len(report.findings) == len(MARKS) and report.counters["hot_functions"] == 2
    with pytest.raises(AuditError, match="does not exist"):
        lint_paths([tmp_path / "absent"])
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(AuditError, match=r"broken.py:1"):
        lint_paths([tmp_path])


def test_table_in_pyproject(tmp_path):
    file = tmp_path / "pyproject.toml"
    file.write_text('[tool.slipstream-audit]\nhot = ["a.py::f"]\n')
    assert read_hot_table(file) == ["a.py::f"]
    file.write_text("[project]\n")
    assert read_hot_table(file) == []
    file.write_text('[tool.slipstream-audit]\nhot = "a.py::f"\n')
    with pytest.raises(AuditError, match="list of strings"):
        read_hot_table(file)


def test_founding_case_4_in_source():
    """The last tokens of all sequences, listed and copied up each step; and counted where they are."""
    source = """
import torch
from torch import Tensor

def penalties(sequences, device):  # audit: hot
    last_tokens = [s.output[-1] for s in sequences]
    return torch.tensor(last_tokens).to(device, non_blocking=True)

def counted(tally_SV: Tensor, slot_B: Tensor, token_B: Tensor):  # audit: hot
    return tally_SV.index_put_((slot_B, token_B), torch.ones_like(token_B), accumulate=True)
"""
    assert [(f.rule, f.site.function) for f in lint_source(source).findings] == [("pageable-copy", "penalties")]
