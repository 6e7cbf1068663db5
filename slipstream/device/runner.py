"""The device as the engine sees it: `launch` enqueues a plan, `collect` hands out the oldest result.

The same on any torch device. On a CPU a launch has run when `launch` returns and its result only waits to be
collected, so run-ahead, stale frames and late page release behave as they do on a GPU; on a GPU everything is
enqueued on one stream, and `collect` waits for the event of the launch that it reads.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.device.control import ControlWriter
from slipstream.device.frame import Frame
from slipstream.device.masks import MaskRing
from slipstream.device.media import EmbedRing
from slipstream.device.precision import IeeeProducts
from slipstream.device.staging import RecordRing, TableRing, UploadRing
from slipstream.logprobs import FrameLogprobs
from slipstream.types import RECORD_COLUMNS, FramePlan, FrameResult, PrefillSpan

if TYPE_CHECKING:
    from slipstream.device.graphs import FrameGraphs


class _Launched(NamedTuple):
    seq: int
    ring_slot: int
    slots: tuple[int, ...]
    decoded: int
    columns: int
    masked: bool
    seconds: float = 0.0
    tables: _Tables | None = None


class _Tables(NamedTuple):
    """Where a launch's log-probabilities are on their way down. decode, ends, prompt: rows of the table."""

    ring_slot: int
    decode: range
    width: int
    ends: range
    prompt: range
    spans: tuple[PrefillSpan, ...]


class Device:
    """Owns the rings; runs frames and prefill chunks from captured graphs when it is given some, else eagerly."""

    def __init__(self, frame: Frame, *, run_ahead: int, graphs: FrameGraphs | None = None) -> None:
        self.frame = frame
        self.graphs = graphs
        self.exact = IeeeProducts(wanted=frame.model.dtype == torch.float32)
        state = frame.state
        # Tensors that were made in inference mode can only be written in it.
        self.bare = graphs is not None and not state.arena.is_inference()
        self.control = ControlWriter(state.offset, state.shapes, num_drafts=state.num_drafts)
        depth = run_ahead + 1
        self.up = UploadRing(state.arena, slots=depth, capacity=state.arena.numel())
        rows = state.decode_B.shape[0] + state.last_slot_B.shape[0]
        self.survivals = 0 if state.survival_SK is None else state.num_drafts  # columns of a record
        columns = RECORD_COLUMNS + self.survivals + state.num_drafts + 1
        # A launch with a grammar brings all slots' drafts, and how they follow one another where they are trees.
        self.drafts = (state.pending_SW, state.parent_SW) if state.tree else (state.pending_SW,)
        self.down = RecordRing(
            slots=depth, rows=rows, columns=columns, device=state.device, extra=sum(t.numel() for t in self.drafts)
        )
        self.masks = MaskRing(frame.logit_stages.masks, slots=depth)
        self.embeds = EmbedRing(frame.given, slots=depth)
        self.tables = TableRing(frame.logit_stages.logprobs_NC, slots=depth)
        self.launched: deque[_Launched] = deque()
        self.device_seconds = 0.0  # time inside frames, where launching one means running it

    def launch(self, plan: FramePlan) -> None:
        began = time.perf_counter()
        if self.bare and not (plan.prefill or plan.admits):
            # A replay and copies: nothing here depends on these modes, and entering them costs more than both.
            self._launch(plan)
        else:
            with torch.inference_mode(), self.exact:
                self._launch(plan)
        if self.frame.state.device.type == "cpu":
            seconds = time.perf_counter() - began
            self.device_seconds += seconds
            self.launched[-1] = self.launched[-1]._replace(seconds=seconds)

    def _launch(self, plan: FramePlan) -> None:
        frame, state = self.frame, self.frame.state
        self.up.send(self.control.pairs(plan))
        if plan.masks:
            self.masks.send(plan.masks)
        if frame.clears_pages:
            self._clear(plan)
        for a in plan.admits:
            frame.admit(a)
        records: list[Tensor] = []
        slots = plan.decode
        if plan.catch_up:
            if self.graphs is not None:
                self.graphs.read_missing(plan)
            else:
                frame.read_missing(plan, state.decode_B[: len(plan.decode)])
        if plan.decode:
            if self.graphs is not None:
                record_BC = self.graphs.run(plan)
                # The graphs share one pool: a chunk's graph may use what this one has left behind.
                records.append(record_BC.clone() if plan.prefill else record_BC)
            else:
                records.append(frame.decode(plan, state.decode_B[: len(plan.decode)]))
        if plan.prefill:
            if frame.given.media:
                self.embeds.send(plan)
            last = tuple(s.slot for s in plan.prefill if s.last)
            run = frame.prefill if self.graphs is None else self.graphs.prefill
            record = run(plan, last=bool(last))
            if record is not None and last:
                records.append(record[: len(last)])
                slots += last
        packed = records[0] if len(records) == 1 else _joined(records) if records else state.arena[:0]
        columns = packed.shape[1] if records else RECORD_COLUMNS
        asked = plan.logprobs or plan.prompt_logprobs
        tables = self._tables(plan, columns - RECORD_COLUMNS - self.survivals) if asked else None
        ring_slot = self.down.receive(packed, self.drafts if plan.masked else ())
        self.launched.append(
            _Launched(plan.seq, ring_slot, slots, len(plan.decode), columns, plan.masked, tables=tables)
        )

    def _tables(self, plan: FramePlan, width: int) -> _Tables:
        """Start the copy of what the launch's requests have asked for besides tokens."""
        stages, asked = self.frame.logit_stages, plan.logprobs
        decode = range(len(plan.decode) * width if asked else 0)
        ends = range(stages.ends_at, stages.ends_at + sum([s.last for s in plan.prefill]) * asked)
        rows = sum([s.length for s in plan.prefill]) * plan.prompt_logprobs
        prompt = range(stages.prompt_at, stages.prompt_at + rows)
        at = self.tables.receive((decode, ends, prompt))
        return _Tables(at, decode, width, ends, prompt, plan.prefill if plan.prompt_logprobs else ())

    def _clear(self, plan: FramePlan) -> None:
        """Zero pages that change hands (backends that read masked columns)."""
        frame = self.frame
        pages = [p for a in plan.admits for p in a.pages[a.start // frame.kv.page_size :]]
        pages += [p for append in plan.pages for p in append.pages]
        if pages:
            pages_P = torch.tensor(pages, dtype=torch.int64, device=frame.state.device)
            frame.kv.clear(pages_P)
            if frame.drafter is not None:
                frame.drafter.clear_pages(pages_P)

    def collect(self) -> FrameResult:
        done = self.launched.popleft()
        records = self.down.read(done.ring_slot, len(done.slots), done.columns)
        result = FrameResult(done.seq, done.slots, records, done.decoded, done.seconds)
        if done.masked:
            state_np = self.down.extra_np[done.ring_slot].reshape(len(self.drafts), *self.drafts[0].shape)
            drafts, *parents = (part_np[list(done.slots)].tolist() for part_np in state_np)
            result = result._replace(drafts=drafts, parents=parents[0] if parents else None)
        if done.tables is not None:
            at, decode, width, ends, prompt, spans = done.tables
            read = self.tables.read
            found = FrameLogprobs(read(at, decode), width, read(at, ends), read(at, prompt))
            result = result._replace(logprobs=found, prompt=spans)
        return result


def _joined(records: list[Tensor]) -> Tensor:
    """Records of different widths as one, padded with tokens that nobody reads."""
    columns = max(r.shape[1] for r in records)
    return torch.cat([F.pad(r, (0, columns - r.shape[1])) for r in records])
