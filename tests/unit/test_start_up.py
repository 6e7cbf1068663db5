"""Bad input at start-up, as far as a CPU can show it: each refusal names the value and the limit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream import LLM, SamplingParams, build
from slipstream.config import EngineConfig, LLMConfig, resolve_engine
from slipstream.device.costs import points
from slipstream.device.graphs import CaptureReport
from slipstream.errors import ConfigError
from slipstream.models.loader import load_model, plan_gguf
from tests.support.raw_gguf import write_raw_gguf
from tests.support.tiny import tiny_values, write_tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("m") / "llama", "llama"))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_gpu_that_is_not_there(model: str, no_gpu: None) -> None:
    with pytest.raises(ConfigError, match="device=cuda, but this machine has no usable GPU"):
        LLM(model=model, device="cuda")


def test_weights_that_do_not_fit(model: str) -> None:
    need = sum(p.numel() for p in _floats(model)) * 4
    assert load_model(model, memory_bytes=need).weights == "safetensors in float32"
    with pytest.raises(ConfigError, match=r"the weights need 0\.\d MiB in float32, and 0\.\d MiB are left on cpu"):
        load_model(model, memory_bytes=need - 1)


def _floats(model: str) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(Path(model) / "model.safetensors").values())


def engine(memory_bytes: int, **options: Any) -> Any:
    return resolve_engine(
        LLMConfig(page_size=16, max_model_len=64, **options), context=64, num_drafts=0, lookahead=0,
        kv_bytes_per_token=1024, memory_bytes=memory_bytes, on_cpu=False,
    )  # fmt: skip


def test_prefill_tiers_end_at_the_chunk() -> None:
    made = engine(1 << 30)
    assert made.prefill_tiers == (128, 512, 2048) and made.prefill_chunk_busy == 128 and made.prefill_prompts == 16
    assert engine(1 << 30, prefill_chunk=300).prefill_tiers == (128, 300)
    assert engine(1 << 30, prefill_chunk=4096).prefill_tiers == (128, 512, 2048, 4096)
    assert engine(1 << 30, prefill_chunk_busy=512).prefill_chunk_busy == 512
    with pytest.raises(ConfigError, match=r"prefill_tiers=\[64\] do not reach prefill_chunk=2048 rows"):
        engine(1 << 30, prefill_tiers=(64,))


def test_a_gpu_holds_every_slot_where_memory_is_there() -> None:
    """64 sequences of 700 tokens are more than a CPU's 32,768: at batch 64 they waited for pages."""
    many = {"context": 700, "num_drafts": 0, "lookahead": 0, "kv_bytes_per_token": 1024, "memory_bytes": 1 << 40}
    options = LLMConfig(page_size=16, max_model_len=700, max_slots=64)
    assert resolve_engine(options, **many, on_cpu=False).num_pages >= 64 * -(-700 // 16)
    assert resolve_engine(options, **many, on_cpu=True).num_pages == 32768 // 16
    long = LLMConfig(page_size=16, max_model_len=131_072, max_slots=64)
    assert resolve_engine(long, **{**many, "context": 131_072}, on_cpu=False).num_pages == (1 << 18) // 16


def test_pages_that_do_not_fit_a_gpu() -> None:
    needs = -(-(64 + 2) // 16)
    assert engine(needs * 16 * 1024).num_pages == needs
    with pytest.raises(ConfigError, match=rf"holds {needs - 1} pages of 16 tokens .*max_model_len=64 needs {needs}"):
        engine(needs * 16 * 1024 - 1)
    with pytest.raises(ConfigError, match=r"0\.0 MiB, holds 0 pages"):
        engine(0)
    assert engine(0, num_pages=9).num_pages == 9  # the user's own number is tried


def test_states_that_do_not_fit_a_gpu() -> None:
    def made(memory_bytes: int, **options: Any) -> Any:
        return resolve_engine(
            LLMConfig(page_size=16, max_model_len=64, max_slots=3, **options), context=64, num_drafts=0, lookahead=0,
            kv_bytes_per_token=1024, memory_bytes=memory_bytes, on_cpu=False, slot_bytes=1 << 20, state_bytes=1 << 20,
        )  # fmt: skip

    with pytest.raises(ConfigError, match=r"take 1.0 MiB for each of max_slots=3 .* 4.0 MiB are left: lower max_slots"):
        made(4 << 20)
    few = made(5 << 20)  # a tenth of the last MiB holds no saved state
    assert (few.saved_states, few.prefix_cache) == (0, False) and few.num_pages > 0
    many = made(64 << 20)
    assert (many.saved_states, many.state_interval, many.prefix_cache) == (6, 16, True)
    assert made(64 << 20, saved_states=9).saved_states == 9


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"run_ahead": 0}, "run_ahead=0 must be a whole number from 1 to 64"),
        ({"max_slots": 8, "slot_buckets": (1, 2)}, r"slot_buckets=\[1, 2\] do not reach max_slots=8"),
        ({"draft": "ngram", "num_drafts": 3, "row_tiers": (1, 2)}, r"row_tiers=\[1, 2\] do not reach num_drafts"),
        ({"num_pages": 1}, "num_pages=1 of 32 tokens cannot hold one sequence"),
        ({"capture_seconds": 0}, "capture_seconds=0 must be a number above 0"),
        ({"capture_mib": -1.0}, "capture_mib=-1.0 must be"),
        ({"gpu_memory_mib": float("inf")}, "gpu_memory_mib=inf must be"),
    ],
)
def test_options_that_cannot_work(model: str, options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        LLM(model=model, device="cpu", **options)


def test_gpu_memory_is_the_smaller_of_free_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 << 20, 200 << 20))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 8 << 20)
    gpu = torch.device("cuda:0")
    assert build._memory(LLMConfig(), gpu) == 100 << 20
    assert build._memory(LLMConfig(gpu_memory_mib=20), gpu) == 12 << 20
    assert build._memory(LLMConfig(gpu_memory_mib=4), gpu) == 0
    assert build._memory(LLMConfig(), torch.device("cpu")) is None
    assert build._kv_budget(LLMConfig(gpu_memory_mib=20), gpu) == int((12 << 20) * 0.85)


def test_what_capture_took_is_in_the_notes() -> None:
    assert build._capture_note(None) == []
    [note] = build._capture_note(CaptureReport(graphs=12, seconds=3.14, mib=240.4))
    assert note == "captured 12 frame graphs in 3.1 s, 240 MiB"


def test_stats_and_resolved_carry_the_capture_report(model: str) -> None:
    with LLM(model=model, device="cpu") as llm:
        assert llm.resolved["capture"] is None and llm.stats()["capture"] is None
        assert llm.resolved["weights"] == "safetensors in float32"


def test_capture_gets_the_budget_and_the_bar(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import slipstream.device.graphs as graphs

    seen: dict[str, Any] = {}

    class Recorded:
        def __init__(self, frame: Any, **sizes: Any) -> None:
            self.report = None

        def capture(self, **given: Any) -> CaptureReport:
            seen.update(given)
            given["progress"](1, 1)
            return CaptureReport(graphs=1, seconds=0.1, mib=1.0)

    monkeypatch.setattr(graphs, "FrameGraphs", Recorded)
    config = LLMConfig(capture_seconds=5, capture_mib=64)
    bars: list[tuple[int, int]] = []
    engine_config = engine(1 << 30)
    made = build._graphs(config, None, engine_config, torch.device("cuda"), lambda *at: bars.append(at))  # type: ignore[arg-type]
    assert made.report.graphs == 1 and bars == [(1, 1)]
    assert seen["budget_seconds"] == 5.0 and seen["budget_mib"] == 64.0


@pytest.mark.parametrize(("budget", "graphs"), [(30.0, 3), (20.0, 3), (19.0, 2)])
def test_what_graphs_take_is_not_hidden_by_cached_blocks(
    monkeypatch: pytest.MonkeyPatch, budget: float, graphs: int
) -> None:
    """S27: loading left 500 MiB cached, which the first capture hands back; three graphs take 20 MiB after that."""
    import slipstream.device.graphs as module

    used, cached = 1000 << 20, 500 << 20
    taken = iter((12, 8, 0))

    def empty_cache() -> None:
        nonlocal cached
        cached = 0

    def capture(self: Any, shape: Any) -> Any:
        nonlocal used
        empty_cache()
        used += next(taken) << 20
        return None, None

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: used + cached)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(module.FrameGraphs, "_capture", capture)
    made = object.__new__(module.FrameGraphs)
    made.shapes = [module.Chunk(rows=r, last=False, stages=module.Stages.GREEDY) for r in (1, 2, 3)]
    made.graphs = {}
    if graphs == 3:
        report = made.capture(budget_mib=budget)
        assert (report.graphs, report.mib) == (3, 20.0) and len(made.graphs) == 3
    else:
        with pytest.raises(ConfigError, match=r"capturing 2 of 3 graphs took 0 s and 20 MiB; .* 19 MiB"):
            made.capture(budget_mib=budget)


@pytest.mark.parametrize(
    ("types", "four_bit", "dtype", "device", "packed", "kept", "says"),
    [
        (("Q4_0", "F32"), True, "auto", "cpu", True, "GGUF Q4_0, 4-bit packed", "stay packed"),
        (("Q4_0", "F32"), True, "auto", "cuda", False, "GGUF Q4_0 dequantised to bfloat16", "to bfloat16 on the GPU"),
        (("Q8_0", "F32"), False, "auto", "cuda", False, "GGUF Q8_0 dequantised to bfloat16", "quantised weights are"),
        (("Q4_1", "Q8_0"), True, "float32", "cpu", False, "GGUF Q4_1, Q8_0 dequantised to float32", "to float32: Q4_1"),
        (("F32",), False, "auto", "cpu", False, "GGUF F32 in float32", None),
        (("F16", "F32"), False, "auto", "cuda", False, "GGUF F16, F32 in bfloat16", None),
    ],
)
def test_how_a_gguf_file_is_kept(
    types: tuple[str, ...], four_bit: bool, dtype: str, device: str, packed: bool, kept: str, says: str | None
) -> None:
    plan = plan_gguf(types, four_bit=four_bit, dtype=dtype, device=device, load_format="auto")
    assert plan.packed is packed and plan.weights == kept
    assert (says is None and plan.notes == ()) or (says is not None and says in plan.notes[0])
    assert plan_gguf(types, four_bit=four_bit, dtype=dtype, device=device, load_format="dummy").notes == ()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_gguf_file_gives_the_tokens_of_the_values_it_holds(tmp_path: Path, kind: str) -> None:
    """On the CPU in float32; tests/gpu/test_start_up_gpu.py does the same in bf16 on a GPU."""
    held = write_raw_gguf(tmp_path / "m.gguf", kind=kind)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(tiny_values("llama")))
    save_file(held, tmp_path / "hf" / "model.safetensors")
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    tokens = []
    for model in (tmp_path / "m.gguf", tmp_path / "hf"):
        with LLM(model=str(model), device="cpu", dtype="float32", max_slots=2, max_model_len=64) as llm:
            tokens.append([o.outputs[0].token_ids for o in llm.generate([[5, 6, 7], [9] * 20], params)])
            if model.suffix == ".gguf":
                assert llm.resolved["weights"] == f"GGUF {kind} dequantised to float32"
    assert tokens[0] == tokens[1]


def test_the_command_line_has_the_budgets() -> None:
    from slipstream.cli.options import Parser, add_engine_options, engine_options

    parser = Parser(prog="x")
    add_engine_options(parser)
    words = ["--capture-seconds", "5", "--capture-mib", "64", "--gpu-memory-mib", "1000", "--draft", "none"]
    assert engine_options(parser.parse_args(words)) == {
        "capture_seconds": 5.0, "capture_mib": 64.0, "gpu_memory_mib": 1000.0, "draft": "none",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"--capture-mib -1\.0 must be above 0"):
        engine_options(parser.parse_args(["--capture-mib", "-1"]))


def test_the_command_line_has_the_saved_states() -> None:
    from slipstream.cli.options import Parser, add_engine_options, engine_options

    parser = Parser(prog="x")
    add_engine_options(parser)
    words = ["--saved-states", "12", "--state-interval", "64", "--draft", "none"]
    assert engine_options(parser.parse_args(words)) == {"saved_states": 12, "state_interval": 64, "draft": "none"}
    assert engine_options(parser.parse_args(["--saved-states", "0"]))["saved_states"] == 0
    with pytest.raises(ConfigError, match="--saved-states -1 must be at least 0"):
        engine_options(parser.parse_args(["--saved-states", "-1"]))
    with pytest.raises(ConfigError, match="--state-interval 0 must be at least 1"):
        engine_options(parser.parse_args(["--state-interval", "0"]))


def test_frames_that_plans_may_ask_for() -> None:
    """One capture per (rows per slot, drafts made): without adaptive one number of drafts, and none at all."""
    config = EngineConfig(num_drafts=3, row_tiers=(1, 2, 4))
    assert config.frame_kinds == [(1, 0), (1, 3), (2, 3), (4, 3)]
    assert EngineConfig(num_drafts=0, row_tiers=(1,)).frame_kinds == [(1, 0)]
    assert EngineConfig(num_drafts=3, row_tiers=(1, 4), lookahead=3).frame_kinds == [(1, 3), (4, 3)]
    adaptive = replace(config, adaptive=True)
    assert adaptive.draft_modes == (0, 1, 3)
    assert adaptive.frame_kinds == [(1, 0), (1, 1), (1, 3), (2, 1), (2, 3), (4, 3)]
    assert replace(adaptive, row_tiers=(1, 2, 8)).frame_kinds == [(1, 0), (1, 1), (1, 3), (2, 1), (2, 3), (8, 3)]
    assert EngineConfig(num_drafts=7, adaptive=True).draft_modes == (0, 1, 2, 3, 7)


@pytest.mark.parametrize("tiers", [(1, 2, 4), (1, 4, 8), (4,), (2, 16)])
def test_every_scheduled_frame_is_timed(tiers: tuple[int, ...]) -> None:
    """Where shapes are fixed, the points of the cost table are the captured frames that draft."""
    config = EngineConfig(max_slots=4, num_drafts=3, lookahead=3, slot_buckets=(1, 4), row_tiers=tiers)
    frames = {(b, b * tier) for b in config.slot_buckets for tier, drafts in config.frame_kinds if drafts}
    assert points(config) == sorted(frames)
