"""The trace: pure functions over hand-made Chrome trace events, and a real profile of CPU work."""

import gzip
import json

import pytest
import torch

from slipstream.audit import AuditError, load_trace, profile, summarize
from slipstream.audit.trace import copy_kind, union_us


class Trace:
    """Builds events; `now` is the host's clock in µs."""

    def __init__(self):
        self.events = []
        self.correlation = 0

    def frame(self, ts, dur, tid=1, name="frame"):
        self.events.append(
            {"ph": "X", "cat": "user_annotation", "name": name, "pid": 7, "tid": tid, "ts": ts, "dur": dur}
        )

    def host(self, name, ts, dur=1.0, tid=1, device=None, cat="cuda_runtime"):
        """A driver call; `device` = (category, name, start, duration, bytes) of the work that it causes."""
        self.correlation += 1
        args = {"correlation": self.correlation}
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )
        for cat, kernel, start, length, size in [device] if device else []:
            args = {"correlation": self.correlation, "bytes": size}
            self.events.append(
                {"ph": "X", "cat": cat, "name": kernel, "pid": 0, "tid": 7, "ts": start, "dur": length, "args": args}
            )


def two_frames():
    """Frame 0: device work 100..150; frame 1: 160..200, with one gap of 10 between them and one of 5 inside."""
    t = Trace()
    t.frame(0, 40)
    t.host("cudaGraphLaunch", 5, device=("kernel", "gemm", 100, 30, 0))
    t.host("cudaLaunchKernel", 10, device=("kernel", "norm", 130, 20, 0))
    t.host("cudaEventSynchronize", 20, 15.5)
    t.frame(50, 40)
    t.host("cuLaunchKernelEx", 55, device=("kernel", "gemm", 160, 20, 0), cat="cuda_driver")
    t.host("cudaMemcpyAsync", 60, device=("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 185, 10, 4096))
    t.host("cudaMemcpyAsync", 65, device=("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 195, 5, 64))
    t.host("cudaStreamSynchronize", 70, 12.0)
    t.host("cudaEventQuery", 84)
    t.host("cudaStreamWaitEvent", 85)
    t.host("cudaMalloc", 86)
    t.host("cudaDeviceSynchronize", 200, 9.0)  # after the last frame: nobody's
    return t


def test_counts_per_frame():
    first, second = summarize(two_frames().events).frames
    assert (first.graph_launches, first.kernel_launches, first.kernels) == (1, 1, 2)
    assert first.syncs == {"event": 1} and first.sync_us == {"event": 15.5}
    assert first.host_us == 40 and first.copies == {} and first.queued_us == 150 - 35.5
    assert second.syncs == {"stream": 1} and second.sync_us == {"stream": 12.0}
    assert (second.event_queries, second.stream_waits, second.allocations) == (1, 1, 1)
    assert second.copies == {"HtoD pageable": [1, 4096], "DtoH pinned": [1, 64]}
    assert (second.kernel_launches, second.graph_launches, second.kernels) == (1, 0, 1)


def test_idle_share():
    s = summarize(two_frames().events)
    assert s.span_us == 100 and s.busy_us == 85
    assert s.idle_share == pytest.approx(0.15)
    assert s.idle_between_share == pytest.approx(0.10)
    assert [f.gap_before_us for f in s.frames] == [0, 10]
    assert [f.device_busy_us for f in s.frames] == [50, 35] and [f.device_span_us for f in s.frames] == [50, 40]


def test_run_ahead_work_belongs_to_the_frame_that_launched_it():
    t = Trace()
    t.frame(0, 10)
    t.host("cudaLaunchKernel", 1, device=("kernel", "a", 100, 50, 0))
    t.frame(10, 10)
    t.host("cudaLaunchKernel", 11, device=("kernel", "b", 150, 50, 0))  # both run long after the host's frames
    s = summarize(t.events)
    assert [f.kernels for f in s.frames] == [1, 1]
    assert s.idle_share == 0 and s.idle_between_share == 0


def test_overlapping_streams_count_once():
    assert union_us([(0, 10), (5, 12), (20, 21), (2, 3)]) == 13
    assert union_us([]) == 0


def test_a_wait_for_everything_is_told_from_a_late_one():
    t = Trace()
    t.frame(0, 100)
    t.host("cudaGraphLaunch", 1, device=("kernel", "frame", 10, 50, 0))
    t.host("cudaEventSynchronize", 5, 58)  # until 63: the frame's own work ended at 60
    t.frame(100, 100)
    s = summarize(t.events)
    assert [f.queued_us for f in s.frames] == [-3, None] and s.drained_frames == 1
    assert s.report().counters["drained_frames"] == 1


def test_other_threads_and_other_names_are_not_in_the_frame():
    t = Trace()
    t.frame(0, 100, tid=1)
    t.frame(0, 100, tid=2, name="other")
    t.host("cudaStreamSynchronize", 50, tid=2)
    t.host("cudaLaunchKernel", 60, tid=2, device=("kernel", "foreign", 70, 5, 0))
    s = summarize(t.events)
    assert s.frames[0].syncs == {} and s.frames[0].kernels == 0 and s.unattributed == 1
    assert summarize(t.events, "other").frames[0].syncs == {"stream": 1}


def test_report_uses_the_rules():
    report = summarize(two_frames().events).report()
    assert {f.rule: f.count for f in report.findings} == {
        "explicit-sync": 1,
        "pageable-copy": 1,
        "allocation-growth": 1,
    }
    assert report.counters["event_waits_per_frame"] == 0.5 and report.counters["idle_between_share"] == 0.1
    strict = summarize(two_frames().events).report(event_waits_per_frame=0)
    assert [f.count for f in strict.by_rule("event-wait")] == [1]


def test_clean_loop_has_no_finding():
    t = Trace()
    for i in range(5):
        t.frame(i * 50, 40)
        t.host("cudaGraphLaunch", i * 50 + 5, device=("kernel", "frame", 100 + i * 50, 50, 0))
        t.host("cudaEventSynchronize", i * 50 + 20, 5)
    s = summarize(t.events)
    assert s.report().ok and s.idle_share == 0 and s.drained_frames == 0
    assert [f.queued_us for f in s.frames] == [150 + i * 50 - (i * 50 + 25) for i in range(5)]
    assert "device idle share" in s.table() and json.loads(s.to_json())["frames"][4]["graph_launches"] == 1


def test_empty_trace():
    s = summarize([])
    assert s.frames == [] and s.idle_share == 0 and s.report().ok and s.table()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "HtoD pageable"),
        ("Memcpy HtoD (Pinned -> Device)", "HtoD pinned"),
        ("Memcpy DtoH (Device -> Pageable)", "DtoH pageable"),
        ("Memcpy DtoD (Device -> Device)", "DtoD"),
        ("Memcpy HtoD (Unknown -> Device)", "HtoD unknown"),
    ],
)
def test_copy_kinds(name, kind):
    assert copy_kind(name) == kind


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_real_profile_writes_a_chrome_trace(tmp_path, suffix):
    path = tmp_path / f"trace{suffix}"
    with profile(path, frame="step") as result:
        for _ in range(3):
            with torch.profiler.record_function("step"):
                torch.ones(8).sum()
    assert len(result.summary.frames) == 3 and all(f.host_us > 0 for f in result.summary.frames)
    events = load_trace(path)
    assert any(e.get("name") == "aten::sum" for e in events)
    opener = gzip.open if suffix.endswith("gz") else open
    with opener(path, "rt") as f:
        assert "traceEvents" in json.load(f)


def test_files_that_are_no_traces(tmp_path):
    bad = tmp_path / "x.json"
    bad.write_text("{not json")
    with pytest.raises(AuditError, match="not a readable trace"):
        load_trace(bad)
    bad.write_text('{"a": 1}')
    with pytest.raises(AuditError, match="holds no traceEvents"):
        load_trace(bad)
    with pytest.raises(AuditError, match="not a readable trace"):
        load_trace(tmp_path / "absent.json")
