"""Scratch that the kernels' split programs share. One per stream of launches; passed in, never global."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.attention import partial_floats
from slipstream.kernels.tuning import attention_config

LEAST_FLOATS, LEAST_COUNTERS = 8 << 20, 1 << 15
"""What the products' splits need."""


class Workspace:
    """partial: float32 partial sums, any content. counters: int32 zeros, and zero again after every launch.

    Launches that share a workspace must be ordered (one stream, or dependent launches on it).
    """

    partial: Tensor
    counters: Tensor

    def __init__(
        self, device: torch.device | str, *, floats: int = LEAST_FLOATS, counters: int = LEAST_COUNTERS
    ) -> None:
        self.partial = torch.empty(floats, dtype=torch.float32, device=device)
        self.counters = torch.zeros(counters, dtype=torch.int32, device=device)

    @classmethod
    def for_frames(
        cls, device: torch.device, *, slots: int, rows: int, shapes: list[tuple[int, int, int]]
    ) -> Workspace:
        """Room for attention over frames of up to `slots` slots with `rows` rows each.

        shapes: (query heads, KV heads, head size) of the models that share it.
        """
        floats, counters = LEAST_FLOATS, LEAST_COUNTERS
        for heads, kv_heads, dim in shapes:
            counters = max(counters, slots * rows * kv_heads)
            for n in range(1, slots + 1):
                splits = attention_config(n * rows, dim, rows).splits
                floats = max(floats, partial_floats(n * rows, heads, dim, splits))
        return cls(device, floats=floats, counters=counters)
