"""The prefix cache of a target with recurrent layers: on equals off, whatever is shared, evicted or preempted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream import LLM, SamplingParams
from slipstream.errors import ConfigError
from tests.support.kit import VOCAB, tiny_model_dir
from tests.support.mtp import add_mtp
from tests.support.reference import DenseReference, planted_oracle
from tests.support.server import RunningServer

INTERVAL = 16
TREE_OF_PROMPTS = [[(7 * i + 3 * b + i * i * b) % VOCAB for i in range(80)] for b in range(3)]
"""Prompts are prefixes of these, with an end of their own."""


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hybrid")
    return {"target": add_mtp(tiny_model_dir(root / "target", seed=1, layers=3, arch="qwen3_5_text"))}


@pytest.fixture(scope="module")
def reference(dirs: dict[str, Path]) -> DenseReference:
    return DenseReference(LLM(model=str(dirs["target"]), dtype="float64", max_model_len=256)._built.model)


def engine(dirs: dict[str, Path], reference: DenseReference, draft: str, **options: Any) -> LLM:
    oracle = planted_oracle(
        lambda r: reference.continuation(r.prompt_token_ids, r.params, r.child), vocab=VOCAB, seed=3
    )
    drafts: dict[str, Any] = {"none": None, "oracle": oracle, "mtp": "mtp"}
    return LLM(
        model=str(dirs["target"]), dtype="float64", draft=drafts[draft], num_drafts=3 if draft != "none" else None,
        max_slots=3, max_model_len=160, page_size=4, prefill_chunk=23, **{"state_interval": INTERVAL, **options},
    )  # fmt: skip


ENGINES = {
    "plain, few states": ("none", {"saved_states": 3}),
    "oracle, pressure": ("oracle", {"num_pages": 60, "run_ahead": 2, "saved_states": 6}),
    "prediction head": ("mtp", {"run_ahead": 8, "saved_states": 12}),
}


@pytest.fixture(scope="module", params=ENGINES)
def llm(request: pytest.FixtureRequest, dirs: dict[str, Path], reference: DenseReference) -> Iterator[LLM]:
    draft, options = ENGINES[request.param]
    with engine(dirs, reference, draft, **options) as made:
        yield made


@settings(
    max_examples=8, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 79), st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=5
    )
)
def test_cache_on_equals_cache_off(
    llm: LLM, reference: DenseReference, stream: list[tuple[int, int, int, int]]
) -> None:
    """Streams of requests that share prefixes, against a recomputation without any cache; seeded every other one."""
    prompts = [(*TREE_OF_PROMPTS[b][:length], *range(own)) for b, length, own, _ in stream]
    laws: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 5}]
    params = [
        SamplingParams(max_tokens=tokens, ignore_eos=True, **laws[i % 2]) for i, (*_, tokens) in enumerate(stream)
    ]
    outs = llm.generate([list(p) for p in prompts], params)
    want = [reference.continuation(p, s) for p, s in zip(prompts, params, strict=True)]
    assert [o.outputs[0].token_ids for o in outs] == want
    llm.check_idle()


def test_the_streams_above_had_hits(llm: LLM, reference: DenseReference) -> None:
    """And a hit is as long as the last saved state, not as long as the pages."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompt = TREE_OF_PROMPTS[1][:70]
    llm.generate(prompt, params)
    seen = llm.stats()["counters"]["cached_prompt_tokens"]
    out = llm.generate([*prompt[:69], 5], params)[0]
    hit = llm.stats()["counters"]["cached_prompt_tokens"] - seen
    rereads = llm._built.engine_config.rereads
    assert hit == 64 - rereads, "four intervals of 16"
    assert out.outputs[0].token_ids == reference.continuation((*prompt[:69], 5), params)
    llm.check_idle()


def test_a_state_from_decoding_is_hit(dirs: dict[str, Path], reference: DenseReference) -> None:
    """The next turn of a conversation goes on from what the last one saved while it decoded."""
    prompt = tuple(TREE_OF_PROMPTS[2][:20])
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    with engine(dirs, reference, "oracle", saved_states=4) as llm:
        answer = llm.generate(list(prompt), params)[0].outputs[0].token_ids
        assert answer == reference.continuation(prompt, params)
        assert llm.stats()["saved_states"] == {"states": 4, "free": 1, "cached": 3}  # the prompt's, and the last two
        turn = (*prompt, *answer, 3)
        few = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        out = llm.generate(list(turn), few)[0]
        assert llm.stats()["counters"]["cached_prompt_tokens"] == 64
        assert out.outputs[0].token_ids == reference.continuation(turn, few)
        llm.check_idle()


@pytest.mark.parametrize("fault", ["a draft's state", "too late", "not restored"])
def test_a_wrong_saved_state_changes_the_output(
    dirs: dict[str, Path], reference: DenseReference, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Negative control."""
    prompt = tuple(TREE_OF_PROMPTS[2][:20])
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    with engine(dirs, reference, "oracle", saved_states=4) as llm:
        pool = llm._built.device.frame.states
        if fault == "too late":
            pool.layers = [m._replace(early=m.early + 1) for m in pool.layers]
        answer = llm.generate(list(prompt), params)[0].outputs[0].token_ids
        if fault == "not restored":
            monkeypatch.setattr(pool, "restore", lambda *a: None)
        if fault == "a draft's state":
            pool.saved_state.copy_(pool.saved_state.roll(1, 1))
        turn = [*prompt, *answer, 3]
        few = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        out = llm.generate(turn, few)[0]
        assert out.outputs[0].token_ids != reference.continuation(tuple(turn), few)


def test_options(dirs: dict[str, Path]) -> None:
    target = str(dirs["target"])
    with pytest.raises(ConfigError, match="state_interval=24 must be a multiple of 32"):
        LLM(model=target, state_interval=24)
    with pytest.raises(ConfigError, match="saved_states=-1"):
        LLM(model=target, saved_states=-1)
    with pytest.raises(ConfigError, match="state_interval=32 with saved_states=0: nothing is saved"):
        LLM(model=target, saved_states=0, state_interval=32)
    with pytest.raises(ConfigError, match="saved_states=3 are the prefix cache's"):
        LLM(model=target, saved_states=3, prefix_cache=False)
    with LLM(model=target, saved_states=0) as llm:
        assert llm.resolved["prefix_cache"] is False
        assert any("prefix_cache is off" in note for note in llm.notes)


def test_a_server_takes_the_options_and_reports_the_states(dirs: dict[str, Path]) -> None:
    words = ("--saved-states", "6", "--state-interval", "32", "--max-slots", "2", "--max-model-len", "128")
    with RunningServer(str(dirs["target"]), *words) as server:
        model = server.http.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": TREE_OF_PROMPTS[0][:70], "max_tokens": 4, "temperature": 0}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        server.idle()
        info = server.info()
    resolved, states = info["resolved"], info["engine"]["pools"]["states"]
    assert (resolved["saved_states"], resolved["state_interval"]) == (6, 32) and resolved["state_bytes"] > 0
    assert resolved["embeds_bytes"] == 0, "no prompt brings embeddings over HTTP"
    assert states["states"] == 6 == states["free"] + states["cached"] and states["cached"] > 0


def test_options_of_other_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="saved_states=3 is for models with recurrent layers"):
        LLM(model=str(tiny_model_dir(tmp_path / "m")), saved_states=3)
