"""Rings between host and device: (cell, value) pairs up, records down.

Preallocated, contiguous, pinned where pinning works, ordinary memory elsewhere; same code. A ring slot is used
again only after the launch that used it has been collected, which `run_ahead` + 1 slots guarantee.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.audit import allow_sync
from slipstream.device.control import Pairs


def staging(*shape: int, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Host zeros, pinned when `device` is a GPU that can use it."""
    pinned = device.type == "cuda"
    try:
        return torch.zeros(shape, dtype=dtype, pin_memory=pinned)
    except RuntimeError:
        return torch.zeros(shape, dtype=dtype)


class UploadRing:
    """Pairs of a plan to the arena: at most one copy and one scatter per launch, none when nothing changed."""

    def __init__(self, arena: Tensor, *, slots: int, capacity: int) -> None:
        self.arena = arena
        self.slots, self.capacity = slots, capacity
        self.host = staging(slots, 2, capacity, device=arena.device)
        self.host_np: Any = self.host.numpy()
        on_device = arena.device.type != "cpu"
        self.landing = torch.zeros(2 * capacity, dtype=torch.int64, device=arena.device) if on_device else None
        self.at = 0

    def send(self, pairs: Pairs) -> None:
        """Apply pairs in stream order; the host does not wait."""
        cells_np, values_np = pairs
        n = len(cells_np)
        if n == 0:
            return
        assert n <= self.capacity, f"{n} control pairs; the ring holds {self.capacity}"
        flat_np = self.host_np[self.at].reshape(-1)
        flat_np[:n], flat_np[n : 2 * n] = cells_np, values_np
        source = self.host[self.at].view(-1)[: 2 * n]
        self.at = (self.at + 1) % self.slots
        if self.landing is not None:
            source = self.landing[: 2 * n].copy_(source, non_blocking=True)
        self.arena.index_copy_(0, source[:n], source[n:])


class RecordRing:
    """Records of launches on their way to the host: [slots, N, columns] int64, an event per launch.

    extra: numbers of slot state that a launch may bring besides.
    """

    def __init__(self, *, slots: int, rows: int, columns: int, device: torch.device, extra: int = 0) -> None:
        self.slots = slots
        self.extra = staging(slots, extra, device=device)
        self.extra_np: Any = self.extra.numpy()
        self.host = staging(slots, rows * columns, device=device)
        self.host_np: Any = self.host.numpy()
        self.events = [torch.cuda.Event() for _ in range(slots)] if device.type == "cuda" else None
        self.at = 0
        self._views: dict[tuple[int, torch.Size], Tensor] = {}  # few shapes, and views cost as much as the copy

    def receive(self, record_NC: Tensor, extra: Sequence[Tensor] = ()) -> int:
        """Start the copy of a record (or of none) down, and of the extra numbers one behind the other; returns the
        ring slot to `read` later."""
        at, first = self.at, 0
        for more in extra:
            self.extra[at][first : first + more.numel()].copy_(more.view(-1), non_blocking=True)
            first += more.numel()
        if record_NC.numel():
            self._place(at, record_NC.shape).copy_(record_NC, non_blocking=True)
        if self.events is not None:
            self.events[at].record()
        self.at = (at + 1) % self.slots
        return at

    def read(self, at: int, rows: int, columns: int) -> list[list[int]]:
        """Wait for a launch and return its record, [rows][columns]: the one place where the host may block."""
        self._wait(at)
        record: list[list[int]] = self.host_np[at, : rows * columns].reshape(rows, columns).tolist()
        return record

    def _place(self, at: int, shape: torch.Size) -> Tensor:
        view = self._views.get((at, shape))
        if view is None:
            view = self._views[at, shape] = self.host[at][: shape.numel()].view(shape)
        return view

    @allow_sync("the host reads the record of frame t - D while D frames are queued", rules=["event-wait"])
    def _wait(self, at: int) -> None:
        if self.events is not None:
            self.events[at].synchronize()


class TableRing:
    """Parts of a device table on their way to the host, behind the same events as the launch's records."""

    def __init__(self, table_NC: Tensor, *, slots: int) -> None:
        self.table_NC = table_NC
        self.host = staging(slots, *table_NC.shape, device=table_NC.device)
        self.host_np: Any = self.host.numpy()
        self.slots = slots
        self.at = 0

    def receive(self, parts: Sequence[range]) -> int:
        """Start the copy of some rows down, before the launch's records; returns the ring slot to `read` later."""
        at = self.at
        for part in parts:
            if part:
                rows = slice(part.start, part.stop)
                self.host[at, rows].copy_(self.table_NC[rows], non_blocking=True)
        self.at = (at + 1) % self.slots
        return at

    def read(self, at: int, part: range) -> npt.NDArray[np.int64]:
        """The rows as a copy, once the launch's records have been read."""
        rows: npt.NDArray[np.int64] = self.host_np[at, part.start : part.stop].copy()
        return rows
