"""Runs each file of interpreted cases in a fresh process: Triton reads TRITON_INTERPRET when it is first imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests run the compiled kernels")
@pytest.mark.parametrize(
    ("cases", "least"),
    [
        ("interpreted_cases.py", 20),
        ("frame_interpreted_cases.py", 20),
        ("sample_interpreted_cases.py", 13),
        ("adjust_interpreted_cases.py", 8),
        ("delta_interpreted_cases.py", 14),
        ("train_interpreted_cases.py", 6),
    ],
)
def test_kernels_in_the_interpreter(cases: str, least: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (dev: pip install --no-deps 'triton>=3.9')")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE.parent / cases)],
        cwd=HERE.parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= least and "skipped" not in done.stdout
