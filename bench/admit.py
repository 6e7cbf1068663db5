"""Steady decode while requests are admitted: how long the others' tokens wait, and whether the device does.

    python bench/admit.py --model bench/configs/llama-3.1-8b --load-format dummy --dtype bfloat16 --slots 8

`slots` requests decode without end; then others with prompts of 128 to 2,000 tokens arrive one after another, each when
the last has ended. One JSON line. itl_frames: time between two events of a decoding request, in units of the plain step
(the same engine with nobody admitted). device: idle shares of a traced stretch of admissions, the largest gap between
launches, by `slipstream.audit`; the profiler's load is in them. ttft_ms: from submission to the first token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream import LLM, SamplingParams
from slipstream.audit import profile

PROMPTS = (128, 500, 1000, 2000)
STEADY, OUTPUT = 200, 16


def percentiles(values: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3), "max": round(max(values), 3)}


class Clients:
    """Submits requests, steps the engine, and notes when each request's tokens came."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.rng = llm, random.Random(0)
        self.engine = llm._engine
        self.came: dict[str, list[float]] = {}
        self.added: dict[str, float] = {}
        self.ended: set[str] = set()

    def add(self, prompt_tokens: int, output: int) -> str:
        vocab = self.llm.model_config.vocab_size
        prompt = [self.rng.randrange(vocab - 1) for _ in range(prompt_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        before = set(self.engine.scheduler.sequences)
        began = time.perf_counter()
        self.llm._submit(*self.llm._prepare(prompt, params))
        [(request_id, _)] = set(self.engine.scheduler.sequences) - before
        self.added[request_id], self.came[request_id] = began, []
        return request_id

    def step(self) -> None:
        for event in self.engine.step():
            if event.tokens:
                self.came[event.request_id].append(time.perf_counter())
            if event.finish_reason is not None:
                self.ended.add(event.request_id)

    def gaps(self, ids: list[str], since: float) -> list[float]:
        """Seconds between events of requests `ids` after `since`."""
        times = [[t for t in self.came[i] if t >= since] for i in ids]
        return [b - a for row in times for a, b in itertools.pairwise(row)]


def admit(clients: Clients, prompts: list[int]) -> list[str]:
    """One request after another, each while the others decode."""
    ids = []
    for n in prompts:
        ids.append(clients.add(n, OUTPUT))
        while ids[-1] not in clients.ended:
            clients.step()
    return ids


def measure(llm: Any, slots: int, rounds: int, trace: Path) -> dict[str, Any]:
    clients = Clients(llm)
    endless = llm.resolved["max_model_len"] - 128 - 1
    steady = [clients.add(128, endless) for _ in range(slots)]
    while not all(clients.came[i] for i in steady):
        clients.step()
    admit(clients, [PROMPTS[0]])
    began = time.perf_counter()
    for _ in range(STEADY):
        clients.step()
    unit = float(np.median(clients.gaps(steady, began)))
    began = time.perf_counter()
    ids = admit(clients, list(PROMPTS) * rounds)
    itl = [gap / unit for gap in clients.gaps(steady, began)]
    ttft = [1e3 * (clients.came[i][0] - clients.added[i]) for i in ids]
    with profile(trace, frame="frame") as profiled:
        todo = list(PROMPTS)
        waiting = clients.add(todo.pop(0), OUTPUT)
        while True:
            with torch.profiler.record_function("frame"):
                clients.step()
            if waiting in clients.ended:
                if not todo:
                    break
                waiting = clients.add(todo.pop(0), OUTPUT)
    summary = profiled.summary
    assert summary is not None and not clients.ended & set(steady), "a steady request ended: raise --max-model-len"
    return {
        "plain_step_ms": round(1e3 * unit, 3),
        "itl_frames": percentiles(itl),
        "ttft_ms": percentiles(ttft),
        "device": {
            "idle_share": round(summary.idle_share, 4),
            "idle_between_share": round(summary.idle_between_share, 4),
            "largest_gap_us": round(max(f.gap_before_us for f in summary.frames), 1),
            "syncs": dict(summary.total("syncs")),
            "copies": dict(summary.total("copies")),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", required=True)
    add("--load-format", default="auto", choices=("auto", "dummy"))
    add("--dtype", default="auto")
    add("--draft")
    add("--num-drafts", type=int)
    add("--synthetic-acceptance", type=float)
    add("--slots", type=int, default=8, help="requests that decode all the time")
    add("--rounds", type=int, default=5, help="times that each prompt length is admitted")
    add("--run-ahead", type=int)
    add("--max-model-len", type=int, default=8192)
    add("--trace", type=Path)
    options = parser.parse_args()
    chosen = ("draft", "num_drafts", "synthetic_acceptance", "run_ahead")
    given = {k: getattr(options, k) for k in chosen if getattr(options, k) is not None}
    with tempfile.TemporaryDirectory() as folder, LLM(
        model=options.model, load_format=options.load_format, dtype=options.dtype, device="cuda",
        max_slots=options.slots + 2, max_model_len=options.max_model_len, prefix_cache=False,
        num_pages=(options.slots + 2) * (options.max_model_len // 32 + 1), **given,
    ) as llm:  # fmt: skip
        found = measure(llm, options.slots, options.rounds, options.trace or Path(folder) / "trace.json")
        resolved = {k: llm.resolved[k] for k in ("run_ahead", "prefill_tiers", "prefill_chunk_busy")}
    print(json.dumps({
        "model": options.model, "slots": options.slots, "draft": options.draft, "prompts": PROMPTS,
        "rounds": options.rounds, **resolved, **found, "torch": torch.__version__,
        "device_name": torch.cuda.get_device_name(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
