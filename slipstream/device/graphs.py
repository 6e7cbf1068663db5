"""Decode frames as CUDA graphs: one per (slot bucket, row tier) and kind of work, in one memory pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.frame import Frame
from slipstream.device.precision import IeeeProducts
from slipstream.errors import ConfigError
from slipstream.types import FramePlan


class Shape(NamedTuple):
    """What a captured frame is fixed to. full: every sampling stage is in; else greedy work only."""

    slots: int
    width: int
    full: bool


@dataclass(frozen=True, kw_only=True)
class CaptureReport:
    """What start-up capture cost."""

    graphs: int
    seconds: float
    mib: float


class FrameGraphs:
    """Captures every shape at start-up; `run` replays the one that a plan asks for and returns its record.

    A frame reads the decode list, the page table and all slot state from fixed memory, so a graph has no inputs
    to copy. Shapes beyond the buckets cannot be asked for: the scheduler pads to them.
    """

    def __init__(self, frame: Frame, *, buckets: tuple[int, ...], tiers: tuple[int, ...], len_ub: int) -> None:
        self.frame = frame
        self.len_ub = len_ub
        self.shapes = [Shape(slots=b, width=t, full=full) for full in (False, True) for b in buckets for t in tiers]
        self.graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
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
        began, before = time.perf_counter(), torch.cuda.memory_reserved()
        order = sorted(self.shapes, key=lambda s: (-s.slots * s.width, s.full))
        for i, shape in enumerate(order):
            self.graphs[shape] = self._capture(shape)
            seconds = time.perf_counter() - began
            mib = (torch.cuda.memory_reserved() - before) / 2**20
            if seconds > budget_seconds or mib > budget_mib:
                raise ConfigError(
                    f"capturing {i + 1} of {len(order)} frame graphs took {seconds:.0f} s and {mib:.0f} MiB; "
                    f"the budget is {budget_seconds:.0f} s, {budget_mib:.0f} MiB: use fewer slot_buckets or row_tiers"
                )
            if progress is not None:
                progress(i + 1, len(order))
        torch.cuda.synchronize()
        return CaptureReport(
            graphs=len(order),
            seconds=time.perf_counter() - began,
            mib=(torch.cuda.memory_reserved() - before) / 2**20,
        )

    def plan_for(self, shape: Shape) -> FramePlan:
        """A plan of that shape whose slots are all the sink."""
        return FramePlan(
            seq=-1, decode=(0,) * shape.slots, rows=shape.slots * shape.width, width=shape.width, len_ub=self.len_ub,
            first_page=(-1,) * shape.slots, sampled=shape.full, filtered=shape.full, rejection=shape.full,
            coupled=shape.full, min_tokens=shape.full,
        )  # fmt: skip

    def _capture(self, shape: Shape) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        plan = self.plan_for(shape)
        slot_B = self.frame.state.decode_B[: shape.slots]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), IeeeProducts(wanted=self.frame.model.dtype == torch.float32):
            with torch.cuda.stream(stream):
                self.frame.decode(plan, slot_B)  # compiles kernels and fills the allocator's caches
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                record = self.frame.decode(plan, slot_B)
        return graph, record

    def run(self, plan: FramePlan) -> Tensor:
        """Replay; the record stays valid until the same shape runs again."""
        shape = Shape(len(plan.decode), plan.width, plan.sampled or plan.min_tokens)
        found = self.graphs.get(shape)
        if found is None:
            raise ConfigError(
                f"no frame graph for {shape.slots} slots of {shape.width} rows; captured: "
                f"{sorted({(s.slots, s.width) for s in self.graphs})}"
            )
        graph, record = found
        graph.replay()
        return record
