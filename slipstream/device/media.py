"""Rows of prompts with images and videos: where they stand for the rotary embedding, and embeddings that were given.

A slot's delta, rotary position less token number, is slot state; a slot with text alone has 0 there. A decode row
stands at its position and the delta of its slot, whatever stands beside it in the batch: nothing is listed, nothing
read. Rows of a chunk have three offsets each, which the host sends beside the chunk's positions where a prompt has
pictures. Cells of the cache go by token number.

Embeddings that a request brought go up before the chunk that reads them, through a ring of their own: into a table that
the captured pass reads beside the tokens' own, by a mark that the host says with the chunk's rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.device.staging import staging
from slipstream.device.state import SlotState
from slipstream.models.config import ModelConfig
from slipstream.models.mrope import Media
from slipstream.types import Admit, FramePlan


class Given(NamedTuple):
    """Embeddings [R, H] in the place of the tokens' own where given_R is true."""

    embeds_RH: Tensor
    given_R: Tensor


def row_positions(state: SlotState, slot_R: Tensor, pos_R: Tensor) -> Tensor:
    """Rotary positions [R] of decode rows at token numbers pos_R: on all axes the same."""
    return pos_R if state.rope_delta_S is None else pos_R + state.rope_delta_S[slot_R]


def chunk_positions(state: SlotState, pos_R: Tensor) -> Tensor:
    """Rotary positions of the chunk's rows: [3, R] for a model that takes three, else [R]."""
    if state.chunk_rope_3R is None:
        return pos_R
    return pos_R + state.chunk_rope_3R[:, : pos_R.shape[0]]


def takes_embeds(asked: bool | None, config: ModelConfig, device: torch.device) -> bool:
    """Whether an engine has room for embeddings: as asked, else where pictures may come, and on a CPU."""
    return (device.type == "cpu" or config.vision is not None) if asked is None else asked


class GivenRows:
    """Room for the embeddings that requests brought, a row for each of a chunk: embeds_RH [R, H].

    state.chunk_given_R says which rows of the chunk they are; the others hold anything. Without state.chunk_given_R
    there is no room.
    """

    def __init__(self, state: SlotState, hidden_size: int, dtype: torch.dtype, *, kernels: bool) -> None:
        self.state, self.kernels = state, kernels
        rows = 0 if state.chunk_given_R is None else state.chunk_given_R.shape[0]
        self.embeds_RH = torch.zeros(rows, hidden_size, dtype=dtype, device=state.device)
        self.media: dict[int, Media] = {}

    def admit(self, admit: Admit) -> None:
        self.media.pop(admit.slot, None)
        media = admit.request.media
        if media is not None and media.embeds is not None:
            assert self.state.chunk_given_R is not None, "embeddings for an engine without room for them"
            self.media[admit.slot] = media

    def of(self, plan: FramePlan, rows: int) -> Given | None:
        """For the rows of the plan's chunk. The kernels' pass is the same whatever the plan brings; another one has
        None where no prompt in it brings any."""
        given_R = self.state.chunk_given_R
        if given_R is None or not (self.kernels or any(s.slot in self.media for s in plan.prefill)):
            return None
        return Given(self.embeds_RH[:rows], given_R[:rows] > 0)


class EmbedRing:
    """Embeddings on their way up: one copy for a chunk that has any, from its first such row to its last."""

    def __init__(self, given: GivenRows, *, slots: int) -> None:
        self.given = given
        # Bytes, because numpy has no bfloat16.
        self.table = given.embeds_RH.view(torch.uint8)
        self.slots = slots
        device = self.table.device if len(self.table) else torch.device("cpu")  # without room nothing is pinned
        self.staging = staging(slots, *self.table.shape, device=device, dtype=torch.uint8)
        self.staging_np: Any = self.staging.numpy()
        self.at = 0
        self.rows = 0  # sent so far

    def send(self, plan: FramePlan) -> None:
        """Those of the plan's chunk, before it runs; the host does not wait."""
        known, first, end, at, sent = self.given.media, len(self.table), 0, 0, 0
        for span in plan.prefill:
            media = known.get(span.slot)
            if media is not None:
                low, high = np.searchsorted(media.places, (span.start, span.start + span.length))
                if low < high:
                    rows_np = at + media.places[low:high] - span.start
                    self.staging_np[self.at, rows_np] = media.embeds.view(torch.uint8).numpy()[low:high]
                    first, end, sent = min(first, int(rows_np[0])), int(rows_np[-1]) + 1, sent + len(rows_np)
            at += span.length
        if first < end:
            self.table[first:end].copy_(self.staging[self.at, first:end], non_blocking=True)
            self.at = (self.at + 1) % self.slots
            self.rows += sent
