"""Targets with sliding windows through the whole engine: speculative equals plain, cached equals read anew."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from slipstream import LLM, SamplingParams
from slipstream.attention.windows import WindowLayers
from slipstream.errors import ConfigError
from slipstream.models import load_model
from tests.support.block_draft import write_block_draft
from tests.support.eagle import write_eagle3
from tests.support.equality_cells import FACTORS, TREE, run_cell
from tests.support.kit import VOCAB, perturb, tiny_model_dir
from tests.support.pairwise import pairwise
from tests.support.reference import DenseReference
from tests.support.server import RunningServer

DRAFTERS = tuple(d for d in FACTORS["drafter"] if d != "mtp")
PAIRS = pairwise({**FACTORS, "drafter": DRAFTERS, "batch": (1, 4)}, seed=11)
CELLS = [pytest.param(cell, marks=() if i < 14 else pytest.mark.slow) for i, cell in enumerate(PAIRS)]


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target's layers: a window of 8, none, a window of 8. Its good draft has windows too."""
    root = tmp_path_factory.mktemp("windows")
    target = tiny_model_dir(root / "target", seed=1, layers=3, arch="gemma3_text")
    return {
        "target": target,
        "draft-good": perturb(target, root / "good", scale=0.02),
        "draft-bad": tiny_model_dir(root / "bad", seed=9, layers=1),
        "eagle3": write_eagle3(root / "eagle3", target, draft_vocab=24),
        "dflash": write_block_draft(root / "dflash", target, "dflash"),
        "dspark": write_block_draft(root / "dspark", target, "dspark", head="gated"),
    }


@pytest.fixture(scope="module")
def reference(dirs: dict[str, Path]) -> DenseReference:
    return DenseReference(load_model(dirs["target"], dtype="float64").model)


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_speculative_equals_plain(cell: dict[str, Any], dirs: dict[str, Path], reference: DenseReference) -> None:
    run_cell(cell, dirs, reference, dtype="float64")


CELL = {
    "drafter": "oracle", "sampling": "greedy", "batch": 4, "page_size": 1, "prefix": "hit", "chunk": 5,
    "event": "none", "run_ahead": 2, "shapes": "exact",
}  # fmt: skip


def _one_position_too_many(m: pytest.MonkeyPatch) -> None:
    of = WindowLayers.of
    m.setattr(WindowLayers, "of", lambda windows, kv=None: of([w + 1 if w else 0 for w in windows], kv))


def _one_position_too_few(m: pytest.MonkeyPatch) -> None:
    of = WindowLayers.of
    m.setattr(WindowLayers, "of", lambda windows, kv=None: of([w - 1 if w else 0 for w in windows], kv))


def _full_layers_have_the_window(m: pytest.MonkeyPatch) -> None:
    """The layers change places: the one without a window gets it, one of the others loses it."""
    of = WindowLayers.of
    m.setattr(WindowLayers, "of", lambda windows, kv=None: of([windows[1], windows[0], windows[2]], kv))


@pytest.mark.parametrize("fault", [_one_position_too_many, _one_position_too_few, _full_layers_have_the_window])
def test_a_fault_in_a_window_changes_the_output(
    dirs: dict[str, Path], reference: DenseReference, monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:  # fmt: skip
    """Negative control: the equality above sees each of these."""
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        run_cell(CELL, dirs, reference, dtype="float64")


@pytest.mark.parametrize("drafter", ["draft-good", "oracle-tree"])
def test_pages_of_nan_reach_nobody(dirs: dict[str, Path], reference: DenseReference, drafter: str) -> None:
    """Every window page, the sink included, holds NaN when it is given out."""

    def poison(llm: LLM) -> None:
        windows = llm._built.device.frame.cache.windows
        assert windows is not None and windows.kv is not None
        with torch.inference_mode():
            windows.kv.data.fill_(float("nan"))

    run_cell({**CELL, "drafter": drafter, "shapes": "padded"}, dirs, reference, dtype="float64", prepare=poison)


def test_windows_in_every_layer(tmp_path: Path) -> None:
    """No layer sees everything: the pages of the others are ids without memory."""
    target = tiny_model_dir(tmp_path / "mistral", seed=2, arch="mistral", sliding_window=6)
    reference = DenseReference(load_model(target, dtype="float64").model)
    for drafter in ("ngram", "oracle"):
        run_cell({**CELL, "drafter": drafter, "sampling": "mixed"}, {"target": target}, reference, dtype="float64")
    with LLM(model=str(target), max_model_len=64) as llm:
        assert llm.resolved["kv_bytes"] == 0 and llm.resolved["window_kv"]["layers"] == 2


@st.composite
def streams(draw: st.DrawFn) -> list[list[tuple[int, ...]]]:
    """Rounds of prompts that begin alike: earlier prompts cut anywhere, and what somebody added."""
    seen: list[tuple[int, ...]] = [tuple(random.Random(draw(st.integers(0, 3))).choices(range(3, VOCAB), k=50))]
    rounds = []
    for _ in range(draw(st.integers(2, 4))):
        prompts = []
        for _ in range(draw(st.integers(1, 3))):
            stem = draw(st.sampled_from(seen))
            own = draw(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=12))
            prompts.append((*stem[: draw(st.integers(0, len(stem)))], *own))
        seen += prompts
        rounds.append(prompts)
    return rounds


@given(
    rounds=streams(), page=st.sampled_from([1, 3, 4, 16]), chunk=st.sampled_from([3, 8, 64]),
    drafter=st.sampled_from([None, "ngram", "eagle3"]), spare=st.sampled_from([0, 7, 400]),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_cached_prefixes_change_nothing(
    dirs: dict[str, Path], rounds: list[list[tuple[int, ...]]], page: int, chunk: int, drafter: str | None, spare: int
) -> None:
    """Float64: with a prefix cache, in a pool of any size, the tokens are those without one."""
    draft: dict[str, Any] = {"draft": str(dirs.get(str(drafter), drafter)), "num_drafts": 2} if drafter else {}
    options = {"dtype": "float64", "page_size": page, "prefill_chunk": chunk, "max_model_len": 128, "max_slots": 3}
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)

    def run(**more: Any) -> tuple[list[list[int]], int]:
        with LLM(model=str(dirs["target"]), **options, **draft, **more) as llm:
            out = [[o.outputs[0].token_ids for o in llm.generate([list(p) for p in r], params)] for r in rounds]
            llm.check_idle()
            return [t for r in out for t in r], llm.stats()["counters"].get("cached_prompt_tokens", 0)

    with LLM(model=str(dirs["target"]), **options, **draft) as llm:
        need = llm.resolved["window_pages"]
    cached, hits = run(window_pages=need + spare)
    anew, none = run(prefix_cache=False)
    assert cached == anew and none == 0
    event(f"hits: {hits > 0}")


def test_a_long_context_keeps_window_plus_chunk(tmp_path: Path) -> None:
    """At 8,192 tokens: (window + chunk) / context of full KV on these layers, reported and seen."""
    target = tiny_model_dir(tmp_path / "long", arch="gemma3_text", sliding_window=512, max_position_embeddings=8192)
    prompt = random.Random(0).choices(range(3, VOCAB), k=8150)
    with LLM(model=str(target), max_slots=2, draft="ngram") as llm:
        kept = llm.resolved["window_kv"]
        assert kept["share"] <= (512 + 256) / 8192 and kept["slot_bytes"] / kept["slot_bytes_without"] == kept["share"]
        assert kept["bytes"] <= (512 + 256) / 8192 * kept["bytes_without"]
        windows = llm._built.device.frame.cache.windows
        assert windows is not None and windows.kv is not None
        sink = windows.kv.nbytes // (kept["pages"] + 1)
        assert windows.kv.nbytes - sink == kept["bytes"], "what is reported is what is there"
        out = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        assert len(out[0].outputs[0].token_ids) == 30
        assert 0 < llm.stats()["window_pages"]["most_held"] * llm.resolved["page_size"] <= 512 + 256
        llm.check_idle()


def test_a_server_reports_what_windows_keep(dirs: dict[str, Path]) -> None:
    body = {"model": "m", "prompt": [5, 6, 7] * 20, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with RunningServer(str(dirs["target"]), "--max-slots", "2", "--max-model-len", "96") as server:
        model = server.http.get("/v1/models").json()["data"][0]["id"]
        assert server.http.post("/v1/completions", json={**body, "model": model}).status_code == 200
        server.idle()
        info = server.info()
    kept, pool = info["resolved"]["window_kv"], info["engine"]["pools"]["window"]
    assert kept["window"] == 8 and kept["layers"] == 2 and kept["bytes"] <= kept["bytes_without"]
    assert pool["pages"] == kept["pages"] and pool["held"] == 0 < pool["most_held"] <= 2 * kept["slot_pages"]


def test_what_does_not_go_with_windows(dirs: dict[str, Path], tmp_path: Path) -> None:
    narrow = tiny_model_dir(tmp_path / "narrow", seed=1, arch="gemma3_text", sliding_window=3)
    eagle = write_eagle3(tmp_path / "eagle", narrow, draft_vocab=24)
    with pytest.raises(ConfigError, match="draft_tree with 3 levels and a sliding window of 3 tokens"):
        LLM(model=str(narrow), draft=str(eagle), draft_tree=TREE)
    with pytest.raises(ConfigError, match="window_pages=5 is below the"):
        LLM(model=str(dirs["target"]), window_pages=5)
