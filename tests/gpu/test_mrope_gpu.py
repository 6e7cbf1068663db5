"""Pictures beside text on a GPU: the CPU's tokens, with graphs and without, and nothing waits on their way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import slipstream.build as build_room
from slipstream import LLM, SamplingParams
from slipstream.audit import profile, watch
from slipstream.benchmark.audit_cells import Frames, engine, failures, run_cell, with_pictures
from slipstream.device import control, frame
from slipstream.device.media import EmbedRing
from slipstream.errors import UnsupportedError
from slipstream.types import FramePlan
from tests.support.kit import tiny_model_dir
from tests.support.pictures import axes, pictures_and_text
from tests.support.tiny import write_tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_float32"),
]

BIG = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}
KINDS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "fused": ("llama", axes(4, 2, 2), True),
    "plain": ("llama", axes(4, 2, 2), False),
    "hybrid": ("qwen3_5_text", axes(2, 1, 1, partial_rotary_factor=0.5), True),
}
CHUNKS: dict[str, Any] = {"prefill_chunk": 16, "prefill_chunk_busy": 16, "prefill_tiers": (16,)}
"""Pictures stand across the edges of chunks."""
MIXED = pictures_and_text(BIG["hidden_size"])
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=3, top_p=0.9, max_tokens=24, ignore_eos=True)
PARAMS = [GREEDY, GREEDY, SEEDED, SEEDED] * 2


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    arch, values, _ = KINDS[kind]
    return str(tiny_model_dir(tmp_path_factory.mktemp(kind) / "m", seed=4, arch=arch, **BIG, **values))


@pytest.fixture(scope="module")
def want(model: str) -> list[list[int]]:
    return generate(model, fused=False, device="cpu")


@pytest.fixture
def fused(kind: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Engines of that kind are made, and whether their pass is fused; the plain one where the fused would fit, too."""
    if not KINDS[kind][2]:
        monkeypatch.setattr(build_room, "_fused", lambda *_: None)
    return KINDS[kind][2]


def generate(model: str, *, fused: bool, **options: Any) -> list[list[int]]:
    with LLM(model=model, dtype="float32", max_slots=4, max_model_len=128, page_size=16, **options) as llm:
        outs = [o.outputs[0].token_ids for o in llm.generate(MIXED, PARAMS)]
        again = [o.outputs[0].token_ids for o in llm.generate(MIXED, PARAMS)]  # from the prefix cache
        assert again == outs
        assert (llm._built.device.frame.fused is not None) == fused
        llm.check_idle()
    return outs


@pytest.mark.parametrize(
    ("draft", "graphs", "run_ahead"), [(None, True, 2), (None, False, 1), ("ngram", True, 8), ("ngram", False, 2)]
)
def test_gpu_equals_cpu_with_and_without_graphs(
    model: str, fused: bool, want: list[list[int]], draft: str | None, graphs: bool, run_ahead: int
) -> None:
    options = {"draft": draft, "cuda_graphs": graphs, "run_ahead": run_ahead, **CHUNKS}
    got = generate(model, fused=fused, device="cuda", **options)
    assert got == want


@pytest.mark.parametrize("fault", ["offsets", "marks", "rows"])
def test_without_a_part_other_tokens_come_out(
    model: str, fused: bool, want: list[list[int]], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Negative controls; text beside the pictures does not notice."""
    if fault == "offsets":
        monkeypatch.setattr(frame, "chunk_positions", lambda state, pos_R: pos_R.expand(3, -1))
    if fault == "marks":
        monkeypatch.setattr(control, "_given_marks", lambda span, media: 0)
    if fault == "rows":
        monkeypatch.setattr(EmbedRing, "send", lambda self, plan: None)
    got = generate(model, fused=fused, device="cuda", **CHUNKS)
    assert got != want and got[1::2] == want[1::2]


@pytest.mark.parametrize("draft", [None, "mtp"])
@pytest.mark.parametrize("graphs", [True, False])
def test_the_golden_prompt_beside_text(golden_dir: Path, draft: str | None, graphs: bool) -> None:
    folder = golden_dir / "mrope_positions"
    values = json.loads((folder / "expected.json").read_text())
    tensors = load_file(folder / "expected.safetensors")
    layout = next(x for x in values["layouts"] if x["name"] == values["lm_layout"])
    prompt = {
        "prompt_token_ids": layout["input_ids"], "prompt_embeds": tensors["lm_image_features"],
        "image_grid_thw": layout["image_grid_thw"],
    }  # fmt: skip
    greedy, text = tensors["lm_greedy_ids"].tolist(), [7, 19, 3, 88, 150, 4, 9]
    params = SamplingParams(temperature=0, max_tokens=len(greedy), ignore_eos=True)
    with LLM(
        model=str(golden_dir / "target_qwen3_5"), device="cuda", dtype="float32", max_slots=4, max_model_len=64,
        draft=draft, cuda_graphs=graphs, **CHUNKS,
    ) as llm:  # fmt: skip
        alone = llm.generate(text, params)[0].outputs[0].token_ids
        outs = [o.outputs[0].token_ids for o in llm.generate([text, prompt, text, prompt], params)]
        llm.check_idle()
    assert outs == [alone, greedy, alone, greedy]


def test_a_model_without_pictures_takes_them_when_asked(tmp_path: Path) -> None:
    """A token's own embeddings change nothing; without the option there is no room, and the engine says so."""
    folder = str(tiny_model_dir(tmp_path / "m", seed=2, **BIG))
    ids = list(range(3, 43))
    options: dict[str, Any] = {"model": folder, "device": "cuda", "max_slots": 2, "max_model_len": 128}
    with LLM(dtype="float32", prompt_embeds=True, **options, **CHUNKS) as llm:
        embeds = llm._built.model.embed(torch.tensor(ids, device="cuda")).cpu()
        assert llm.resolved["embeds_bytes"] == 16 * 64 * 4
        outs = [
            llm.generate(p, GREEDY)[0].outputs[0].token_ids
            for p in (
                ids, {"prompt_token_ids": ids, "prompt_embeds": embeds},
                {"prompt_token_ids": ids, "prompt_embeds": embeds.flip(0)},
            )
        ]  # fmt: skip
    assert outs[0] == outs[1] != outs[2]
    with LLM(dtype="float32", **options) as llm:
        assert llm.resolved["embeds_bytes"] == 0 and llm._built.device.frame.state.chunk_given_R is None
        with pytest.raises(UnsupportedError, match="prompt_embeds=True"):
            llm.generate({"prompt_token_ids": ids, "prompt_embeds": embeds}, GREEDY)


def run_watched(llm: LLM, trace: Path) -> tuple[Any, Any]:
    """The batch from its submission to its end, after two such runs: under the watch, then traced."""

    def run() -> None:
        for prompt in MIXED:
            llm._submit(*llm._prepare(prompt, GREEDY))
        while llm._live:
            with torch.profiler.record_function("frame"):
                llm._step()

    run()
    run()
    with watch(device="cuda", name="pictures") as report:
        run()
    with profile(trace, frame="frame") as profiled:
        run()
    return report, profiled.summary


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_mixed_batch_is_read_and_decoded_without_a_wait(
    model: str, fused: bool, dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No synchronisation, no pageable copy, no memory from the driver; sending embeddings allocates nothing at all."""
    grown: list[int] = []
    send = EmbedRing.send

    def counted(self: EmbedRing, plan: FramePlan) -> None:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        send(self, plan)
        grown.append(torch.cuda.memory_stats()["allocation.all.allocated"] - before)

    monkeypatch.setattr(EmbedRing, "send", counted)
    with LLM(
        model=model, device="cuda", dtype=dtype, max_slots=8, max_model_len=128, page_size=16, prefix_cache=False,
        draft="ngram", **CHUNKS,
    ) as llm:  # fmt: skip
        report, summary = run_watched(llm, tmp_path / "trace.json")
        rows = sum(len(p["prompt_embeds"]) for p in MIXED[::2])
        assert llm._built.device.embeds.rows == 4 * rows
        llm.check_idle()
    assert report.findings == [], report.table()
    assert report.counters.get("pinned_allocations", 0) == 0
    assert grown and not any(grown)
    syncs, copies = summary.total("syncs"), summary.total("copies")
    assert syncs["stream"] == syncs["device"] == 0 and summary.total("allocations")["allocations"] == 0
    assert not [kind for kind in copies if kind.endswith("pageable")] and copies["HtoD pinned"] > 0


def test_embeddings_from_pageable_memory_are_seen(
    model: str, fused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Negative control: the request's own tensor is copied."""

    def slow(self: EmbedRing, plan: FramePlan) -> None:
        for span in plan.prefill:
            media = self.given.media.get(span.slot)
            if media is not None:
                self.given.embeds_RH[: len(media.embeds)].copy_(media.embeds, non_blocking=True)

    monkeypatch.setattr(EmbedRing, "send", slow)
    with LLM(
        model=model, device="cuda", dtype="float32", max_slots=8, max_model_len=128, page_size=16, prefix_cache=False,
        **CHUNKS,
    ) as llm:  # fmt: skip
        report, summary = run_watched(llm, tmp_path / "trace.json")
    assert {f.rule for f in report.findings} == {"pageable-copy"}
    assert summary.total("copies")["HtoD pageable"] > 0


def test_a_cell_with_pictures_is_clean(tmp_path: Path) -> None:
    """As bench/audit_cells.py --mixed-rope. Times of a tiny model say nothing."""
    frames = Frames(watched=8, traced=8, timed=16)
    folder = write_tiny_checkpoint(
        tmp_path / "m", "qwen3_5_text", seed=1, hidden_size=256, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, intermediate_size=512, vocab_size=512, num_hidden_layers=4, max_position_embeddings=1024,
    )  # fmt: skip
    with (
        with_pictures(str(folder)) as seeing,
        engine(seeing, (1, 8), frames, draft=True, dtype="bfloat16") as llm,
    ):
        for batch in (1, 8):
            cell = run_cell(llm, batch=batch, sampling="greedy", frames=frames, pictures=True)
            assert not failures(cell, host_us=None, idle_between=None), cell
            assert cell["reading"]["embeddings"] == 64 * cell["pictures"]
