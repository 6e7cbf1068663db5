"""`bench decode` on a GPU, as far as a CPU can show it: figures per frame, the floor of several passes, its options."""

from __future__ import annotations

import argparse
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM
from slipstream.audit import Report, summarize
from slipstream.benchmark import decode, floor, frames
from tests.support.tiny import write_tiny_checkpoint


def event(cat: str, name: str, ts: float, dur: float, correlation: int | None = None, tid: int = 1) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation, "bytes": 8}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def test_figures_are_means_per_frame() -> None:
    events = []
    for i in range(2):
        at = 100.0 * i
        events += [
            event("user_annotation", "frame", at, 50),
            event("cuda_runtime", "cudaGraphLaunch", at + 1, 5, 10 * i + 1),
            event("kernel", "gemm", at + 10, 60, 10 * i + 1, tid=9),
            event("cuda_runtime", "cudaMemcpyAsync", at + 8, 2, 10 * i + 2),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", at + 70, 10, 10 * i + 2, tid=9),
            event("cuda_runtime", "cudaEventSynchronize", at + 20, 9),
        ]
    events.append(event("cuda_runtime", "cudaStreamSynchronize", 130, 9))
    got = frames.figures(summarize(events), Report("x"), step_seconds=100e-6)
    assert got["device_idle_share"] == pytest.approx(0.3)
    assert got["syncs_per_frame"] == 0.5 and got["event_waits_per_frame"] == 1.0
    assert got["copies_per_frame"] == {"DtoH pinned": 1.0}
    assert got["graph_launches_per_frame"] == 1.0 and got["kernel_launches_per_frame"] == 0.0
    assert got["findings"] == {} and got["traced_frames"] == 2


def test_room_counts_the_frames_that_requests_live_through() -> None:
    assert frames.room(10_000, 1, 2) == frames.FRAMES
    assert frames.room(300, 4, 2) == (75 - frames.WARM_UP - 3) // 2
    assert frames.room(20, 4, 2) < frames.FEWEST


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_observe_leaves_an_idle_engine(tmp_path: Path, draft: str | None) -> None:
    model = write_tiny_checkpoint(tmp_path / "m", "llama")
    with LLM(model=str(model), device="cpu", max_slots=2, max_model_len=256, draft=draft) as llm:
        assert frames.observe(llm, [[5, 6, 7]], tokens=8, step_seconds=1e-3) == {}
        got = frames.observe(llm, [[5, 6, 7], [9] * 20], tokens=120, step_seconds=1e-3)
        assert got["traced_frames"] >= frames.FEWEST and got["syncs_per_frame"] == 0
        llm.check_idle()


def test_the_floor_takes_the_larger_of_bytes_and_arithmetic_per_pass() -> None:
    few = floor.Pass(weight_bytes=1000, itemsize=2, rows=1)
    many = floor.Pass(weight_bytes=1000, itemsize=2, rows=100)
    assert floor.frame_floor([few], kv_bytes=0, read=10.0, matrix=1e9) == 100.0
    assert floor.frame_floor([many], kv_bytes=0, read=10.0, matrix=500.0) == 200.0
    assert floor.frame_floor([few, many], kv_bytes=50, read=10.0, matrix=500.0) == 305.0


def test_the_gpu_floor_counts_rows_drafter_and_kv() -> None:
    kv = types.SimpleNamespace(nbytes=11 * 4 * 8, num_pages=10, page_size=4)  # 8 bytes per token
    model = types.SimpleNamespace(weight_bytes=lambda: 1000, dtype=types.SimpleNamespace(itemsize=2))
    drafter = types.SimpleNamespace(weight_bytes=lambda: 300)
    frame = types.SimpleNamespace(model=model, drafter=drafter, kv=kv, states=None)
    device = types.SimpleNamespace(frame=frame)
    llm = types.SimpleNamespace(resolved={"num_drafts": 3}, _built=types.SimpleNamespace(device=device))
    given = argparse.Namespace(prompt_len=100, output_len=512)
    bytes_only = (1300 + 2 * (100 + decode.SHORT + 256) * 8) / 10.0
    assert decode.gpu_floor(llm, given, batch=2, read=10.0, matrix=1e9) == pytest.approx(bytes_only)
    bound = decode.gpu_floor(llm, given, batch=2, read=10.0, matrix=1.0)
    assert bound == pytest.approx(2 * 500 * 8 + 2 * 150 * 2 + 2 * (100 + decode.SHORT + 256) * 8 / 10.0)
    # Two recurrent layers, six numbers of 4 bytes per slot and layer: read and written once.
    frame.states = types.SimpleNamespace(state=torch.zeros(2, 5, 3, 2))
    with_states = decode.gpu_floor(llm, given, batch=2, read=10.0, matrix=1e9)
    assert with_states - bytes_only == pytest.approx(2 * 2 * 12 * 4 / 10.0)


def test_the_floors_own_buffers_are_not_in_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_device_peak", lambda: (5 << 20, 9 << 20))
    assert decode.peak_memory((7 << 20, 8 << 20)) == {"peak_memory_mib": 7.0, "peak_reserved_mib": 9.0}
