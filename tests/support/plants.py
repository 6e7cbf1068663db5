"""Known slow forms, each put back into a production function: what the proof must find. Used by tests only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.attention.kernel import KernelAttention
from slipstream.device import frame as frame_room
from slipstream.device import tree as tree_room
from slipstream.device.logits import LogitStages
from slipstream.device.media import EmbedRing, GivenRows
from slipstream.draft.ngram import NgramDrafter
from slipstream.models.fused import FusedDecoder


def scalar_per_draft_step() -> None:
    """Founding case 2: a scalar made with torch.tensor(n, device=...) in the drafter, once per step."""
    draft = NgramDrafter.draft_slots

    def slow(self: NgramDrafter, slots: Any) -> None:
        for step in range(self.max_drafts):
            torch.tensor(step, device=slots.slot_B.device)
        draft(self, slots)

    NgramDrafter.draft_slots = slow  # type: ignore[method-assign]


def one_element_at_admission() -> None:
    """draft room: an admission assigns one element, which torch copies up from a pageable scalar."""
    admit = NgramDrafter.admit

    def slow(self: NgramDrafter, admitted: Any) -> None:
        admit(self, admitted)
        self.matched_S[admitted.slot] = 0

    NgramDrafter.admit = slow  # type: ignore[method-assign]


def length_read_back() -> None:
    """device room: the frame reads the longest length to size its attention."""
    pack = frame_room.pack_rows

    def slow(state: Any, slot_B: Tensor, **kw: Any) -> Any:
        int(state.committed_S[slot_B].max())
        return pack(state, slot_B, **kw)

    frame_room.pack_rows = slow  # type: ignore[assignment]


def boolean_index_in_sampling() -> None:
    """sampling of a frame's rows: the weighed tokens picked with a boolean mask."""
    real = frame_room.race_rows

    def slow(logits_RV: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        logits_RV[logits_RV > 0].sum()
        tokens: tuple[Tensor, Tensor, Tensor] = real(logits_RV, *args)
        return tokens

    frame_room.race_rows = slow  # type: ignore[assignment]


def positions_from_a_list() -> None:
    """models room: positions built from a Python list and copied from pageable memory."""
    run = FusedDecoder.run

    def slow(self: FusedDecoder, token_R: Tensor, slot_R: Tensor, pos_R: Tensor, table_SP: Tensor, **kw: Any) -> Any:
        torch.tensor(list(range(token_R.shape[0]))).to(pos_R.device, non_blocking=True)
        return run(self, token_R, slot_R, pos_R, table_SP, **kw)

    FusedDecoder.run = slow  # type: ignore[method-assign]


def positions_from_device_scalars() -> None:
    """Founding case 1: each request's offset as a device scalar, listed in Python, made one tensor again."""
    real = frame_room.row_positions

    def slow(state: Any, slot_R: Tensor, pos_R: Tensor) -> Tensor:
        deltas = [state.rope_delta_S[row] for row in range(4)]
        torch.tensor(deltas, device=pos_R.device)
        return real(state, slot_R, pos_R)

    frame_room.row_positions = slow


def grids_read_back() -> None:
    """models room: the longest position of a chunk is read, to know where the text goes on."""
    real = frame_room.chunk_positions

    def slow(state: Any, pos_R: Tensor) -> Tensor:
        positions_3R = real(state, pos_R)
        int(positions_3R.max())
        return positions_3R

    frame_room.chunk_positions = slow


def embeddings_as_they_came() -> None:
    """device room: a picture's embeddings copied from the request's own, pageable memory."""

    def slow(self: EmbedRing, plan: Any) -> None:
        for span in plan.prefill:
            media = self.given.media.get(span.slot)
            if media is not None:
                self.given.embeds_RH[1:3].copy_(media.embeds, non_blocking=True)

    EmbedRing.send = slow  # type: ignore[method-assign]


def embeddings_put_by_their_marks() -> None:
    """models room: the marked rows found, and written one behind the other."""
    real = GivenRows.of

    def slow(self: GivenRows, plan: Any, rows: int) -> Any:
        given = real(self, plan, rows)
        assert given is not None
        given.embeds_RH[given.given_R].sum()
        return given

    GivenRows.of = slow  # type: ignore[method-assign]


def first_visible_pages_listed() -> None:
    """attention room: the pages that windows begin with found in Python."""
    real = KernelAttention.__init__

    def slow(self: KernelAttention, *args: Any, window: int = 0, **kw: Any) -> None:
        real(self, *args, window=window, **kw)
        if window:
            self.low_R.tolist()  # type: ignore[union-attr]

    KernelAttention.__init__ = slow  # type: ignore[method-assign]


def tree_mask_from_the_host() -> None:
    """draft room: the ancestors of a tree's nodes found in Python, from parents that are read back."""
    real = tree_room.seen_bits

    def slow(parent_BN: Tensor, levels: int) -> Tensor:
        for parent in parent_BN[0, :2]:
            int(parent)
        return real(parent_BN, levels)

    tree_room.seen_bits = slow


def last_tokens_from_a_list() -> None:
    """Founding case 4: what penalties count is listed on the host and copied from pageable memory, once per step."""
    committed = LogitStages.committed

    def slow(self: LogitStages, plan: Any, slot_B: Tensor, record_BC: Tensor, *rest: Any) -> None:
        last_tokens = [[0] * 4 for _ in range(slot_B.shape[0])]
        torch.tensor(last_tokens).to(slot_B.device, non_blocking=True)
        committed(self, plan, slot_B, record_BC, *rest)

    LogitStages.committed = slow  # type: ignore[method-assign]


def drafts_counted_by_the_host() -> None:
    """device room: the drafts before a row read back, to be counted in Python."""
    adjust = LogitStages.adjust

    def slow(self: LogitStages, plan: Any, slot_R: Tensor, *rest: Any) -> Tensor:
        self.state.pending_SW[:2].tolist()
        return adjust(self, plan, slot_R, *rest)

    LogitStages.adjust = slow  # type: ignore[method-assign]


def lengths_from_the_host() -> None:
    """device room: confidences read back, and the lengths of drafts found in Python."""
    real = frame_room.allot_drafts

    def slow(active_S: Tensor, draft_count_S: Tensor, survival_SK: Tensor, slot_B: Tensor, *shape: int) -> None:
        survival_SK[slot_B].tolist()
        real(active_S, draft_count_S, survival_SK, slot_B, *shape)

    frame_room.allot_drafts = slow  # type: ignore[assignment]
