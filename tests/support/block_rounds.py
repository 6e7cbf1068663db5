"""Rounds of trained DFlash and DSpark drafters against those that a reference implementation recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream import LLM, SamplingParams
from slipstream.types import TokenEvent

RUNS = {
    "dflash": ("e2e_dflash", {}),
    "dspark": ("e2e_dspark", {}),
    "dspark_threshold": ("e2e_dspark", {"confidence_threshold": 0.3}),
}


def build(golden_dir: Path, case: str, options: dict[str, Any], **engine: Any) -> LLM:
    return LLM(
        model=str(golden_dir / "e2e_target"), draft=str(golden_dir / case), draft_options=options,
        dtype="float32", max_model_len=160, **engine,
    )  # fmt: skip


def rounds_of(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[TokenEvent]]:
    """The tokens, and one event per round."""
    events: list[TokenEvent] = []
    step = llm._engine.step

    def listening() -> list[TokenEvent]:
        got = step()
        events.extend(got)
        return got

    llm._engine.step = listening  # type: ignore[method-assign]
    try:
        out = llm.generate(prompt, params)
    finally:
        llm._engine.step = step  # type: ignore[method-assign]
    return out[0].outputs[0].token_ids, [e for e in events if e.drafted is not None]


def recorded_rounds(golden_dir: Path, name: str, **engine: Any) -> None:
    """Asserts that a run's rounds are the recorded ones. engine: options of it.

    Where counts come late (confidences of earlier frames decide, as losslessness asks), only the tokens are.
    """
    case, options = RUNS[name]
    expected = json.loads((golden_dir / case / "expected.json").read_text())
    with build(golden_dir, case, options, **engine) as llm:
        for prompt in expected["prompts"]:
            # Longer than recorded, because the recorded last round is not shortened.
            params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
            tokens, rounds = rounds_of(llm, prompt["prompt_ids"], params)
            assert tokens[:48] == prompt["output_ids"]
            if llm._engine.config.late_counts:
                assert options and all(e.accepted <= e.drafted for e in rounds if e.drafted is not None)
                continue
            want = prompt[name]["rounds"]
            got = rounds[: len(want)]
            assert [(len(w["draft"]), w["accepted"], w["emitted"]) for w in want] == [
                (e.drafted, e.accepted, list(e.tokens)) for e in got
            ]
        llm.check_idle()
