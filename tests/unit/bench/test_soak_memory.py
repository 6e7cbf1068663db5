"""bench/soak_memory.py on a CPU: everything ends, nothing is held, and its verdict can be red."""

from __future__ import annotations

from pathlib import Path

from bench import soak_memory
from slipstream import LLM
from tests.support.tiny import write_tiny_checkpoint


def test_a_block_ends_with_an_idle_engine_and_some_were_aborted(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "m", "llama")
    with LLM(model=str(model), device="cpu", max_slots=8, max_model_len=128, draft="ngram") as llm:
        assert soak_memory.run_block(llm, 0, 48) >= 1
        assert llm.stats()["counters"]["requests"] == 48


def test_the_verdict() -> None:
    def note(allocated: int, reserved: int, host: int) -> dict[str, int]:
        return {"requests": 0, "allocated": allocated, "reserved": reserved, "host": host}

    assert soak_memory.verdict([note(5, 9, 1000), note(5, 9, 1010)])["ok"]
    assert not soak_memory.verdict([note(5, 9, 1000), note(5, 9, 1020)])["ok"]
    assert not soak_memory.verdict([note(5, 9, 1000), note(6, 9, 1000), note(5, 9, 1000)])["device_same"]
    assert not soak_memory.verdict([note(5, 9, 1000), note(5, 10, 1000)])["device_same"]


def test_requests_are_mixed_and_the_same_in_every_run() -> None:
    import random

    params = [soak_memory.params_of(i, random.Random(i)) for i in range(8)]
    assert params == [soak_memory.params_of(i, random.Random(i)) for i in range(8)]
    assert {p.greedy for p in params} == {True, False} and len({p.max_tokens for p in params}) > 3
    assert soak_memory.resident_bytes() > 1 << 20
