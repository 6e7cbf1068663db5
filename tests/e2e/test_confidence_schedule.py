"""Confidence-scheduled verification in the whole engine: plain decoding's tokens at any budget, fixed lengths at low
load, costs that are timed once, refusals."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.config import EngineConfig
from slipstream.device import costs
from slipstream.draft.dflash import BlockDrafter
from slipstream.errors import ConfigError
from slipstream.types import SURVIVAL_ONE, SpecStats
from tests.support.block_draft import write_block_draft
from tests.support.equality_cells import FACTORS, model_dirs, run_cell
from tests.support.grammar_kit import character_models
from tests.support.kit import tiny_model_dir
from tests.support.pairwise import pairwise
from tests.support.reference import DenseReference

PROMPTS = [[5, 6, 7, 8, 9], [9] * 20, [1, 2], [30, 31, 32], [7] * 3]


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("scheduled")
    found = model_dirs(root)
    target = found["target"]
    found["unsure"] = write_block_draft(root / "unsure", target, "dspark", confidence=False)
    return found


@pytest.fixture(scope="module")
def reference(dirs: dict[str, Path]) -> DenseReference:
    return DenseReference(LLM(model=str(dirs["target"]), dtype="float64", max_model_len=256)._built.model)


def build(dirs: dict[str, Path], draft: str = "dspark", **options: Any) -> LLM:
    given = {"confidence_schedule": True, "num_drafts": 5, "max_slots": 4, "max_model_len": 160, **options}
    return LLM(str(dirs["target"]), dtype="float64", draft=str(dirs.get(draft, draft)), **given)


def jagged(frame: Any, engine: EngineConfig, graphs: Any) -> costs.RowSeconds:
    """A machine on which rows are dear, and some counts oddly so: budgets are small and move."""
    rng = random.Random(5)
    return tuple((s, rows, (1 + 0.4 * rows / s) * rng.uniform(0.8, 1.25)) for s, rows in costs.points(engine))


def level(frame: Any, engine: EngineConfig, graphs: Any) -> costs.RowSeconds:
    return tuple((s, rows, 1.0) for s, rows in costs.points(engine))


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))


PAIRS = pairwise({**FACTORS, "drafter": ("dspark",), "batch": (4,), "chunk": (5,)}, seed=3)
CELLS = [pytest.param(cell, marks=() if i < 7 else pytest.mark.slow) for i, cell in enumerate(PAIRS)]


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_scheduled_equals_plain(
    cell: dict[str, Any], dirs: dict[str, Path], reference: DenseReference, no_cache: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(costs, "measure", jagged)
    seen: list[LLM] = []
    run_cell(cell, dirs, reference, dtype="float64", confidence_schedule=True, prepare=seen.append)
    stats = seen[0].stats()
    spec = seen[0]._engine.metrics.spec
    assert 0 < spec.drafted < 0.9 * 3 * spec.rounds, "the budget has to bind"
    assert stats["counters"]["rows"] <= stats["counters"]["frames"] * 64
    assert 0 < stats["schedule"]["mean_budget"] < 3 * 16


def counted(llm: LLM, params: SamplingParams) -> list[SpecStats]:
    return [o.spec for o in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("shape", [{}, {"slot_buckets": (4,), "row_tiers": (6,)}], ids=["exact", "tier"])
def test_where_rows_cost_nothing_lengths_are_fixed(
    dirs: dict[str, Path], shape: dict[str, Any], no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round for round what a fixed number of drafts gives, confident or not."""
    monkeypatch.setattr(costs, "measure", level)
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=40, ignore_eos=True)
    with build(dirs, **shape) as scheduled, build(dirs, confidence_schedule=False, **shape) as fixed:
        ours, theirs = counted(scheduled, params), counted(fixed, params)
        assert [s.counts for s in ours] == [s.counts for s in theirs]
        assert sum(s.drafted for s in ours) > 500
        assert "schedule" not in fixed.stats() and scheduled.stats()["schedule"]["budget"] > 0


def test_the_budget_is_what_frames_verify(
    dirs: dict[str, Path], no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows a slot, for the likeliest drafts: some slots verify several drafts, others none, never more in all."""

    def two(frame: Any, engine: EngineConfig, graphs: Any) -> costs.RowSeconds:
        return tuple((s, rows, 1.0 if rows <= 2 * s else 1e3) for s, rows in costs.points(engine))

    monkeypatch.setattr(costs, "measure", two)
    with build(dirs, run_ahead=2, slot_buckets=(4,), row_tiers=(1, 2, 6)) as llm:
        verified: list[list[int]] = []
        collect = llm._built.device.collect

        def watched() -> Any:
            result = collect()
            if result.decoded == 4:
                verified.append([r[3] for r in result.records[:4] if r[1]])
            return result

        monkeypatch.setattr(llm._built.device, "collect", watched)
        llm.generate(PROMPTS[:4], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        full = [v for v in verified if len(v) == 4]
        assert len(full) > 20
        # Before anything is known all drafts are hoped for; that is worth a thousand frames' time to nobody here.
        assert all(sum(v) <= 4 for v in full) and sum(sum(v) == 4 for v in full) > 0.8 * len(full)
        assert sum(max(v) > 1 for v in full) > 5 and sum(min(v) == 0 for v in full) > 5
        assert set(llm._engine.metrics.frames_by_drafts) == {5}


def test_confidences_are_calibrated_and_travel_to_the_host(
    dirs: dict[str, Path], no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the scheduler gets is prod sigmoid(z_i / T_i) of the head's own logits."""
    monkeypatch.setattr(costs, "measure", level)
    temperatures = [0.5, 1.0, 2.0, 4.0, 8.0]
    logits: list[torch.Tensor] = []
    chain = BlockDrafter._chain

    def kept(self: BlockDrafter, *args: Any) -> Any:
        said: list[torch.Tensor] = []
        real = self.model.confidence_logit
        with monkeypatch.context() as patch:
            patch.setattr(self.model, "confidence_logit", lambda *a: said.append(real(*a)) or said[-1])
            drafts = chain(self, *args)
        logits.append(torch.stack(said, 1))
        return drafts

    with build(dirs, max_slots=1, draft_options={"temperatures": temperatures}) as llm:
        monkeypatch.setattr(BlockDrafter, "_chain", kept)
        llm._submit(*llm._prepare(PROMPTS[0], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)))
        for _ in range(6):
            llm._engine.step()
        seq = next(iter(llm._engine.scheduler.running.values()))
        want = torch.sigmoid(logits[-1][0].double() / torch.tensor(temperatures)).cumprod(0)
        assert seq.fresh is not None
        assert torch.allclose(torch.tensor(seq.fresh[1]).double() / SURVIVAL_ONE, want, rtol=1e-5, atol=1e-8)
        before = torch.sigmoid(logits[-2][0].double() / torch.tensor(temperatures)).cumprod(0)
        assert seq.survival is not None
        assert torch.allclose(torch.tensor(seq.survival).double() / SURVIVAL_ONE, before, rtol=1e-5, atol=1e-8)


def test_costs_are_timed_once(
    dirs: dict[str, Path], no_cache: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with build(dirs) as llm:
        table = llm.resolved["row_seconds"]
        assert [(s, r) for s, r, _ in table] == costs.points(llm._built.engine_config)
        assert not [note for note in llm.notes if "warning" in note]
        assert all(seconds > 0 for *_, seconds in table) and llm.resolved["confidence_schedule"] is True
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".json"
    with monkeypatch.context() as patch:
        patch.setattr(costs, "measure", lambda *a: pytest.fail("timed again"))
        with build(dirs) as llm:
            assert llm.resolved["row_seconds"] == table
    # Another shape of frames, another number of threads: other files.
    with build(dirs, num_drafts=2):
        assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "zero", "list"])
def test_a_damaged_table_is_timed_again_with_a_warning(
    dirs: dict[str, Path], damage: str, no_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "measure", level)
    with build(dirs):
        pass
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    values = json.loads(whole)
    if damage == "zero":
        values["seconds"][0][2] = 0
    if damage == "other":
        values["seconds"].pop()
    file.write_text({"cut": whole[:40], "empty": "", "list": "[1]"}.get(damage, json.dumps(values)))
    with build(dirs) as llm:
        (note,) = (note for note in llm.notes if "warning" in note)
        assert str(file) in note and "timed again" in note
    assert file.read_text() == whole, "the file is whole again"


def test_a_folder_that_cannot_be_written_costs_a_note(
    dirs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(costs, "measure", level)
    with build(dirs) as llm:
        assert any("cannot be kept" in note for note in llm.notes)


@pytest.mark.parametrize(
    ("draft", "options", "words"),
    [
        ("ngram", {}, r"confidence_schedule=True needs a draft with a confidence head .*'ngram'"),
        ("suffix", {}, "confidence head"),
        ("none", {"num_drafts": None}, "confidence head"),
        ("draft-good", {}, r"confidence head \(DSpark\); draft=.* is a language model"),
        ("eagle3", {}, "confidence head .*Eagle3Drafter without one"),
        ("dflash", {}, "confidence head .*BlockDrafter without one"),
        ("unsure", {}, "confidence head .*BlockDrafter without one"),
        ("dspark", {"adaptive": True}, "confidence_schedule=True and adaptive=True"),
        (
            "eagle3", {"num_drafts": None, "draft_tree": {"topk": 2, "levels": 2, "total": 4}},
            "confidence_schedule=True schedules chains",
        ),
        ("dspark", {"draft_options": {"temperatures": [1.0, 1.0]}}, "temperatures has 2 values; the draft has 5"),
        ("dspark", {"confidence_schedule": "yes"}, "confidence_schedule='yes' must be True or False"),
    ],
)  # fmt: skip
def test_what_cannot_be_scheduled_is_refused(
    dirs: dict[str, Path], draft: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        build(dirs, draft, **options)


def test_the_command_line_names_it() -> None:
    from slipstream.cli.options import Parser, add_engine_options, engine_options

    parser = Parser(prog="x")
    add_engine_options(parser)
    got = engine_options(parser.parse_args(["--draft", "D", "--confidence-schedule"]))
    assert got == {"draft": "D", "confidence_schedule": True}
    with pytest.raises(ConfigError, match="--confidence-schedule needs a draft"):
        engine_options(parser.parse_args(["--confidence-schedule"]))


ASKS: list[dict[str, Any]] = [
    {"temperature": 0, "presence_penalty": 1.2, "logprobs": 2}, {"temperature": 0.8, "seed": 4, "logit_bias": {7: 3.0}},
    {"temperature": 0, "structured_outputs": {"regex": "(ab|[0-9]{2,4}x)+ true"}},
    {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.4, "prompt_logprobs": 1, "logprobs": 0},
    {"temperature": 0, "min_tokens": 5, "speculative": 1}, {"temperature": 0.7, "seed": 9, "speculative": "off"},
]  # fmt: skip


@pytest.mark.parametrize(("kind", "run_ahead"), [("characters", 1), ("characters", 2), ("hybrid", 2), ("windows", 2)])
def test_with_whatever_else_requests_and_targets_have(
    kind: str, run_ahead: int, no_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties, biases, log-probabilities, grammars, drafts per request; recurrent layers; sliding windows."""
    monkeypatch.setattr(costs, "measure", jagged)
    if kind == "characters":
        pytest.importorskip("llguidance")
        target = character_models(tmp_path / "models")["target"]
    else:
        arch, layers = {"hybrid": ("qwen3_5_text", 3), "windows": ("gemma3_text", 6)}[kind]
        target = tiny_model_dir(tmp_path / "target", seed=1, layers=layers, arch=arch)
    dspark = write_block_draft(tmp_path / "dspark", target, "dspark", head="gated")
    asks = [a for a in ASKS if kind == "characters" or "structured_outputs" not in a]
    params = [SamplingParams(max_tokens=30, ignore_eos="structured_outputs" not in a, **a) for a in asks]
    prompts = [[5 + i, 9, 11, 5 + i] * (1 + 2 * i) for i in range(len(params))]
    options: dict[str, Any] = {"dtype": "float64", "max_slots": 4, "max_model_len": 96, "page_size": 8}
    with LLM(str(target), **options) as plain:
        want = plain.generate(prompts, [replace(p, speculative=None) for p in params])
    with LLM(
        str(target), draft=str(dspark), num_drafts=3, confidence_schedule=True, run_ahead=run_ahead, **options
    ) as llm:
        for ours, theirs in zip(llm.generate(prompts, params), want, strict=True):
            assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
            a, b = (o.outputs[0].logprobs or [] for o in (ours, theirs))
            assert [list(x) for x in a] == [list(x) for x in b]
        spec = llm._engine.metrics.spec
        assert 0 < spec.drafted < 0.9 * 3 * spec.rounds, "the budget has to bind"
        llm.check_idle()
