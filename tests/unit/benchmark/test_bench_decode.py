"""The arithmetic of `slipstream bench decode`, on an engine with known times."""

from __future__ import annotations

import argparse
import json
import math
import sys
import types
from collections import Counter
from typing import Any

import pytest

from slipstream.benchmark import decode, floor
from slipstream.errors import ConfigError
from slipstream.types import SamplingParams, SpecStats

PREFILL_PER_TOKEN = 0.003
STEP = 0.010
HOST = 40e-6
TAU = 4  # tokens per sequence and frame


class FakeLLM:
    """Time passes on its own clock: prefill per prompt token, then one STEP per TAU tokens of the batch."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.now = 0.0
        self.frames = 0
        self.device_seconds = 0.0
        self.calls: list[tuple[int, int, SamplingParams]] = []
        self.jitter: list[float] = []
        self.resolved = {
            "model": "fake",
            "dtype": "float32",
            "device": "cpu",
            "num_drafts": TAU - 1,
            "run_ahead": 1,
        }
        self.model_config = types.SimpleNamespace(vocab_size=1000)
        model = types.SimpleNamespace(weight_bytes=lambda: 8 << 20)
        drafter = types.SimpleNamespace(weight_bytes=lambda: 3 << 20)
        frame = types.SimpleNamespace(model=model, drafter=drafter)
        self._built = types.SimpleNamespace(device=types.SimpleNamespace(frame=frame))

    def stats(self) -> dict[str, Any]:
        return {
            "counters": {"frames": self.frames} if self.frames else {},
            "device_seconds": self.device_seconds,
            "host_seconds": self.device_seconds + self.frames * HOST,
        }

    def generate(self, prompts: list[list[int]], params: SamplingParams, *, use_tqdm: bool = True) -> list[Any]:
        assert params.max_tokens is not None
        self.calls.append((len(prompts), params.max_tokens, params))
        frames = math.ceil((params.max_tokens - 1) / TAU)  # the first token comes out of the prefill
        on_device = sum(map(len, prompts)) * PREFILL_PER_TOKEN + frames * (STEP - HOST)
        self.now += on_device + frames * HOST
        self.device_seconds += on_device
        self.now += self.jitter.pop(0) if self.jitter else 0.0
        self.frames += frames
        spec = SpecStats(Counter({(3, 3, TAU): frames}))
        one = types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[7] * params.max_tokens)], spec=spec)
        return [one for _ in prompts]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()
    monkeypatch.setattr(decode, "_clock", lambda: fake.now)
    return fake


def pair(llm: FakeLLM, batch: int, prompt_len: int, output_len: int) -> tuple[decode.Run, decode.Run]:
    prompts = [[1] * prompt_len] * batch
    short = decode.run_once(llm, prompts, decode.SHORT)
    return short, decode.run_once(llm, prompts, decode.SHORT + output_len)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("prompt_len", [1, 700])
def test_prefill_cancels_and_every_figure_is_the_known_one(llm: FakeLLM, batch: int, prompt_len: int) -> None:
    timed = decode.timing([pair(llm, batch, prompt_len, 40)], batch=batch)
    assert timed.step == pytest.approx(STEP)
    assert timed.tpot == pytest.approx(STEP / TAU)
    assert timed.tok_s == pytest.approx(batch * TAU / STEP)
    assert timed.acceptance_length == pytest.approx(TAU)
    assert timed.host_per_frame == pytest.approx(HOST)
    assert timed.spread == 0.0


def test_one_slow_pair_does_not_move_the_median_but_shows_in_the_spread(llm: FakeLLM) -> None:
    pairs = [pair(llm, 1, 5, 40), pair(llm, 1, 5, 40)]
    llm.jitter = [0.0, 0.5]
    pairs.append(pair(llm, 1, 5, 40))
    timed = decode.timing(pairs, batch=1)
    assert timed.tpot == pytest.approx(STEP / TAU)
    assert timed.spread == pytest.approx(0.5 / 40 / (STEP / TAU))


def test_a_difference_below_the_noise_is_refused_not_reported(llm: FakeLLM) -> None:
    llm.jitter = [1.0]  # the short run took longer than the long one
    with pytest.raises(ConfigError, match="raise --output-len"):
        decode.timing([pair(llm, 1, 5, 40)], batch=1)


def test_plain_decoding_without_rounds_counts_one_token_per_frame() -> None:
    plain = [
        decode.Run(seconds=s, tokens=t, frames=t - 1, host_seconds=0.0, rounds=0, emitted=0)
        for s, t in ((1.0, 32), (2.0, 72))
    ]
    assert decode.timing([(plain[0], plain[1])], batch=1).acceptance_length == 1.0


def test_the_row_holds_what_the_issue_names() -> None:
    timed = decode.Timing(tpot=0.002, step=0.004, tok_s=500.0, acceptance_length=2.0, host_per_frame=1e-4, spread=0.0)
    line = decode.row(timed, batch=1, floor_seconds=0.001, facts={"model": "m", "versions": {"torch": "2"}})
    assert line["tpot_ms"] == 2.0
    assert line["step_ms"] == 4.0
    assert line["host_us_per_frame"] == 100.0
    assert line["floor_ms"] == 1.0
    assert line["share_of_floor"] == 0.25
    assert line["model"] == "m"
    json.dumps(line)


def test_prompts_are_seeded_distinct_and_inside_the_vocabulary() -> None:
    prompts = decode.random_prompts(4, 50, vocab_size=1000, seed=3)
    assert prompts == decode.random_prompts(4, 50, vocab_size=1000, seed=3)
    assert prompts != decode.random_prompts(4, 50, vocab_size=1000, seed=4)
    assert len({tuple(p) for p in prompts}) == 4
    assert all(256 <= token < 1000 for p in prompts for token in p)
    assert all(0 <= token < 16 for token in decode.random_prompts(1, 99, vocab_size=16, seed=0)[0])


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    decode.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    made: list[FakeLLM] = []

    def build(**options: Any) -> FakeLLM:
        made.append(FakeLLM(**options))
        monkeypatch.setattr(decode, "_clock", lambda: made[-1].now)
        return made[-1]

    module = types.ModuleType("slipstream.llm")
    module.LLM = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slipstream.llm", module)
    monkeypatch.setattr(floor, "read_rate", lambda size, device: 4e9)
    return made


def test_run_prints_one_json_line_per_batch_size(fake_llm: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    code = decode.run(
        arguments(
            "--draft",
            "ngram",
            "--num-drafts",
            "3",
            "--batch",
            "1,4",
            "--json",
            "--prompt-len",
            "20",
            "--output-len",
            "40",
            "--synthetic-acceptance",
            "2.5",
            "--load-format",
            "dummy",
        )
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert [line["batch"] for line in lines] == [1, 4]
    for line in lines:
        assert line["tok_s"] == pytest.approx(line["batch"] * TAU / STEP)
        assert line["floor_ms"] == pytest.approx((11 << 20) / 4e9 * 1e3, rel=1e-3)
        assert line["share_of_floor"] == pytest.approx(line["floor_ms"] / line["step_ms"], rel=1e-3)
        assert {
            "model",
            "draft",
            "dtype",
            "device",
            "threads",
            "prompt_len",
            "output_len",
            "versions",
        } <= line.keys()
    options = fake_llm[0].options
    assert options["draft"] == "ngram" and options["num_drafts"] == 3
    assert options["synthetic_acceptance"] == 2.5 and options["load_format"] == "dummy"
    assert options["max_slots"] == 4 and options["max_model_len"] == 20 + decode.SHORT + 40
    assert "device" not in options, "options the user left alone must not override LLM's defaults"
    assert all(params.greedy and params.ignore_eos for _, _, params in fake_llm[0].calls)


def test_without_json_it_prints_a_table(fake_llm: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.run(arguments("--batch", "2", "--output-len", "40")) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "batch" and line.split()[0] == "2"
    assert len(head.split()) == len(line.split())


@pytest.mark.parametrize(
    "words, what",
    [
        (["--batch", "1,x"], "--batch"),
        (["--batch", "0"], "--batch 0"),
        (["--batch", ""], "--batch"),
        (["--output-len", "0"], "--output-len 0"),
        (["--prompt-len", "-3"], "--prompt-len -3"),
        (["--repeats", "0"], "--repeats 0"),
    ],
)
def test_bad_options_are_named(words: list[str], what: str, fake_llm: list[FakeLLM]) -> None:
    with pytest.raises(ConfigError, match=what):
        decode.run(arguments(*words))
    assert not fake_llm, "nothing is loaded for options that cannot work"


def test_read_rate_is_that_of_a_memory_not_of_a_clock() -> None:
    rate = floor.read_rate(8 << 20, seconds=0.02)
    assert 1e8 < rate < 1e13
