"""What a drafter with a cache of its own has to see again after frames without drafting.

Frames without a drafting stage leave the rows that they commit unseen by the drafter. What it would have read, the
target's taps, stays in a ring of the last positions of each slot; before drafting comes back, or the ring is full, one
pass over those rows brings its cache up to date, as a prompt chunk would. A pass over many rows streams the drafter's
weights once for all of them, so drafting costs next to nothing while it is off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.attention.paged import cache_slots
from slipstream.device.state import SlotState
from slipstream.draft.protocol import Drafter, PrefillView, TargetRows
from slipstream.types import FramePlan


class CatchUp:
    """Rings [S, T, H], one per tap of the drafter; `state.behind_S` says how many of the last positions it lacks.

    T is the host's bound on behind: `EngineConfig.catch_up`. A drafter without taps reads history alone.
    """

    def __init__(
        self, drafter: Drafter, state: SlotState, *, ring: int, page_size: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self.drafter, self.state, self.ring, self.page_size = drafter, state, ring, page_size
        self.taps = len(drafter.taps)
        rows = state.behind_S.shape[0] * ring
        self.rings = [
            torch.zeros(rows, hidden_size, dtype=dtype, device=state.device)
            for _ in range(self.taps + drafter.reads_hidden)
        ]
        self.offset_T = torch.arange(ring, device=state.device)

    def keep(self, rows: TargetRows, emitted_B: Tensor) -> None:
        """The end of a frame without drafting. Rejected rows go in too: the next frame writes their positions again."""
        at_R = rows.slot_R * self.ring + rows.pos_R % self.ring
        kept = (*rows.taps, *(() if rows.hidden_RH is None else (rows.hidden_RH,)))
        for ring, tap_RH in zip(self.rings, kept, strict=True):
            ring.index_copy_(0, at_R, tap_RH.to(ring.dtype))
        self.state.behind_S.index_add_(0, rows.slot_B, emitted_B)

    def run(self, plan: FramePlan, slot_B: Tensor, *, kernels: bool) -> None:
        """Before a decode frame over the same slots: the drafter reads the positions that it lacks.

        Rows [B * T]: of each slot its last T positions, those that are not missing as padding at slot 0. The kernels
        take padding behind all other rows; the CPU goes slot by slot, by host bounds.
        """
        state, ring = self.state, self.ring
        behind_B = torch.where(state.active_S[slot_B] > 0, state.behind_S[slot_B], 0)
        missing_BT = self.offset_T >= ring - behind_B[:, None]
        pos_R = torch.where(missing_BT, state.committed_S[slot_B][:, None] - ring + self.offset_T, 0).view(-1)
        slot_R = torch.where(missing_BT, slot_B[:, None], 0).view(-1)
        if kernels:
            order_R = _first(missing_BT.view(-1))
            pos_R, slot_R = pos_R[order_R], slot_R[order_R]
        kept = [r[slot_R * ring + pos_R % ring] for r in self.rings]
        none = slot_B[:0]
        self.drafter.prefill(
            PrefillView(
                slot_R=slot_R, pos_R=pos_R, token_R=state.history_SL[slot_R, pos_R],
                cache_slot_R=cache_slots(state.table_SP, slot_R, pos_R, self.page_size), table_SP=state.table_SP,
                history_SL=state.history_SL, last_row_B=none, last_slot_B=none,
                spans=() if kernels else _bounds(plan, ring), taps=tuple(kept[: self.taps]),
                hidden_RH=kept[self.taps] if self.drafter.reads_hidden else None,
            )
        )  # fmt: skip
        state.behind_S.index_fill_(0, slot_B, 0)


def _first(wanted_R: Tensor) -> Tensor:
    """Indices of the wanted rows in order, then of the others."""
    number_R = wanted_R.to(torch.int64)
    last = number_R.sum()
    to_R = torch.where(wanted_R, number_R.cumsum(0) - 1, last + (1 - number_R).cumsum(0) - 1)
    index_R = torch.arange(wanted_R.shape[0], device=wanted_R.device)
    return torch.empty_like(index_R).scatter_(0, to_R, index_R)


def _bounds(plan: FramePlan, ring: int) -> Sequence[tuple[int, int, int, int]]:
    """Spans as `span_attention` takes them: `ring` rows of each slot, at positions below its reach."""
    return [
        (slot, max(0, reach - ring), ring, first)
        for slot, reach, first in zip(plan.decode, plan.reach, plan.first_page, strict=True)
    ]
