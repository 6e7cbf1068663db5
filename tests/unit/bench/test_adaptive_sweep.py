"""bench/adaptive_sweep.py: every number of drafts, and the choice, over sequences of the same length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import adaptive_sweep
from tests.support.kit import tiny_model_dir


def test_tokens_by_the_law() -> None:
    assert adaptive_sweep.Law(1.0).tokens == [1, 1, 1, 1] and adaptive_sweep.Law(4.0).tokens == [1, 2, 3, 4]
    assert adaptive_sweep.Law(2.4).tokens == pytest.approx([1, 2, 2.4, 2.4])


def test_a_cell_compares_equal_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model_dir(tmp_path / "model", seed=1, max_position_embeddings=1024)
    words = ["--model", str(model), "--device", "cpu", "--batch", "2", "--acceptance", "2.5", "--frames", "40"]
    code = adaptive_sweep.main([*words, "--context", "220", "--least", "0"])
    cell, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0 and cell["batch"] == 2 and last["lowest"]["steady"] == min(1.0, cell["share_steady"])
    modes = [m for m in cell["tok_s"] if m.isdigit()]
    assert modes == ["0", "1", "2", "3"]
    for name in modes:
        assert cell["context"][name] == pytest.approx(220, abs=8), cell
        # The law is what rounds really bring, but for luck.
        assert cell["counted"][name] == pytest.approx(cell["tok_s"][name], rel=0.15), cell
    assert sum(cell["frames"]["learning"].values()) == sum(cell["frames"]["steady"].values()) == 40


def test_lengths_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        adaptive_sweep.main(["--context", "600"])
    assert "--context 600 must be above 628" in capsys.readouterr().err
