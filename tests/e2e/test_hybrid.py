"""Targets with recurrent layers through the whole engine: speculative equals plain, and what does not go with them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams
from slipstream.attention.delta import DeltaFrame
from slipstream.engine.adaptive import Adaptive
from slipstream.errors import UnsupportedError
from slipstream.kernels import delta as delta_ops
from slipstream.kernels.workspace import Workspace
from slipstream.models.fused import FusedDecoder
from slipstream.models.fused_hybrid import FusedHybrid
from tests.support.block_draft import write_block_draft
from tests.support.eagle import write_eagle3
from tests.support.equality_cells import FACTORS, TREE, run_cell
from tests.support.kit import VOCAB, tiny_model_dir
from tests.support.mtp import add_mtp
from tests.support.pairwise import pairwise
from tests.support.reference import DenseReference, planted_oracle

DRAFTERS = ("none", "ngram", "suffix", "oracle", "draft-bad", "eagle3", "dflash", "dspark", "mtp")
PAIRS = pairwise({**FACTORS, "drafter": DRAFTERS, "batch": (1, 4)}, seed=3)
CELLS = [pytest.param(cell, marks=() if i < 10 else pytest.mark.slow) for i, cell in enumerate(PAIRS)]


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hybrid")
    target = add_mtp(tiny_model_dir(root / "target", seed=1, layers=3, arch="qwen3_5_text"))
    return {
        "target": target,
        "mtp": Path("mtp"),
        "draft-bad": tiny_model_dir(root / "bad", seed=9, layers=1),
        "eagle3": write_eagle3(root / "eagle3", target, draft_vocab=24),
        "dflash": write_block_draft(root / "dflash", target, "dflash"),
        "dspark": write_block_draft(root / "dspark", target, "dspark", head="gated"),
    }


@pytest.fixture(scope="module")
def reference(dirs: dict[str, Path]) -> DenseReference:
    return DenseReference(LLM(model=str(dirs["target"]), dtype="float64", max_model_len=256)._built.model)


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_speculative_equals_plain(cell: dict[str, Any], dirs: dict[str, Path], reference: DenseReference) -> None:
    run_cell(cell, dirs, reference, dtype="float64", state_interval=16)


CELL = {
    "drafter": "oracle", "sampling": "greedy", "batch": 4, "page_size": 16, "prefix": "miss", "chunk": 5,
    "event": "none", "run_ahead": 2, "shapes": "exact",
}  # fmt: skip


@pytest.mark.parametrize("fault", ["no replay", "drafts stay", "bonus token twice", "last owner's state"])
def test_a_fault_in_the_state_changes_the_output(
    dirs: dict[str, Path], reference: DenseReference, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Negative control: the equality above sees each of these."""
    if fault == "no replay":
        monkeypatch.setattr(delta_ops, "replays_of", lambda recent, w: 0)
    elif fault == "last owner's state":
        spans = delta_ops.delta_spans

        def from_anything(x: Any, memory: Any, w: Any, of: Any) -> Any:
            return spans(x, memory, w, [(slot, start or 1, length) for slot, start, length in of])

        monkeypatch.setattr(delta_ops, "delta_spans", from_anything)
    else:
        more = 1 if fault == "drafts stay" else -1

        def commit(self: DeltaFrame) -> None:
            delta_ops.absorbed_rows(self.pool.absorbed_S, self.committed_S + more, self.slot_B, self.rows_B)

        monkeypatch.setattr(DeltaFrame, "commit", commit)
    with pytest.raises(AssertionError):
        run_cell(CELL, dirs, reference, dtype="float64")


@pytest.mark.parametrize(
    ("case", "dtype", "drafter"),
    [
        ("qwen3_5", "float32", "none"), ("qwen3_5", "float32", "oracle"), ("qwen3_5", "float64", "ngram"),
        ("qwen3_5", "float32", "mtp"),
        ("qwen3_5", "float64", "mtp"),
        ("qwen3_next", "float32", "ngram"), ("qwen3_next", "float32", "oracle"), ("qwen3_next", "float64", "oracle"),
    ],
)  # fmt: skip
def test_golden_continuation(golden_dir: Path, case: str, dtype: str, drafter: str) -> None:
    folder = golden_dir / f"target_{case}"
    expected = load_file(folder / "expected.safetensors")
    prompt, greedy = expected["prompt_ids"].tolist(), expected["greedy_ids"].tolist()
    draft: dict[str, Any] = {
        "none": {},
        "mtp": {"draft": "mtp"},
        "ngram": {"draft": "ngram", "num_drafts": 3, "draft_options": {"min_n": 1, "gate": False}},
        "oracle": {"draft": planted_oracle(lambda r: greedy, vocab=256, seed=1), "num_drafts": 3},
    }[drafter]
    params = SamplingParams(temperature=0, max_tokens=len(greedy), ignore_eos=True)
    with LLM(model=str(folder), dtype=dtype, prefill_chunk=7, max_model_len=64, **draft) as llm:
        out = llm.generate([prompt, prompt[:-1], prompt], params)
        assert [out[i].outputs[0].token_ids for i in (0, 2)] == [greedy] * 2
        llm.check_idle()


@pytest.mark.parametrize(("adaptive", "sampling"), [(False, "seeded"), (True, "greedy"), (True, "seeded")])
def test_a_prediction_head_comes_and_goes(
    dirs: dict[str, Path], reference: DenseReference, adaptive: bool, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of drafts per request, and per frame at random: its cache catches up, the states stay right."""
    rng = random.Random(sampling)
    monkeypatch.setattr(Adaptive, "choose", lambda self, slots: rng.choice(self.modes))
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(5 + 9 * i)) for i in range(4)]
    law: dict[str, Any] = {"temperature": 0} if sampling == "greedy" else {"temperature": 0.8, "seed": 7}
    params = [
        SamplingParams(max_tokens=30 + 5 * i, ignore_eos=True, speculative=k, **law)
        for i, k in enumerate(("off", None, 1, 2))
    ]
    with LLM(
        str(dirs["target"]), dtype="float64", draft="mtp", num_drafts=3, adaptive=adaptive, run_ahead=2, page_size=4,
        max_slots=3, max_model_len=96,
    ) as llm:  # fmt: skip
        outs = llm.generate([list(p) for p in prompts], params)
        for prompt, p, out in zip(prompts, params, outs, strict=True):
            assert out.outputs[0].token_ids == reference.continuation(prompt, p)
        assert outs[0].spec.drafted == 0 < outs[1].spec.drafted
        frames = llm.stats()["drafts"]["frames"]
        assert set(frames) == (set(llm._built.engine_config.draft_modes) if adaptive else {3})
        llm.check_idle()


@pytest.mark.parametrize(("sampling", "fused"), [("greedy", True), ("mixed", True), ("mixed", False)])
def test_the_frame_as_it_runs_on_a_gpu(
    dirs: dict[str, Path], reference: DenseReference, sampling: str, fused: bool
) -> None:
    """The same frames out of the kernels' ops, each by its definition; the chunk's spans follow from tensors."""

    def on_kernels(llm: LLM) -> None:
        frame = llm._built.device.frame
        frame.workspace = frame.cache.workspace = Workspace("cpu", floats=8, counters=8)
        frame.kernels = True
        frame.laws = frame.state.laws()
        if fused:
            frame.fused = FusedHybrid(frame.model, frame.kv, frame.workspace)
            assert not FusedDecoder.fits(frame.model)

    cell = {**CELL, "sampling": sampling, "shapes": "padded", "page_size": 1}
    run_cell(cell, dirs, reference, dtype="float64", prepare=on_kernels)


def test_a_sink_and_slots_of_nan_reach_nobody(dirs: dict[str, Path], reference: DenseReference) -> None:
    def poison(llm: LLM) -> None:
        states = llm._built.device.frame.states
        with torch.inference_mode():
            states.state.fill_(float("nan"))
            states.recent.fill_(float("nan"))

    run_cell({**CELL, "shapes": "padded"}, dirs, reference, dtype="float64", prepare=poison)


def test_what_does_not_go_with_recurrent_layers(dirs: dict[str, Path], tmp_path: Path) -> None:
    target = str(dirs["target"])
    with pytest.raises(UnsupportedError, match="draft_tree with Qwen3_5ForCausalLM"):
        LLM(model=target, draft=str(dirs["eagle3"]), draft_tree=TREE)
    with pytest.raises(UnsupportedError, match="a draft model must not have"):
        LLM(model=str(tiny_model_dir(tmp_path / "t", seed=1)), draft=target)
    with LLM(model=target, max_model_len=64) as llm:
        assert llm.resolved["prefix_cache"] is True and llm.resolved["state_bytes"] > 0
        assert (llm.resolved["saved_states"], llm.resolved["state_interval"]) == (64, 32)
        assert len(llm._built.device.frame.kv.data) == 1, "the cache has pages for attention layers only"
