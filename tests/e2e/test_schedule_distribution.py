"""Unseeded sampling under confidence scheduling keeps the target's law, where confidences give drafts away.

Exact laws and sample sizes as in test_distribution.py; tests/unit/verify/test_schedule_laws.py enumerates one round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.config import EngineConfig
from slipstream.device import costs
from slipstream.engine.budget import Schedule
from slipstream.engine.sequence import Sequence
from slipstream.types import SURVIVAL_ONE
from tests.e2e.test_distribution import ALPHA, SAMPLES, TOKENS, VOCAB, chi_square_p, exact_law, sample
from tests.support.steered import steered
from tests.support.tiny import write_tiny_checkpoint

DRAFTS, TELL = 3, 1


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 1, "intermediate_size": 32, "spread": 1.0}
    return write_tiny_checkpoint(tmp_path_factory.mktemp("law") / "t", seed=7, **small)


def either_or(frame: Any, engine: EngineConfig, graphs: Any) -> costs.RowSeconds:
    """A row beyond one per slot costs half a frame, all further ones nothing: confident slots pay, others do not."""
    return tuple((s, rows, 1.0 if rows == s else 1.5) for s, rows in costs.points(engine))


def build(target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **options: Any) -> LLM:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "measure", either_or)
    law_KV = torch.tensor([[0.08, 0.46, 0.08, 0.38]] * DRAFTS)
    return LLM(
        model=str(target), draft=steered(law_KV, TELL), num_drafts=DRAFTS, confidence_schedule=True, page_size=1,
        max_model_len=16, **{"max_slots": 64, **options},
    )  # fmt: skip


def p_value(llm: LLM, count: int) -> float:
    """Of all six tokens, or of the first three where samples are few."""
    params = SamplingParams(temperature=1.0, n=64, max_tokens=TOKENS, ignore_eos=True)
    cells, accepted = sample(llm, params, count)
    assert accepted > count // 8, "the test needs accepted drafts"
    law = exact_law(llm, params)
    if count < SAMPLES // 4:
        cells, law = (x.reshape(VOCAB**3, -1).sum(1) for x in (cells, law))
    return chi_square_p(cells, law)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        pytest.param({"run_ahead": 1}, SAMPLES, marks=pytest.mark.slow),
        ({"run_ahead": 2, "verifier": "block"}, SAMPLES),
        ({"max_slots": 1}, 512),
    ],
    ids=["D1", "D2-block", "alone"],
)
def test_law_is_the_targets(
    target: Path, options: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with build(target, monkeypatch, tmp_path, **options) as llm:
        assert p_value(llm, count) > ALPHA
        spec = llm._engine.metrics.spec
        assert 0.1 * DRAFTS * spec.rounds < spec.drafted < 0.95 * DRAFTS * spec.rounds
        llm.check_idle()


def test_lengths_that_look_ahead_are_noticed(target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Negative control: all drafts of a slot where its last one looks good, else none."""

    def ahead(active_S: Any, draft_count_S: Any, survival_SK: Any, slot_B: Any, rows: int, width: int) -> None:
        sure_B = survival_SK[slot_B, -1] > SURVIVAL_ONE // 10
        draft_count_S[slot_B] = torch.where(sure_B, draft_count_S[slot_B].clamp(max=width - 1), 0) * active_S[slot_B]

    monkeypatch.setattr("slipstream.device.frame.allot", ahead)
    monkeypatch.setattr(Schedule, "choose", lambda self, known, most: (3 * len(known), 4 * len(known), 4))
    with build(target, monkeypatch, tmp_path) as llm:
        assert p_value(llm, 1024) < ALPHA


def test_a_budget_from_current_confidences_is_noticed(
    target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Negative control: the budget of a lone slot knows the drafts that it is for."""
    monkeypatch.setattr(Sequence, "noted", lambda self, wanted, survival: setattr(self, "survival", survival))
    with build(target, monkeypatch, tmp_path, max_slots=1) as llm:
        assert p_value(llm, 512) < ALPHA
