"""Adaptive drafting in the whole engine: the tokens are plain decoding's whatever it chooses, and the choice shows."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.device import costs
from slipstream.engine.adaptive import Adaptive
from slipstream.errors import ConfigError, ModelLoadError
from tests.support.block_draft import write_block_draft
from tests.support.eagle import write_eagle3
from tests.support.kit import VOCAB, perturb, tiny_model_dir
from tests.support.mtp import add_mtp
from tests.support.reference import DenseReference

DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"min_n": 1, "gate": False}, "suffix": {"offset": 1.0}, "model": {}, "eagle3": {}, "mtp": {}, "dspark": {},
}  # fmt: skip
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.9, "seed": 5}}
CELLS = [
    *itertools.product([d for d in DRAFTS if d != "mtp"], (1, 2, 8), ("exact", "buckets", "padded"), SAMPLING),
    # As EAGLE-3, but for what it reads of the target.
    ("mtp", 2, "buckets", "seeded"), ("mtp", 8, "padded", "greedy"),
]  # fmt: skip


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adaptive")
    target = add_mtp(tiny_model_dir(root / "target", seed=1))
    return {
        "target": target,
        "model": perturb(target, root / "draft", scale=0.02),
        "eagle3": write_eagle3(root / "eagle3", target, draft_vocab=24),
        "dspark": write_block_draft(root / "dspark", target, "dspark", head="gated"),
    }


def build(dirs: dict[str, Path], draft: str, **options: Any) -> LLM:
    return LLM(
        str(dirs["target"]), dtype="float64", draft=str(dirs.get(draft, draft)), adaptive=True,
        **{"max_slots": 4, "max_model_len": 160, **options},
    )  # fmt: skip


@pytest.mark.parametrize(("draft", "run_ahead", "shapes", "sampling"), CELLS, ids=str)
def test_tokens_do_not_depend_on_what_is_chosen(
    dirs: dict[str, Path], draft: str, run_ahead: int, shapes: str, sampling: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The mode jumps at random, wilder than any measurement would make it."""
    shape: dict[str, Any] = {
        "exact": {}, "buckets": {"slot_buckets": (2, 4), "row_tiers": (1, 2, 4)},
        "padded": {"slot_buckets": (4,), "row_tiers": (4,)},
    }[shapes]  # fmt: skip
    rng = random.Random(f"{draft}{run_ahead}{shapes}")
    monkeypatch.setattr(Adaptive, "choose", lambda self, slots: rng.choice(self.modes))
    with build(
        dirs, draft, num_drafts=3, run_ahead=run_ahead, page_size=4, draft_options=DRAFTS[draft], **shape
    ) as llm:
        reference = DenseReference(llm._built.model)
        prompts = [[rng.randrange(VOCAB) for _ in range(3 + 5 * i)] * 2 for i in range(6)]
        params = [
            SamplingParams(
                max_tokens=20 + 5 * i, ignore_eos=True, speculative=(None, 1)[i % 3 == 2], **SAMPLING[sampling]
            )
            for i in range(6)
        ]
        outs = llm.generate(prompts, params)
        for prompt, p, out in zip(prompts, params, outs, strict=True):
            assert out.outputs[0].token_ids == reference.continuation(tuple(prompt), p)
        assert sum(o.spec.drafted for o in outs) > 0
        assert set(llm.stats()["drafts"]["frames"]) == set(llm._built.engine_config.draft_modes)
        llm.check_idle()


def test_a_draft_that_is_never_right_is_turned_off(dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is sampled, so nothing is accepted; frames take a tenth longer per draft, on a clock that is set here."""
    real, seen = Adaptive.collected, list[float]()

    def timed(self: Adaptive, seq: int, rounds: Any, seconds: float) -> None:
        seen.append(seconds)
        mode = self._launches[0].key[1] if self._launches and self._launches[0].seq == seq else 0
        real(self, seq, rounds, 1.0 + 0.1 * mode)

    monkeypatch.setattr(Adaptive, "collected", timed)
    options = {"min_n": 1, "gate": False}
    with build(dirs, "ngram", draft_options=options, max_model_len=500, num_drafts=3) as llm:
        out = llm.generate([[1, 2, 3]], SamplingParams(temperature=50.0, seed=1, max_tokens=480, ignore_eos=True))[0]
        frames = llm.stats()["drafts"]["frames"]
        assert frames[0] > 0.8 * sum(frames.values()) and sum(frames.values()) == out.spec.rounds, frames
        assert llm.stats()["drafts"]["now"] in (0, 1)
        assert set(llm._engine.scheduler.adaptive.rates(1)) >= {0, 1}  # type: ignore[union-attr]
    assert min(seen) > 0, "on a CPU every launch says what it took"


def test_a_trained_draft_brings_what_to_expect(
    dirs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its acceptance comes from config.json; frames are timed once, and the first may draft already."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))

    def start(acceptance: Any) -> LLM:
        draft = tmp_path / "draft"
        write_eagle3(draft, dirs["target"], draft_vocab=24, slipstream_training={"acceptance": acceptance})
        return build({**dirs, "eagle3": draft}, "eagle3", num_drafts=3)

    timed = list[Any]()
    real = costs.measure_modes
    monkeypatch.setattr(costs, "measure_modes", lambda *a: timed.append(real(*a)) or timed[-1])
    with start([0.9, 0.8]) as llm:
        config = llm._built.engine_config
        assert config.draft_acceptance == (0.9, 0.8) and config.mode_seconds == timed[0]
        assert [(slots, drafts) for slots, drafts, _ in timed[0]] == [(1, k) for k in config.draft_modes]
        adaptive = llm._engine.scheduler.adaptive
        assert adaptive is not None and set(adaptive.rates(1)) == set(config.draft_modes)
        expected = [1, 1.9, 1.9 + 0.72, 1.9 + 0.72 + 0.576]
        assert adaptive.acceptance.tokens() == pytest.approx(expected)
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        want = DenseReference(llm._built.model).continuation((5, 6, 7), params)
        assert llm.generate([5, 6, 7], params)[0].outputs[0].token_ids == want
        llm.check_idle()
    with start([0.9, 0.8]) as llm:
        assert len(timed) == 1 and llm._built.engine_config.mode_seconds == timed[0], "the table is kept"
    with start([]) as llm:
        assert llm._built.engine_config.mode_seconds == ()
    for wrong in ([1.2], "high", [True]):
        with pytest.raises(ModelLoadError, match=r"slipstream_training\.acceptance=.* shares from 0 to 1"):
            start(wrong)


def test_bad_options(dirs: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"adaptive=True .*draft"):
        LLM(str(dirs["target"]), adaptive=True)
    with pytest.raises(ConfigError, match=r"adaptive=True .*draft_tree"):
        build(dirs, "eagle3", draft_tree={"topk": 2, "levels": 2, "total": 4})
    with pytest.raises(ConfigError, match="adaptive='yes'"):
        LLM(str(dirs["target"]), draft="ngram", adaptive="yes")
