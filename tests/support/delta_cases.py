"""Slots with recurrent states for kernel tests: random where something is, NaN where nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.kernels.delta import DeltaWeights, Span
from slipstream.memory.states import DeltaMemory

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer's memory, and a decode frame over slots 1.. with the sink behind them."""

    memory: DeltaMemory
    weights: DeltaWeights
    x_RX: Tensor
    committed_S: Tensor
    slot_B: Tensor
    rows_B: Tensor
    owner_R: Tensor
    row_of_BW: Tensor

    def clone(self) -> Case:
        """The same with a memory of its own."""
        copy = (x.clone() if isinstance(x, Tensor) else x for x in self.memory)
        return replace(self, memory=DeltaMemory(*copy))

    def to(self, device: str, dtype: torch.dtype) -> Case:
        """On another device; inputs in `dtype`, states and weights in float32."""
        m, w = self.memory, self.weights
        return Case(
            memory=DeltaMemory(
                m.state_SNKV.to(device), m.recent_SMX.to(device, dtype), m.saved_ZNKV.to(device),
                m.saved_ZHX.to(device, dtype), m.absorbed_S.to(device), m.saved_SC.to(device), m.interval, m.early,
            ),
            weights=DeltaWeights(*(x.to(device) for x in w[:3]), *w[3:]), x_RX=self.x_RX.to(device, dtype),
            **{f: getattr(self, f).to(device) for f in ("committed_S", "slot_B", "rows_B", "owner_R", "row_of_BW")},
        )  # fmt: skip


def delta_case(
    rows: Sequence[int],
    *,
    lengths: Sequence[int],
    lacks: Sequence[int],
    heads: int = 2,
    key_heads: int = 1,
    dk: int = 8,
    dv: int = 6,
    taps: int = 4,
    replays: int = 3,
    padding: int = 2,
    interval: int = 0,
    early: int = 0,
) -> Case:
    """Slot s (from 1) has lengths[s - 1] committed tokens, of which its state lacks the last lacks[s - 1], and
    rows[s - 1] rows of x. Every row of x is a part of a longer one."""
    slots, history, width = len(rows), taps - 1, max(*rows, 1)
    channels = 2 * key_heads * dk + heads * dv
    inputs, ring = channels + 2 * heads, history + 2 * replays + 1
    state = torch.full((slots + 1, heads, dk, dv), NAN)
    recent = torch.full((slots + 1, ring, inputs), NAN)
    absorbed, committed = torch.zeros(slots + 1, dtype=torch.int64), torch.zeros(slots + 1, dtype=torch.int64)
    for s, length, lack in zip(range(1, slots + 1), lengths, lacks, strict=False):
        committed[s], absorbed[s] = length, length - lack
        state[s] = torch.randn(heads, dk, dv)
        for p in range(max(0, length - lack - history), length):
            recent[s, p % ring] = torch.randn(inputs)
    count = sum(rows) + padding
    owners = [b for b, n in enumerate(rows) for _ in range(n)] + [slots] * padding
    start = [sum(rows[:b]) for b in range(slots)]
    row_of = [[start[b] + min(d, max(n - 1, 0)) for d in range(width)] for b, n in enumerate(rows)]
    # As pack_rows: the cells of a slot without rows name some row.
    row_of_BW = torch.tensor([*row_of, [sum(rows)] * width]).clamp(max=count - 1)
    saved = torch.full((slots * 4 + 1, heads, dk, dv), NAN)
    return Case(
        memory=DeltaMemory(
            state, recent, saved, torch.full((slots * 4 + 1, history, inputs), NAN), absorbed,
            torch.arange((slots + 1) * 4).view(-1, 4).clamp(max=slots * 4), interval, early,
        ),
        weights=DeltaWeights(
            (torch.randn(taps, channels) / 2).T, -torch.rand(heads), torch.randn(heads), key_heads, dk
        ),
        x_RX=torch.randn(count, inputs + 5)[:, :inputs], committed_S=committed,
        slot_B=torch.tensor([*range(1, slots + 1), 0]), rows_B=torch.tensor([*rows, 0]),
        owner_R=torch.tensor(owners), row_of_BW=row_of_BW,
    )  # fmt: skip


def prompt_rows(case: Case, spans: Sequence[Span], padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, slots and positions of spans, then of padding; what a span goes on from is put into the memory."""
    memory, taps = case.memory, case.weights.conv_CT.shape[1]
    for slot, start, _ in spans:
        if start:
            memory.state_SNKV[slot] = torch.randn(memory.state_SNKV.shape[1:])
        for p in range(max(0, start - taps + 1), start):
            memory.recent_SMX[slot, p % memory.recent_SMX.shape[1]] = torch.randn(memory.recent_SMX.shape[2])
    slots = [slot for slot, _, length in spans for _ in range(length)] + [0] * padding
    positions = [start + i for _, start, length in spans for i in range(length)] + [0] * padding
    x_RX = torch.randn(len(slots), memory.recent_SMX.shape[2] + 5)[:, : memory.recent_SMX.shape[2]]
    return x_RX, torch.tensor(slots), torch.tensor(positions)
