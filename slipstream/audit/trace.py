"""What the device and the driver did, per frame, from a torch.profiler (Kineto/CUPTI) trace.

Frames are host ranges marked by `torch.profiler.record_function("frame")`. Driver calls belong to the frame whose
range, on the same thread, contains their start; device work belongs to the frame of the driver call with the same
correlation number, so that run-ahead does not blur it. All functions over events are pure; times are microseconds.

Event format: Chrome trace events as Kineto writes them (categories cuda_runtime, cuda_driver, kernel, gpu_memcpy,
gpu_memset, user_annotation; `args.correlation`, `args.bytes`).
"""

from __future__ import annotations

import contextlib
import gzip
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.audit.report import AuditError, Finding, Report, Site
from slipstream.audit.rules import BY_ID

SYNC_CALLS = {
    "StreamSynchronize": "stream",
    "DeviceSynchronize": "device",
    "CtxSynchronize": "device",
    "EventSynchronize": "event",
}
_QUERIES = ("EventQuery", "StreamQuery")
_LAUNCHES = ("LaunchKernel", "LaunchKernelExC", "LaunchKernelEx", "LaunchCooperativeKernel")
_ALLOCATIONS = ("Malloc", "MallocAsync", "HostAlloc", "MemAlloc", "MemAllocHost", "MallocHost", "MemCreate")
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST_CATEGORIES = ("cuda_runtime", "cuda_driver")


@dataclass
class FrameStats:
    """One frame. Counts, and microseconds where the name says so.

    `copies`: by direction and host memory kind ("HtoD pageable", "DtoH pinned", "DtoD") -> [count, bytes].
    `gap_before_us`: device idle time between the end of the previous frame's device work and the start of this one's.
    `queued_us`: how much longer this frame's device work lasted after its last synchronisation call returned; None
    without either. At or below 0 the host had waited until nothing was left to do.
    """

    index: int
    host_us: float = 0.0
    syncs: dict[str, int] = field(default_factory=dict)
    sync_us: dict[str, float] = field(default_factory=dict)
    event_queries: int = 0
    stream_waits: int = 0
    copies: dict[str, list[int]] = field(default_factory=dict)
    kernel_launches: int = 0
    graph_launches: int = 0
    allocations: int = 0
    kernels: int = 0
    device_busy_us: float = 0.0
    device_span_us: float = 0.0
    gap_before_us: float = 0.0
    queued_us: float | None = None


@dataclass
class TraceSummary:
    """All frames of a trace, and the device's idle time between the first and the last of them.

    `idle_share`: 1 - busy ÷ span over the device work of all frames, where busy is the union of all device work.
    `idle_between_share`: only the gaps between frames ÷ span.
    """

    frames: list[FrameStats]
    span_us: float = 0.0
    busy_us: float = 0.0
    idle_share: float = 0.0
    idle_between_share: float = 0.0
    unattributed: int = 0  # device activities that belong to no frame

    @property
    def drained_frames(self) -> int:
        """Frames in which the host waited until the device had nothing left to do."""
        return sum(f.queued_us is not None and f.queued_us <= 0 for f in self.frames)

    def total(self, name: str) -> Counter[str]:
        """Sum of a counting field over frames; per kind for `syncs`, `sync_us` and `copies` (counts)."""
        out: Counter[str] = Counter()
        for frame in self.frames:
            value = getattr(frame, name)
            for key, n in value.items() if isinstance(value, Mapping) else [(name, value)]:
                out[key] += n[0] if isinstance(n, list) else n
        return out

    def report(self, name: str = "trace", *, event_waits_per_frame: int = 1) -> Report:
        """Findings by the same rules as `watch`. One wait per frame for an old event is allowed."""
        report = Report(name)
        syncs = self.total("syncs")
        allowed = event_waits_per_frame * len(self.frames)
        facts = [
            ("explicit-sync", syncs["stream"] + syncs["device"], "stream or device synchronisation"),
            ("event-wait", max(0, syncs["event"] - allowed), f"event wait beyond {event_waits_per_frame} per frame"),
            ("pageable-copy", _pageable(self.total("copies")), "copy from or to pageable memory"),
            ("allocation-growth", self.total("allocations")["allocations"], "allocation from the driver"),
        ]
        for rule_id, count, what in facts:
            if count:
                rule = BY_ID[rule_id]
                site = [Site("<trace>", 0, "frame")]
                text = f"{what}, in {len(self.frames)} frame(s)"
                report.add(Finding(rule_id, rule.severity, text, rule.explain, rule.fix, site, int(count)))
        n = max(1, len(self.frames))
        report.counters = {
            "frames": len(self.frames),
            "idle_share": round(self.idle_share, 4),
            "idle_between_share": round(self.idle_between_share, 4),
            "event_waits_per_frame": syncs["event"] / n,
            "event_queries_per_frame": self.total("event_queries")["event_queries"] / n,
            "kernel_launches_per_frame": self.total("kernel_launches")["kernel_launches"] / n,
            "graph_launches_per_frame": self.total("graph_launches")["graph_launches"] / n,
            "copies_per_frame": sum(self.total("copies").values()) / n,
            "host_us_per_frame": sum(f.host_us for f in self.frames) / n,
            "drained_frames": self.drained_frames,
        }
        return report

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def table(self) -> str:
        """Means per frame, one line each."""
        n = max(1, len(self.frames))
        rows = [
            ("frames", f"{len(self.frames)}"),
            ("device idle share", f"{self.idle_share:.2%}  (between frames {self.idle_between_share:.2%})"),
            ("device span, busy", f"{self.span_us / n:.1f} µs, {self.busy_us / n:.1f} µs"),
            ("waits that drained it", f"{self.drained_frames}"),
            ("host time", f"{sum(f.host_us for f in self.frames) / n:.1f} µs"),
        ]
        sync_us = self.total("sync_us")
        for kind in ("stream", "device", "event"):
            rows.append(
                (f"{kind} synchronisations", f"{self.total('syncs')[kind] / n:.2f}, {sync_us[kind] / n:.1f} µs")
            )
        for label, name in (
            ("event queries", "event_queries"),
            ("stream waits", "stream_waits"),
            ("kernel launches", "kernel_launches"),
            ("graph launches", "graph_launches"),
            ("kernels on the device", "kernels"),
            ("driver allocations", "allocations"),
        ):
            rows.append((label, f"{self.total(name)[name] / n:.2f}"))
        for kind, count in sorted(self.total("copies").items()):
            bytes_ = sum(f.copies.get(kind, [0, 0])[1] for f in self.frames)
            rows.append((f"copies {kind}", f"{count / n:.2f}, {bytes_ / n:.0f} bytes"))
        return "\n".join(f"{label:28} {value}" for label, value in rows)


def _pageable(copies: Mapping[str, int]) -> int:
    return sum(n for kind, n in copies.items() if kind.endswith("pageable"))


def load_trace(path: str | Path) -> list[dict[str, Any]]:
    """Events of a Chrome trace file (.json or .json.gz). Raises AuditError if it is not one."""
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as f:
            data = json.load(f)
    except (OSError, ValueError) as error:
        raise AuditError(f"{path} is not a readable trace: {error}") from error
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise AuditError(f"{path} holds no traceEvents")
    return events


def _short(name: str) -> str:
    """cudaStreamSynchronize, cuStreamSynchronize, hipStreamSynchronize -> StreamSynchronize."""
    for prefix in ("cuda", "hip", "cu"):
        if name.startswith(prefix):
            return name.removeprefix(prefix).split("_v")[0].removesuffix("_ptsz")
    return name


def copy_kind(name: str) -> str:
    """Direction and host memory kind of a copy: "Memcpy HtoD (Pageable -> Device)" -> "HtoD pageable"."""
    direction = next((d for d in ("HtoD", "DtoH", "DtoD", "HtoH", "PtoP") if d in name), "other")
    if direction in ("HtoD", "DtoH", "HtoH"):
        lower = name.lower()
        kind = "pageable" if "pageable" in lower else "pinned" if "pinned" in lower else "unknown"
        return f"{direction} {kind}"
    return direction


def _spans(events: Iterable[Mapping[str, Any]], frame: str) -> dict[Any, list[tuple[float, float, int]]]:
    """Frame ranges per (pid, tid), sorted: start, end, index in time order over all threads."""
    marks = [e for e in events if e.get("ph") == "X" and e.get("cat") == "user_annotation" and e.get("name") == frame]
    marks.sort(key=lambda e: float(e["ts"]))
    out: dict[Any, list[tuple[float, float, int]]] = defaultdict(list)
    for index, e in enumerate(marks):
        out[e.get("pid"), e.get("tid")].append((float(e["ts"]), float(e["ts"]) + float(e["dur"]), index))
    return out


def _frame_of(spans: Mapping[Any, list[tuple[float, float, int]]], e: Mapping[str, Any]) -> int | None:
    mine = spans.get((e.get("pid"), e.get("tid")), [])
    at = bisect_right(mine, (float(e["ts"]), float("inf"), 0)) - 1
    return mine[at][2] if at >= 0 and float(e["ts"]) < mine[at][1] else None


def union_us(intervals: Iterable[tuple[float, float]]) -> float:
    """Total length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for a, b in sorted(intervals):
        total += max(0.0, b - max(a, end))
        end = max(end, b)
    return total


def summarize(events: Iterable[Mapping[str, Any]], frame: str = "frame") -> TraceSummary:
    """Statistics of every frame named `frame` in Chrome trace events. No frame gives an empty summary."""
    events = [e for e in events if e.get("ph") == "X" and "ts" in e and "dur" in e]
    spans = _spans(events, frame)
    frames = [FrameStats(index) for index in range(sum(len(s) for s in spans.values()))]
    for per_thread in spans.values():
        for start, end, index in per_thread:
            frames[index].host_us = end - start
    owner: dict[Any, int] = {}  # correlation -> frame
    for e in events:
        if e.get("cat") in _HOST_CATEGORIES:
            index_or_none = _frame_of(spans, e)
            if index_or_none is not None:
                _count_host(frames[index_or_none], e)
                correlation = e.get("args", {}).get("correlation")
                if correlation is not None:
                    owner[correlation] = index_or_none
    work: dict[int, list[tuple[float, float]]] = defaultdict(list)
    waited: dict[int, float] = {}
    for e in events:
        if e.get("cat") in _HOST_CATEGORIES and _short(str(e["name"])) in SYNC_CALLS:
            index_or_none = _frame_of(spans, e)
            if index_or_none is not None:
                waited[index_or_none] = max(waited.get(index_or_none, 0.0), float(e["ts"]) + float(e["dur"]))
    summary = TraceSummary(frames)
    for e in events:
        if e.get("cat") in _DEVICE_CATEGORIES:
            index_or_none = owner.get(e.get("args", {}).get("correlation"))
            if index_or_none is None:
                summary.unattributed += 1
                continue
            work[index_or_none].append((float(e["ts"]), float(e["ts"]) + float(e["dur"])))
            _count_device(frames[index_or_none], e)
    for index, until in waited.items():
        if work[index]:
            frames[index].queued_us = max(end for _, end in work[index]) - until
    _idle(summary, work)
    return summary


def _count_host(stats: FrameStats, e: Mapping[str, Any]) -> None:
    name = _short(str(e["name"]))
    if name in SYNC_CALLS:
        kind = SYNC_CALLS[name]
        stats.syncs[kind] = stats.syncs.get(kind, 0) + 1
        stats.sync_us[kind] = stats.sync_us.get(kind, 0.0) + float(e["dur"])
    elif name in _QUERIES:
        stats.event_queries += 1
    elif name == "StreamWaitEvent":
        stats.stream_waits += 1
    elif name in _LAUNCHES:
        stats.kernel_launches += 1
    elif name == "GraphLaunch":
        stats.graph_launches += 1
    elif name in _ALLOCATIONS:
        stats.allocations += 1


def _count_device(stats: FrameStats, e: Mapping[str, Any]) -> None:
    if e["cat"] == "kernel":
        stats.kernels += 1
    elif e["cat"] == "gpu_memcpy":
        entry = stats.copies.setdefault(copy_kind(str(e["name"])), [0, 0])
        entry[0] += 1
        entry[1] += int(e.get("args", {}).get("bytes", 0))


def _idle(summary: TraceSummary, work: Mapping[int, list[tuple[float, float]]]) -> None:
    end_before: float | None = None
    gaps = 0.0
    for stats in summary.frames:
        intervals = work.get(stats.index)
        if not intervals:
            continue
        start, end = min(a for a, _ in intervals), max(b for _, b in intervals)
        stats.device_busy_us = union_us(intervals)
        stats.device_span_us = end - start
        if end_before is not None:
            stats.gap_before_us = max(0.0, start - end_before)
            gaps += stats.gap_before_us
        end_before = end if end_before is None else max(end, end_before)
    everything = [interval for intervals in work.values() for interval in intervals]
    if everything:
        summary.span_us = max(b for _, b in everything) - min(a for a, _ in everything)
        summary.busy_us = union_us(everything)
    if summary.span_us > 0:
        summary.idle_share = 1.0 - summary.busy_us / summary.span_us
        summary.idle_between_share = gaps / summary.span_us


@dataclass
class Profile:
    """Filled when `profile` ends: the trace file and its summary."""

    path: Path
    frame: str
    summary: TraceSummary | None = None


@contextlib.contextmanager
def profile(path: str | Path, *, frame: str = "frame") -> Iterator[Profile]:
    """Profile the body with CPU and, if there is one, CUDA activity; write a Chrome trace (.json, .json.gz).

    Mark frames with `torch.profiler.record_function(frame)`. The profiler slows the host down (some µs per call), so
    take speeds from a run without it.
    """
    import torch
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    result = Profile(Path(path), frame)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        yield result
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # so that the device work of the last frames is in the trace
    profiler.export_chrome_trace(str(result.path))
    result.summary = summarize(load_trace(result.path), frame)
