"""A small decode loop as many programs have one: a model's layers, a few rows, host bookkeeping around them."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

RING = 9
"""Slots of each pinned ring: one more than the largest run-ahead of `measure`."""


class Loop:
    """State of B sequences and a stack of MLP layers that one step streams through.

    On a GPU the sizes give about 1 ms of device work per step. captured: the layers are a CUDA graph per number of
    rows, as serving engines have them, so that a loop which does not wait is bound by the device and not by the
    host's launches. On a CPU the sizes are tiny, in float64, so that both forms of a pair choose the same tokens. All
    that a step changes is put back by `reset`.

    token_B, pos_B, accepted_B, rows_B int64 [B]; active_B, finished_B bool [B]; table_BP int64 [B, P]. kv_LH: a cache
    with the rows of all layers in one tensor; a step adds kv_step of them.
    """

    def __init__(self, device: str | torch.device, *, tiny: bool | None = None, captured: bool = False) -> None:
        self.device = torch.device(device)
        self.captured = captured
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
        on_gpu = self.device.type == "cuda"
        tiny = not on_gpu if tiny is None else tiny
        self.slots, self.pages, self.max_len = 8, 16, 2048
        self.vocab = 128 if tiny else 4096
        hidden, inner, layers = (16, 32, 2) if tiny else (4096, 14336, 16)
        dtype = torch.bfloat16 if on_gpu else torch.float64
        make = torch.Generator(device="cpu").manual_seed(0)

        def random(*shape: int) -> Tensor:
            if on_gpu:
                return torch.empty(shape, dtype=dtype, device=self.device).uniform_(-1, 1).div_(shape[-1] ** 0.5)
            return torch.rand(shape, dtype=dtype, generator=make).mul_(2).sub_(1).div_(shape[-1] ** 0.5)

        self.embed_VH, self.position_LH = random(self.vocab, hidden), random(self.max_len, hidden)
        self.layers = [(random(inner, hidden), random(hidden, inner)) for _ in range(layers)]
        self.gain_H = torch.ones(hidden, dtype=dtype, device=self.device)
        self.eos = 7
        ids = {"dtype": torch.int64, "device": self.device}
        self.slot_B = torch.arange(self.slots, **ids)
        self.live_B = torch.arange(0, self.slots, 2, **ids)
        self.live_list = list(range(0, self.slots, 2))
        self.rows_B = torch.full((self.slots,), 2, **ids)
        self.total_rows = 2 * self.slots
        self.active_B = self.slot_B % 2 == 0
        self.accepted_B = torch.ones(self.slots, **ids)
        self.token_B = torch.zeros(self.slots, **ids)
        self.pos_B = torch.zeros(self.slots, **ids)
        self.finished_B = torch.zeros(self.slots, dtype=torch.bool, device=self.device)
        self.table_BP = torch.zeros(self.slots, self.pages, **ids)
        self.landing_PB = torch.zeros(self.pages, self.slots, **ids)
        self.kv_rows, self.kv_step = (64 if tiny else 2048), self.slots * layers
        self.kv_LH = torch.zeros(self.kv_rows + 64 * self.kv_step, hidden, dtype=dtype, device=self.device)
        # Rings between host and device: pinned, contiguous, made once.
        pin = {"dtype": torch.int64, "pin_memory": on_gpu}
        self.up_BP = torch.zeros(RING, self.slots, self.pages, **pin)
        self.up_PB = torch.zeros(RING, self.pages, self.slots, **pin)
        self.up_B = torch.zeros(RING, self.slots, **pin)
        self.down_B = torch.zeros(RING, self.slots, **pin)
        self.up_BP_np, self.up_PB_np, self.up_B_np, self.down_B_np = (
            ring.numpy() for ring in (self.up_BP, self.up_PB, self.up_B, self.down_B)
        )
        self.reset()

    def reset(self) -> None:
        """Back to the state before the first step."""
        self.token_B.fill_(1)
        self.pos_B.fill_(3)
        self.finished_B.fill_(False)
        self.lengths = [3] * self.slots
        self.grown_LH: Tensor | None = None
        self.seen: list[list[int]] = []

    def forward(self, token_R: Tensor, pos_R: Tensor) -> Tensor:
        """Next token of each row [R]; captured, the same buffer every time."""
        if not self.captured:
            return self._layers(token_R, pos_R)
        graph, in_token_R, in_pos_R, out_R = self._graph(len(token_R))
        in_token_R.copy_(token_R)
        in_pos_R.copy_(pos_R)
        graph.replay()
        return out_R

    def _graph(self, rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]:
        """The layers for this many rows, captured on first use: graph, tokens [R], positions [R], next tokens [R]."""
        if rows not in self._graphs:
            token_R, pos_R = self.token_B.new_ones(rows), self.token_B.new_ones(rows)
            self._layers(token_R, pos_R)  # libraries make their workspaces
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out_R = self._layers(token_R, pos_R)
            self._graphs[rows] = graph, token_R, pos_R, out_R
        return self._graphs[rows]

    def _layers(self, token_R: Tensor, pos_R: Tensor) -> Tensor:
        x_RH = self.embed_VH[token_R] + self.position_LH[pos_R]
        for up, down in self.layers:
            normed_RH = F.rms_norm(x_RH, x_RH.shape[-1:], self.gain_H)
            x_RH = x_RH + F.linear(F.silu(F.linear(normed_RH, up)), down)
        return F.linear(x_RH, self.embed_VH).argmax(-1)

    def advance(self) -> Tensor:
        """One plain step for all slots, from and to device state; returns the tokens [B]."""
        next_B = self.forward(self.token_B, self.pos_B)
        self.token_B.copy_(next_B)
        self.pos_B.add_(1)
        return next_B

    def host_table(self, t: int) -> np.ndarray:
        """The page table that the host wants on the device at step t: int64 [B, P]."""
        return np.arange(self.slots * self.pages, dtype=np.int64).reshape(self.slots, self.pages) + t

    def host_lengths(self) -> list[int]:
        """The lengths as the host keeps them, one step on."""
        self.lengths = [n + 1 for n in self.lengths]
        return self.lengths
