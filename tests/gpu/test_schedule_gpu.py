"""Confidence-scheduled verification on a GPU: its kernels, its frames as captured graphs, what they cost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.audit import watch
from slipstream.config import EngineConfig
from slipstream.device import costs
from slipstream.errors import ConfigError
from slipstream.kernels import schedule as ops
from tests.support.block_draft import write_block_draft
from tests.support.frame_kernel_cases import random_state, same_state, slot_list, survival_case
from tests.support.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

BIG = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
}  # fmt: skip
PROMPTS = [[5, 6, 7] * 10, [9] * 20, [1, 2], list(range(30, 70))]
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.8, "seed": 3}}


@pytest.mark.parametrize(
    ("slots", "padding", "drafts"), [(1, 0, 1), (7, 1, 3), (32, 32, 7), (250, 6, 15), (1000, 24, 31)]
)
def test_allot_drafts(slots: int, padding: int, drafts: int) -> None:
    first, slot, survival = (
        random_state(slots, drafts, seed=drafts),
        slot_list(slots, padding),
        survival_case(slots, drafts),
    )
    least = int(first.active.sum())
    for rows in (least, least + 1, least + slots // 2, least + slots * drafts // 2, slots * (drafts + 1)):
        for width in (drafts + 1, 2):
            want, got = first.copy(), first.copy("cuda")
            ops.allot(want.active, want.draft_count, survival, slot, rows, width)
            ops.allot_drafts(got.active, got.draft_count, survival.cuda(), slot.cuda(), rows, width)
            assert same_state(got, want)


@pytest.mark.parametrize(("drafts", "most"), [(1, 1), (7, 7), (2, 5), (15, 31)])
def test_offer_scheduled(drafts: int, most: int) -> None:
    slots, padding = 30, 2
    state, slot = random_state(slots, most, seed=2), slot_list(slots, padding)
    there, record = state.copy("cuda"), torch.randint(0, 4, (32, 6 + most + 1))
    token, wish = torch.randint(0, 90, (32, drafts)), torch.randint(0, drafts + 1, (32,))
    logit = 3 * torch.randn(32, drafts)
    logit[::5, 0], logit[3] = float("nan"), -float("inf")
    survival = survival_case(slots, most)
    there_survival = survival.cuda()
    rest = (state.active, state.committed, state.max_len, state.max_drafts, state.pending, state.draft_count)
    rest_there = (there.active, there.committed, there.max_len, there.max_drafts, there.pending, there.draft_count)
    want = ops.offer_with_survivals(token, wish, logit, record, slot, *rest, survival)
    got = ops.offer_scheduled(
        token.cuda(), wish.cuda(), logit.cuda(), record.cuda(), slot.cuda(), *rest_there, there_survival
    ).cpu()  # fmt: skip
    assert same_state(there, state)
    unit = slice(6, 6 + most)
    assert torch.equal(got[:, :6], want[:, :6]) and torch.equal(got[:, 6 + most :], want[:, 6 + most :])
    assert torch.equal(got[:, unit] > 0, want[:, unit] > 0)
    assert torch.allclose(got[:, unit].double(), want[:, unit].double(), rtol=1e-5, atol=8)
    assert torch.equal(there_survival.cpu()[slot], got[:, unit])
    assert bool((got[:, 7 : 6 + most] <= got[:, 6 : 5 + most]).all())


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    target = write_tiny_checkpoint(root / "target", "llama", seed=1, **BIG)
    return {"target": target, "dspark": write_block_draft(root / "dspark", target, "dspark", head="gated")}


def build(dirs: dict[str, Path], **options: Any) -> LLM:
    given = {"confidence_schedule": True, "num_drafts": 3, "draft": str(dirs["dspark"]), **options}
    return LLM(str(dirs["target"]), device="cuda", dtype="float32", max_slots=4, max_model_len=192, **given)


def jagged(frame: Any, engine: EngineConfig, graphs: Any) -> costs.RowSeconds:
    rng = random.Random(5)
    return tuple((s, rows, (1 + 0.4 * rows / s) * rng.uniform(0.8, 1.25)) for s, rows in costs.points(engine))


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
@pytest.mark.parametrize("sampling", list(SAMPLING))
def test_scheduled_equals_plain(
    dirs: dict[str, Path], run_ahead: int, sampling: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "measure", jagged)
    params = [SamplingParams(max_tokens=60 + 9 * i, ignore_eos=True, **SAMPLING[sampling]) for i in range(4)]
    with build(dirs, draft=None, num_drafts=None, confidence_schedule=False) as llm:
        want = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    with build(dirs, run_ahead=run_ahead) as llm:
        outs = llm.generate(PROMPTS, params)
        assert [o.outputs[0].token_ids for o in outs] == want
        spec = llm._engine.metrics.spec
        assert 0 < spec.drafted < 0.95 * 3 * spec.rounds, "the budget has to bind"
        llm.check_idle()


def test_costs_are_those_of_the_captured_frames(
    dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    with build(dirs) as llm:
        table = llm.resolved["row_seconds"]
        assert [(s, r) for s, r, _ in table] == costs.points(llm._built.engine_config)
        assert all(1e-6 < seconds < 1 for *_, seconds in table) and not [n for n in llm.notes if "warning" in n]
    monkeypatch.setattr(costs, "measure", lambda *a: pytest.fail("timed again"))
    with build(dirs) as llm:
        assert llm.resolved["row_seconds"] == table


@pytest.mark.parametrize("sampling", list(SAMPLING))
def test_scheduling_never_waits(
    dirs: dict[str, Path], sampling: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "measure", jagged)
    params = SamplingParams(max_tokens=150, ignore_eos=True, **SAMPLING[sampling])
    with build(dirs) as llm:
        ids = [llm._submit(*llm._prepare(p, params)) for p in PROMPTS]
        for _ in range(12):
            llm._engine.step()
        with watch(device="cuda", name="schedule") as report:
            for _ in range(20):
                llm._engine.step()
        assert not report.findings, report.table()
        for request_id in ids:
            llm.abort(request_id)


def test_frames_that_nobody_timed_are_refused(dirs: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="cuda_graphs"):
        build(dirs, cuda_graphs=False)
