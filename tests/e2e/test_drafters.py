"""What a drafter must achieve, not only that it does no harm: a lossless verifier hides a wrong drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.support.kit import tiny_model_dir


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("run_ahead", [1, 2, 8])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0}], ids=str
)
def test_the_target_as_its_own_draft_is_always_right(
    tmp_path: Path, page_size: int, run_ahead: int, sampling: dict[str, Any]
) -> None:
    """Its cache is right after full acceptance, and pages reach as far as it writes: every draft is accepted."""
    target = str(tiny_model_dir(tmp_path / "m", seed=1))
    with LLM(
        model=target, dtype="float64", draft=target, num_drafts=3, page_size=page_size, run_ahead=run_ahead,
        max_model_len=96, max_slots=4,
    ) as llm:  # fmt: skip
        params = SamplingParams(max_tokens=41, ignore_eos=True, **sampling)
        outs = llm.generate([[5, 6, 7], [9] * 20, [1, 2], [30, 31]], params)
        for out in outs:
            assert len(out.outputs[0].token_ids) == 41
            # 1 token from prefill, then 10 rounds of 4.
            assert (out.spec.rounds, out.spec.accepted, out.spec.drafted) == (10, 30, 30)
            assert out.spec.accepted_per_position == [10, 10, 10]
        llm.check_idle()


def test_ngram_stops_drafting_where_nothing_is_accepted(tmp_path: Path) -> None:
    """Random sampling at high temperature: matches are noise, and the gate turns drafting off."""
    target = str(tiny_model_dir(tmp_path / "m", seed=1))
    drafted = {}
    for gate in (True, False):
        with LLM(model=target, draft="ngram", max_model_len=400, draft_options={"gate": gate, "min_n": 1}) as llm:
            params = SamplingParams(temperature=50.0, seed=1, max_tokens=300, ignore_eos=True)
            drafted[gate] = llm.generate([[5, 6, 7]], params)[0].spec.drafted
    assert drafted[True] < 0.25 * drafted[False]
