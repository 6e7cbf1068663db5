"""bench/grammar_load.py: every grammar is new and can be compiled; its verdict can be red."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("llguidance")
pytest.importorskip("msgspec")

from bench import grammar_load
from slipstream.benchmark.load import Sample
from slipstream.server.formats import structured
from slipstream.server.protocol import CompletionBody
from slipstream.text import Tokenizer
from slipstream.text.grammar import Grammars
from tests.support.grammar_kit import EOS, VOCAB, write_characters


def test_every_request_has_a_grammar_of_its_own(tmp_path: Path) -> None:
    write_characters(tmp_path)
    grammars = Grammars(Tokenizer.from_dir(tmp_path), vocab_size=VOCAB, eos_ids=[EOS])
    made = [f for tag in ("a", "b") for f in itertools.islice(grammar_load.forms(tag), 4)]
    specs = [structured(CompletionBody(prompt="x", **fields)) for fields in made]
    assert len(set(specs)) == 8 and None not in specs
    for spec in specs:
        assert spec is not None
        grammars.check(spec)


def test_the_verdict() -> None:
    def leg(tpot: float, error: str | None = None) -> dict[str, object]:
        samples = [Sample(sent=0.0, ttft=1.0, last=1.0 + tpot * 9, tokens=10) for _ in range(3)]
        return grammar_load.row(samples, [Sample(sent=0.0, error=error)] if error else [], 2.0)

    rounds = [{"plain": leg(0.1), "mixed": leg(0.1 * x)} for x in (1.02, 1.5, 0.9)]
    assert grammar_load.verdict(rounds, 1.03) == {"ratio": 1.02, "ratios": [1.02, 1.5, 0.9], "ok": True}
    assert not grammar_load.verdict(rounds, 1.01)["ok"]
    assert not grammar_load.verdict([*rounds, {"plain": leg(0.1), "mixed": leg(0.1, "status 500")}], 1.03)["ok"]
    assert not grammar_load.verdict([{"plain": leg(0.1), "mixed": grammar_load.row([], [], 1.0)}], 1.03)["ok"]
