"""Host time of a steady decode frame: the real scheduler, control lane, rings and collector around a stub frame.

    python bench/host_frame.py --batch 1,8,32,64 --drafts 0 [--adaptive]

Prints one JSON line per batch size, medians in microseconds: `plan` (scheduler), `launch` (control lane, rings,
record down; without the frame itself), `read` (record up to the engine), `collect` (records to events). `host_us`
is their sum, `p99` its tail (frames with page appends). No model and no GPU: what remains there is the launch of a
graph, an event and a copy. Every slot accepts all its drafts but the last, pages grow as they would. With --adaptive
the number of drafts is chosen, at made-up frame times at which drafting pays.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.device.logits import LogitStages
from slipstream.device.media import GivenRows
from slipstream.device.runner import Device
from slipstream.device.state import SlotState
from slipstream.engine.loop import EngineCore
from slipstream.types import RECORD_COLUMNS, Admit, FramePlan, FrameResult, Request, SamplingParams

PROMPT, CONTEXT = 128, 4096


class StubFrame:
    """Frame and graphs: answers with records of the right shape and nothing else; `ns` is the time that took."""

    clears_pages = False

    def __init__(self, state: SlotState) -> None:
        self.state = state
        self.logit_stages = LogitStages(state, 1, kernels=False)
        self.given = GivenRows(state, 1, torch.bfloat16, kernels=False)
        self.kv, self.model = SimpleNamespace(page_size=32), SimpleNamespace(dtype=torch.bfloat16)
        self.ns = 0

    def admit(self, admit: Admit) -> None:
        """No drafter and no states: control pairs say it all."""

    def run(self, plan: FramePlan) -> Tensor:
        began = perf_counter_ns()
        with torch.inference_mode():
            record_BC = self._record(self.state.decode_B[: len(plan.decode)], plan.width)
        self.ns += perf_counter_ns() - began
        return record_BC

    def prefill(self, plan: FramePlan, *, last: bool) -> Tensor | None:
        ends = plan.prefill_prompts or sum(span.last for span in plan.prefill)
        return self._record(self.state.last_slot_B[:ends], 1) if last else None

    def _record(self, slot_B: Tensor, width: int) -> Tensor:
        record_BC = slot_B.new_ones(slot_B.shape[0], RECORD_COLUMNS + width)
        record_BC[:, 0] = self.state.generation_S[slot_B]
        record_BC[:, 1] = max(1, width - 1)
        record_BC[:, 2] = max(0, width - 2)
        record_BC[:, 3] = width - 1
        record_BC[:, 4] = 0
        record_BC[:, 5] = self.state.num_drafts
        return record_BC


def build(batch: int, drafts: int, run_ahead: int, adaptive: bool = False) -> tuple[EngineCore, StubFrame]:
    """An engine as `LLM` configures it for a GPU, on a device without a model."""
    pages = -(-(CONTEXT + drafts + 1) // 32)
    config = EngineConfig(
        max_slots=64, num_pages=64 * pages, max_model_len=CONTEXT, run_ahead=run_ahead, num_drafts=drafts,
        prefill_chunk=2048, slot_buckets=(1, 2, 4, 8, 16, 32, 64), row_tiers=tuple(sorted({1, drafts + 1})),
    )  # fmt: skip
    if adaptive:
        config = replace(config, adaptive=True)
        times = ((s, w, k, 1e-3 + 1e-6 * s * w) for s in config.slot_buckets for w, k in config.frame_kinds)
        config = replace(config, frame_seconds=tuple(times))
    state = SlotState(
        max_slots=64, max_len=CONTEXT, pages_per_slot=pages, num_drafts=drafts, chunk_rows=2048, widest_frame=64,
        device=torch.device("cpu"),
    )  # fmt: skip
    frame = StubFrame(state)
    engine = EngineCore(config, Device(frame, run_ahead=run_ahead, graphs=frame))  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    for i in range(batch):
        prompt = tuple(range(i, i + PROMPT))
        engine.add(Request(request_id=f"r{i}", prompt_token_ids=prompt, params=params, max_len=CONTEXT))
    return engine, frame


def measure(batch: int, drafts: int, run_ahead: int, frames: int, adaptive: bool = False) -> dict[str, Any]:
    engine, frame = build(batch, drafts, run_ahead, adaptive)
    times: dict[str, list[float]] = {"plan": [], "launch": [], "read": [], "collect": []}

    steady = lambda: all(s.prefilled for s in engine.scheduler.running.values())
    while not (len(engine.scheduler.running) == batch and steady()):
        engine.step()
    for _ in range(20):
        engine.step()
    real = engine.metrics.launched, engine.metrics.collected

    def launched(plan: FramePlan, began: int, planned: int, ended: int) -> None:
        times["plan"].append((planned - began) / 1e3)
        times["launch"].append((ended - planned - frame.ns) / 1e3)
        frame.ns = 0
        real[0](plan, began, planned, ended)

    def collected(result: FrameResult, events: Any, began: int, arrived: int, ended: int) -> None:
        times["read"].append((arrived - began) / 1e3)
        times["collect"].append((ended - arrived) / 1e3)
        real[1](result, events, began, arrived, ended)

    engine.metrics.launched, engine.metrics.collected = launched, collected  # type: ignore[method-assign]
    frame.ns = 0
    for _ in range(frames):
        engine.step()
    assert len(engine.scheduler.running) == batch, "a request ended: fewer frames, or a longer context"
    total_np = np.array([times[k] for k in times]).sum(0)
    out: dict[str, Any] = {"batch": batch, "drafts": drafts, "adaptive": adaptive}
    out |= {k: round(statistics.median(v), 2) for k, v in times.items()}
    p10, p50, p99 = (round(float(x), 2) for x in np.percentile(total_np, (10, 50, 99)))
    return {**out, "host_us": p50, "p10": p10, "p99": p99}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--batch", default="1,8,32,64")
    p.add_argument("--drafts", type=int, default=0)
    p.add_argument("--run-ahead", type=int, default=2)
    p.add_argument("--frames", type=int, default=800)
    p.add_argument("--adaptive", action="store_true")
    options = p.parse_args()
    torch.set_num_threads(1)
    for batch in map(int, options.batch.split(",")):
        line = measure(batch, options.drafts, options.run_ahead, options.frames, options.adaptive)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
