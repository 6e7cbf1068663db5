"""The host engine under random schedules: outputs equal the pure function, pools stay whole."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.collect import Collector
from slipstream.engine.ledger import Ledger
from slipstream.engine.radix import RadixCache
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.sequence import Key, Sequence
from slipstream.types import TokenEvent
from tests.support.engine_scenarios import draw_scenario, run_scenario


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_schedules(data: st.DataObject, run_ahead: int, page_size: int) -> None:
    run_scenario(draw_scenario(lambda a, b: data.draw(st.integers(a, b)), run_ahead, page_size))


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
def test_seeded_schedules(run_ahead: int) -> None:
    for seed in range(150):
        run_scenario(draw_scenario(random.Random(seed).randint, run_ahead, (1, 4, 16)[seed % 3]))


def test_the_schedules_reach_every_case() -> None:
    """The schedules above mean something only if they preempt, hit the cache, evict, cut and run ahead."""
    seen: Counter[str] = Counter()
    for seed in range(200):
        engine, device = run_scenario(draw_scenario(random.Random(seed).randint, (1, 2, 8)[seed % 3], 1 + seed % 4))
        seen += engine.metrics.counters
        seen["evicted"] += engine.scheduler.ledger.radix.evicted
        seen["accepted"] += engine.metrics.spec.accepted
        seen["rejected"] += engine.metrics.spec.drafted - engine.metrics.spec.accepted
        seen["dropped"] += sum(len(p.drops) for p in device.plans)
        seen["padded"] += sum(p.decode.count(0) for p in device.plans)
        seen["mixed"] += sum(bool(p.decode and p.prefill) for p in device.plans)
        seen["packed"] += sum(len(p.prefill) > 1 for p in device.plans)
        seen["idle_rows"] += device.idle_rows
        if engine.scheduler.schedule is not None:
            most = engine.config.num_drafts + 1
            seen["scheduled"] += sum(0 < p.rows < len(p.decode) * most for p in device.plans)
    few = ("preemptions", "cached_prompt_tokens", "evicted", "finished_stop", "finished_length", "finished_abort")
    for case in (*few, "accepted", "rejected", "dropped", "padded", "mixed", "packed", "idle_rows", "scheduled"):
        assert seen[case] >= 15, f"{case}: {seen[case]}"


def _release_at_once(m: pytest.MonkeyPatch) -> None:
    settle = Ledger.settle

    def broken(self: Ledger) -> None:
        collected, self.collected = self.collected, 10**9
        settle(self)
        self.collected = collected

    m.setattr(Ledger, "settle", broken)


def _requeue_at_once(m: pytest.MonkeyPatch) -> None:
    let_go = Scheduler._let_go

    def broken(self: Scheduler, seq: Sequence) -> None:
        seq.last_launch = -1
        let_go(self, seq)

    m.setattr(Scheduler, "_let_go", broken)


def _forget_queued_frames(m: pytest.MonkeyPatch) -> None:
    m.setattr(Sequence, "len_ub", property(lambda self: min(self.length, self.request.max_len)))


def _cache_unreturned(m: pytest.MonkeyPatch) -> None:
    cut = Collector.cut

    def broken(self: Collector, key: Key, keep: int, reason: str, error: str | None = None) -> TokenEvent | None:
        seq = self.scheduler.sequences.get(key)
        return cut(self, key, len(seq.outputs) if seq else keep, reason, error)

    m.setattr(Collector, "cut", broken)


def _cache_unacknowledged(m: pytest.MonkeyPatch) -> None:
    m.setattr(Ledger, "_returned", lambda self, seq: len(seq.request.prompt_token_ids) + len(seq.outputs))


def _cache_without_locks(m: pytest.MonkeyPatch) -> None:
    m.setattr(RadixCache, "lock", lambda self, node: None)
    m.setattr(RadixCache, "unlock", lambda self, node: self._offer(node))


def _cache_one_row_too_many(m: pytest.MonkeyPatch) -> None:
    retire = Ledger.retire

    def broken(self: Ledger, seq: Sequence) -> None:
        seq.length += 1
        retire(self, seq)

    m.setattr(Ledger, "retire", broken)


def _never_preempt(m: pytest.MonkeyPatch) -> None:
    m.setattr(Scheduler, "_preempt", lambda self: None)


def _rows_from_current_drafts(m: pytest.MonkeyPatch) -> None:
    m.setattr(Sequence, "noted", lambda self, wanted, survival: setattr(self, "survival", survival))


def _rows_from_before_a_preemption(m: pytest.MonkeyPatch) -> None:
    restart = Sequence.restart

    def broken(self: Sequence, **how: Any) -> None:
        known = self.survival
        restart(self, **how)
        self.survival = known

    m.setattr(Sequence, "restart", broken)


@pytest.mark.parametrize(
    "fault",
    [
        _release_at_once,
        _requeue_at_once,
        _forget_queued_frames,
        _cache_unreturned,
        _cache_unacknowledged,
        _cache_without_locks,
        _cache_one_row_too_many,
        _never_preempt,
        _rows_from_current_drafts,
        _rows_from_before_a_preemption,
    ],
)
def test_a_planted_fault_is_found(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each of these rules, when broken, makes some schedule fail."""
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        for seed in range(400):
            run_scenario(draw_scenario(random.Random(seed).randint, (2, 8, 1)[seed % 3], 1 + seed % 4))
