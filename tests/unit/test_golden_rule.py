"""On CI a golden test that is skipped although its folder is there must fail (tests/conftest.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

TESTS = """
import pytest

def test_golden(golden_dir):
    pytest.skip("left out")

def test_other():
    pytest.skip("left out")
"""


@pytest.mark.parametrize(
    "ci, folder, expect",
    [("1", True, "1 failed, 1 skipped"), ("1", False, "2 skipped"), ("", True, "2 skipped")],
)
def test_skips(tmp_path, ci, folder, expect):
    tests = tmp_path / "tests" / "unit"
    tests.mkdir(parents=True)
    shutil.copy(CONFTEST, tests.parent)
    (tests / "test_it.py").write_text(TESTS)
    golden = tmp_path / "golden"
    if folder:
        golden.mkdir()
    env = {**os.environ, "CI": ci, "SLIPSTREAM_GOLDEN": str(golden)}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(tmp_path),
            str(tests),
        ],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert expect in done.stdout, done.stdout + done.stderr
