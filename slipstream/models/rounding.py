"""Weights rounded to 4 bits at load: for drafts, where an error costs acceptance and never a token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from slipstream.models.blocks import GROUP, Int4Blocks, Int8Blocks
from slipstream.models.weights import WeightSource

_LEVELS = 15
_ROWS = 1024  # rounded at a time, so that temporaries stay in the cache


def round_int4(weight_NK: Tensor) -> Int4Blocks:
    """The nearest of 16 even steps between the least and the greatest value of each group of 32 along K."""
    rows, columns = weight_NK.shape
    codes_NK = torch.empty(rows, columns, dtype=torch.uint8)
    scale_NG, minimum_NG = (torch.empty(rows, columns // GROUP) for _ in range(2))
    for start in range(0, rows, _ROWS):
        part = slice(start, min(start + _ROWS, rows))
        group = weight_NK[part].float().unflatten(1, (-1, GROUP))
        low, high = group.aminmax(dim=-1)
        scale = (high - low) / _LEVELS
        step = torch.where(scale > 0, scale, 1.0)
        codes_NK[part] = (group - low[..., None]).div_(step[..., None]).round_().clamp_(0, _LEVELS).flatten(1)
        scale_NG[part], minimum_NG[part] = scale, low
    return Int4Blocks(codes_NK, scale_NG, minimum_NG)


class Rounded:
    """Another source, whose matrices can also be had with 4 bits."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source

    def names(self) -> set[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.source.read(name, start, stop)

    def packed_kind(self, name: str) -> Literal["int4", "int8"] | None:
        shape = self.shape(name)
        return "int4" if len(shape) == 2 and shape[1] % GROUP == 0 else None

    def read_packed(self, name: str) -> Int4Blocks | Int8Blocks:
        return round_int4(self.read(name, 0, self.shape(name)[0]))
