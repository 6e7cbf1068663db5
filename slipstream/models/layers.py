"""Leaf layers that the architectures share. Decoder blocks stay in the architecture's own file."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models.linear import Dense, Linear, PackedInt8


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467); float32 inside.

    bf16 on the CPU goes through LayerNorm of (x, -x): the mean is zero and the variance mean(x^2), so the
    first half is RMSNorm of x. torch has one kernel for it, and six for rms_norm at half the speed.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight [D]: of x's dtype, or float32 beside a narrower x."""
        self.weight, self.eps, self._size = weight, eps, weight.shape[0]
        mirrored = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        self._weight_twice = torch.cat((weight, weight)) if mirrored else None

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            return F.rms_norm(x.to(self.weight.dtype), (self._size,), self.weight, self.eps).to(x.dtype)
        if self._weight_twice is None:
            return F.rms_norm(x, (self._size,), self.weight, self.eps)
        both = torch.cat((x, -x), -1)
        normed = F.layer_norm(both, (2 * self._size,), self._weight_twice, None, self.eps)
        return normed[..., : self._size].contiguous()


def swiglu(gate_up_R2F: Tensor) -> Tensor:
    """silu(gate) * up for rows that hold gate and up side by side (arXiv 2002.05202): [R, 2F] -> [R, F]."""
    gate, up = gate_up_R2F.chunk(2, -1)
    return F.silu(gate).mul_(up)


def geglu(gate_up_R2F: Tensor) -> Tensor:
    """gelu(gate) * up, with the tanh form of GELU (arXiv 2002.05202): [R, 2F] -> [R, F]."""
    gate, up = gate_up_R2F.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


class Embedding:
    """Token ids [R] to rows [R, H] of a table [V, H]."""

    def __init__(self, table_VH: Tensor) -> None:
        self.table_VH = table_VH

    def __call__(self, tokens_R: Tensor) -> Tensor:
        return F.embedding(tokens_R, self.table_VH)

    def as_head(self) -> Linear:
        """The same storage as an output projection (tied embeddings)."""
        return Dense(self.table_VH)


class PackedEmbedding:
    """Token ids [R] to rows [R, H] of a table that is kept packed because it is the output head too."""

    def __init__(self, table: PackedInt8) -> None:
        self.table = table

    def __call__(self, tokens_R: Tensor) -> Tensor:
        return self.table.rows(tokens_R)

    def as_head(self) -> Linear:
        return self.table
