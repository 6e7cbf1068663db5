"""What a trained head accepts does not depend on pages, chunks, prefix hits, preemption, neighbours or run-ahead.

A lossless verifier hides a drafter whose cache went wrong somewhere; acceptance shows it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.draft.eagle3 import Eagle3Drafter
from slipstream.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def cases(golden_dir: Path) -> list[dict[str, Any]]:
    return json.loads((golden_dir / "e2e_eagle3" / "expected.json").read_text())["prompts"]


@pytest.fixture(scope="module", params=["chain", "tree"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


KINDS: dict[str, dict[str, Any]] = {
    "chain": {"num_drafts": 4},
    "tree": {"draft_tree": {"topk": 4, "levels": 4, "total": 16}},
}


def build(golden_dir: Path, kind: str, **options: Any) -> LLM:
    options = {"dtype": "float64", "max_model_len": 128, **KINDS[kind], **options}
    return LLM(model=str(golden_dir / "e2e_target"), draft=str(golden_dir / "e2e_eagle3"), **options)


def seen(outs: list[RequestOutput]) -> list[tuple[list[int], int, list[int]]]:
    return [(o.outputs[0].token_ids, o.spec.rounds, o.spec.accepted_per_position) for o in outs]


@pytest.fixture(scope="module")
def plain(golden_dir: Path, kind: str, cases: list[dict[str, Any]]) -> list[tuple[list[int], int, list[int]]]:
    """Each prompt alone, one page size above everything, no cache."""
    with build(golden_dir, kind, page_size=128, prefix_cache=False) as llm:
        found = [seen(llm.generate(c["prompt_ids"], GREEDY))[0] for c in cases]
    assert [f[0] for f in found] == [c["output_ids"] for c in cases]
    for (_, rounds, _), case in zip(found, cases, strict=True):
        assert 48 / rounds > 0.9 * case[kind]["mean_emitted_per_round"] > 2
    return found


@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize(("chunk", "run_ahead"), [(3, 1), (256, 2), (5, 8)])
def test_in_a_batch_and_from_the_prefix_cache(
    golden_dir: Path, kind: str, cases: list[dict[str, Any]], plain: Any, page_size: int, chunk: int, run_ahead: int
) -> None:
    prompts = [c["prompt_ids"] for c in cases]
    with build(golden_dir, kind, page_size=page_size, prefill_chunk=chunk, run_ahead=run_ahead) as llm:
        assert seen(llm.generate(prompts, GREEDY)) == plain
        # Again: now most of each prompt is a prefix hit whose last row the head needs the target for.
        assert seen(llm.generate(prompts, GREEDY)) == plain
        assert llm.stats()["counters"]["cached_prompt_tokens"] > 0
        llm.check_idle()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_conversation_goes_on_from_its_cached_answer(
    golden_dir: Path, kind: str, cases: list[dict[str, Any]], page_size: int
) -> None:
    """The cached pages of an answer hold the head's rows too, those of its last round included."""
    longer = [c["prompt_ids"] + c["output_ids"][:n] for c, n in zip(cases, (20, 33, 41), strict=True)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with build(golden_dir, kind, page_size=page_size, prefix_cache=False) as llm:
        want = seen([llm.generate(p, params)[0] for p in longer])
    with build(golden_dir, kind, page_size=page_size) as llm:
        for case, n in zip(cases, (20, 33, 41), strict=True):
            llm.generate(case["prompt_ids"], SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))
        assert seen([llm.generate(p, params)[0] for p in longer]) == want


def test_two_branches_of_one_cached_prompt(golden_dir: Path, kind: str, cases: list[dict[str, Any]]) -> None:
    """What follows a shared page differs; the shared rows must not depend on who came first."""
    stem = cases[2]["prompt_ids"][:16]
    branches = [stem + c["prompt_ids"][:9] for c in cases]
    with build(golden_dir, kind, page_size=8, prefix_cache=False) as llm:
        want = seen([llm.generate(b, GREEDY)[0] for b in branches])
    with build(golden_dir, kind, page_size=8) as llm:
        assert seen([llm.generate(b, GREEDY)[0] for b in branches]) == want
        assert seen(llm.generate(branches[::-1], GREEDY)) == want[::-1]


@pytest.mark.parametrize("run_ahead", [1, 2])
def test_under_preemption(golden_dir: Path, kind: str, cases: list[dict[str, Any]], plain: Any, run_ahead: int) -> None:
    """Rounds begin elsewhere after a preemption, so only the tokens and the mean acceptance must hold."""
    prompts = [c["prompt_ids"] for c in cases] * 2
    with build(golden_dir, kind, page_size=4, num_pages=40, run_ahead=run_ahead, max_model_len=100) as llm:
        outs = llm.generate(prompts, GREEDY)
        assert llm.stats()["counters"]["preemptions"] > 0
        llm.check_idle()
    assert [o.outputs[0].token_ids for o in outs] == [p[0] for p in plain] * 2
    rounds = sum(o.spec.rounds for o in outs)
    assert rounds < 1.1 * 2 * sum(p[1] for p in plain)


def test_the_reread_row_is_needed(
    golden_dir: Path, kind: str, cases: list[dict[str, Any]], plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without it the head's cache has a hole behind every prefix hit, and less is accepted."""
    monkeypatch.setattr(Eagle3Drafter, "rereads", 0)
    with build(golden_dir, kind, page_size=4) as llm:
        first, again = (seen(llm.generate([c["prompt_ids"] for c in cases], GREEDY)) for _ in range(2))
    assert first == plain and again != plain
    assert [a[0] for a in again] == [p[0] for p in plain]
