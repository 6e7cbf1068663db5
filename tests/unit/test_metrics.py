"""Busy and idle of the device as the host can know them, histograms, the timeline."""

from __future__ import annotations

import pytest

from slipstream.metrics import Histogram, Metrics
from slipstream.types import FramePlan, FrameResult, PrefillSpan, TokenEvent

US = 1000


def launch(m: Metrics, seq: int, began: int, planned: int, ended: int, prefill: int = 0) -> None:
    span = (PrefillSpan(slot=1, start=0, length=prefill, last=True),) if prefill else ()
    m.launched(FramePlan(seq=seq, decode=(1, 2, 0), rows=8, prefill=span), began * US, planned * US, ended * US)


def collect(m: Metrics, seq: int, began: int, arrived: int, ended: int, seconds: float = 0.0) -> None:
    events = [TokenEvent("a", 0, (5, 6), 1, 3)]
    m.collected(FrameResult(seq, (), [], 2, seconds), events, began * US, arrived * US, ended * US)


def test_a_queue_without_gaps_is_not_idle() -> None:
    """Run-ahead 2: launch 1 is queued before launch 0 is in, so the device is taken as busy all the time."""
    m = Metrics()
    m.arrived(0, alone=True)
    launch(m, 0, 0, 10, 30)
    launch(m, 1, 30, 40, 50)
    collect(m, 0, 50, 500, 520)
    launch(m, 2, 520, 530, 540)
    collect(m, 1, 540, 1000, 1010)
    collect(m, 2, 1010, 1500, 1510)
    assert m.busy_ns == (1500 - 30) * US
    assert m.idle_ns == 30 * US, "from the arrival to the first launch"
    assert m.wait_ns == (450 + 460 + 490) * US and m.host_ns == (50 + 20 + 20 + 10 + 10) * US
    assert m.frame_seconds.total == 3 and m.frame_seconds.sum == pytest.approx(m.busy_ns / 1e9)


def test_gaps_count_only_while_there_is_work() -> None:
    m = Metrics()
    m.arrived(0, alone=True)
    launch(m, 0, 0, 10, 30, prefill=7)
    collect(m, 0, 30, 200, 220)
    launch(m, 1, 300, 310, 320)  # a slow host: 120 without anything queued
    collect(m, 1, 320, 400, 410)
    m.arrived(5000 * US, alone=True)  # 4600 without a request
    m.arrived(5010 * US, alone=False)
    launch(m, 2, 5040, 5050, 5060)
    collect(m, 2, 5060, 5200, 5210)
    assert m.idle_ns == (30 + 120 + 60) * US
    assert m.frame_seconds.total == 2, "a launch that reads a prompt is no frame time"


def test_where_launching_is_running_the_device_is_busy_inside_the_launch() -> None:
    m = Metrics()
    m.arrived(0, alone=True)
    launch(m, 0, 0, 100, 1000)
    collect(m, 0, 1000, 1001, 1100, seconds=800e-6)
    launch(m, 1, 1100, 1150, 2000)
    collect(m, 1, 2000, 2001, 2100, seconds=800e-6)
    assert (m.busy_ns, m.idle_ns) == (1600 * US, (200 + 200) * US)
    first, second = m.timeline(10)
    assert first["device"] == (0.2, 1.0) and second["device"] == (1.2, 2.0)
    assert (second["slots"], second["rows"], second["emitted"], second["plan"]) == (2, 8, 2, (1.1, 1.15))
    assert m.timeline(1)[0]["plan"] == (0.0, 0.05), "from the planning of the first that is shown"


def test_the_ring_goes_round() -> None:
    m = Metrics(capacity=4)
    for seq in range(11):
        launch(m, seq, seq * 100, seq * 100 + 10, seq * 100 + 20)
        collect(m, seq, seq * 100 + 20, seq * 100 + 90, seq * 100 + 99)
    times = m.timeline(100)
    assert [row["plan"][0] for row in times] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert m.snapshot(launches=False)["launch"] == {} and m.snapshot()["launch"]["rows"]["mean"] == 8
    assert m.snapshot()["window"] == 4 and m.frame_seconds.total == 11


def test_histograms_count_at_and_below_a_bound() -> None:
    h = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        h.observe(value)
    h.observe(2.0, times=3)
    assert h.as_dict() == {"bounds": [1.0, 2.0], "counts": [2, 4, 1], "sum": 18.0} and h.total == 7
