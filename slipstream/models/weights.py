"""From named tensors of a checkpoint to the layers of a model, one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from slipstream.errors import ModelLoadError
from slipstream.models.blocks import Int4Blocks, Int8Blocks
from slipstream.models.layers import Embedding, PackedEmbedding, RMSNorm
from slipstream.models.linear import Columns, Dense, Int8Rows, Linear, PackedInt4, PackedInt8

_CHUNK = 1 << 23  # values converted at a time, so that float32 intermediates stay small


class WeightSource(Protocol):
    """Named tensors under their Hugging Face names."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in `names()`, without reading it."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) along the first dimension, dequantised, in any floating dtype."""

    def packed_kind(self, name: str) -> Literal["int4", "int8"] | None:
        """How `read_packed` can give this tensor; None when only `read` can."""

    def read_packed(self, name: str) -> Int4Blocks | Int8Blocks:
        """The whole tensor as stored."""


class DenseSource:
    """The packed half of `WeightSource` for sources without packed tensors."""

    def packed_kind(self, name: str) -> Literal["int4", "int8"] | None:
        return None

    def read_packed(self, name: str) -> Int4Blocks | Int8Blocks:
        raise AssertionError(f"{name} is not packed")


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: what sums, gates and states are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class WeightBuilder:
    """Hands a model its layers, in its dtype and on its device, and checks that names and shapes fit.

    packed: keep 4-bit weights, and an 8-bit head, packed (CPU, bf16 activations). rounded: matrices that are not kept
    packed get 8 bits (likewise); for drafts, where that costs acceptance and never a token. Rows that a model fuses
    (q, k, v or gate, up) are written straight into one tensor, so no weight is ever held twice.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
        packed: bool = False,
        rounded: bool = False,
    ) -> None:
        narrow = packed or rounded
        assert not narrow or (device.type == "cpu" and dtype == torch.bfloat16), "packed is bf16 on the CPU"
        self.source, self.device, self.dtype, self.packed, self.rounded = source, device, dtype, packed, rounded
        self._names = source.names()
        self._read: set[str] = set()

    def vector(self, name: str, size: int) -> Tensor:
        """A 1-d tensor [size]."""
        self._check(name, (size,))
        return self._dense([name], (size,))

    def wide(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A small tensor [shape] in float32, or float64 in a float64 model: what the model's dtype would round."""
        self._check(name, shape)
        return self.source.read(name, 0, shape[0]).to(device=self.device, dtype=wide_dtype(self.dtype))

    def norm(self, name: str, size: int, eps: float, offset: float = 0.0) -> RMSNorm:
        """offset: added to the stored gain, which is then kept wide, as 1 + w of a small w would be rounded."""
        return RMSNorm(self.wide(name, (size,)) + offset if offset else self.vector(name, size), eps)

    def embedding(self, name: str, rows: int, columns: int, *, tied: bool) -> Embedding | PackedEmbedding:
        """The input embedding; `tied`: `as_head` will be asked for, so an 8-bit table may stay packed."""
        self._check(name, (rows, columns))
        packed = self._packed_head(name) if tied else None
        return Embedding(self._dense([name], (rows, columns))) if packed is None else PackedEmbedding(packed)

    def head(self, name: str, rows: int, columns: int) -> Linear:
        """An output head of its own; name without the ".weight"."""
        self._check(name + ".weight", (rows, columns))
        return self._packed_head(name + ".weight") or self.linear(name, rows, columns)

    def linear(
        self, names: str | Sequence[str], rows: int | Sequence[int], columns: int, *, bias: bool = False
    ) -> Linear:
        """One layer from one or several projections of the same input, in order.

        names: without the ".weight"; rows: output rows of each. With `bias`, each has a ".bias" too.
        """
        names = [names] if isinstance(names, str) else list(names)
        sizes = [rows] if isinstance(rows, int) else list(rows)
        weights = [name + ".weight" for name in names]
        for name, n in zip(weights, sizes, strict=True):
            self._check(name, (n, columns))
        bias_N = None
        if bias:
            biases = [name + ".bias" for name in names]
            for name, n in zip(biases, sizes, strict=True):
                self._check(name, (n,))
            bias_N = self._dense(biases, (sum(sizes),))
        packs = [self._packs(name, n, columns) for name, n in zip(weights, sizes, strict=True)]
        if all(packs):
            return PackedInt4.pack(Int4Blocks.concat([self._int4(name) for name in weights]), bias_N)
        if not any(packs):
            return self._product(weights, (sum(sizes), columns), bias_N)
        parts: list[Linear] = []
        start = 0
        for name, n, packed in zip(weights, sizes, packs, strict=True):
            part_bias = None if bias_N is None else bias_N[start : start + n]
            start += n
            if packed:
                parts.append(PackedInt4.pack(self._int4(name), part_bias))
            else:
                parts.append(self._product([name], (n, columns), part_bias))
        return Columns(parts)

    def finish(self, ignore: Sequence[str] = (), parts: Sequence[str] = ()) -> None:
        """ModelLoadError when tensors are left that no layer asked for; `ignore`: suffixes, `parts`: prefixes that
        may be."""
        left = self._names - self._read
        extra = sorted(n for n in left if not n.endswith(tuple(ignore)) and not n.startswith(tuple(parts)))
        if extra:
            shown = ", ".join(extra[:3]) + (f" and {len(extra) - 3} more" if len(extra) > 3 else "")
            raise ModelLoadError(f"the checkpoint has tensors that the model does not: {shown}")

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._names:
            raise ModelLoadError(f"the checkpoint lacks the tensor {name!r}")
        found = self.source.shape(name)
        if found != shape:
            raise ModelLoadError(f"tensor {name!r} has shape {list(found)}; the config needs {list(shape)}")
        self._read.add(name)

    def _packs(self, name: str, rows: int, columns: int) -> bool:
        return self.packed and self.source.packed_kind(name) == "int4" and PackedInt4.fits(rows, columns)

    def _int4(self, name: str) -> Int4Blocks:
        blocks = self.source.read_packed(name)
        assert isinstance(blocks, Int4Blocks)
        return blocks

    def _product(self, names: Sequence[str], shape: tuple[int, int], bias_N: Tensor | None) -> Linear:
        weight_NK = self._dense(names, shape)
        return (
            Int8Rows.round(weight_NK, bias_N) if self.rounded and Int8Rows.fits(shape[1]) else Dense(weight_NK, bias_N)
        )

    def _packed_head(self, name: str) -> PackedInt8 | None:
        if not self.packed or self.source.packed_kind(name) != "int8":
            return None
        blocks = self.source.read_packed(name)
        assert isinstance(blocks, Int8Blocks)
        return PackedInt8.pack(blocks)

    def _dense(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        step = max(1, _CHUNK // math.prod(shape[1:]))
        at = 0
        for name in names:
            rows = self.source.shape(name)[0]
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                out[at + start : at + stop].copy_(self.source.read(name, start, stop))
            at += rows
        return out
