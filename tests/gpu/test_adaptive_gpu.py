"""Adaptive drafting on a GPU: frames without a drafting stage, catching up, and the choice, all as captured graphs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.audit import watch
from slipstream.engine.adaptive import Adaptive
from slipstream.errors import ConfigError
from tests.support.block_draft import write_block_draft
from tests.support.eagle import write_eagle3
from tests.support.mtp import add_mtp
from tests.support.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

BIG = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
}  # fmt: skip
PROMPTS = [[5, 6, 7] * 10, [9] * 20, [1, 2], list(range(30, 70))]
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.8, "seed": 3}}


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    target = add_mtp(write_tiny_checkpoint(root / "target", "llama", seed=1, **BIG))
    return {
        "target": target, "itself": target, "eagle3": write_eagle3(root / "eagle3", target, draft_vocab=24),
        "dspark": write_block_draft(root / "dspark", target, "dspark", head="gated"),
    }  # fmt: skip


def build(dirs: dict[str, Path], draft: str | None, **options: Any) -> LLM:
    named = None if draft is None else str(dirs.get(draft, draft))
    more = {} if draft is None else {"num_drafts": 3, "adaptive": True}
    return LLM(
        str(dirs["target"]), device="cuda", dtype="float32", draft=named,
        **{"max_slots": 4, "max_model_len": 192, **more, **options},
    )  # fmt: skip


@pytest.mark.parametrize("draft", ["ngram", "suffix", "itself", "eagle3", "dspark", "mtp"])
@pytest.mark.parametrize("run_ahead", [1, 2, 8])
@pytest.mark.parametrize("sampling", list(SAMPLING))
def test_tokens_do_not_depend_on_what_is_chosen(
    dirs: dict[str, Path], draft: str, run_ahead: int, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [
        SamplingParams(max_tokens=60 + 9 * i, ignore_eos=True, speculative=(None, 1)[i == 2], **SAMPLING[sampling])
        for i in range(4)
    ]
    rng = random.Random(f"{draft}{run_ahead}")
    plain = [SamplingParams(max_tokens=p.max_tokens, ignore_eos=True, **SAMPLING[sampling]) for p in params]
    with build(dirs, None) as llm:
        want = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, plain)]
    monkeypatch.setattr(Adaptive, "choose", lambda self, slots: rng.choice(self.modes))
    with build(dirs, draft, run_ahead=run_ahead) as llm:
        outs = llm.generate(PROMPTS, params)
        assert [o.outputs[0].token_ids for o in outs] == want
        assert set(llm.stats()["drafts"]["frames"]) == {0, 1, 3}
        llm.check_idle()


@pytest.mark.parametrize("pause", [1, 29, 70])
def test_the_target_as_its_own_draft_stays_right(
    dirs: dict[str, Path], pause: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32, TF32 off: drafts come from the same numbers, but for rounding."""
    frame = iter(range(1 << 30))
    monkeypatch.setattr(Adaptive, "choose", lambda self, slots: 0 if 4 <= next(frame) < 4 + pause else 3)
    with build(dirs, "itself") as llm:
        outs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=140, ignore_eos=True))
        assert llm.stats()["drafts"]["frames"][0] == pause
        drafted, accepted = (sum(getattr(o.spec, name) for o in outs) for name in ("drafted", "accepted"))
        assert accepted > 0.99 * drafted > 100


@pytest.mark.parametrize("draft", ["ngram", "suffix", "itself", "eagle3", "mtp"])
def test_switching_never_waits(dirs: dict[str, Path], draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice as the engine makes it, then one that jumps: no finding under the watch in either."""
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with build(dirs, draft, max_model_len=400) as llm:
        assert llm._built.engine_config.frame_seconds, "captured frames were timed"
        ids = [llm._submit(*llm._prepare(p, params)) for p in PROMPTS]
        for _ in range(12):
            llm._engine.step()
        with watch(device="cuda", name="adaptive") as report:
            for _ in range(12):
                llm._engine.step()
            rng = random.Random(1)
            monkeypatch.setattr(Adaptive, "choose", lambda self, slots: rng.choice(self.modes))
            for _ in range(12):
                llm._engine.step()
        assert not report.findings, report.table()
        for request_id in ids:
            llm.abort(request_id)


def test_frames_that_nobody_timed_are_refused(dirs: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="cuda_graphs"):
        build(dirs, "ngram", cuda_graphs=False)
