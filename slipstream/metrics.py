"""Counters and a ring of per-frame numbers, all host side. `snapshot()` is what the outside sees.

Definitions: a *launch* is one plan handed to the device (a decode frame, a prefill chunk or both);
`prompt_tokens` counts a prompt again when it is read again after a preemption, `cached_prompt_tokens` is the
part whose KV came from the prefix cache; `output_tokens` counts tokens that records brought, before cuts. For
rounds, drafted, accepted and acceptance length see `types.SpecStats`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.types import FramePlan, SpecStats, TokenEvent

_FIELDS = ("slots", "rows", "prefill_rows", "emitted", "plan_us", "launch_us", "wait_us", "collect_us")


class Metrics:
    """One per engine, no globals. Times in microseconds.

    Per launch: slots that decode, rows verified, prompt rows, tokens emitted; time to plan, to enqueue, to
    wait for the result and to turn it into events. The host's own time per launch is plan + launch + collect.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self.counters: Counter[str] = Counter()
        self.spec = SpecStats()
        self.host_ns = self.wait_ns = 0  # plan + launch + collect, and waiting for results, since the start
        self.frames_by_drafts: Counter[int] = Counter()
        self._drafts = 0
        self._ring = [[0.0] * len(_FIELDS) for _ in range(capacity)]
        self._seen = 0

    def count(self, name: str, n: int = 1) -> None:
        self.counters[name] += n

    def launched(self, plan: FramePlan, *, plan_ns: int, launch_ns: int) -> None:
        slots, prefill_rows = len(plan.decode) - plan.decode.count(0), sum([span.length for span in plan.prefill])
        self._ring[plan.seq % len(self._ring)] = [
            slots, plan.rows, prefill_rows, 0, plan_ns / 1e3, launch_ns / 1e3, 0, 0
        ]  # fmt: skip
        self.counters["launches"] += 1
        self.host_ns += plan_ns + launch_ns
        self.counters["frames"] += slots > 0
        self.counters["rows"] += plan.rows
        if slots:
            self._drafts = plan.drafts
            self.frames_by_drafts[plan.drafts] += 1
        self.counters["prefill_rows"] += prefill_rows

    def collected(self, seq: int, events: Sequence[TokenEvent], *, wait_ns: int, collect_ns: int) -> None:
        emitted = sum([len(e.tokens) for e in events])
        row = self._ring[seq % len(self._ring)]
        row[3], row[6], row[7] = emitted, wait_ns / 1e3, collect_ns / 1e3
        self._seen = seq + 1
        self.counters["output_tokens"] += emitted
        self.host_ns += collect_ns
        self.wait_ns += wait_ns

    def snapshot(self) -> dict[str, Any]:
        """Counters since the start, draft statistics, and mean, p50 and p99 over the launches in the ring.

        drafts: how many the last frame made for the next one, and how many frames made each number (0: drafting off).
        """
        n = min(self._seen, len(self._ring))
        kept = [self._ring[i % len(self._ring)] for i in range(self._seen - n, self._seen)]
        ring_np = np.array(kept, dtype=np.float64).reshape(n, len(_FIELDS))
        out: dict[str, Any] = {"counters": dict(self.counters), "spec": self.spec.as_dict(), "window": n}
        out["drafts"] = {"now": self._drafts, "frames": dict(sorted(self.frames_by_drafts.items()))}
        out["host_seconds"], out["wait_seconds"] = self.host_ns / 1e9, self.wait_ns / 1e9
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
