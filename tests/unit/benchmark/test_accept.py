"""`bench accept`: prompts, pooled figures, and a run on the real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.benchmark.accept import Tally, read_prompts, table
from slipstream.cli import main
from slipstream.errors import ConfigError
from slipstream.models.default import packaged_gguf


def test_figures_are_pooled_and_conditional() -> None:
    t = Tally(prompts=2, tokens=30, seconds=2.0, plain_tokens=30, plain_seconds=3.0)
    t.spec.add_round(drafted=3, accepted=3, emitted=4)
    t.spec.add_round(drafted=3, accepted=1, emitted=2)
    t.spec.add_round(drafted=2, accepted=0, emitted=1)
    t.spec.add_round(drafted=0, accepted=0, emitted=1)
    row = t.row("all")
    assert row["acceptance_length"] == 2.0
    # Draft 1: verified in 3 rounds, held in 2. Draft 2: judged in those 2, held in 1. Draft 3: judged in 1, held in 1.
    assert row["conditional_acceptance"] == [0.6667, 0.5, 1.0]
    assert row["drafted"] == 8 and row["accepted"] == 4
    assert row["tok_s"] == 15.0 and row["plain_tok_s"] == 10.0 and row["speedup"] == 1.5
    assert "1.50x" in table([row])


def test_prompts_are_spread_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"q{i}"], "category": "c" + str(i // 5)}) + "\n" for i in range(10)))
    assert [p.text for p in read_prompts(path, 4)] == ["q0", "q2", "q5", "q7"]
    assert {p.category for p in read_prompts(path, None)} == {"c0", "c1"}
    path.write_text('{"turns": []}\n')
    with pytest.raises(ConfigError, match="line 1"):
        read_prompts(path, None)
    with pytest.raises(ConfigError, match="not a file"):
        read_prompts(tmp_path / "no", None)


def test_the_real_model_with_ngram(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if packaged_gguf() is None:
        pytest.skip("the default model's wheel is not installed")
    path = tmp_path / "p.jsonl"
    lines = [{"prompt": "Repeat: one two three four one two three four", "category": "copy"}, {"prompt": "x " * 9000}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["bench", "accept", "--prompts", str(path), "--draft", "ngram", "--num-drafts", "3", "--max-tokens", "24"]
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["left_out"] == 1
    assert [r["category"] for r in report["rows"]] == ["copy", "all"]
    row = report["rows"][-1]
    assert row["prompts"] == 1 and 0 < row["tokens"] <= 24 and row["acceptance_length"] >= 1.0 and row["speedup"] > 0
    assert main([*argv, "--max-prompts", "0"]) == 2
