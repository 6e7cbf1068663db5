"""bench/cpu_peers.py without the peers: protocol, interleaving, figures, targets, table."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"


def load(name: str) -> types.ModuleType:
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCH))


cpu_peers, peer_worker, peer_prompts, peer_report = map(
    load, ("cpu_peers", "peer_worker", "peer_prompts", "peer_report")
)


class FakeEngine:
    packages = ("torch", "no-such-package")

    def __init__(self, model: str, threads: int) -> None:
        if model == "absent":
            raise ImportError("No module named 'absent'")

    def tokenize(self, messages: list[dict[str, str]]) -> list[int]:
        return [len(m["content"]) for m in messages]

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        if prompts == [[666]]:
            raise RuntimeError("no")
        return {
            "tokens": [[1] * max_tokens for _ in prompts],
            "decode_s": 1.0,
            "decode_tokens": 3,
            "total_s": 2.0,
        }


def converse(model: str, *asks: dict[str, Any]) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = []
    lines = io.StringIO("".join(json.dumps(ask) + "\n" for ask in asks))
    peer_worker.serve(FakeEngine, model, 2, lines, answers.append)
    return answers


def test_a_worker_says_hello_then_answers_each_line() -> None:
    hello, ids, made = converse(
        "m",
        {"op": "tokenize", "messages": [{"role": "user", "content": "four"}]},
        {"op": "generate", "prompts": [[1]], "max_tokens": 2},
    )
    assert hello["ready"] and hello["versions"]["no-such-package"] == "source tree"
    assert ids == {"ids": [4]}
    assert made["tokens"] == [[1, 1]] and made["peak_rss_mb"] > 1


def test_a_missing_package_is_said_and_ends_the_worker() -> None:
    assert converse("absent", {"op": "tokenize", "messages": []}) == [{"missing": "No module named 'absent'"}]


def test_a_failing_request_is_answered_and_the_next_one_served(capsys: pytest.CaptureFixture[str]) -> None:
    _, bad, good = converse(
        "m",
        {"op": "generate", "prompts": [[666]], "max_tokens": 1},
        {"op": "generate", "prompts": [[1]], "max_tokens": 1},
    )
    assert bad == {"error": "RuntimeError: no"}
    assert good["tokens"] == [[1]]
    assert "RuntimeError" in capsys.readouterr().err


def test_the_first_token_counts_as_prefill() -> None:
    reply = peer_worker._one_by_one([0.5, 0.5], [1.0, 1.0], [[1] * 11, [1] * 11])
    assert reply["decode_tokens"] == 20 and reply["decode_s"] == 1.0 and reply["total_s"] == 2.0


def test_the_transformers_clock_starts_at_the_first_output_token() -> None:
    clock = peer_worker._TokenClock()
    clock.put("the prompt")
    assert clock.first == 0.0
    clock.put("first token")
    first = clock.first
    clock.put("second token")
    assert first > 0.0 and clock.first == first and clock.last >= first


class FakeLLM:
    """Streams the prefill's token alone, then two tokens a round; each step takes a tick of the clock."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def stream(self, prompt: list[int], params: Any) -> Any:
        self.clock[0] += 5.0  # prefill
        yield types.SimpleNamespace(token_ids=[1], output=None)
        for left in range((params.max_tokens - 1) // 2, 0, -1):
            self.clock[0] += 1.0
            spec = types.SimpleNamespace(acceptance_length=2.0)
            output = types.SimpleNamespace(spec=spec) if left == 1 else None
            yield types.SimpleNamespace(token_ids=[2, 2], output=output)

    def generate(self, prompts: list[list[int]], params: Any, *, use_tqdm: bool) -> list[Any]:
        self.clock[0] += 5.0 * len(prompts) + (params.max_tokens - 1) / 2
        outputs = [types.SimpleNamespace(token_ids=[1] * params.max_tokens)]
        spec = types.SimpleNamespace(rounds=(params.max_tokens - 1) // 2, emitted=params.max_tokens - 1)
        return [types.SimpleNamespace(outputs=outputs, spec=spec) for _ in prompts]


def test_our_own_decode_time_excludes_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(peer_worker, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    engine = peer_worker.Slipstream.__new__(peer_worker.Slipstream)
    engine.llm = FakeLLM(clock)
    one = engine.generate([[1, 2]], 21)
    assert (one["decode_s"], one["decode_tokens"], one["total_s"]) == (10.0, 20, 15.0)
    assert one["tokens"] == [[1] + [2] * 20] and one["acceptance_length"] == 2.0
    eight = engine.generate([[1, 2]] * 8, 21)
    assert (eight["decode_s"], eight["decode_tokens"], eight["total_s"]) == (10.0, 160, 50.0)
    assert eight["acceptance_length"] == 2.0 and len(eight["tokens"]) == 8


class FakeWorker:
    """Answers at a fixed rate; `log` is shared and shows who was asked in which order."""

    def __init__(self, engine: str, rate: float, log: list[str], missing: str | None = None) -> None:
        self.engine, self.rate, self.log, self.missing = engine, rate, log, missing
        self.hello = {"load_s": 1.0, "versions": {}}
        self.fail_after = 10**9

    def ask(self, **request: Any) -> dict[str, Any]:
        self.log.append(self.engine)
        if len([name for name in self.log if name == self.engine]) > self.fail_after:
            return {"error": "it broke"}
        counted = len(request["prompts"]) * (request["max_tokens"] - 1)
        speed = self.rate * (4 if len(request["prompts"]) == 8 and self.engine == "slipstream" else 1)
        return {
            "tokens": [[7] * request["max_tokens"] for _ in request["prompts"]],
            "decode_s": counted / speed,
            "decode_tokens": counted,
            "total_s": 1.0,
            "peak_rss_mb": 500.04,
            "acceptance_length": 1.5,
        }


ARGS = argparse.Namespace(max_tokens=11, rounds=3)
PROMPTS = {"extractive": [[1], [2]], "chat": [[3], [4]]}


def fakes(log: list[str]) -> dict[str, Any]:
    rates = {"slipstream": 100.0, "slipstream+ngram": 130.0, "llama.cpp": 110.0, "llama.cpp raw": 120.0}
    workers: dict[str, Any] = {name: FakeWorker(name, rate, log) for name, rate in rates.items()}
    workers["transformers"] = FakeWorker("transformers", 0.0, log, missing="not installed")
    return workers


def test_engines_take_turns_and_the_order_rotates() -> None:
    log: list[str] = []
    cpu_peers.measure(fakes(log), PROMPTS, ARGS)
    names = ["slipstream", "slipstream+ngram", "llama.cpp", "llama.cpp raw"]
    assert log[:4] == names  # the warm-up
    asks_per_round = 4 * 4 + 4  # four prompts and one batch for each engine
    for number in range(3):
        part = log[4 + number * asks_per_round :][:asks_per_round]
        first = (number + 1) % 4
        assert part == (names[first:] + names[:first]) * 5
    assert len(log) == 4 + 3 * asks_per_round
    assert "transformers" not in log


def test_medians_ratios_and_targets() -> None:
    workers = fakes([])
    engines = cpu_peers.summary(workers, cpu_peers.measure(workers, PROMPTS, ARGS))
    assert engines["slipstream"]["tok_s"] == {"extractive": 100.0, "chat": 100.0}
    assert engines["slipstream"]["batch8_tok_s"] == 400.0
    assert engines["slipstream+ngram"]["acceptance_length"]["chat"] == 1.5
    assert engines["llama.cpp"]["same_prefix_as_slipstream"] == {"extractive": 1.0, "chat": 1.0}
    assert engines["transformers"] == {"missing": "not installed"}
    got = {t["what"]: (t["ratio"], t["met"]) for t in peer_report.targets(engines)}
    assert got["plain / llama.cpp, chat"] == (0.833, True)  # against the faster one, 120
    assert got["plain / transformers, chat"] == (None, None)
    assert got["batch 8 / llama.cpp in sequence"] == (3.333, True)
    assert got["n-gram / plain, extractive"] == (1.3, True)
    engines["slipstream+ngram"]["tok_s"]["chat"] = 94.0
    assert {
        "what": "n-gram / plain, chat",
        "ratio": 0.94,
        "target": 0.95,
        "met": False,
    } in peer_report.targets(engines)
    text = peer_report.table({"engines": engines, "prompt_tokens": PROMPTS, "targets": peer_report.targets(engines)})
    assert "not installed" in text and "MISSED" in text and "not measured" in text
    assert "130.0" in text and "1.30" in text


def test_a_peer_that_breaks_keeps_the_others_going() -> None:
    workers = fakes([])
    workers["llama.cpp"].fail_after = 3
    engines = cpu_peers.summary(workers, cpu_peers.measure(workers, PROMPTS, ARGS))
    assert engines["llama.cpp"]["error"] == "it broke"
    assert len(engines["slipstream"]["rounds"]["chat"]) == 3


@pytest.mark.parametrize(
    "ours, theirs, share",
    [([[1, 2, 3, 4]], [[1, 2, 3, 4]], 1.0), ([[1, 2, 3, 4]], [[1, 2, 9, 4]], 0.5), ([], [], 0.0),
     ([[1], [2]], [[1], [3]], 0.5)],
)  # fmt: skip
def test_agreement_is_the_common_start(ours: list[list[int]], theirs: list[list[int]], share: float) -> None:
    assert peer_report.agreement(ours, theirs) == share


def test_built_in_prompts_are_enough_and_distinct() -> None:
    sets = peer_prompts.load(None, 4)
    assert {name: len(texts) for name, texts in sets.items()} == {"extractive": 4, "chat": 4, "code": 4}
    assert len({text for texts in sets.values() for text in texts}) == 12


def test_a_prompt_file_replaces_the_sets_it_has(tmp_path: Path) -> None:
    rows = [{"category": c, "turns": [f"{c} {i}", "more"]} for c in ("summarization", "rag") for i in range(6)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    sets = peer_prompts.load(path, 4)
    assert sets["extractive"] == ["summarization 0", "summarization 3", "rag 0", "rag 3"]
    assert sets["chat"] == peer_prompts.BUILT_IN["chat"]


def test_unknown_engines_and_silly_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, what in ((["--engines", "vllm"], "unknown vllm"), (["--max-tokens", "1"], "--max-tokens 1")):
        with pytest.raises(SystemExit) as error:
            cpu_peers.main(words)
        assert error.value.code == 2
        assert what in capsys.readouterr().err
