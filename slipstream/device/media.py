"""Rows of prompts with images and videos: where they stand for the rotary embedding, and embeddings that were given.

A slot's delta, rotary position less token number, is slot state; a slot with text alone has 0 there. A decode row
stands at its position and the delta of its slot, whatever stands beside it in the batch: nothing is listed, nothing
read. Rows of a chunk have three offsets each, which the host sends beside the chunk's positions where a prompt has
pictures. Cells of the cache go by token number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.device.state import SlotState
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


class GivenRows:
    """The embeddings that running requests brought, by slot. On a CPU only: build refuses them elsewhere."""

    def __init__(self, state: SlotState) -> None:
        self.state = state
        self.media: dict[int, Media] = {}

    def admit(self, admit: Admit) -> None:
        self.media.pop(admit.slot, None)
        media = admit.request.media
        if media is not None and media.embeds is not None:
            self.media[admit.slot] = media

    def of(self, plan: FramePlan) -> Given | None:
        """For the rows of the plan's chunk; None where no prompt in it brings any."""
        rows, sources, at = [], [], 0
        for span in plan.prefill:
            media = self.media.get(span.slot)
            if media is not None:
                first, end = np.searchsorted(media.places, (span.start, span.start + span.length))
                if first < end:
                    rows.append(at + media.places[first:end] - span.start)
                    sources.append(media.embeds[int(first) : int(end)])
            at += span.length
        if not rows:
            return None
        row_M, embeds_MH = torch.from_numpy(np.concatenate(rows)), torch.cat(sources)
        embeds_RH = embeds_MH.new_zeros(at, embeds_MH.shape[1]).index_copy_(0, row_M, embeds_MH)
        return Given(embeds_RH, torch.zeros(at, dtype=torch.bool).index_fill_(0, row_M, True))
