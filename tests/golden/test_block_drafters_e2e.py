"""Trained DFlash and DSpark drafters through the whole engine: recorded rounds, plain output in every layout."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.support.block_rounds import RUNS, build, recorded_rounds


@pytest.mark.parametrize("name", list(RUNS))
def test_recorded_rounds(golden_dir: Path, name: str) -> None:
    recorded_rounds(golden_dir, name, max_slots=2)


def requests(golden_dir: Path, case: str) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [p["prompt_ids"] for p in json.loads((golden_dir / case / "expected.json").read_text())["prompts"]]
    prompts += [prompts[0] + prompts[1][:5], prompts[2][:-1]]
    return prompts, [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=5, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=6, top_p=0.9, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0.6, seed=7, min_p=0.02, max_tokens=30, ignore_eos=True),
    ]


@functools.cache
def accepted_alone(golden_dir: Path, name: str) -> list[int]:
    """Accepted drafts of each request, one at a time, whole prompts, no cache."""
    case, options = RUNS[name]
    prompts, params = requests(golden_dir, case)
    with build(golden_dir, case, options, max_slots=1, prefix_cache=False) as llm:
        return [llm.generate(p, s)[0].spec.accepted for p, s in zip(prompts, params, strict=True)]


@pytest.mark.parametrize(
    ("page_size", "chunk", "event", "run_ahead"),
    [(1, 3, "none", 8), (16, 256, "preempt", 2), (16, 5, "preempt", 8), (4, 5, "abort", 1), (4, 256, "abort", 2)],
)
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_plain_output_in_every_layout(
    golden_dir: Path, name: str, page_size: int, chunk: int, event: str, run_ahead: int
) -> None:
    """Greedy, seeded and filtered requests together; a prefix hit; chunks; pressure; an abort."""
    case, options = RUNS[name]
    prompts, params = requests(golden_dir, case)
    engine: dict[str, Any] = {"page_size": page_size, "prefill_chunk": chunk, "max_slots": 3, "run_ahead": run_ahead}
    if event == "preempt":
        engine["num_pages"] = -(-(160 + 16) // page_size) + 2
    model = str(golden_dir / "e2e_target")
    with LLM(model=model, dtype="float32", max_model_len=160) as plain:
        want = [o.outputs[0].token_ids for o in plain.generate(prompts, params)]
    with build(golden_dir, case, options, **engine) as llm:
        llm.generate(prompts[0], params[0])  # the second time its pages come from the cache
        if event == "abort":
            victim = llm.stream(prompts[1], params[1])
            next(victim)
            victim.close()
        outs = llm.generate(prompts, params)
        assert [o.outputs[0].token_ids for o in outs] == want
        # A drafter that has lost its context drafts blindly, so what it is worth must not depend on the layout either.
        accepted, alone = [o.spec.accepted for o in outs], accepted_alone(golden_dir, name)
        if event == "preempt":  # who is preempted begins his rounds elsewhere
            assert 0.7 * sum(alone) < sum(accepted) < 1.3 * sum(alone)
        else:
            assert accepted == alone
        llm.check_idle()


def test_control_shuffled_features_accept_less(golden_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context matters: with the features of other positions the same drafter loses most of its acceptance."""
    from slipstream.draft.block_model import BlockModel

    real = BlockModel.context

    def rolled(self: BlockModel, taps: Any, pos_R: Any) -> Any:
        return real(self, [tap_RH.roll(7, 1) for tap_RH in taps], pos_R)

    lengths = {}
    for shuffled in (False, True):
        if shuffled:
            monkeypatch.setattr(BlockModel, "context", rolled)
        for name in ("dflash", "dspark"):
            case, options = RUNS[name]
            prompts = requests(golden_dir, case)[0][:3]
            with build(golden_dir, case, options) as llm:
                outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True))
                emitted = sum(o.spec.emitted for o in outs)
                lengths[name, shuffled] = emitted / sum(o.spec.rounds for o in outs)
    for name in ("dflash", "dspark"):
        assert lengths[name, False] > 1.5 * lengths[name, True], lengths
