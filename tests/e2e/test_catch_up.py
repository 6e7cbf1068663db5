"""Drafters with a cache of their own after frames without drafting: their cache is as if they had never paused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.engine.adaptive import Adaptive
from tests.support.block_draft import write_block_draft
from tests.support.eagle import write_eagle3
from tests.support.kit import tiny_model_dir
from tests.support.mtp import add_mtp

PROMPTS = [[5, 6, 7, 8, 9], [9] * 20, [1, 2], [30, 31, 32]]


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("catch_up")
    target = add_mtp(tiny_model_dir(root / "target", seed=1))
    return {
        "target": target, "itself": target, "mtp": Path("mtp"),
        "eagle3": write_eagle3(root / "eagle3", target, draft_vocab=24),
        "dflash": write_block_draft(root / "dflash", target, "dflash"),
        "dspark": write_block_draft(root / "dspark", target, "dspark", head="gated"),
    }  # fmt: skip


def paused(first: int, length: int, then: int = 3) -> Callable[..., int]:
    """A choice for `Adaptive.choose`: full drafts, from frame `first` on `length` frames without, then `then`."""
    frame = iter(range(1 << 30))

    def choose(self: Adaptive, slots: int) -> int:
        n = next(frame)
        return 3 if n < first else 0 if n < first + length else then

    return choose


def build(dirs: dict[str, Path], draft: str, **options: Any) -> LLM:
    return LLM(
        str(dirs["target"]), dtype="float64", draft=str(dirs[draft]), num_drafts=3, adaptive=True,
        **{"max_model_len": 192, "max_slots": 4, **options},
    )  # fmt: skip


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
@pytest.mark.parametrize("shapes", ["exact", "buckets"])
@pytest.mark.parametrize("pause", [1, 7, 29, 30, 70])
def test_the_target_as_its_own_draft_stays_right(
    dirs: dict[str, Path], run_ahead: int, shapes: str, pause: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer pauses than the ring is wide, too: every draft that is verified is accepted."""
    monkeypatch.setattr(Adaptive, "choose", paused(4, pause))
    options = {"slot_buckets": (2, 4), "row_tiers": (1, 2, 4)} if shapes == "buckets" else {}
    with build(dirs, "itself", run_ahead=run_ahead, page_size=4, **options) as llm:
        outs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
        frames = llm.stats()["drafts"]["frames"]
        assert frames[0] == pause and frames[3] > 10
        for out in outs:
            assert out.spec.accepted == out.spec.drafted > 40
        llm.check_idle()


@pytest.mark.parametrize("draft", ["itself", "eagle3", "dflash", "dspark", "mtp"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_the_cache_is_that_of_a_drafter_that_never_paused(
    dirs: dict[str, Path], draft: str, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of every committed position, after a pause of 50 frames and a few frames of drafting."""
    caches = []
    for pause in (0, 50):
        monkeypatch.setattr(Adaptive, "choose", paused(3, pause))
        with build(dirs, draft, page_size=8) as llm:
            llm.generate([PROMPTS[0]], SamplingParams(max_tokens=100, ignore_eos=True, **sampling))
            frame = llm._built.device.frame
            assert frame.drafter is not None and frame.catch_up is not None
            assert len(frame.catch_up.rings) == len(frame.drafter.taps) + frame.drafter.reads_hidden
            table = frame.state.table_SP[1]
            positions = torch.arange(1, 95)  # a head that pairs features keeps nothing at position 0
            cells = table[positions // 8] * 8 + positions % 8
            assert bool((cells >= 8).all())
            caches.append([part[cells].clone() for layer in frame.drafter.kv.flat for part in layer])  # type: ignore[attr-defined]
            assert (llm.stats()["drafts"]["frames"].get(0, 0) == 50) == (pause == 50)
    for plain, late in zip(*caches, strict=True):
        assert float(plain.abs().min(0).values.max()) > 0
        assert torch.allclose(plain, late, rtol=1e-9, atol=1e-11)


def test_without_catching_up_the_cache_would_differ(dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: drafts of a drafter that lacks 40 positions are often wrong."""
    monkeypatch.setattr(Adaptive, "choose", paused(4, 40))
    with build(dirs, "itself") as llm:
        monkeypatch.setattr(llm._built.device.frame.catch_up, "run", lambda *a, **k: None)
        out = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))[0]
        assert out.spec.accepted < 0.9 * out.spec.drafted


def test_what_a_drafter_has_not_read_is_not_shared(dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends during a pause leaves its last positions out of the prefix cache: a later hit has no hole."""
    monkeypatch.setattr(Adaptive, "choose", paused(4, 40))
    with build(dirs, "itself", page_size=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True)
        first = llm.generate([PROMPTS[0]], params)[0]
        assert llm.stats()["drafts"]["now"] == 0
        monkeypatch.setattr(Adaptive, "choose", lambda self, slots: 3)
        again = llm.generate([PROMPTS[0] + first.outputs[0].token_ids], params)[0]
        assert llm.stats()["counters"]["cached_prompt_tokens"] >= 8
        assert again.spec.accepted == again.spec.drafted > 20
