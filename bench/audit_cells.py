"""The auditor on the engine in steady decode, all cells of a model in one process; one JSON.

    python bench/audit_cells.py --models bench/configs/llama-3.2-1b,bench/configs/llama-3.1-8b --out cells.json

A cell is a batch size, a kind of sampling (greedy, seeded, sampled with min-p, top-p and stop ids, requests with
penalties, biases and logprobs) and a drafter (none, n-gram with k = 3 and synthetic acceptance 3.0). Weights are
loaded once per model. With --mixed-rope every second request carries a picture, by embeddings and a grid, and what
happens while those prompts are read is in each cell too. Exit code 1 if a cell shows what it must not: see `failures`
in slipstream/benchmark/audit_cells.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slipstream.benchmark.audit_cells import SAMPLING, Frames, engine, run_cell, time_cell, weights_once, with_pictures
from slipstream.benchmark.decode import versions


def main() -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = p.add_argument
    add("--models", default="bench/configs/llama-3.2-1b,bench/configs/llama-3.1-8b")
    add("--load-format", default="dummy", choices=("auto", "dummy"))
    add("--dtype", default="bfloat16")
    add("--batches", default="1,8,32")
    add("--sampling", default=",".join(SAMPLING))
    add("--drafts", default="none,ngram")
    add("--mixed-rope", action="store_true", help="half of the requests carry pictures; models without get three axes")
    add("--frames", type=int, default=16, help="under the watch and under the profiler; three times as many are timed")
    add("--budget-s", type=float, default=150.0, help="no new cell begins after this many seconds")
    add("--traces", metavar="FOLDER", help="keep every cell's Chrome trace there")
    add("--out", metavar="FILE")
    args = p.parse_args()
    if not torch.cuda.is_available():
        print("audit_cells needs a CUDA device", file=sys.stderr)
        return 2
    if args.traces:
        Path(args.traces).mkdir(parents=True, exist_ok=True)
    frames = Frames(watched=args.frames, traced=args.frames, timed=3 * args.frames)
    batches = [int(b) for b in args.batches.split(",")]
    began, cells, engines, left_out = time.perf_counter(), [], [], []
    traced = False  # see benchmark/audit_cells.py: for times without CUPTI, one model and draft per process
    for model in args.models.split(","):
        seeing = with_pictures(model) if args.mixed_rope else contextlib.nullcontext(model)
        with weights_once(), seeing as folder:
            for draft in args.drafts.split(","):
                name = f"{Path(model).name} {draft}"
                if time.perf_counter() - began > args.budget_s:
                    left_out.append(name)
                    continue
                start = time.perf_counter()
                with engine(
                    folder, batches, frames, draft=draft == "ngram", dtype=args.dtype, load_format=args.load_format
                ) as llm:
                    report: Any = llm._built.device.graphs.report
                    engines.append({"engine": name, "start_s": round(time.perf_counter() - start, 1),
                                    "graphs": report.graphs, "capture_s": round(report.seconds, 1),
                                    "capture_mib": round(report.mib, 1)})  # fmt: skip
                    print(json.dumps(engines[-1]), file=sys.stderr, flush=True)
                    todo = [(batch, sampling) for batch in batches for sampling in args.sampling.split(",")]
                    times = [
                        time_cell(llm, batch=b, sampling=s, frames=frames, pictures=args.mixed_rope) for b, s in todo
                    ]
                    for (batch, sampling), timed in zip(todo, times, strict=True):
                        label = f"{name} batch {batch} {sampling}"
                        if time.perf_counter() - began > args.budget_s:
                            left_out.append(label)
                            continue
                        file = Path(args.traces) / f"{label.replace(' ', '-')}.json.gz" if args.traces else None
                        cell = run_cell(
                            llm, batch=batch, sampling=sampling, frames=frames, trace=file, times=timed,
                            pictures=args.mixed_rope,
                        )  # fmt: skip
                        cells.append({"model": Path(model).name, "timed_after_a_trace": traced, **cell})
                        print(f"{label}: {cell['failures'] or 'clean'}", file=sys.stderr, flush=True)
                    traced = True
                del llm  # its pages and graphs go before the next engine comes
    bad = [c for c in cells if c["failures"]]
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "hardware": torch.cuda.get_device_name(), "commit": _commit(),
        "command": "python " + " ".join(sys.argv), "versions": versions(), "dtype": args.dtype,
        "load_format": args.load_format, "seconds": round(time.perf_counter() - began, 1), "frames": vars(frames),
        "engines": engines, "clean_cells": len(cells) - len(bad), "cells_with_failures": len(bad),
        "not_run": left_out, "cells": cells,
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    if args.out:
        Path(args.out).write_text(text + "\n", encoding="utf-8")
    print(text if not args.out else json.dumps({k: v for k, v in result.items() if k != "cells"}))
    return 1 if bad or left_out or not cells else 0


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False,
                          cwd=Path(__file__).parent)  # fmt: skip
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    raise SystemExit(main())
