"""Short cuts of steady frames: plans, events, statistics and lengths are those that looking at every slot gives."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slipstream.config import EngineConfig
from slipstream.engine.collect import Collector
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.sequence import Sequence
from slipstream.types import FrameResult, Request, SamplingParams, TokenEvent
from tests.support.engine_scenarios import Client, Scenario, draw_scenario, run_scenario


def scenarios(seeds: int) -> Iterator[Scenario]:
    """Short ones with everything in them, and a few of many frames, which come to the end of pages and of lengths."""
    for seed in range(seeds // 30):
        yield few_pages(random.Random(seed))
    for seed in range(seeds):
        yield draw_scenario(random.Random(seed).randint, (1, 2, 8)[seed % 3], (1, 4, 16)[seed // 3 % 3])
    for seed in range(seeds // 10):
        yield long(random.Random(seed))


def long(rng: random.Random) -> Scenario:
    k, context = rng.choice((0, 0, 3)), 180
    config = EngineConfig(
        max_slots=6, page_size=4, num_pages=rng.choice((120, 300)), max_model_len=context, num_drafts=k,
        run_ahead=rng.choice((1, 2, 4)), adaptive=bool(k) and rng.random() < 0.3,
        **rng.choice(({}, {"slot_buckets": (2, 4, 8), "row_tiers": tuple(sorted({1, k + 1}))})),  # type: ignore[arg-type]
    )  # fmt: skip
    clients = []
    for i in range(8):
        n, ack = rng.randint(2, 30), rng.random() < 0.4
        request = Request(
            request_id=f"r{i}", prompt_token_ids=tuple(rng.randrange(90) for _ in range(n)), key=i, needs_ack=ack,
            params=SamplingParams(temperature=0.0, max_tokens=None), max_len=rng.randint(n + 40, context),
            num_drafts=rng.choice((None, None, 1)) if k else None,
        )  # fmt: skip
        client = Client(request, arrives=rng.choice((0, 0, 5, 12)), lag=rng.randint(0, 2))
        if ack and rng.random() < 0.5:
            client.cut_at = rng.randint(1, 90)
        elif rng.random() < 0.2:
            client.abort_at = client.arrives + rng.randint(1, 60)
        clients.append(client)
    return Scenario(config, 97, rng.randrange(10_000), clients)


def few_pages(rng: random.Random) -> Scenario:
    """Slots are sent away while frames with fewer rows than they could have are in flight, so no end is near."""
    config = EngineConfig(
        max_slots=6, page_size=4, num_pages=rng.randint(25, 50), max_model_len=90, num_drafts=rng.choice((1, 2)),
        run_ahead=4, adaptive=True, prefix_cache=False,
    )  # fmt: skip
    clients = []
    for i in range(7):
        prompt = tuple(rng.randrange(90) for _ in range(rng.randint(2, 12)))
        request = Request(
            request_id=f"r{i}", prompt_token_ids=prompt, key=i, max_len=rng.randint(50, 90),
            params=SamplingParams(temperature=0.0, max_tokens=None), num_drafts=rng.choice((None, 0, 1)),
        )  # fmt: skip
        clients.append(Client(request, arrives=rng.choice((0, 0, 3, 9))))
    return Scenario(config, 97, rng.randrange(10_000), clients)


def told(scenario: Scenario, m: pytest.MonkeyPatch, seen: Counter[str]) -> list[Any]:
    """Everything that a run makes known: plans, events, and what is known of each sequence after each result."""
    out: list[Any] = []
    take, split, steady = Collector.take, Scheduler._split, Collector._take_steady

    def taken(self: Collector, result: FrameResult, arrived: int) -> list[TokenEvent]:
        events = take(self, result, arrived)
        kinds = self.scheduler.round_kinds
        facts = [
            (s.key, s.state, s.length, s.ahead, s.queued, s.wanted, s.acked, [*s.outputs], s.stats(kinds).counts)
            for s in self.scheduler.sequences.values()
        ]
        out.append((events, facts, self.metrics.spec.counts.copy(), [type(e) for e in events]))
        return events

    def splits(self: Scheduler) -> Any:
        seen["calm plans"] += self._calm >= 0
        return split(self)

    def steadily(self: Collector, *args: Any) -> Any:
        found = steady(self, *args)
        seen["steady results"] += found is not None
        seen["with drafts"] += found is not None and any(e.drafted for e in found[0])
        return found

    with m.context() as patch:
        patch.setattr(Collector, "take", taken)
        patch.setattr(Scheduler, "_split", splits)
        patch.setattr(Collector, "_take_steady", steadily)
        engine, device = run_scenario(scenario)
    return [out, [*map(repr, device.plans)], engine.metrics.counters]  # masks in plans are arrays


def look_at_every_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "calm", property(lambda self: -1))
    patch.setattr(Collector, "_take_steady", lambda *args: None)


def compare(m: pytest.MonkeyPatch, seeds: int) -> tuple[Counter[str], Counter[str]]:
    short, whole = Counter[str](), Counter[str]()
    for mine, same in zip(scenarios(seeds), scenarios(seeds), strict=True):
        got = told(mine, m, short)
        with m.context() as patch:
            look_at_every_slot(patch)
            want = told(same, m, whole)
        for a, b in zip(got, want, strict=True):
            assert a == b
    return short, whole


def test_short_cuts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    short, whole = compare(monkeypatch, 90)
    assert not whole.total()
    assert short["calm plans"] > 150 and short["steady results"] > 600 and short["with drafts"] > 100, short


def _ends_are_overlooked(m: pytest.MonkeyPatch) -> None:
    m.setattr(Sequence, "calm", property(lambda s: s.covered - s.most_rows - s.lookahead - s.length - s.ahead))


def _pages_are_overlooked(m: pytest.MonkeyPatch) -> None:
    m.setattr(Sequence, "calm", property(lambda s: s.max_len - 2 - s.length - s.ahead))


def _who_left_is_overlooked(m: pytest.MonkeyPatch) -> None:
    m.setattr(Scheduler, "leave", lambda self, seq: self.running.pop(seq.slot, None))


def _who_left_a_frame_is_overlooked(m: pytest.MonkeyPatch) -> None:
    leave = Scheduler.leave

    def broken(self: Scheduler, seq: Sequence) -> None:
        left = self.left
        leave(self, seq)
        self.left = left

    m.setattr(Scheduler, "leave", broken)


def _who_is_sent_away_is_overlooked(m: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def broken(self: Scheduler) -> None:
        calm, left = self._calm, self.left
        preempt(self)
        self._calm = calm if self.left == left else self._calm

    m.setattr(Scheduler, "_preempt", broken)


@pytest.mark.parametrize(
    "fault",
    [
        _ends_are_overlooked,
        _pages_are_overlooked,
        _who_left_is_overlooked,
        _who_left_a_frame_is_overlooked,
        _who_is_sent_away_is_overlooked,
    ],
)
def test_a_planted_fault_is_found(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        compare(monkeypatch, 90)
