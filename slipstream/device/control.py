"""The lane up: a plan's control rows as (cell, value) pairs of the slot-state arena. Pure numpy.

Order matters where a cell is written twice: pairs are applied as one scatter, so later writes replace earlier
ones here, on the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from slipstream.models.mrope import Media
from slipstream.types import MIN_TEMPERATURE, Admit, FramePlan, IntArray, PageAppend, PrefillSpan

Pairs = tuple[IntArray, IntArray]
_NONE: IntArray = np.zeros(0, dtype=np.int64)


def bits(x: float) -> int:
    """The int64 with the bit pattern of float64 x."""
    return int(np.float64(x).view(np.int64))


class ControlWriter:
    """Knows where each field of `SlotState` lies; turns plans into pairs."""

    def __init__(self, offset: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], *, num_drafts: int) -> None:
        self.offset = dict(offset)
        self.stride = {name: (shape[1] if len(shape) > 1 else 1) for name, shape in shapes.items()}
        self.num_drafts = num_drafts
        self.processors = [name.removeprefix("custom ") for name in offset if name.startswith("custom ")]
        self._decode: tuple[int, ...] = ()
        self._pictures = "rope_delta" in self.offset
        self._media: dict[int, Media] = {}
        # Of each table beside the chunk's rows: how many of its rows, from the first, may hold another number than 0.
        self._stood: dict[str, int] = {}
        self._cells: list[IntArray] = []
        self._values: list[IntArray] = []

    def pairs(self, plan: FramePlan) -> Pairs:
        """Everything the host says with this plan; empty in steady decode, when nothing changes."""
        for d in plan.drops:
            self._put("active", d.slot, (0,))
        for a in plan.admits:
            self._admit(a)
        if plan.pages:
            self._append("table", plan.pages)
        if plan.window_pages:
            self._append("window_table", plan.window_pages)
        if plan.saved:
            self._append("saved", plan.saved)
        for masks in plan.masks:
            if masks.drafts is not None:
                self._put("pending", masks.slot, masks.drafts, first=1)
                self._put("draft_count", masks.slot, (len(masks.drafts),))
        if plan.decode and plan.decode != self._decode:
            self._put("decode", 0, plan.decode)
            self._decode = plan.decode
        if plan.prefill:
            self._prefill(plan)
        if not self._cells:
            return _NONE, _NONE
        cells, values = np.concatenate(self._cells), np.concatenate(self._values)
        self._cells.clear()
        self._values.clear()
        if plan.drops or plan.admits:  # a slot may be dropped and admitted, or admitted and given pages, at once
            last = len(cells) - 1 - np.unique(cells[::-1], return_index=True)[1]
            cells, values = cells[last], values[last]
        return cells, values

    def _put(self, name: str, slot: int, values: Sequence[int] | npt.NDArray[np.int64], first: int = 0) -> None:
        at = self.offset[name] + slot * self.stride[name] + first
        self._cells.append(np.arange(at, at + len(values), dtype=np.int64))
        self._values.append(np.asarray(values, dtype=np.int64))

    def _append(self, table: str, appends: Sequence[PageAppend]) -> None:
        start, stride = self.offset[table], self.stride[table]
        cells = [start + p.slot * stride + p.first + i for p in appends for i in range(len(p.pages))]
        self._cells.append(np.array(cells, dtype=np.int64))
        self._values.append(np.array([page for p in appends for page in p.pages], dtype=np.int64))

    def _admit(self, a: Admit) -> None:
        """Give a slot to a request. It stays inactive until its last prefill chunk."""
        request, params, n = a.request, a.request.params, len(a.tokens)
        of_prompt = params.prompt_logprobs if request.child == 0 else None
        drafts = self.num_drafts if request.num_drafts is None else min(request.num_drafts, self.num_drafts)
        masked = params.masked
        self._media.pop(a.slot, None)
        if request.media is not None:
            self._media[a.slot] = request.media
        for name, value in (
            ("generation", a.generation),
            ("active", 0),
            ("committed", n - 1),
            ("max_len", request.max_len),
            # The host has put min_tokens into the masks: where only the end is allowed, that wins.
            ("min_len", 0 if masked else len(request.prompt_token_ids) + params.min_tokens),
            ("masked", int(masked)),
            ("prompt_len", len(request.prompt_token_ids)),
            ("draft_count", 0),
            ("max_drafts", drafts),
            ("behind", 0),
            *((("absorbed", a.absorbed),) if "absorbed" in self.offset else ()),
            *((("rope_delta", 0 if request.media is None else request.media.delta),) if self._pictures else ()),
            ("mode", int(request.mode)),
            ("key", request.key),
            ("child", request.child),
            ("top_k", params.top_k),
            ("temperature", bits(0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE))),
            ("top_p", bits(params.top_p)),
            ("min_p", bits(params.min_p)),
            ("repetition", bits(params.repetition_penalty)),
            ("presence", bits(params.presence_penalty)),
            ("frequency", bits(params.frequency_penalty)),
            ("bias_count", len(params.logit_bias or ())),
            ("logprobs", 0 if params.logprobs is None else params.logprobs + 1),
            ("prompt_logprobs", 0 if of_prompt is None else of_prompt + 1),
        ):
            self._put(name, a.slot, (value,))
        asked = params.logits_processors or {}
        for name in self.processors:
            self._put(f"custom {name}", a.slot, (bits(asked.get(name, math.nan)),))
        if params.logit_bias:
            self._put("bias_id", a.slot, tuple(params.logit_bias))
            self._put("bias_value", a.slot, [bits(x) for x in params.logit_bias.values()])
        self._put("stop_ids", a.slot, (*request.stop_ids, *(-1,) * (self.stride["stop_ids"] - len(request.stop_ids))))
        self._put("history", a.slot, a.tokens)
        self._put("table", a.slot, (*a.pages, *(0,) * (self.stride["table"] - len(a.pages))))
        if "window_table" in self.offset:
            self._put("window_table", a.slot, (0,) * self.stride["window_table"])
        if a.saved:
            self._put("saved", a.slot, a.saved)

    def _media_rows(self, spans: Sequence[PrefillSpan], rows: int) -> None:
        """What rows of prompts with pictures, or with embeddings, have besides: rotary offsets, marks."""
        ends = itertools.accumulate(s.length for s in spans)
        found = [(end, s, self._media[s.slot]) for end, s in zip(ends, spans, strict=True) if s.slot in self._media]
        if "chunk_rope" in self.offset:
            self._beside("chunk_rope", 3, _rope_offsets, found, rows)
        if "chunk_given" in self.offset:
            self._beside("chunk_given", 1, _given_marks, [x for x in found if x[2].embeds is not None], rows)

    def _beside(
        self, name: str, axes: int, of: Callable[[PrefillSpan, Media], IntArray],
        found: Sequence[tuple[int, PrefillSpan, Media]], rows: int,
    ) -> None:  # fmt: skip
        """Rows [axes, R] of the device's table. Those of text are 0, and said only where others stood."""
        stood = self._stood.get(name, 0)
        if not found and not stood:
            return
        # Text behind a picture's rows may be shorter than they were: the others would keep theirs for a longer chunk.
        table_np = np.zeros((axes, max(rows, stood)), dtype=np.int64)
        for end, s, media in found:
            table_np[:, end - s.length : end] = of(s, media)
        self._stood[name] = found[-1][0] if found else 0
        for axis in range(axes):
            self._put(name, axis, table_np[axis])

    def _prefill(self, plan: FramePlan) -> None:
        """Rows of the chunk and the ends of prompts among them, padded with the sink's row 0."""
        spans = plan.prefill
        lengths = [s.length for s in spans]
        ends = np.cumsum(lengths) - 1
        slots_np = np.repeat([s.slot for s in spans], lengths)
        positions_np = np.concatenate([np.arange(s.start, s.start + s.length) for s in spans])
        spare = max(0, plan.prefill_rows - len(slots_np))
        self._put("chunk_slot", 0, np.pad(slots_np, (0, spare)))
        self._put("chunk_pos", 0, np.pad(positions_np, (0, spare)))
        self._media_rows(spans, len(slots_np) + spare)
        last = [i for i, s in enumerate(spans) if s.last]
        if last or plan.prompt_logprobs:  # the pass with prompt log-probabilities has the ends of prompts in it too
            spare = max(0, plan.prefill_prompts - len(last))
            self._put("last_row", 0, np.pad(ends[np.array(last, dtype=np.int64)], (0, spare)))
            self._put("last_slot", 0, np.pad(np.array([spans[i].slot for i in last], dtype=np.int64), (0, spare)))
            # The rows of this chunk sample their first token at its end: the slots decode from then on.
            for i in last:
                self._put("active", spans[i].slot, (1,))


def _rope_offsets(span: PrefillSpan, media: Media) -> IntArray:
    """Rotary position less token number, [3, length]."""
    number_np = np.arange(span.start, span.start + span.length)
    known = media.positions.shape[1]
    inside_np = media.positions[:, np.minimum(number_np, known - 1)] - np.minimum(number_np, known - 1)
    # Output that is read again after a preemption goes on behind the prompt.
    offsets_np: IntArray = np.where(number_np < known, inside_np, media.delta)
    return offsets_np


def _given_marks(span: PrefillSpan, media: Media) -> IntArray:
    """1 where a token has an embedding of its own, [length]."""
    marks_np = np.zeros(span.length, dtype=np.int64)
    low, high = np.searchsorted(media.places, (span.start, span.start + span.length))
    marks_np[media.places[low:high] - span.start] = 1
    return marks_np
