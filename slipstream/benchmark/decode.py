"""`slipstream bench decode`: time per decoded token, beside the time it takes to read the weights once.

Each batch size is measured by pairs of runs over the same prompts, a short one and one that is
`output_len` tokens longer. Prefill, start-up and the ends of the run are the same in both, so the
difference of the two is pure decoding. The floor is measured in the same process with the same threads.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from slipstream import __version__
from slipstream.benchmark import floor
from slipstream.draft.options import SCHEDULE_HELP, TREE_HELP, tree_values
from slipstream.errors import ConfigError
from slipstream.types import SamplingParams

SHORT = 32
"""Output tokens of the short run: enough that every sequence of a batch has started before one ends."""

_LLM_OPTIONS = (
    "model", "load_format", "draft", "num_drafts", "draft_tree", "adaptive", "confidence_schedule",
    "synthetic_acceptance", "dtype", "device",
    "threads", "run_ahead", "seed",
)  # fmt: skip

_clock = time.perf_counter

_COLUMNS = (
    "batch",
    "tpot_ms",
    "step_ms",
    "tok_s",
    "acceptance_length",
    "host_us_per_frame",
    "floor_ms",
    "share_of_floor",
)


_GPU_COLUMNS = (
    "device_idle_share",
    "syncs_per_frame",
    "graph_launches_per_frame",
    "kernel_launches_per_frame",
    "peak_memory_mib",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `slipstream bench decode`."""
    add = parser.add_argument
    add("--model", metavar="M", help="directory, GGUF file or hub id (default: SmolLM2-135M-Instruct)")
    add("--load-format", choices=("auto", "dummy"), help="dummy: seeded random weights from a config.json")
    add("--draft", metavar="D", help='"ngram", "suffix", "mtp" or the path of a draft (default: none)')
    add("--num-drafts", type=int, metavar="K", help="drafts per round")
    add("--draft-tree", metavar="TOPK,LEVELS,TOTAL", help=TREE_HELP)
    add("--adaptive", action="store_true", default=None, help="draft only as much as pays, or not")
    add("--confidence-schedule", action="store_true", default=None, help=SCHEDULE_HELP)
    add(
        "--synthetic-acceptance",
        type=float,
        metavar="X",
        help="mean tokens per round, 1 to K + 1 (of a tree: to its levels + 1); overrides only the accept decision",
    )
    add("--batch", default="1,8,32", metavar="N,N,...", help="batch sizes (default 1,8,32)")
    add("--prompt-len", type=int, default=128, metavar="N", help="prompt tokens per sequence (default 128)")
    add("--output-len", type=int, metavar="N", help="measured tokens per sequence (default 64, 512 on a GPU)")
    add("--repeats", type=int, default=3, metavar="N", help="pairs of runs; the median counts (default 3)")
    add("--dtype", choices=("auto", "float32", "float64", "bfloat16"))
    add("--device", choices=("auto", "cpu", "cuda"))
    add("--threads", type=int, metavar="N", help="CPU threads")
    add("--run-ahead", type=int, metavar="N", help="frames queued before the first result is read")
    add("--seed", type=int, default=0, metavar="S", help="of the random prompts and of dummy weights")
    add("--no-trace", action="store_true", help="on a GPU: leave out what the auditor sees per frame")
    add("--json", action="store_true", help="print JSON, one line per batch size")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One `generate` call. Seconds are wall time; host_seconds is what the host did for
    the frames: plan, enqueue, collect (not the frames themselves on a CPU, not waiting for them, not text).

    rounds: sum over sequences of the frames in which they were active; emitted: tokens of those rounds.
    """

    seconds: float
    tokens: int
    frames: int
    host_seconds: float
    rounds: int
    emitted: int


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one batch size costs; lengths of time in seconds.

    tpot: between two tokens of one sequence, the mean over the batch. step: one frame.
    tok_s: tokens of all sequences per second. acceptance_length: tokens per sequence and frame.
    """

    tpot: float
    step: float
    tok_s: float
    acceptance_length: float
    host_per_frame: float
    spread: float


def timing(pairs: Sequence[tuple[Run, Run]], *, batch: int) -> Timing:
    """Median over (short, long) pairs of the differences long - short.

    `spread` is (largest - smallest tpot) / median tpot, 0 for a single pair.
    Raises ConfigError when a longer run did not take longer: the measurement is then below the clock's noise.
    """
    if not pairs:
        raise ValueError("no pairs of runs")
    tpots, steps, taus, hosts = [], [], [], []
    for short, long in pairs:
        seconds, tokens, frames = (
            long.seconds - short.seconds,
            long.tokens - short.tokens,
            long.frames - short.frames,
        )
        rounds, emitted = long.rounds - short.rounds, long.emitted - short.emitted
        if seconds <= 0 or tokens <= 0 or frames <= 0:
            raise ConfigError(
                f"{tokens} more tokens in {frames} more frames took {seconds * 1e3:.3f} ms more: "
                "too little to measure; raise --output-len"
            )
        tpots.append(seconds * batch / tokens)
        steps.append(seconds / frames)
        taus.append(emitted / rounds if rounds > 0 else 1.0)
        hosts.append((long.host_seconds - short.host_seconds) / frames)
    tpot = median(tpots)
    return Timing(
        tpot=tpot,
        step=median(steps),
        tok_s=batch / tpot,
        acceptance_length=median(taus),
        host_per_frame=median(hosts),
        spread=(max(tpots) - min(tpots)) / tpot,
    )


def random_prompts(count: int, length: int, *, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` token ids, uniform over the vocabulary without its first ids (controls)."""
    import numpy as np

    low = min(256, vocab_size // 2)
    ids_np = np.random.default_rng(seed).integers(low, vocab_size, size=(count, length))
    return [[int(i) for i in row_np] for row_np in ids_np]


def run_once(llm: Any, prompts: list[list[int]], output_len: int) -> Run:
    """Greedy `generate` of exactly `output_len` tokens per prompt, with the engine's counters around it."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    before = llm.stats()
    start = _clock()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = _clock() - start
    after = llm.stats()
    specs = [output.spec for output in outputs]
    return Run(
        seconds=seconds,
        tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        frames=after["counters"]["frames"] - before["counters"].get("frames", 0),
        host_seconds=sum(sign * (s["host_seconds"] - s["device_seconds"]) for sign, s in ((1, after), (-1, before))),
        rounds=sum(spec.rounds for spec in specs),
        emitted=sum(spec.emitted for spec in specs),
    )


def measure(
    llm: Any, *, batch: int, prompt_len: int, output_len: int, repeats: int, vocab_size: int, seed: int
) -> Timing:
    """`repeats` interleaved (short, long) pairs after a short warm-up, which also fills the prefix cache."""
    prompts = random_prompts(batch, prompt_len, vocab_size=vocab_size, seed=seed)
    run_once(llm, prompts, SHORT)
    pairs = [(run_once(llm, prompts, SHORT), run_once(llm, prompts, SHORT + output_len)) for _ in range(repeats)]
    return timing(pairs, batch=batch)


def row(timed: Timing, *, batch: int, floor_seconds: float, facts: dict[str, Any]) -> dict[str, Any]:
    """The JSON object of one batch size; `facts` (model, device, versions ...) are appended as they are."""
    return {
        "batch": batch,
        "tpot_ms": round(timed.tpot * 1e3, 4),
        "step_ms": round(timed.step * 1e3, 4),
        "tok_s": round(timed.tok_s, 2),
        "acceptance_length": round(timed.acceptance_length, 4),
        "host_us_per_frame": round(timed.host_per_frame * 1e6, 2),
        "floor_ms": round(floor_seconds * 1e3, 4),
        "share_of_floor": round(floor_seconds / timed.step, 4),
        "spread": round(timed.spread, 4),
        **facts,
    }


def _batches(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in str(text).split(",")]
    except ValueError:
        raise ConfigError(f"--batch {text!r} must be whole numbers with commas between, such as 1,8,32") from None
    for size in sizes:
        if not 1 <= size <= 4096:
            raise ConfigError(f"--batch {size} must be between 1 and 4096")
    return sizes


def _positive(option: str, value: int) -> None:
    if not 1 <= value <= 1 << 20:
        raise ConfigError(f"{option} {value} must be between 1 and {1 << 20}")


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for LLM; those the user left alone are left to LLM's own defaults."""
    chosen = {name: getattr(args, name) for name in _LLM_OPTIONS}
    if args.draft_tree is not None:
        chosen["draft_tree"] = tree_values(args.draft_tree)
    return {name: value for name, value in chosen.items() if value is not None}


def run(args: argparse.Namespace) -> int:
    """Measures every batch size and prints one line each. Returns the exit code.

    Raises SlipstreamError subclasses for options that cannot work; the command line turns them into one line.
    """
    batches = _batches(args.batch)
    if args.output_len is None:
        args.output_len = 512 if _on_gpu(args.device) else 64
    for option in ("prompt_len", "output_len", "repeats"):
        _positive(f"--{option.replace('_', '-')}", getattr(args, option))

    from slipstream.benchmark.frames import observe
    from slipstream.llm import LLM

    context = args.prompt_len + SHORT + args.output_len
    llm = LLM(max_slots=max(batches), max_model_len=context, **_options(args))
    on_gpu = str(llm.resolved["device"]).startswith("cuda")
    start_up = _device_peak() if on_gpu else (0, 0)
    weight_bytes = streamed_bytes(llm)
    rate = floor.read_rate(weight_bytes, device=llm.resolved["device"])
    facts = _facts(llm, args, rate=rate, weight_bytes=weight_bytes)
    if on_gpu:
        facts["matrix_tflop_s"] = round(floor.matrix_rate(llm.resolved["dtype"]) / 1e12, 1)
        _forget_device_peak()  # the floor's own buffers are not the engine's
    traced = on_gpu and not args.no_trace
    columns = (*_COLUMNS, *(_GPU_COLUMNS if traced else ()))
    if not args.json:
        print("  ".join(f"{name:>17}" for name in columns))
    lines = []
    for batch in batches:
        timed = measure(
            llm, batch=batch, prompt_len=args.prompt_len, output_len=args.output_len, repeats=args.repeats,
            vocab_size=llm.model_config.vocab_size, seed=args.seed,
        )  # fmt: skip
        seconds = weight_bytes / rate
        if on_gpu:
            seconds = gpu_floor(llm, args, batch=batch, read=rate, matrix=facts["matrix_tflop_s"] * 1e12)
        line = row(timed, batch=batch, floor_seconds=seconds, facts=facts)
        if on_gpu:
            line |= peak_memory(start_up)
        if not traced:
            _show(line, columns, as_json=args.json)
        lines.append((batch, timed.step, line))
    # Traces come after all times: the first leaves CUPTI attached, which adds to the host time of later launches.
    for batch, step_seconds, line in lines if traced else ():
        prompts = random_prompts(batch, args.prompt_len, vocab_size=llm.model_config.vocab_size, seed=args.seed)
        line |= observe(llm, prompts, tokens=SHORT + args.output_len, step_seconds=step_seconds)
        _show(line, columns, as_json=args.json)
    return 0


def gpu_floor(llm: Any, args: argparse.Namespace, *, batch: int, read: float, matrix: float) -> float:
    """Seconds: `floor.frame_floor` of this engine's passes, with the KV of the run's mean context read once, and the
    states of recurrent layers read and written once.

    The target's pass has batch x (drafts + 1) rows; a drafter's bytes count all of its passes of a frame together.
    """
    frame = llm._built.device.frame
    size = frame.model.dtype.itemsize
    passes = [
        floor.Pass(
            weight_bytes=int(frame.model.weight_bytes()), itemsize=size, rows=batch * (llm.resolved["num_drafts"] + 1)
        )
    ]
    drafts = streamed_bytes(llm) - passes[0].weight_bytes
    if drafts:
        passes.append(floor.Pass(weight_bytes=drafts, itemsize=size, rows=batch))
    context = args.prompt_len + SHORT + args.output_len / 2
    token_bytes = frame.kv.nbytes / ((frame.kv.num_pages + 1) * frame.kv.page_size)
    slot_bytes = context * token_bytes
    if frame.states is not None:
        slot_bytes += 2 * frame.states.state[:, 0].numel() * frame.states.state.element_size()
    return floor.frame_floor(passes, kv_bytes=batch * slot_bytes, read=read, matrix=matrix)


def peak_memory(start_up: tuple[int, int]) -> dict[str, Any]:
    """Peak device memory so far. start_up: the peak before the floor was measured, see `_device_peak`."""
    held, reserved = (max(pair) for pair in zip(start_up, _device_peak(), strict=True))
    return {"peak_memory_mib": round(held / 2**20, 1), "peak_reserved_mib": round(reserved / 2**20, 1)}


def _show(line: dict[str, Any], columns: Sequence[str], *, as_json: bool) -> None:
    print(json.dumps(line) if as_json else "  ".join(f"{line.get(name, '-'):>17}" for name in columns), flush=True)


def _device_peak() -> tuple[int, int]:
    """Most bytes that tensors, and the allocator, have held on the GPU since the start or `_forget_device_peak`."""
    import torch

    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def _forget_device_peak() -> None:
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def _on_gpu(device: str | None) -> bool:
    if device not in (None, "auto"):
        return device == "cuda"
    import torch

    return torch.cuda.is_available()


def streamed_bytes(llm: Any) -> int:
    """Weight bytes one frame reads: the target once, and what the drafter's passes read."""
    frame = llm._built.device.frame
    drafter = getattr(frame.drafter, "weight_bytes", None)
    return int(frame.model.weight_bytes()) + (int(drafter()) if drafter is not None else 0)


def _facts(llm: Any, args: argparse.Namespace, *, rate: float, weight_bytes: int) -> dict[str, Any]:
    import torch

    resolved = llm.resolved
    return {
        "read_gb_s": round(rate / 1e9, 2),
        "weight_mb": round(weight_bytes / 1e6, 2),
        "model": resolved["model"],
        "load_format": args.load_format or "auto",
        "gpu": torch.cuda.get_device_name() if str(resolved["device"]).startswith("cuda") else None,
        "capture": resolved.get("capture"),
        "draft": args.draft,
        "num_drafts": resolved["num_drafts"],
        "draft_tree": resolved.get("draft_tree"),
        "adaptive": resolved.get("adaptive", False),
        "confidence_schedule": resolved.get("confidence_schedule", False),
        "synthetic_acceptance": args.synthetic_acceptance,
        "dtype": resolved["dtype"],
        "device": resolved["device"],
        "run_ahead": resolved["run_ahead"],
        "threads": torch.get_num_threads(),
        "prompt_len": args.prompt_len,
        "output_len": args.output_len,
        "repeats": args.repeats,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions that a number depends on."""
    import torch

    return {
        "slipstream": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "os": sys.platform,
    }
