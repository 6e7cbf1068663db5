"""Data generation, with a scripted model; and the command from corpus to draft on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.cli import main
from slipstream.errors import ConfigError
from slipstream.train.corpus import Corpus
from slipstream.train.generate import OPENERS, Recipe, generate_corpus, make_prompts, read_prompts, user_header
from tests.support.tiny import write_tiny_checkpoint


class ScriptedLLM:
    """Writes different user turns by seed, and answers that depend on prompt and seed; every ninth is a loop."""

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(apply_chat_template=self._template, encode=self._encode)
        self.asked: list[Any] = []
        self.resolved = {"max_slots": 20}

    @staticmethod
    def _template(messages: list[dict[str, str]], **_: Any) -> str:
        return f"<s>user {messages[0]['content']} <e>"

    @staticmethod
    def _encode(text: str, **_: Any) -> list[int]:
        return [ord(c) % 90 for c in text]

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        return self._encode(self._template(messages))

    def generate(self, prompts: list[Any], params: list[Any], **_: Any) -> list[Any]:
        outs = []
        for p in params:
            self.asked.append(p)
            n = min(p.max_tokens, 40)
            ids = [5] * n if p.seed % 9 == 0 else [(p.seed * 31 + 7 * i * i) % 89 for i in range(n)]
            text = f"turn number {p.seed % 20}: " + "words " * 40
            outs.append(SimpleNamespace(outputs=[SimpleNamespace(text=text, token_ids=ids, finish_reason="stop")]))
        return outs


def test_prompts_are_distinct_and_the_corpus_repeats() -> None:
    llm: Any = ScriptedLLM()
    assert user_header(llm) == ScriptedLLM._encode("<s>user ")
    prompts = make_prompts(llm, 100, Recipe(conversations=100))
    assert len(set(prompts)) == 100
    assert {o.strip() for o in OPENERS} <= {p.partition("turn number")[0].strip() for p in prompts}
    recipe = Recipe(conversations=60, max_len=400, follow_ups=0.25, seed=3)
    corpus, again = generate_corpus(llm, recipe), generate_corpus(llm, recipe)
    assert torch.equal(corpus.token_NT, again.token_NT)
    assert 40 <= len(corpus) < 60  # loops are gone
    temperatures = {p.temperature for p in llm.asked}
    assert temperatures == {0.0, 0.7, 1.0}


def test_a_time_limit_ends_generation_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch takes ten seconds here: of 100 s, 70 are for prompts; what has begun is made."""
    llm: Any = ScriptedLLM()
    clock = [0.0]
    plain = llm.generate

    def generate(prompts: list[Any], params: list[Any], **options: Any) -> list[Any]:
        clock[0] += 10.0
        return list(plain(prompts, params, **options))

    llm.generate = generate
    monkeypatch.setattr("slipstream.train.generate.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("slipstream.train.generate._ROUNDS", 1)
    prompts = [f"prompt {i}" for i in range(1000)]
    recipe = Recipe(conversations=1000, max_len=400, follow_ups=0.3, seconds=100.0)
    generate_corpus(llm, recipe, prompts=prompts)
    assert clock[0] == (8 + 3) * 10.0
    with pytest.raises(ConfigError, match="time limit of 0"):
        Recipe(seconds=0)
    with pytest.raises(ConfigError, match="different prompts"):
        make_prompts(llm, 600, Recipe(conversations=600))


def test_prompts_fit_a_short_context_and_progress_is_told_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.train.generate._ROUNDS", 1)
    llm: Any = ScriptedLLM()
    longest = len(user_header(llm)) + max(map(len, OPENERS))
    told: list[tuple[str, int, int]] = []
    prompts = make_prompts(llm, 60, Recipe(max_len=longest + 9), lambda *at: told.append(at))
    assert {p.max_tokens for p in llm.asked} == {9} and len(prompts) == 60
    assert len(told) >= 4 and told[-1] == ("prompts", 60, 60)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_text('{"prompt": "a"}\n\n{"turns": ["b", "c"]}\nplain text\n')
    assert read_prompts(path) == ["a", "b", "plain text"]
    path.write_text('{"other": 1}\n')
    with pytest.raises(ConfigError, match="line 1"):
        read_prompts(path)


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_the_command_goes_from_corpus_to_draft(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    target = write_tiny_checkpoint(tmp_path / "target", num_hidden_layers=6)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 90, (40, 24), generator=generator).tolist()
    Corpus.pack([(r[:6], r[6:]) for r in rows], 24).save(tmp_path / "c.safetensors")
    argv = [
        "train", kind, "--model", str(target), "--out", str(tmp_path / "out"), "--corpus",
        str(tmp_path / "c.safetensors"), "--held-out", "8", "--steps", "4", "--batch", "8", "--device", "cpu",
    ]  # fmt: skip
    argv += ["--draft-vocab", "64", "--unroll", "2"] if kind == "eagle3" else ["--block-size", "3", "--layers", "1"]
    assert main(argv) == 0, capsys.readouterr().err
    out = tmp_path / "out"
    values = json.loads((out / "config.json").read_text())
    assert values["slipstream_training"]["steps"] == 4
    assert (out / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert (out / "model.safetensors").is_file()
    if kind == "dspark":
        assert len(json.loads((out / "temperatures.json").read_text())["temperatures"]) == 3


def test_bad_values_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "medusa"]) == 2
    assert "'medusa'" in capsys.readouterr().err
    assert main(["train", "eagle3", "--out", str(tmp_path), "--corpus", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
