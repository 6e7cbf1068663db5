"""Grammar masks on the device: a table with a row per slot and draft, filled from a ring before a frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.device.staging import staging
from slipstream.device.state import SlotState
from slipstream.kernels.grammar import mask_rows, masked_rows
from slipstream.structured import Masks


class MaskTable:
    """mask_SWN [S, W, N] int32: of each slot's pending rows, W of them, N words; see `types.MaskRows`.

    Allocated at start, V / 8 bytes per slot and row.
    """

    def __init__(self, state: SlotState, vocab: int) -> None:
        self.state = state
        slots, width = state.pending_SW.shape
        self.mask_SWN = torch.full((slots, width, -(-vocab // 32)), -1, dtype=torch.int32, device=state.device)

    @property
    def nbytes(self) -> int:
        return self.mask_SWN.nbytes

    def apply(self, slot_R: Tensor, cell_R: Tensor, logits_RV: Tensor, *, kernels: bool) -> None:
        """Mask the rows' logits in place. cell_R: where each is kept in the cache."""
        mask = mask_rows if kernels else masked_rows
        mask(logits_RV, slot_R, cell_R, self.state.committed_S, self.state.masked_S, self.mask_SWN)


class MaskRing:
    """Masks on their way up: at most one copy of rows, one of their places and one scatter per launch, else none."""

    def __init__(self, table: MaskTable, *, slots: int) -> None:
        mask_SWN = table.mask_SWN
        device, (count, self.width, words) = mask_SWN.device, mask_SWN.shape
        self.table_RN = mask_SWN.view(-1, words)
        self.slots, self.capacity, self.at = slots, count * self.width, 0
        self.staging_rows = staging(slots, self.capacity, words, device=device, dtype=torch.int32)
        self.staging_places = staging(slots, self.capacity, device=device)
        self.rows_np: Any = self.staging_rows.numpy()
        self.places_np: Any = self.staging_places.numpy()
        on_device = device.type != "cpu"
        self.rows_landing = torch.zeros_like(self.staging_rows[0], device=device) if on_device else None
        self.places_landing = torch.zeros_like(self.staging_places[0], device=device) if on_device else None

    def send(self, masks: Sequence[Masks]) -> None:
        """Apply them in stream order; the host does not wait."""
        n, rows_np, places_np = 0, self.rows_np[self.at], self.places_np[self.at]
        for slot, given_np, _ in masks:
            m = min(len(given_np), self.width)
            rows_np[n : n + m] = given_np[:m]
            places_np[n : n + m] = range(slot * self.width, slot * self.width + m)
            n += m
        staging_rows, staging_places = self.staging_rows[self.at][:n], self.staging_places[self.at][:n]
        self.at = (self.at + 1) % self.slots
        if self.rows_landing is not None and self.places_landing is not None:
            staging_rows = self.rows_landing[:n].copy_(staging_rows, non_blocking=True)
            staging_places = self.places_landing[:n].copy_(staging_places, non_blocking=True)
        self.table_RN.index_copy_(0, staging_places, staging_rows)
