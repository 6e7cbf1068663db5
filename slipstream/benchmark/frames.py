"""What one frame of steady decode does on a GPU, as the auditor sees it: the other half of `bench decode` there.

The engine, its options and the prompts are those of the timing; only the instruments are added. The runtime watch
counts findings, the profiler's trace everything else. Both slow the host down, so times come from runs without them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.types import SamplingParams

if TYPE_CHECKING:
    from slipstream.audit import Report, TraceSummary

FRAMES, FEWEST, WARM_UP = 50, 4, 8
"""Frames under each instrument, the fewest worth reporting, and frames before the first of them."""


def room(tokens: int, most: int, run_ahead: int) -> int:
    """Frames under each of the two instruments when a request can emit `tokens`, at most `most` per frame."""
    return min(FRAMES, (tokens // most - WARM_UP - run_ahead - 1) // 2)


def observe(llm: Any, prompts: list[list[int]], *, tokens: int, step_seconds: float) -> dict[str, Any]:
    """Per-frame figures of the engine decoding `prompts` greedily; see `figures`.

    tokens: output tokens that the context has room for. step_seconds: time per frame without instruments. An empty
    dict when the requests would end within `FEWEST` frames. They are aborted at the end.
    """
    import torch

    from slipstream.audit import profile, watch

    resolved = llm.resolved
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    ids = [llm._submit(*llm._prepare(prompt, params)) for prompt in prompts]
    step = llm._engine.step
    try:
        live = [llm._live[i].output.outputs[0] for i in ids]
        while not all(answer.token_ids or answer.finish_reason for answer in live):
            llm._step()
        most = max(len(answer.token_ids) for answer in live)
        frames = room(tokens - most, int(resolved["num_drafts"]) + 1, int(resolved["run_ahead"]))
        if frames < FEWEST:
            return {}
        for _ in range(WARM_UP):
            step()
        with watch(device=str(resolved["device"]).split(":")[0], name="bench decode") as report:
            for _ in range(frames):
                step()
        with tempfile.TemporaryDirectory() as folder:
            with profile(Path(folder) / "trace.json", frame="frame") as profiled:
                for _ in range(frames):
                    with torch.profiler.record_function("frame"):
                        step()
        assert profiled.summary is not None
        return figures(profiled.summary, report, step_seconds=step_seconds)
    finally:
        for request_id in ids:
            llm.abort(request_id)


def figures(trace: TraceSummary, report: Report, *, step_seconds: float) -> dict[str, Any]:
    """Means per frame.

    device_idle_share: 1 - device busy time per frame ÷ step_seconds. traced_idle_share: the trace's own, gaps between
    and inside frames, with the profiler's load on the host. syncs: stream and device synchronisations; event_waits: the
    one wait for frame t - D belongs there. copies: by direction and kind of host memory. findings: of the runtime
    watch, in all of its frames.
    """
    n = max(1, len(trace.frames))
    syncs, copies = trace.total("syncs"), trace.total("copies")

    def mean(name: str) -> float:
        return round(float(trace.total(name)[name]) / n, 3)

    return {
        "device_idle_share": round(max(0.0, 1.0 - trace.busy_us / n / (step_seconds * 1e6)), 4),
        "traced_idle_share": round(trace.idle_share, 4),
        "idle_between_frames": round(trace.idle_between_share, 4),
        "syncs_per_frame": round((syncs["stream"] + syncs["device"]) / n, 3),
        "event_waits_per_frame": round(syncs["event"] / n, 3),
        "copies_per_frame": {kind: round(count / n, 3) for kind, count in sorted(copies.items())},
        "kernel_launches_per_frame": mean("kernel_launches"),
        "graph_launches_per_frame": mean("graph_launches"),
        "kernels_per_frame": mean("kernels"),
        "driver_allocations_per_frame": mean("allocations"),
        "findings": {f.rule: f.count for f in report.findings},
        "traced_frames": len(trace.frames),
    }
