"""Counters, histograms and a ring of per-launch numbers, all host side. `snapshot()` is what the outside sees.

Definitions: a *launch* is one plan handed to the device (a decode frame, a prefill chunk or both);
`prompt_tokens` counts a prompt again when it is read again after a preemption, `cached_prompt_tokens` is the
part whose KV came from the prefix cache; `output_tokens` counts tokens that records brought, before cuts. For
rounds, drafted, accepted and acceptance length see `types.SpecStats`.

When the device worked is known from the host's side only. Where launching means running (a CPU) the device is busy for
the seconds that the launch reports. Elsewhere it counts as busy from the end of the enqueuing, or the end of the launch
before it, to the moment at which the host has the result: too long while the host is late, never too short. *Idle* is
what is left of the time in which requests were there; gaps between launches that were queued in time do not show in it
(the auditor's trace of the device has them).
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.types import FramePlan, FrameResult, Round, SpecStats, TokenEvent

_FIELDS = ("slots", "rows", "prefill_rows", "emitted", "plan_us", "launch_us", "wait_us", "collect_us")

FRAME_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.032, 0.064, 0.128, 0.5, 2.0)
QUEUE_SECONDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Counts under fixed, ascending upper bounds; one more for what is above them all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """`times` equal observations."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def total(self) -> int:
        return sum(self.counts)

    def as_dict(self) -> dict[str, Any]:
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}


class Metrics:
    """One per engine, no globals. Times in microseconds.

    Per launch: slots that decode, rows verified, prompt rows, tokens emitted; time to plan, to enqueue, to
    wait for the result and to turn it into events. The host's own time per launch is plan + launch + collect.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self.counters: Counter[str] = Counter()
        self.rounds = SpecStats()
        self.kinds: tuple[Round, ...] = ()
        self.tally: list[int] = []
        """How many rounds there were of each of `kinds`, which are not in `rounds`: a frame adds one per slot."""
        self.host_ns = self.wait_ns = 0  # plan + launch + collect, and waiting for results, since the start
        self.busy_ns = self.idle_ns = 0  # of the device, see above
        self.frame_seconds, self.queue_seconds = Histogram(FRAME_SECONDS), Histogram(QUEUE_SECONDS)
        self.frames_by_drafts: Counter[int] = Counter()
        self._drafts = 0
        self.budget: int | None = None  # drafts that the last frame may verify, where confidences schedule it
        self._budgets = 0
        self._ring = [[0.0] * len(_FIELDS) for _ in range(capacity)]
        self._stamps = [[0] * 8 for _ in range(capacity)]
        """Of the same launches, on perf_counter_ns: plan, enqueue and its end; the device's begin and end; begin of
        the collection, arrival of the result, end of the collection."""
        self._seen = 0
        self._work_since = self._busy_until = 0

    def count(self, name: str, n: int = 1) -> None:
        self.counters[name] += n

    def tells(self, kinds: tuple[Round, ...]) -> None:
        """Rounds of these kinds are counted in `tally`."""
        self.kinds, self.tally = kinds, [0] * len(kinds)

    @property
    def spec(self) -> SpecStats:
        """Draft statistics so far."""
        return self.rounds.with_tally(self.kinds, self.tally)

    def arrived(self, at: int, *, alone: bool) -> None:
        """A request came at `at`, perf_counter_ns. alone: the engine had none."""
        self.counters["requests"] += 1
        if alone:
            self._work_since = at

    def admitted(self, tokens: int, cached: int, waited_ns: int | None) -> None:
        """A sequence has a slot. cached: tokens whose KV was there; waited_ns: None when it had one before."""
        self.counters["prompt_tokens"] += tokens
        self.counters["cached_prompt_tokens"] += cached
        if waited_ns is not None:
            self.queue_seconds.observe(waited_ns / 1e9)

    def launched(self, plan: FramePlan, began: int, planned: int, ended: int) -> None:
        """Planning began, enqueuing began and ended, on perf_counter_ns."""
        slots, prefill_rows = len(plan.decode) - plan.decode.count(0), sum([span.length for span in plan.prefill])
        at = plan.seq % len(self._ring)
        self._ring[at] = [
            slots, plan.rows, prefill_rows, 0, (planned - began) / 1e3, (ended - planned) / 1e3, 0, 0
        ]  # fmt: skip
        self._stamps[at] = [began, planned, ended, 0, 0, 0, 0, 0]
        self.counters["launches"] += 1
        self.host_ns += ended - began
        self.counters["frames"] += slots > 0
        self.counters["rows"] += plan.rows
        if slots:
            self._drafts = plan.drafts
            self.frames_by_drafts[plan.drafts] += 1
            self._budgets += self.budget or 0
        self.counters["prefill_rows"] += prefill_rows

    def span(self, result: FrameResult, arrived: int) -> tuple[int, int]:
        """When the device began and ended the oldest launch that is not `collected`, on perf_counter_ns (see above)."""
        enqueued = self._stamps[result.seq % len(self._ring)][2]
        if result.seconds:
            return enqueued - round(result.seconds * 1e9), enqueued
        return max(enqueued, self._busy_until), arrived

    def collected(
        self, result: FrameResult, events: Sequence[TokenEvent], began: int, arrived: int, ended: int
    ) -> None:
        """The host began to wait for the result, had it, and had its events, on perf_counter_ns."""
        emitted = sum([len(e.tokens) for e in events])
        at = result.seq % len(self._ring)
        row, stamps = self._ring[at], self._stamps[at]
        row[3], row[6], row[7] = emitted, (arrived - began) / 1e3, (ended - arrived) / 1e3
        start, until = self.span(result, arrived)
        self.idle_ns += max(0, start - max(self._busy_until, self._work_since))
        self.busy_ns += until - start
        self._busy_until = until
        stamps[3:] = start, until, began, arrived, ended
        if row[0] and not row[2]:
            self.frame_seconds.observe((until - start) / 1e9)
        self._seen = result.seq + 1
        self.counters["output_tokens"] += emitted
        self.host_ns += ended - arrived
        self.wait_ns += arrived - began

    def timeline(self, launches: int) -> list[dict[str, Any]]:
        """The last collected launches, oldest first; times in milliseconds from the planning of the first of them.

        Pairs of begin and end: plan, launch (enqueuing), device (see above), wait, collect.
        """
        n = min(self._seen, len(self._ring), launches)
        places = [seq % len(self._ring) for seq in range(self._seen - n, self._seen)]
        out: list[dict[str, Any]] = []
        for at in places:
            plan, enqueue, enqueued, start, until, began, arrived, ended = (
                round((t - self._stamps[places[0]][0]) / 1e6, 4) for t in self._stamps[at]
            )
            slots, rows, prefill_rows, emitted = (int(x) for x in self._ring[at][:4])
            out.append({
                "slots": slots, "rows": rows, "prefill_rows": prefill_rows, "emitted": emitted,
                "plan": (plan, enqueue), "launch": (enqueue, enqueued), "device": (start, until),
                "wait": (began, arrived), "collect": (arrived, ended),
            })  # fmt: skip
        return out

    def snapshot(self, *, launches: bool = True) -> dict[str, Any]:
        """Counters since the start, draft statistics, and mean, p50 and p99 over the launches in the ring.

        launches: False leaves the last out, which take a millisecond, too long between two frames.

        drafts: how many the last frame made for the next one, and how many frames made each number (0: drafting off).
        Histograms: frame_seconds, of launches that decoded and read no prompt; queue_seconds, arrival to first slot.
        schedule: drafts that the last frame was given rows for, and the mean, where confidences schedule verification.
        """
        n = min(self._seen, len(self._ring)) if launches else 0
        kept = [self._ring[i % len(self._ring)] for i in range(self._seen - n, self._seen)]
        ring_np = np.array(kept, dtype=np.float64).reshape(n, len(_FIELDS))
        out: dict[str, Any] = {"counters": dict(self.counters), "spec": self.spec.as_dict(), "window": n}
        out["drafts"] = {"now": self._drafts, "frames": dict(sorted(self.frames_by_drafts.items()))}
        if self.budget is not None:
            mean = self._budgets / max(1, self.counters["frames"])
            out["schedule"] = {"budget": self.budget, "mean_budget": round(mean, 4)}
        for name in ("host", "wait", "busy", "idle"):
            out[f"{name}_seconds"] = getattr(self, f"{name}_ns") / 1e9
        out["histograms"] = {name: getattr(self, name).as_dict() for name in ("frame_seconds", "queue_seconds")}
        host_np = ring_np[:, 4] + ring_np[:, 5] + ring_np[:, 7]
        columns = {name: ring_np[:, i] for i, name in enumerate(_FIELDS)} | {"host_us": host_np}
        out["launch"] = {
            name: {
                "mean": round(float(c.mean()), 3),
                "p50": round(float(np.percentile(c, 50)), 3),
                "p99": round(float(np.percentile(c, 99)), 3),
            }
            for name, c in columns.items()
            if n
        }
        return out
