"""`speculative` per request: drafts for some, none for others, the same tokens for all."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.errors import InvalidRequestError
from tests.support.kit import perturb, tiny_model_dir
from tests.support.reference import DenseReference

PROMPTS = [[5, 6, 7, 5, 6], [9] * 20, [1, 2, 1, 2, 1], [30, 31]]


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("off")
    target = tiny_model_dir(root / "target", seed=1)
    return {"target": str(target), "model": str(perturb(target, root / "draft", scale=0.02))}


def build(dirs: dict[str, str], draft: str | None, **options: Any) -> LLM:
    named = dirs.get(draft, draft) if draft else None
    return LLM(dirs["target"], dtype="float64", draft=named, max_model_len=96, max_slots=4, **options)


@pytest.mark.parametrize("draft", ["ngram", "suffix", "model"])
@pytest.mark.parametrize("run_ahead", [1, 2, 8])
@pytest.mark.parametrize("shapes", ["exact", "buckets"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "seeded"])
def test_each_request_has_its_own_number_of_drafts(
    dirs: dict[str, str], draft: str, run_ahead: int, shapes: str, sampling: dict[str, Any]
) -> None:
    options = {"slot_buckets": (2, 4), "row_tiers": (1, 2, 4)} if shapes == "buckets" else {}
    asked: list[int | str | None] = ["off", None, 1, 0]
    with build(dirs, draft, run_ahead=run_ahead, num_drafts=3, **options) as llm:
        reference = DenseReference(llm._built.model)
        params = [SamplingParams(max_tokens=20 + 8 * i, ignore_eos=True, speculative=k, **sampling)
                  for i, k in enumerate(asked)]  # fmt: skip
        outs = llm.generate(PROMPTS, params)
        for prompt, p, out in zip(PROMPTS, params, outs, strict=True):
            assert out.outputs[0].token_ids == reference.continuation(tuple(prompt), p)
        assert [o.num_drafts for o in outs] == [0, 3, 1, 0]
        assert [o.spec.drafted > 0 for o in outs] == [False, True, True, False] or draft != "model"
        assert max((d for d, *_ in outs[2].spec.counts), default=0) <= 1
        assert outs[0].spec.drafted == outs[3].spec.drafted == 0
        # The last request runs alone at the end: frames without a drafting stage, unless the drafter has KV to fill.
        frames = llm.stats()["drafts"]["frames"]
        assert set(frames) == ({3} if draft == "model" else {0, 3})
        llm.check_idle()


def test_off_runs_no_drafter(dirs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with build(dirs, "ngram") as llm:
        drafter = llm._built.device.frame.drafter
        assert drafter is not None
        calls, real = [], drafter.propose
        monkeypatch.setattr(drafter, "propose", lambda *a: calls.append(1) or real(*a))
        llm.generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, speculative="off"))
        assert len(calls) <= 2, "only where a prompt ends"
        assert llm.stats()["drafts"] == {"now": 0, "frames": {0: 29}}


@pytest.mark.parametrize("value", ["on", -1, 2.5, True, 99])
def test_bad_values_are_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="speculative="):
        SamplingParams(speculative=value)


def test_more_than_the_engine_makes_is_refused(dirs: dict[str, str]) -> None:
    with build(dirs, "ngram", num_drafts=2) as llm, pytest.raises(InvalidRequestError, match=r"speculative=3.* 2"):
        llm.generate([[1, 2]], SamplingParams(speculative=3))
    with build(dirs, None) as llm:
        with pytest.raises(InvalidRequestError, match="speculative=1, but the engine has no drafter"):
            llm.generate([[1, 2]], SamplingParams(speculative=1))
        assert llm.generate([[1, 2]], SamplingParams(speculative="off", max_tokens=3, ignore_eos=True))[0].finished
