"""Linear layers by how their weight is stored: x [R, K] to [R, N].

In bf16 on the CPU, packed or not, a row's result does not depend on R (tested). That is what makes speculative
output equal plain output bit by bit in the default CPU mode.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models.blocks import GROUP, Int4Blocks, Int8Blocks

_ROW_BLOCK = 16  # the int4 op takes whole blocks of this many output rows
_PACK_ROWS = 4096  # packed at a time: a multiple of every block the op lays rows out in


class Linear(Protocol):
    """y = x W^T + b with x [R, K], y [R, N]."""

    def __call__(self, x_RK: Tensor) -> Tensor: ...

    def bytes(self) -> int:
        """Bytes read by one call."""


class Dense:
    """Weight [N, K] in the activation dtype, bias [N] or None.

    bf16 on the CPU multiplies a single row as two: torch's one-row kernel sums K above 1024 in another order
    than its kernel for more rows, and the second row costs about 1 %.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self.weight_NK, self.bias_N = weight_NK, bias_N
        self._pair_up = weight_NK.device.type == "cpu" and weight_NK.dtype == torch.bfloat16

    def __call__(self, x_RK: Tensor) -> Tensor:
        if self._pair_up and x_RK.shape[0] == 1:
            return F.linear(x_RK.repeat(2, 1), self.weight_NK, self.bias_N)[:1]
        return F.linear(x_RK, self.weight_NK, self.bias_N)

    def bytes(self) -> int:
        return _bytes(self.weight_NK, self.bias_N)


class PackedInt4:
    """4-bit weight in torch's CPU layout, one bf16 scale and zero point per group of 32 along K.

    packed uint8 [N, K/2] in the op's own layout, scales_zeros bf16 [K/32, N, 2]. A weight is
    (code - 8) * scale + zero. x must be bf16; sums are float32, the result is rounded to bf16 once.
    """

    def __init__(self, packed: Tensor, scales_zeros: Tensor, bias_N: Tensor | None = None) -> None:
        self.packed, self.scales_zeros, self.bias_N = packed, scales_zeros, bias_N

    @staticmethod
    def fits(rows: int, columns: int) -> bool:
        """Whether the CPU op takes a weight of this shape."""
        return rows % _ROW_BLOCK == 0 and columns % GROUP == 0

    @classmethod
    def pack(cls, blocks: Int4Blocks, bias_N: Tensor | None = None) -> PackedInt4:
        # The op's zero point is the value of code 8, so a rounded scale moves the codes near it least.
        zero_NG = blocks.minimum_NG + 8.0 * blocks.scale_NG
        return cls(_pack_codes(blocks.codes_NK), _scales_zeros(blocks.scale_NG, zero_NG), bias_N)

    def __call__(self, x_RK: Tensor) -> Tensor:
        x_RK = x_RK.contiguous()
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x_RK, self.packed, GROUP, self.scales_zeros)
        return y if self.bias_N is None else y + self.bias_N

    def bytes(self) -> int:
        return _bytes(self.packed, self.scales_zeros, self.bias_N)


class PackedInt8:
    """8-bit weight held as two 4-bit halves, so that the int4 op can multiply it; also an embedding.

    With code = 16 * high + low - 128 and both halves in 0..15, weight = (high - 8) * 16 scale
    + (low - 8) * scale + 8 scale: two int4 weights. Their products are added in float32. Half the bytes of
    bf16, so twice as fast for few rows and slower from about 8: meant for the output head.
    """

    def __init__(self, high: PackedInt4, low: PackedInt4, lanes: int) -> None:
        self.high, self.low = high, low
        rows, half = high.packed.shape
        self._high = high.packed.view(rows // lanes, half * 2, lanes // 2)
        self._low = low.packed.view(rows // lanes, half * 2, lanes // 2)
        self._lanes = lanes

    @classmethod
    def pack(cls, blocks: Int8Blocks) -> PackedInt8 | None:
        """None when the shape does not fit, or the op lays its rows out in a way that `rows` does not know."""
        rows, columns = blocks.codes_NK.shape
        if rows % 64 or columns % GROUP:
            return None
        codes = blocks.codes_NK.view(torch.uint8) ^ 128  # code + 128
        high_NK, low_NK = codes >> 4, codes & 15
        del codes
        high = PackedInt4(_pack_codes(high_NK), _scales_zeros(blocks.scale_NG * 16.0, None))
        low = PackedInt4(_pack_codes(low_NK), _scales_zeros(blocks.scale_NG, blocks.scale_NG * 8.0))
        for lanes in (64, 32, 16):
            made = cls(high, low, lanes)
            probe = torch.arange(64)
            if torch.equal(made._codes(made._high, probe), high_NK[:64]):
                return made
        return None

    def __call__(self, x_RK: Tensor) -> Tensor:
        """float32 [R, N]."""
        return self.high(x_RK).float().add_(self.low(x_RK))

    def rows(self, tokens_R: Tensor) -> Tensor:
        """Weight rows [R, K] in bf16: the embedding of `tokens_R`."""
        codes = (self._codes(self._high, tokens_R) << 4) + self._codes(self._low, tokens_R)
        scale_RG = self.low.scales_zeros[:, tokens_R, 0].t().float()
        signed: Tensor = (codes.float() - 128.0).unflatten(1, (-1, GROUP))
        return (signed * scale_RG.unsqueeze(-1)).flatten(1).to(torch.bfloat16)

    def _codes(self, blocks: Tensor, tokens_R: Tensor) -> Tensor:
        """4-bit codes [R, K]. The op keeps `lanes` rows together, K major; the first half of them sits in the
        low nibbles, the second half in the high ones."""
        lane = tokens_R % self._lanes
        half = self._lanes // 2
        bytes_RK: Tensor = blocks.transpose(1, 2)[tokens_R // self._lanes, lane % half]
        shift = (lane // half * 4).to(torch.uint8).unsqueeze(1)
        codes_RK: Tensor = bytes_RK.bitwise_right_shift(shift) & 15
        return codes_RK

    def bytes(self) -> int:
        return self.high.bytes() + self.low.bytes()


class Int8Rows:
    """8-bit weight with one bf16 scale per output row; x is bf16, sums are float32 (torch's CPU product).

    Meant for drafts: rounding moves a product by about 0.8 % of its length, where 4 bits move it by 8 %, and few rows
    take a sixth to a third of a dense bf16 product's time.
    """

    def __init__(self, codes_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None = None) -> None:
        self.codes_NK, self.scale_N, self.bias_N = codes_NK, scale_N, bias_N

    @staticmethod
    def fits(columns: int) -> bool:
        """Whether the op takes rows of that length: it reads them in whole vectors, unchecked."""
        return columns % GROUP == 0

    @classmethod
    def round(cls, weight_NK: Tensor, bias_N: Tensor | None = None) -> Int8Rows:
        """The nearest of 255 even steps that reach the largest value of a row either way. weight_NK: any real type."""
        rows = weight_NK.shape[0]
        codes_NK = torch.empty(weight_NK.shape, dtype=torch.int8)
        scale_N = (weight_NK.float().abs().amax(1) / 127).to(torch.bfloat16)
        for start in range(0, rows, _PACK_ROWS):
            part = slice(start, start + _PACK_ROWS)
            step_N1 = torch.where(scale_N[part] > 0, scale_N[part], 1).float()[:, None]
            codes_NK[part] = (weight_NK[part].float() / step_N1).round_().clamp_(-127, 127)
        return cls(codes_NK, scale_N, bias_N)

    def __call__(self, x_RK: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int8pack_mm(x_RK.contiguous(), self.codes_NK, self.scale_N)
        return y if self.bias_N is None else y + self.bias_N

    def bytes(self) -> int:
        return _bytes(self.codes_NK, self.scale_N, self.bias_N)


class Columns:
    """Several layers over the same input, their results side by side: fused projections of unlike storage."""

    def __init__(self, parts: list[Linear]) -> None:
        self.parts = parts

    def __call__(self, x_RK: Tensor) -> Tensor:
        return torch.cat([part(x_RK) for part in self.parts], -1)

    def bytes(self) -> int:
        return sum(part.bytes() for part in self.parts)


def _pack_codes(codes_NK: Tensor) -> Tensor:
    packed = torch.empty((codes_NK.shape[0], codes_NK.shape[1] // 2), dtype=torch.uint8)
    for start in range(0, codes_NK.shape[0], _PACK_ROWS):  # the op wants int32: a slice at a time
        part = codes_NK[start : start + _PACK_ROWS].to(torch.int32)
        packed[start : start + _PACK_ROWS] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(part, 1)
    return packed


def _scales_zeros(scale_NG: Tensor, zero_NG: Tensor | None) -> Tensor:
    rows, groups = scale_NG.shape
    out = torch.zeros((groups, rows, 2), dtype=torch.bfloat16)
    out[..., 0] = scale_NG.t()
    if zero_NG is not None:
        out[..., 1] = zero_NG.t()
    return out


def _bytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
