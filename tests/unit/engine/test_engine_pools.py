"""Allocators behind one interface: pages are counted once per step, whoever grows with them (founding case 3)."""

from __future__ import annotations

import random
from typing import Any

import pytest

import slipstream.engine.pages as pages
import slipstream.engine.pools as pools
from slipstream.config import EngineConfig
from slipstream.engine.loop import EngineCore
from slipstream.engine.pools import Allocator
from slipstream.errors import ConfigError
from slipstream.types import Request, SamplingParams
from tests.support.fake_device import FakeDevice, expected
from tests.support.followers import BlockTables, HostPages

VOCAB = 31
CONFIG: dict[str, Any] = {"max_slots": 4, "page_size": 4, "num_pages": 40, "max_model_len": 60, "num_drafts": 3}


def engine_with(*allocators: Allocator, **options: Any) -> tuple[EngineCore, FakeDevice]:
    config = EngineConfig(**{**CONFIG, **options})
    device = FakeDevice(
        num_drafts=config.num_drafts, page_size=config.page_size, run_ahead=config.run_ahead, vocab=VOCAB,
        drafts=lambda key, position: (3, position % 4),
    )  # fmt: skip
    device.allocators = allocators  # type: ignore[attr-defined]
    return EngineCore(config, device), device


def requests(n: int) -> list[Request]:
    rng = random.Random(n)
    stem = tuple(rng.randrange(VOCAB) for _ in range(20))
    params = SamplingParams(temperature=0.0, max_tokens=None)
    return [
        Request(
            request_id=str(i), prompt_token_ids=(*stem[: rng.randrange(1, 20)], i), params=params,
            max_len=rng.randrange(30, 60),
        )
        for i in range(n)
    ]  # fmt: skip


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
def test_one_count_serves_every_allocator(monkeypatch: pytest.MonkeyPatch, run_ahead: int) -> None:
    """However many allocators there are: one count per extension, and at most one extension in a decode step."""
    counted = 0
    count = pages.pages_for_extension

    def counting(*args: Any) -> int:
        nonlocal counted
        counted += 1
        return count(*args)

    monkeypatch.setattr(pages, "pages_for_extension", counting)
    monkeypatch.setattr(pools, "pages_for_extension", counting)
    host, platform = HostPages(40, 4), BlockTables(48, 4)
    engine, device = engine_with(host, platform, run_ahead=run_ahead)
    ledger = engine.scheduler.ledger
    todo, got = requests(9), dict[str, list[int]]()
    for r in todo:
        engine.add(r)
    steady = 0
    while engine.has_work:
        before, launches = counted, len(device.plans)
        for event in engine.step():
            got.setdefault(event.request_id, []).extend(event.tokens)
        engine.scheduler.check()
        plan = device.plans[-1] if len(device.plans) > launches else None
        if plan is not None and not plan.admits and not engine.scheduler.waiting:
            assert bool(plan.pages) <= counted - before <= 1
            steady += bool(plan.pages)
    assert steady > 5
    assert counted == ledger.pools.counted
    assert host.counts == platform.counts and None not in host.counts
    assert len(host.counts) <= counted, "a count that found too few pages extends nothing"
    assert got == {r.request_id: expected(r, VOCAB)[0] for r in todo}
    engine.check_idle()
    assert host.num_free == host.num_pages and platform.num_free == platform.num_pages


def test_followers_never_run_out_first() -> None:
    """Under pressure, with preemptions and a prefix cache, as many pages as the engine's own are enough."""
    host = HostPages(19, 4)
    engine, _ = engine_with(host, num_pages=19)
    for r in requests(12):
        engine.add(r)
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert engine.metrics.snapshot()["counters"]["preemptions"] > 0
    engine.check_idle()


def test_a_follower_that_keeps_a_page_is_noticed() -> None:
    class Leaky(BlockTables):
        def close(self, slot: int) -> list[int]:
            super().close(slot)
            self.blocks.pop()
            return []

    engine, _ = engine_with(Leaky(40, 4))
    engine.add(requests(1)[0])
    with pytest.raises(AssertionError, match="Leaky: 39 of 40 pages are free with no slot open"):
        engine.check_idle()


def test_mixed_page_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="HostPages has pages of 8 tokens and the engine page_size=4"):
        engine_with(HostPages(40, 8))
    with pytest.raises(ConfigError, match="BlockTables has 39 pages and the engine num_pages=40"):
        engine_with(BlockTables(39, 4))
