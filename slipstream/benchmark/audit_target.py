"""`slipstream audit [--model ...]`: the auditor on our own engine in steady decode.

With a GPU: runs decode frames under the runtime watch, and again under the profiler, whose trace tells
synchronisations, copies, launches and idle time per frame. Without one: the proof under fake CUDA tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from slipstream.audit import Report, profile, prove, watch
from slipstream.types import SamplingParams

WARM_UP = 24
"""Frames before the watch begins: prompts are read, every shape has run once."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="slipstream audit", description=__doc__)
    add = p.add_argument
    add("--model", help="as for generate")
    add("--load-format", default="auto", choices=("auto", "dummy"))
    add("--draft")
    add("--num-drafts", type=int)
    add("--synthetic-acceptance", type=float)
    add("--dtype", default="auto")
    add("--batch", type=int, default=8)
    add("--frames", type=int, default=50)
    add("--run-ahead", type=int)
    add("--temperature", type=float, default=0.0)
    add("--top-p", type=float, default=1.0)
    add("--min-p", type=float, default=0.0)
    add("--seed", type=int)
    return p


def main(args: list[str], trace: str | None) -> Report | int:
    """The report over both passes (or of the proof); the trace's table goes to stderr."""
    options = parser().parse_args(args)
    if not torch.cuda.is_available():
        print("no GPU here: proving the frame under fake CUDA tensors instead", file=sys.stderr)
        proof = prove("slipstream.benchmark.frame_program:build", args=["sampled" if options.temperature else "greedy"])
        print(proof.table())
        return proof.exit_code
    with steady_decode(options) as llm:
        report = Report("slipstream engine")
        step = llm._engine.step
        with watch(device="cuda", name="runtime") as watched:
            for _ in range(options.frames):
                step()
        report.merge(watched)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(trace) if trace else Path(folder) / "trace.json"
            with profile(file, frame="frame") as profiled:
                for _ in range(options.frames):
                    with torch.profiler.record_function("frame"):
                        step()
                torch.cuda.synchronize()
            summary = profiled.summary
        assert summary is not None
        report.merge(summary.report())
        print(summary.table(), file=sys.stderr)
    return report


@contextlib.contextmanager
def steady_decode(options: Any) -> Iterator[Any]:
    """An engine in which `batch` long requests decode, warmed up."""
    from slipstream.llm import LLM

    most = (options.num_drafts or 3) + 1 if options.draft else 1
    tokens = (WARM_UP + 2 * options.frames + 16) * most
    chosen = ("model", "draft", "num_drafts", "synthetic_acceptance", "run_ahead")
    given = {k: getattr(options, k) for k in chosen if getattr(options, k) is not None}
    with LLM(
        device="cuda", dtype=options.dtype, load_format=options.load_format, max_slots=options.batch,
        max_model_len=128 + tokens + 1, slot_buckets=(options.batch,), **given,
    ) as llm:  # fmt: skip
        rng = random.Random(0)
        params = SamplingParams(
            temperature=options.temperature, top_p=options.top_p, min_p=options.min_p, seed=options.seed,
            max_tokens=tokens, ignore_eos=True, stop_token_ids=[llm.model_config.vocab_size - 1],
        )  # fmt: skip
        for _ in range(options.batch):
            prompt = [rng.randrange(llm.model_config.vocab_size - 1) for _ in range(128)]
            llm._submit(*llm._prepare(prompt, params))
        for _ in range(WARM_UP):
            llm._engine.step()
        yield llm
