"""Frames and prefill chunks as CUDA graphs, in one memory pool.

One graph per (slot bucket, row tier) and kind of work for decoding, one per row tier and kind of work for prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.frame import Frame
from slipstream.device.precision import IeeeProducts
from slipstream.errors import ConfigError
from slipstream.types import FramePlan, Stages

BUSY_FRAMES = 2.0
"""Frames' time that a prefill chunk may take while somebody decodes."""


class Shape(NamedTuple):
    """What a captured frame is fixed to. rows, width, stages, drafts: as in FramePlan."""

    slots: int
    rows: int
    width: int
    stages: Stages
    drafts: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What a captured prefill pass is fixed to: its packed rows; whether a prompt may end in it; stages for its end;
    whether its rows' own log-probabilities are in."""

    rows: int
    last: bool
    stages: Stages
    prompt: bool = False


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A captured pass of the drafter over what frames without drafting have committed: slots x rows of each."""

    slots: int
    rows: int
    stages: Stages = Stages.GREEDY


AnyShape = Shape | Chunk | Missing


@dataclass(frozen=True, kw_only=True)
class CaptureReport:
    """What start-up capture cost."""

    graphs: int
    seconds: float
    mib: float


class FrameGraphs:
    """Captures every shape at start-up; `run` and `prefill` replay the one that a plan asks for.

    A pass reads the plan's lists, the page table and all slot state from fixed memory, so a graph has no inputs to
    copy. Shapes beyond the buckets cannot be asked for: the scheduler pads to them.
    """

    def __init__(
        self,
        frame: Frame,
        *,
        buckets: tuple[int, ...],
        kinds: Sequence[tuple[int, int]],
        len_ub: int,
        chunks: tuple[int, ...] = (),
        prompts: int = 1,
        width: int | None = None,
    ) -> None:
        """buckets: slots of frames; kinds: (rows per slot, drafts made) of frames; chunks: rows of prefill passes;
        prompts: ends in one. width: most rows of one slot, where it may have more than its share of them."""
        self.frame = frame
        self.len_ub = len_ub
        self.prompts = prompts
        self.shapes: list[AnyShape] = [
            Shape(slots=b, rows=b * tier, width=width or tier, stages=stages, drafts=drafts)
            for stages in Stages
            for b in buckets
            for tier, drafts in kinds
        ]
        ends = ((False, Stages.GREEDY), *((True, stages) for stages in Stages))
        self.shapes += [Chunk(rows=r, last=last, stages=stages) for last, stages in ends for r in chunks]
        self.shapes += [Chunk(rows=r, last=True, stages=Stages.ALL, prompt=True) for r in sorted(chunks)[:1]]
        if frame.catch_up is not None:
            self.shapes += [Missing(slots=b, rows=frame.catch_up.ring) for b in buckets]
        self.graphs: dict[AnyShape, tuple[torch.cuda.CUDAGraph, Tensor | None]] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.report: CaptureReport | None = None

    def capture(
        self,
        *,
        budget_seconds: float = 600.0,
        budget_mib: float = 8192.0,
        progress: Callable[[int, int], None] | None = None,
    ) -> CaptureReport:
        """Capture all shapes, largest first so that later ones fit into its memory.

        Raises ConfigError with the numbers when the budget in seconds or MiB is exceeded.
        """
        # Every capture hands the allocator's cached blocks back: counted before, they would hide what graphs take.
        torch.cuda.empty_cache()
        began, before = time.perf_counter(), torch.cuda.memory_reserved()
        order = sorted(self.shapes, key=lambda s: (-_rows(s), s.stages))
        for i, shape in enumerate(order):
            self.graphs[shape] = self._capture(shape)
            seconds = time.perf_counter() - began
            mib = (torch.cuda.memory_reserved() - before) / 2**20
            if seconds > budget_seconds or mib > budget_mib:
                raise ConfigError(
                    f"capturing {i + 1} of {len(order)} graphs took {seconds:.0f} s and {mib:.0f} MiB; the budget is "
                    f"{budget_seconds:.0f} s, {budget_mib:.0f} MiB: use fewer slot_buckets, row_tiers or prefill_tiers"
                )
            if progress is not None:
                progress(i + 1, len(order))
        torch.cuda.synchronize()
        return CaptureReport(
            graphs=len(order),
            seconds=time.perf_counter() - began,
            mib=(torch.cuda.memory_reserved() - before) / 2**20,
        )

    def busy_rows(self, frames: float = BUSY_FRAMES) -> int | None:
        """Rows of the largest chunk that takes no longer than `frames` of the fastest frame; None without chunks.

        Both are timed by replaying the captured graphs over the sink, after `capture`. The fastest frame, one slot
        with the fewest rows, is the strictest unit: a chunk that is short beside it is short beside every other. The
        smallest chunk if even that takes longer: prompts have to be read.
        """
        chunks = sorted({s.rows for s in self.shapes if isinstance(s, Chunk)})
        if not chunks:
            return None
        unit = self.seconds(min((s for s in self.shapes if isinstance(s, Shape)), key=lambda s: (s.stages, _rows(s))))
        within = [r for r in chunks if self.seconds(Chunk(rows=r, last=True, stages=Stages.GREEDY)) <= frames * unit]
        return max(within, default=chunks[0])

    def frame_seconds(self) -> tuple[tuple[int, int, int, float], ...]:
        """(slots, rows per slot, drafts, device seconds) of every greedy frame, over the sink: short sequences.

        A frame without drafts bears its share of the pass that catches up on many of them.
        """
        share = {s.slots: self.seconds(s) / s.rows for s in self.shapes if isinstance(s, Missing)}
        return tuple(
            (s.slots, s.width, s.drafts, self.seconds(s) + (0.0 if s.drafts else share.get(s.slots, 0.0)))
            for s in self.shapes
            if isinstance(s, Shape) and s.stages is Stages.GREEDY
        )

    def row_seconds(self) -> tuple[tuple[int, int, float], ...]:
        """(slots, rows, device seconds) of every greedy frame that drafts, over the sink: short sequences."""
        return tuple(
            (s.slots, s.rows, self.seconds(s))
            for s in self.shapes
            if isinstance(s, Shape) and s.stages is Stages.GREEDY and s.drafts
        )

    def seconds(self, shape: AnyShape, replays: int = 10) -> float:
        """Device time of one replay, the median of some. At start-up only, while all lists name the sink: it waits."""
        graph, _ = self.graphs[shape]
        graph.replay()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return float(sorted(times)[len(times) // 2])

    def plan_for(self, shape: AnyShape) -> FramePlan:
        """A plan of that shape whose slots are all the sink."""
        if isinstance(shape, Missing):
            return FramePlan(seq=-1, decode=(0,) * shape.slots)
        if isinstance(shape, Chunk):
            plan = FramePlan(seq=-1, prefill_rows=shape.rows, prefill_prompts=self.prompts)
            return _with(plan._replace(prompt_logprobs=shape.prompt), shape.stages)
        plan = FramePlan(
            seq=-1, decode=(0,) * shape.slots, rows=shape.rows, width=shape.width, len_ub=self.len_ub,
            first_page=(-1,) * shape.slots, drafts=shape.drafts,
        )  # fmt: skip
        return _with(plan, shape.stages)

    def _once(self, shape: AnyShape) -> Tensor | None:
        plan = self.plan_for(shape)
        if isinstance(shape, Missing):
            self.frame.read_missing(plan, self.frame.state.decode_B[: shape.slots])
            return None
        if isinstance(shape, Chunk):
            return self.frame.prefill(plan, last=shape.last)
        return self.frame.decode(plan, self.frame.state.decode_B[: shape.slots])

    def _capture(self, shape: AnyShape) -> tuple[torch.cuda.CUDAGraph, Tensor | None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), IeeeProducts(wanted=self.frame.model.dtype == torch.float32):
            with torch.cuda.stream(stream):
                self._once(shape)  # compiles kernels and fills the allocator's caches
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                record = self._once(shape)
        return graph, record

    def run(self, plan: FramePlan) -> Tensor:
        """Replay a decode frame; its record stays valid until another graph of the pool runs."""
        record = self._replay(Shape(len(plan.decode), plan.rows, plan.width, plan.stages, plan.drafts))
        assert record is not None
        return record

    def read_missing(self, plan: FramePlan) -> None:
        """Replay the drafter's pass of plan.catch_up."""
        assert self.frame.catch_up is not None
        self._replay(Missing(slots=len(plan.decode), rows=self.frame.catch_up.ring))

    def prefill(self, plan: FramePlan, *, last: bool) -> Tensor | None:
        """Replay a prefill chunk; the record as `Frame.prefill` gives it, valid as that of `run`."""
        if plan.prompt_logprobs:
            return self._replay(Chunk(rows=plan.prefill_rows, last=True, stages=Stages.ALL, prompt=True))
        stages = plan.stages if last else Stages.GREEDY
        return self._replay(Chunk(rows=plan.prefill_rows, last=last, stages=stages))

    def _replay(self, shape: AnyShape) -> Tensor | None:
        found = self.graphs.get(shape)
        if found is None:
            have = sorted({(s.slots, s.rows, s.drafts) for s in self.graphs if isinstance(s, Shape)})
            chunks = sorted({s.rows for s in self.graphs if isinstance(s, Chunk)})
            raise ConfigError(f"no graph for {shape}; captured: (slots, rows, drafts) {have}, prefill rows {chunks}")
        graph, record = found
        graph.replay()
        return record


def _with(plan: FramePlan, stages: Stages) -> FramePlan:
    """The plan with all that its stages may have to do: each row's slot says on the device what it needs."""
    some, every = stages > Stages.GREEDY, stages is Stages.ALL
    return plan._replace(
        sampled=some, filtered=some, rejection=some, coupled=some, min_tokens=some, penalties=every, biases=every,
        custom=every, logprobs=every, masked=every,
    )  # fmt: skip


def _rows(shape: AnyShape) -> int:
    return shape.slots * shape.rows if isinstance(shape, Missing) else shape.rows
