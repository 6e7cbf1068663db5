"""Scratch that the kernels' split programs share. One per stream of launches; passed in, never global."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """partial: float32 partial sums, any content. counters: int32 zeros, and zero again after every launch.

    Launches that share a workspace must be ordered (one stream, or dependent launches on it).
    """

    partial: Tensor
    counters: Tensor

    def __init__(self, device: torch.device | str, *, floats: int = 8 << 20, counters: int = 1 << 15) -> None:
        self.partial = torch.empty(floats, dtype=torch.float32, device=device)
        self.counters = torch.zeros(counters, dtype=torch.int32, device=device)
