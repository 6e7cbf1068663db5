"""What /metrics says, in Prometheus' text format. The names are stable; docs/serving.md defines each.

Seconds and totals are the user's: from the arrival of a request to its text, tokens after stop-string cuts. Names that
begin with slipstream_engine_ are the engine's own, see `metrics.Metrics`; accepted <= drafted, always. No series of
creation times is exposed, which some readers take for counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from slipstream.metrics import Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 1.0)


class Telemetry:
    """Counts of one server."""

    def __init__(self) -> None:
        self.ttft, self.e2e = Histogram(_SECONDS), Histogram(_SECONDS)
        self.tpot, self.inter_token = Histogram(_TOKEN_SECONDS), Histogram(_TOKEN_SECONDS)
        self.finished: Counter[str] = Counter()
        self.responses: Counter[int] = Counter()
        self.prompts = self.prompt_tokens = self.output_tokens = self.refused = 0

    def prompt(self, tokens: int) -> None:
        self.prompts += 1
        self.prompt_tokens += tokens

    def tokens(self, count: int, seconds: float) -> None:
        """A chunk of an answer, but not its first, came `seconds` after the one before: each of its tokens took a part
        of that, so that a chunk of several tokens is not one slow token."""
        self.inter_token.observe(seconds / count, times=count)

    def ended(self, reason: str, tokens: int, seconds: float, after_first: float) -> None:
        """One answer: its tokens, seconds since the request came, and from its first token to its last."""
        self.finished[reason] += 1
        self.output_tokens += tokens
        self.e2e.observe(seconds)
        if tokens > 1:
            self.tpot.observe(after_first / (tokens - 1))

    @property
    def mean_seconds(self) -> float:
        ended = self.e2e.total
        return self.e2e.sum / ended if ended else 1.0

    def snapshot(self) -> dict[str, Any]:
        """For the page: totals, and means over all answers so far."""
        means = {name: getattr(self, name) for name in ("ttft", "tpot", "e2e")}
        return {
            "prompts": self.prompts, "prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens,
            "refused": self.refused, "finished": dict(self.finished),
            **{f"mean_{name}": h.sum / h.total if h.total else None for name, h in means.items()},
        }  # fmt: skip

    def exposition(self, engine: dict[str, Any] | None, *, stalled: bool = False) -> bytes:
        """The page, with the engine's statistics where it answered."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families([*self._own(), *_engine_families(engine or {}, stalled)]))
        return generate_latest(registry)

    def _own(self) -> Iterator[Any]:
        for name, about, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token, per answer.", self.ttft),
            ("time_per_output_token_seconds", "First to last token over the tokens after the first, per answer.",
             self.tpot),
            ("inter_token_seconds", "Time between two chunks over the tokens of the later one, per token.",
             self.inter_token),
            ("request_seconds", "Arrival to the end of the answer.", self.e2e),
        ):  # fmt: skip
            yield _histogram(f"slipstream_{name}", about, histogram.bounds, histogram.counts, histogram.sum)
        yield _counter("slipstream_prompts", "Prompts taken.", self.prompts)
        yield _counter("slipstream_prompt_tokens", "Their tokens.", self.prompt_tokens)
        yield _counter("slipstream_output_tokens", "Tokens of ended answers.", self.output_tokens)
        yield _counter("slipstream_refused_requests", "Requests refused because the queue was full.", self.refused)
        finished = CounterMetricFamily("slipstream_finished", "Answers ended, by reason.", labels=["reason"])
        for reason in ("stop", "length", "abort", "error"):
            finished.add_metric([reason], self.finished[reason])
        for reason in sorted(self.finished.keys() - {"stop", "length", "abort", "error"}):
            finished.add_metric([reason], self.finished[reason])
        yield finished
        responses = CounterMetricFamily("slipstream_http_responses", "HTTP responses, by status.", labels=["code"])
        for code in sorted(self.responses):
            responses.add_metric([str(code)], self.responses[code])
        yield responses


class _Families(Collector):
    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> Iterable[Any]:
        return self._families


def _counter(name: str, about: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, about, value=value)


def _histogram(
    name: str, about: str, bounds: Sequence[float], counts: Sequence[int], total: float
) -> HistogramMetricFamily:
    """Cumulative, as Prometheus has them."""
    so_far, buckets = 0, []
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        so_far += count
        buckets.append((bound, so_far))
    family = HistogramMetricFamily(name, about)
    family.add_metric([], buckets, total)
    return family


def _engine_families(data: dict[str, Any], stalled: bool) -> Iterator[Any]:
    yield GaugeMetricFamily("slipstream_engine_up", "1 while the engine answers.", value=int(bool(data)))
    yield GaugeMetricFamily("slipstream_engine_stalled", "1 while it makes no progress.", value=int(stalled))
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
        ("slipstream_engine_drafts_per_round", "Drafts that the last frame made for the next one, per answer.",
         data["drafts"]["now"]),
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
        ("slipstream_engine_round_tokens", "Tokens that rounds brought, bonus tokens included.", data["round_tokens"]),
        ("slipstream_engine_drafted_tokens", "Drafts verified.", spec["drafted"]),
        ("slipstream_engine_accepted_tokens", "Drafts accepted.", spec["accepted"]),
        ("slipstream_engine_device_busy_seconds", "Time in which the device had a launch.", data["busy_seconds"]),
        ("slipstream_engine_device_idle_seconds", "Time with requests, but without a launch on the device.",
         data["idle_seconds"]),
        ("slipstream_engine_host_seconds", "Host time to plan, launch and collect.", data["host_seconds"]),
        ("slipstream_engine_wait_seconds", "Host time blocked on results.", data["wait_seconds"]),
    ):  # fmt: skip
        yield _counter(name, about, value)
    for name, about in (
        ("frame_seconds", "Device time of a launch that decodes and reads no prompt, by the host's clock."),
        ("queue_seconds", "Arrival at the engine to the first slot."),
    ):
        h = data["histograms"][name]
        yield _histogram(f"slipstream_engine_{name}", about, h["bounds"], h["counts"], h["sum"])
    for kind in ("drafted", "accepted"):
        family = CounterMetricFamily(
            f"slipstream_engine_{kind}_by_position", f"Rounds in which draft i was {kind}.", labels=["position"]
        )
        for position, count in enumerate(spec[f"{kind}_per_position"]):
            family.add_metric([str(position)], count)
        yield family
