"""The measuring programs on a GPU: the clinic, `bench decode` with its trace, memory over 2,000 requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import soak_memory
from bench.clinic import EngineCase, Pair, cases, measure
from bench.clinic.loop import Loop
from slipstream import LLM
from slipstream.benchmark import decode
from slipstream.cli.options import Parser
from tests.support.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.gpu

SHAPE = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512,
    "vocab_size": 2048, "max_position_embeddings": 16384,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "m", "llama", **SHAPE))


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop("cuda", captured=True)  # full size: small blocks would never make the allocator grow


@pytest.mark.parametrize("case", [c for c in cases() if isinstance(c, Pair)], ids=lambda c: c.name)
def test_each_pair_on_the_device(case: Pair, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime watch names `before`, is silent for `after`; the trace agrees where the driver synchronises."""
    monkeypatch.setattr(measure, "STEPS", 20)
    monkeypatch.setattr(measure, "REPEATS", 1)
    got = measure.measure_pair(case, loop)
    assert case.rule in got["before"]["rules"]
    assert got["after"]["rules"] == [] and got["after"]["findings_per_step"] == 0
    assert got["after"]["syncs_per_step"] == 0 and got["after"]["pageable_copies_per_step"] == 0
    if case.rule in ("host-read", "host-copy", "nonzero", "boolean-index", "repeat-interleave", "tensor-from-scalars",
                     "tensor-literal", "host-index", "explicit-sync"):  # fmt: skip
        assert got["before"]["syncs_per_step"] >= 1
    if case.rule in ("pageable-copy", "strided-copy"):
        assert got["before"]["pageable_copies_per_step"] >= 1


def test_founding_cases_in_the_engine(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ENGINE_FRAMES", 30)
    monkeypatch.setattr(measure, "REPEATS", 1)
    for case in (c for c in cases() if isinstance(c, EngineCase)):
        got = measure.measure_engine(case, model, batch=2)
        assert case.rule in got["before"]["rules"], case.name
        # The driver stages a pageable copy without a synchronisation that a trace could show.
        seen = "pageable_copies_per_step" if case.rule == "pageable-copy" else "syncs_per_step"
        assert got["before"][seen] >= 1, case.name
        assert got["after"]["rules"] == [] and got["after"]["syncs_per_step"] == 0
        assert got["after"]["pageable_copies_per_step"] == 0


def test_bench_decode_reports_the_frame(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="slipstream bench decode")
    decode.add_arguments(parser)
    words = ["--model", model, "--dtype", "bfloat16", "--device", "cuda", "--batch", "1,4", "--repeats", "1", "--json"]
    assert decode.run(parser.parse_args(words)) == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["batch"] for line in lines] == [1, 4]
    for line in lines:
        assert line["output_len"] == 512 and line["prompt_len"] == 128
        assert line["syncs_per_frame"] == 0 and line["graph_launches_per_frame"] == 1
        assert line["driver_allocations_per_frame"] == 0 and line["findings"] == {}
        assert not [kind for kind in line["copies_per_frame"] if kind.endswith("pageable")]
        assert 0 <= line["device_idle_share"] < 1 and line["peak_memory_mib"] > 0
        assert line["capture"]["graphs"] > 0 and line["capture"]["seconds"] > 0


def test_memory_returns_over_2000_requests(model: str) -> None:
    """Allocated and reserved device bytes are those after request 200; the host process grows under 2 % from there."""
    with LLM(
        model=model, device="cuda", dtype="bfloat16", draft="ngram", max_slots=32, slot_buckets=(32,), max_model_len=128
    ) as llm:
        result = soak_memory.soak(llm, 2000)
    assert result["aborted"] > 50
    assert result["device_same"], result["notes"]
    assert result["host_growth"] < 0.02, result["notes"]
    assert result["notes"][0]["allocated"] > 0
