"""What /metrics says, in Prometheus' text format. The names below are stable.

Seconds and totals are the user's: from the arrival of a request to its text, tokens after stop-string cuts. Names that
begin with slipstream_engine_ are the engine's own, see `metrics.Metrics`; accepted <= drafted, always.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 1.0)


class Histogram:
    """Cumulative counts under fixed upper bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def family(self, name: str, about: str) -> HistogramMetricFamily:
        total, buckets = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(name, about)
        family.add_metric([], buckets, self.sum)
        return family


class Telemetry:
    """Counts of one server."""

    def __init__(self) -> None:
        self.ttft, self.e2e = Histogram(_SECONDS), Histogram(_SECONDS)
        self.tpot = Histogram(_TOKEN_SECONDS)
        self.finished: Counter[str] = Counter()
        self.prompts = self.prompt_tokens = self.output_tokens = self.refused = 0

    def prompt(self, tokens: int) -> None:
        self.prompts += 1
        self.prompt_tokens += tokens

    def ended(self, reason: str, tokens: int, seconds: float, after_first: float) -> None:
        """One answer: its tokens, seconds since the request came, and since its first token."""
        self.finished[reason] += 1
        self.output_tokens += tokens
        self.e2e.observe(seconds)
        if tokens > 1:
            self.tpot.observe(after_first / (tokens - 1))

    @property
    def mean_seconds(self) -> float:
        ended = sum(self.e2e.counts)
        return self.e2e.sum / ended if ended else 1.0

    def exposition(self, engine: dict[str, Any] | None) -> bytes:
        """The page, with the engine's statistics where it answered."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families([*self._own(), *_engine_families(engine or {})]))
        return generate_latest(registry)

    def _own(self) -> Iterator[Any]:
        yield self.ttft.family("slipstream_time_to_first_token_seconds", "Arrival to first token, per answer.")
        yield self.tpot.family(
            "slipstream_time_per_output_token_seconds", "First to last token over the tokens after the first."
        )
        yield self.e2e.family("slipstream_request_seconds", "Arrival to the end of the answer.")
        yield _counter("slipstream_prompts", "Prompts taken.", self.prompts)
        yield _counter("slipstream_prompt_tokens", "Their tokens.", self.prompt_tokens)
        yield _counter("slipstream_output_tokens", "Tokens of ended answers.", self.output_tokens)
        yield _counter("slipstream_refused_requests", "Requests refused because the queue was full.", self.refused)
        finished = CounterMetricFamily("slipstream_finished", "Answers ended, by reason.", labels=["reason"])
        for reason in ("stop", "length", "abort", "error"):
            finished.add_metric([reason], self.finished[reason])
        yield finished


class _Families(Collector):
    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> Iterable[Any]:
        return self._families


def _counter(name: str, about: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, about, value=value)


def _engine_families(data: dict[str, Any]) -> Iterator[Any]:
    yield GaugeMetricFamily("slipstream_engine_up", "1 while the engine answers.", value=int(bool(data)))
    if not data:
        return
    counters, spec, pools = data["counters"], data["spec"], data["pools"]
    for name, about, value in (
        ("slipstream_requests_running", "Answers that own a slot.", data["running"]),
        ("slipstream_requests_waiting", "Answers in the queue.", data["waiting"]),
        ("slipstream_kv_pages", "KV pages.", pools["pages"]),
        ("slipstream_kv_pages_free", "KV pages that hold nothing.", pools["pages_free"]),
        ("slipstream_kv_pages_cached", "KV pages of the prefix cache.", pools["pages_cached"]),
        ("slipstream_acceptance_length", "Tokens per round since the start, bonus token included.",
         spec["acceptance_length"]),
    ):  # fmt: skip
        yield GaugeMetricFamily(name, about, value=value)
    for name, about, value in (
        ("slipstream_engine_prompt_tokens", "Prompt tokens of admissions.", counters.get("prompt_tokens", 0)),
        ("slipstream_engine_cached_prompt_tokens", "Those found in the prefix cache.",
         counters.get("cached_prompt_tokens", 0)),
        ("slipstream_engine_preemptions", "Requests sent back to the queue.", counters.get("preemptions", 0)),
        ("slipstream_engine_launches", "Plans handed to the device.", counters.get("launches", 0)),
        ("slipstream_engine_frames", "Decode frames.", counters.get("frames", 0)),
        ("slipstream_engine_rounds", "Frames times their active slots.", spec["rounds"]),
        ("slipstream_engine_drafted_tokens", "Drafts verified.", spec["drafted"]),
        ("slipstream_engine_accepted_tokens", "Drafts accepted.", spec["accepted"]),
        ("slipstream_engine_frame_seconds", "Time inside the device's frames.", data["device_seconds"]),
        ("slipstream_engine_host_seconds", "Host time to plan, launch and collect.", data["host_seconds"]),
        ("slipstream_engine_wait_seconds", "Host time blocked on results.", data["wait_seconds"]),
    ):  # fmt: skip
        yield _counter(name, about, value)
    for kind in ("drafted", "accepted"):
        family = CounterMetricFamily(
            f"slipstream_engine_{kind}_by_position", f"Rounds in which draft i was {kind}.", labels=["position"]
        )
        for position, count in enumerate(spec[f"{kind}_per_position"]):
            family.add_metric([str(position)], count)
        yield family
