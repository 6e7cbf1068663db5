"""Faults that somebody found by trying to break the engine; each stays a test."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream import LLM, SamplingParams
from slipstream.config import EngineConfig
from slipstream.engine.loop import EngineCore
from slipstream.errors import ConfigError, InvalidRequestError
from tests.support.kit import tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model_dir(tmp_path_factory.mktemp("broken") / "m", seed=1))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_banned_stop_ids_beside_filters(model: str, dtype: str) -> None:
    """In float64 the filter's search overflowed on the ban's -inf, and a neighbour's top_k emptied a greedy row."""
    greedy = SamplingParams(temperature=0, max_tokens=8, min_tokens=8)
    filtered = SamplingParams(temperature=1, seed=1, top_p=0.9, max_tokens=8, min_tokens=8)
    with LLM(model=model, dtype=dtype, max_model_len=56) as llm:
        alone = [llm.generate([t], p)[0].outputs[0].token_ids for t, p in ((17, greedy), (5, filtered))]
        both = [o.outputs[0].token_ids for o in llm.generate([[17], [5]], [greedy, filtered])]
    assert both == alone
    assert all(len(set(tokens)) > 1 for tokens in both)


def test_a_tiny_temperature_is_greedy_not_one(model: str) -> None:
    with LLM(model=model, max_model_len=64) as llm:
        want = llm.generate([7, 8], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        got = llm.generate([7, 8], SamplingParams(temperature=1e-46, seed=1, max_tokens=16, ignore_eos=True))
    assert got[0].outputs[0].token_ids == want[0].outputs[0].token_ids


def test_close_ends_an_open_stream(model: str) -> None:
    llm = LLM(model=model, max_model_len=64)
    stream = llm.stream([5, 6], SamplingParams(max_tokens=30, ignore_eos=True))
    next(stream)
    llm.close()
    assert list(stream) == []
    llm.check_idle()


def test_an_interrupt_waits_for_the_whole_step(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(model=model, max_model_len=64) as llm:
        want = llm.generate([5, 6], params)[0].outputs[0].token_ids
        step, turns = EngineCore.step, iter(range(100))

        def interrupted(self: EngineCore) -> Any:
            if next(turns) == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return step(self)

        monkeypatch.setattr(EngineCore, "step", interrupted)
        # A shell starts what it puts into the background with SIGINT ignored.
        inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                llm.generate([5, 6], params)
        finally:
            signal.signal(signal.SIGINT, inherited)
        monkeypatch.undo()
        assert llm.generate([5, 6], params)[0].outputs[0].token_ids == want
        llm.check_idle()


def test_a_fault_in_a_step_comes_out_as_it_is(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(model=model, draft="ngram", max_model_len=64)

    def broken(*_: Any) -> None:
        raise ValueError("a broken drafter")

    monkeypatch.setattr(llm._built.device.frame.drafter, "propose", broken)
    with pytest.raises(ValueError, match="a broken drafter"):
        llm.generate([5, 6], SamplingParams(max_tokens=8))


def test_a_refused_batch_leaves_nothing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(model=model, max_model_len=64, max_slots=2) as llm:
        narrow = EngineConfig(**{**llm._engine.config.__dict__, "max_waiting": 10})
        monkeypatch.setattr(llm._engine.scheduler, "config", narrow)
        with pytest.raises(InvalidRequestError, match="max_waiting=10"):
            llm.generate([[5]] * 8, SamplingParams(n=2, max_tokens=4))
        llm.check_idle()
        assert len(llm.generate([5], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids) == 4


def test_shapes_that_cannot_run_are_refused(model: str) -> None:
    with LLM(model=model, max_slots=1, slot_buckets=(6,), max_model_len=64) as llm:
        llm.generate([5, 6], SamplingParams(max_tokens=4, ignore_eos=True))
    for buckets in ((0, 1), (-3, 1)):
        with pytest.raises(ConfigError, match="slot_buckets"):
            LLM(model=model, max_slots=1, slot_buckets=buckets)
    with pytest.raises(ConfigError, match="row_tiers"):
        LLM(model=model, row_tiers=(0, 4))
    with LLM(model=model, draft="ngram", num_drafts=3, row_tiers=(1, 8), max_model_len=64) as llm:
        assert llm.resolved["row_tiers"] == (1, 4)
        llm.generate([5, 6, 5, 6], SamplingParams(max_tokens=20, ignore_eos=True))


def test_odd_inputs(model: str, tmp_path: Path) -> None:
    with LLM(model=model, max_model_len=64) as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True, seed=np.int64(3))
        assert llm.generate(np.array([1, 2, 3]), params)[0].prompt_token_ids == [1, 2, 3]
        for bad in (None, b"\x01\x02", [1.5], 7):
            with pytest.raises(InvalidRequestError):
                llm.generate(bad, params)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        LLM(model=model, tokenizer=str(tmp_path / "absent"))
