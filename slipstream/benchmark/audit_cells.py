"""Steady decode under the auditor, cell by cell: batch size, kind of sampling, with and without drafts.

Each cell runs the same engine three times over: with no instrument, for the times, under the runtime watch, and under
the profiler. Times come first, of all cells that share a process: the profiler leaves CUPTI attached after its first
trace, and that adds to the host time of every later launch. What a cell must show is in `failures`;
`bench/audit_cells.py` writes all cells of a model to one JSON.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import slipstream.build as build_room
from slipstream.audit import TraceSummary, profile, watch
from slipstream.models.config import parse_hf_config
from slipstream.types import SamplingParams

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 7},
    "sampled": {"temperature": 0.8, "min_p": 0.02, "top_p": 0.9},
    "requests": {
        "temperature": 0.8,
        "seed": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {3: 1.0, 5: -1.0},
        "logprobs": 5,
    },
}
PROMPT, SETTLE = 128, 8
"""Prompt tokens per sequence; frames between the last prompt row and the first measured frame."""
GRID = (1, 16, 16)
"""Patches of a picture in time, height and width; at 2 x 2 patches to a token it is half of a prompt."""


@dataclass(frozen=True, kw_only=True)
class Frames:
    """How many frames of a cell run under the watch, under the profiler, and under the clock alone."""

    watched: int = 16
    traced: int = 16
    timed: int = 48

    @property
    def total(self) -> int:
        return SETTLE + self.watched + self.traced + self.timed


@contextlib.contextmanager
def weights_once() -> Iterator[None]:
    """Within it, engines of the same model share one set of weights."""
    real, known = build_room._load, {}

    def load(config: Any, source: str | None, device: torch.device) -> Any:
        key = (source, str(device), config.dtype, config.load_format, config.seed)
        if key not in known:
            known[key] = real(config, source, device)
        return known[key]

    build_room._load = load
    try:
        yield
    finally:
        build_room._load = real


@contextlib.contextmanager
def engine(model: str, batches: Sequence[int], frames: Frames, *, draft: bool, **options: Any) -> Iterator[Any]:
    """One engine for every cell of a model; with `draft`, n-gram with k = 3 and synthetic acceptance 3.0."""
    from slipstream.llm import LLM

    rows = 4 if draft else 1
    if draft:
        options = {"draft": "ngram", "num_drafts": 3, "synthetic_acceptance": 3.0, **options}
    length = PROMPT + (frames.total + 64) * rows
    with LLM(
        model=model, device="cuda", max_slots=max(batches), slot_buckets=tuple(sorted(batches)),
        max_model_len=length, **options,
    ) as llm:  # fmt: skip
        yield llm
    del llm
    gc.collect()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def with_pictures(model: str) -> Iterator[str]:
    """A folder like `model`, whose rotary embedding has three axes and whose vocabulary an image token.

    A model that has both already is given as it is.
    """
    values = json.loads((Path(model) / "config.json").read_text())
    config = parse_hf_config(values)
    if config.vision is not None and config.rope.sections:
        yield model
        return
    base, more = divmod(config.rope.turned(config.head_dim) // 2, 3)
    values["rope_parameters"] = {
        "rope_theta": config.rope.theta, "partial_rotary_factor": config.rope.partial,
        "mrope_section": [base + (axis < more) for axis in range(3)], "mrope_interleaved": True,
    }  # fmt: skip
    values |= {"image_token_id": config.vocab_size - 3, "vision_config": {"spatial_merge_size": 2}}
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / Path(model).name
        shutil.copytree(model, folder)
        (folder / "config.json").write_text(json.dumps(values))
        yield str(folder)


def time_cell(llm: Any, *, batch: int, sampling: str, frames: Frames, pictures: bool = False) -> dict[str, Any]:
    """Times of one cell in steady decode, without an instrument; to be taken before any trace in the process.

    pictures: every second request, the first one too, has a picture.
    """
    requests = _start(llm, batch, sampling, pictures=pictures)
    step = llm._engine.step
    before, spec = llm.stats(), llm._engine.metrics.spec.as_dict()
    began = time.perf_counter()
    for _ in range(frames.timed):
        step()
    seconds = time.perf_counter() - began
    after, spec_after = llm.stats(), llm._engine.metrics.spec.as_dict()
    running = len(llm._engine.scheduler.running)
    _end(llm, requests)
    return {
        "still_running": running,
        "step_us": round(seconds / frames.timed * 1e6, 1),
        "host_us_per_frame": _per_frame(before, after, "host_seconds", frames.timed),
        "wait_us_per_frame": _per_frame(before, after, "wait_seconds", frames.timed),
        "tokens_per_round": _tokens_per_round(spec, spec_after),
    }


def run_cell(
    llm: Any,
    *,
    batch: int,
    sampling: str,
    frames: Frames,
    trace: Path | None = None,
    times: dict[str, Any] | None = None,
    pictures: bool = False,
) -> dict[str, Any]:
    """One cell in steady decode: what the watch found, what the trace counted, and its times.

    times: of `time_cell`, where it has run already. pictures: as there; what the watch and the trace see while those
    prompts are read is in the cell too, under "reading".
    """
    times = times or time_cell(llm, batch=batch, sampling=sampling, frames=frames, pictures=pictures)
    step = llm._engine.step
    requests = _start(llm, batch, sampling, pictures=pictures)
    torch.cuda.reset_peak_memory_stats()
    with watch(device="cuda", name="runtime") as watched:
        for _ in range(frames.watched):
            step()
    with tempfile.TemporaryDirectory() as folder:
        with profile(trace or Path(folder) / "trace.json", frame="frame") as profiled:
            for _ in range(frames.traced):
                with torch.profiler.record_function("frame"):
                    step()
    running = min(times["still_running"], len(llm._engine.scheduler.running))
    _end(llm, requests)
    assert profiled.summary is not None
    cell = {"batch": batch, "sampling": sampling, "draft": llm.resolved["draft"], **times, "still_running": running}
    cell |= _watched(watched, frames.watched) | _traced(profiled.summary)
    cell |= {
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20, 1),
        "reserved_mib": round(torch.cuda.memory_reserved() / 2**20, 1),
    }
    if pictures:
        cell |= {"pictures": (batch + 1) // 2, "reading": _reading(llm, batch, sampling)}
    return {**cell, "failures": failures(cell)}


def _reading(llm: Any, batch: int, sampling: str) -> dict[str, Any]:
    """A batch with pictures from its submission until its prompts are read, under the watch and then traced."""
    _end(llm, _start(llm, batch, sampling, pictures=True, turn=1))
    before = llm._built.device.embeds.rows
    with watch(device="cuda", name="reading") as watched:
        requests = _submit(llm, batch, sampling, pictures=True, turn=2)
        steps = _read(llm, batch)
    rows = llm._built.device.embeds.rows - before
    _end(llm, requests)
    with tempfile.TemporaryDirectory() as folder, profile(Path(folder) / "trace.json", frame="frame") as profiled:
        requests = _submit(llm, batch, sampling, pictures=True, turn=3)
        _read(llm, batch)
    _end(llm, requests)
    assert profiled.summary is not None
    counts = ("stream_syncs", "device_syncs", "pageable_copies", "driver_allocations")
    traced = _traced(profiled.summary)
    kept = {name: traced[name] for name in (*counts, "copies_per_frame", "traced_frames")}
    return {"embeddings": rows, **_watched(watched, steps), **kept}


def _end(llm: Any, requests: Sequence[str]) -> None:
    for request in requests:
        llm.abort(request)
    llm.check_idle()


def failures(cell: dict[str, Any], *, host_us: float | None = 150.0, idle_between: float | None = 0.02) -> list[str]:
    """What a cell does not show. None leaves a limit in time out (tiny models, shared machines)."""
    out = [f"{rule} x{count}" for rule, count in cell["findings"].items()]
    for name in ("stream_syncs", "device_syncs", "pageable_copies", "allocations", "driver_allocations", "recompiles"):
        if cell[name]:
            out.append(f"{name} {cell[name]}")
    reading = cell.get("reading")
    if reading is not None:
        out += [f"{rule} x{count} while prompts are read" for rule, count in reading["findings"].items()]
        for name in ("stream_syncs", "device_syncs", "pageable_copies", "pinned_allocations", "driver_allocations"):
            if reading[name]:
                out.append(f"{name} {reading[name]} while prompts are read")
        if not reading["embeddings"]:
            out.append("no embedding went up while prompts were read")
    if cell["event_waits_per_frame"] > 1:
        out.append(f"{cell['event_waits_per_frame']} event waits per frame")
    if cell["graph_launches_per_frame"] != 1:
        out.append(f"{cell['graph_launches_per_frame']} graph launches per frame")
    if idle_between is not None:
        if cell["drained_frames"]:
            out.append(f"the device had nothing left to do after {cell['drained_frames']} waits")
        if cell["idle_between_share"] >= idle_between:
            out.append(f"device idle between frames {cell['idle_between_share']:.2%}")
    if host_us is not None and cell["host_us_per_frame"] >= host_us:
        out.append(f"host {cell['host_us_per_frame']} us per frame")
    return out


def _start(llm: Any, batch: int, sampling: str, *, pictures: bool = False, turn: int = 0) -> list[str]:
    """Submit a batch and step until every prompt is read and the frames have settled."""
    requests = _submit(llm, batch, sampling, pictures=pictures, turn=turn)
    _read(llm, batch)
    for _ in range(SETTLE):
        llm._engine.step()
    return requests


def _submit(llm: Any, batch: int, sampling: str, *, pictures: bool, turn: int) -> list[str]:
    """turn: another one has other prompts."""
    rng, vocab = random.Random(batch + 4096 * turn), llm.model_config.vocab_size
    room = llm._built.engine_config.max_model_len - PROMPT
    # Two stop ids that hardly ever come: the test for them runs, and the batch stays whole.
    params = SamplingParams(
        max_tokens=room, ignore_eos=True, stop_token_ids=[vocab - 1, vocab - 2], **SAMPLING[sampling]
    )
    prompts: list[Any] = [[rng.randrange(vocab - 2) for _ in range(PROMPT)] for _ in range(batch)]
    if pictures:
        prompts[::2] = [_pictured(llm.model_config, ids, seed=rng.randrange(1 << 30)) for ids in prompts[::2]]
    return [llm._submit(*llm._prepare(prompt, params)) for prompt in prompts]


def _read(llm: Any, batch: int) -> int:
    """Step until every prompt is read; how many steps it took."""
    running = llm._engine.scheduler.running
    for count in range(64 + 8 * batch):
        if len(running) == batch and all(seq.prefilled for seq in running.values()):
            return count
        with torch.profiler.record_function("frame"):
            llm._engine.step()
    raise RuntimeError(f"{batch} prompts of {PROMPT} tokens are not read after {64 + 8 * batch} frames")


def _pictured(config: Any, ids: list[int], *, seed: int) -> dict[str, Any]:
    """The prompt with a picture in the middle of its text."""
    vision, (t, h, w) = config.vision, GRID
    count = t * h * w // vision.merge**2
    text = [0 if i in (vision.image, vision.video) else i for i in ids]
    first = (PROMPT - count) // 2
    text[first : first + count] = [vision.image] * count
    embeds = torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(seed)) * 0.02
    return {"prompt_token_ids": text, "prompt_embeds": embeds, "image_grid_thw": [list(GRID)]}


def _watched(report: Any, frames: int) -> dict[str, Any]:
    return {
        "findings": {f.rule: f.count for f in report.findings},
        "allowed": {a.reason: dict(a.hits) for a in report.allowed},
        "recompiles": sum(f.count for f in report.by_rule("recompile")),
        "allocations": int(report.counters["allocations"]),
        "pinned_allocations": int(report.counters.get("pinned_allocations", 0)),
        "watched_frames": frames,
    }


def _traced(summary: TraceSummary) -> dict[str, Any]:
    n, report = max(1, len(summary.frames)), summary.report()
    syncs, sync_us = summary.total("syncs"), summary.total("sync_us")
    copies = summary.total("copies")
    return {
        "traced_frames": len(summary.frames),
        "stream_syncs": syncs["stream"],
        "device_syncs": syncs["device"],
        "event_waits_per_frame": round(syncs["event"] / n, 3),
        "event_wait_us_per_frame": round(sync_us["event"] / n, 1),
        "drained_frames": summary.drained_frames,
        "copies_per_frame": {kind: round(count / n, 3) for kind, count in sorted(copies.items())},
        "pageable_copies": sum(count for kind, count in copies.items() if kind.endswith("pageable")),
        "driver_allocations": summary.total("allocations")["allocations"],
        "kernel_launches_per_frame": report.counters["kernel_launches_per_frame"],
        "graph_launches_per_frame": report.counters["graph_launches_per_frame"],
        "kernels_per_frame": round(summary.total("kernels")["kernels"] / n, 2),
        "idle_share": round(summary.idle_share, 4),
        "idle_between_share": round(summary.idle_between_share, 4),
        "traced_host_us_per_frame": round(report.counters["host_us_per_frame"], 1),
    }


def _per_frame(before: dict[str, Any], after: dict[str, Any], name: str, frames: int) -> float:
    return round(float(after[name] - before[name]) / frames * 1e6, 1)


def _tokens_per_round(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    rounds = after["rounds"] - before["rounds"]
    return round(1 + (after["accepted"] - before["accepted"]) / rounds, 3) if rounds else None
