"""Figures of a pair on a GPU: time per step, host time, waits as the auditor sees them, idle share, the pause test."""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.clinic import EngineCase, Pair, Step
from bench.clinic.loop import RING, Loop
from slipstream.audit import TraceSummary, profile, watch
from slipstream.audit.report import Report

RUN_AHEAD, DEEP = 2, 8
"""Steps queued before the loop waits for the oldest: in the timings, and in the pause test."""
STEPS, COLD_STEPS, REPEATS = 100, 12, 3
PAUSE_EVERY, PAUSE_STEPS = 50, 4
"""The pause test of the small loop: every 50 steps the host sleeps as long as 4 steps of the fixed form."""
ENGINE_FRAMES, ENGINE_PAUSE_S = 150, 0.020

assert DEEP < RING


def drive(
    step: Callable[[int], Any], steps: int, *, first: int = 0, run_ahead: int = RUN_AHEAD, pause_s: float = 0.0
) -> tuple[float, float]:
    """Run steps with at most `run_ahead` of them queued: seconds per step, and host seconds inside a step.

    The wait for step t - run_ahead is not counted as host time; a wait inside the step is.
    """
    on_gpu = torch.cuda.is_available()
    events = [torch.cuda.Event() for _ in range(run_ahead)] if on_gpu else []
    _settle()
    host, began = 0.0, time.perf_counter()
    for i in range(steps):
        if events and i >= run_ahead:
            events[i % run_ahead].synchronize()
        if pause_s and i % PAUSE_EVERY == PAUSE_EVERY // 2:
            time.sleep(pause_s)
        entered = time.perf_counter()
        step(first + i)
        host += time.perf_counter() - entered
        if events:
            events[i % run_ahead].record()
    _settle()
    return (time.perf_counter() - began) / steps, host / steps


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def figures(trace: TraceSummary, watched: Report, *, steps: int, step_s: float, host_s: float) -> dict[str, Any]:
    """What is reported of one form; `step_s` and `host_s` come from runs without any instrument.

    device_idle_share: 1 - busy ÷ step time. Busy is the trace's, the step time that of the run without the profiler,
    which slows the host and would make every host-bound form look worse than it is; `traced_idle_share` is its own.
    """
    n = max(1, len(trace.frames))
    syncs, copies = trace.total("syncs"), trace.total("copies")
    pageable = sum(count for kind, count in copies.items() if kind.endswith("pageable"))
    return {
        "device_idle_share": round(max(0.0, 1.0 - trace.busy_us / n / (step_s * 1e6)), 4),
        "traced_idle_share": round(trace.idle_share, 4),
        "syncs_per_step": round((syncs["stream"] + syncs["device"]) / n, 3),
        "pageable_copies_per_step": round(pageable / n, 3),
        "driver_allocations_per_step": round(trace.total("allocations")["allocations"] / n, 3),
        "findings_per_step": round(sum(f.count for f in watched.findings) / steps, 3),
        "rules": sorted({f.rule for f in watched.findings}),
        "host_us": round(host_s * 1e6, 1),
        "step_ms": round(step_s * 1e3, 4),
    }


@contextlib.contextmanager
def _traced(step: Callable[[], Any], frames: int) -> Iterator[TraceSummary]:
    """The profile of `frames` calls of `step`."""
    with tempfile.TemporaryDirectory() as folder:
        with profile(Path(folder) / "trace.json", frame="frame") as profiled:
            for _ in range(frames):
                with torch.profiler.record_function("frame"):
                    step()
        assert profiled.summary is not None
        yield profiled.summary


# -- the small loop ---------------------------------------------------------------------------------------------


def measure_pair(case: Pair, loop: Loop) -> dict[str, Any]:
    """Before and after in turn, interleaved; medians over the repeats."""
    forms = {"before": case.before, "after": case.after}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    steps = COLD_STEPS if case.cold else STEPS
    for _ in range(REPEATS):
        for name, form in forms.items():
            first = _fresh(loop, form, cold=case.cold)
            times[name].append(drive(_bound(loop, form), steps, first=first))
    middle = {name: tuple(map(statistics.median, zip(*runs, strict=True))) for name, runs in times.items()}
    pause_s = PAUSE_STEPS * middle["after"][0]
    out: dict[str, Any] = {}
    for name, form in forms.items():
        trace, watched = _inspect(loop, form, cold=case.cold)
        step_s, host_s = middle[name]
        out[name] = figures(trace, watched, steps=COLD_STEPS, step_s=step_s, host_s=host_s)
        out[name]["pause_kept"] = None if case.cold else round(_pause_kept(loop, form, pause_s), 4)
    return out


def _bound(loop: Loop, form: Step) -> Callable[[int], Any]:
    return lambda t: form(loop, t)


def _fresh(loop: Loop, form: Step, *, cold: bool) -> int:
    """Reset and warm up; returns the number of the next step. cold: only what any first call needs has happened."""
    loop.reset()
    if cold:
        import torch._dynamo

        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    warm = 1 if cold else 2 * RING
    for t in range(warm):
        form(loop, t)
    return warm


def _inspect(loop: Loop, form: Step, *, cold: bool) -> tuple[TraceSummary, Report]:
    """The same steps under the auditor's runtime watch, and again under the profiler."""
    first = _fresh(loop, form, cold=cold)
    with watch(device=loop.device.type) as report:
        for t in range(first, first + COLD_STEPS):
            form(loop, t)
    _settle()
    at = iter(range(_fresh(loop, form, cold=cold), 1 << 30))
    with _traced(lambda: form(loop, next(at)), COLD_STEPS) as trace:
        return trace, report


def _pause_kept(loop: Loop, form: Step, pause_s: float) -> float:
    """Throughput with pauses of the host ÷ without, run-ahead 8."""
    plain, paused = [], []
    for _ in range(REPEATS):
        first = _fresh(loop, form, cold=False)
        plain.append(drive(_bound(loop, form), STEPS, first=first, run_ahead=DEEP)[0])
        paused.append(drive(_bound(loop, form), STEPS, first=first + STEPS, run_ahead=DEEP, pause_s=pause_s)[0])
    return statistics.median(plain) / statistics.median(paused)


# -- the engine -------------------------------------------------------------------------------------------------


def measure_engine(case: EngineCase, model: str, *, batch: int, device: str = "cuda") -> dict[str, Any]:
    """The engine in steady decode with the original form put back, and without it. Two engines, one after the other."""
    out: dict[str, Any] = {}
    with case.before():
        out["before"] = engine_figures(model, case.options, batch=batch, device=device, sampling=case.sampling)
    _let_go()
    out["after"] = engine_figures(model, case.after_options, batch=batch, device=device, sampling=case.sampling)
    _let_go()
    return out


def _let_go() -> None:
    """Give the memory of an engine that has ended back to the device before the next one is built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def engine_figures(
    model: str, options: dict[str, Any], *, batch: int, device: str = "cuda", sampling: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Figures of one engine, run-ahead 8 (the pause test's), everything greedy, with the fields of `sampling`."""
    from bench.clinic.engine import steady_decode

    frames, pauses = ENGINE_FRAMES, 2 * REPEATS * ENGINE_FRAMES
    given = Namespace(
        model=model, options=options, sampling=sampling or {}, batch=batch, frames=frames + pauses + 2 * COLD_STEPS,
        device=device,
    )  # fmt: skip
    with steady_decode(given) as llm:
        step = llm._engine.step
        step_s, host_s = _timed_frames(llm, frames)
        with watch(device=device) as report:
            for _ in range(COLD_STEPS):
                step()
        _settle()
        with _traced(step, COLD_STEPS) as trace:
            out = figures(trace, report, steps=COLD_STEPS, step_s=step_s, host_s=host_s)
        plain, paused = [], []
        for _ in range(REPEATS):
            plain.append(_frames(step, frames, 0.0))
            paused.append(_frames(step, frames, ENGINE_PAUSE_S))
        out["pause_kept"] = round(statistics.median(plain) / statistics.median(paused), 4)
    return out


def _frames(step: Callable[[], Any], frames: int, pause_s: float) -> float:
    """Seconds for `frames` frames of the engine's own loop, which waits for frame t - D by itself."""
    _settle()
    began = time.perf_counter()
    for i in range(frames):
        if pause_s and i % PAUSE_EVERY == PAUSE_EVERY // 2:
            time.sleep(pause_s)
        step()
    return time.perf_counter() - began


def _timed_frames(llm: Any, frames: int) -> tuple[float, float]:
    """Seconds per frame, and host seconds per frame: plan, enqueue and collect; waiting for results is apart."""
    before = llm.stats()
    seconds = _frames(llm._engine.step, frames, 0.0)
    after = llm.stats()
    host = sum(sign * (s["host_seconds"] - s["device_seconds"]) for sign, s in ((1, after), (-1, before)))
    return seconds / frames, host / frames
