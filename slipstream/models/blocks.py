"""Block-quantised weights as a checkpoint stores them: small integers with a scale per 32 values along K."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Values that share a scale."""


@dataclass(frozen=True)
class Int4Blocks:
    """weight = code * scale + minimum. codes uint8 [N, K] in 0..15, scale and minimum float32 [N, K/32]."""

    codes_NK: Tensor
    scale_NG: Tensor
    minimum_NG: Tensor

    def dequantize(self) -> Tensor:
        """float32 [N, K]."""
        codes = self.codes_NK.unflatten(1, (-1, GROUP)).float()
        return torch.addcmul(self.minimum_NG.unsqueeze(-1), codes, self.scale_NG.unsqueeze(-1)).flatten(1)

    @staticmethod
    def concat(parts: list[Int4Blocks]) -> Int4Blocks:
        """The rows of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        return Int4Blocks(
            torch.cat([p.codes_NK for p in parts]),
            torch.cat([p.scale_NG for p in parts]),
            torch.cat([p.minimum_NG for p in parts]),
        )


@dataclass(frozen=True)
class Int8Blocks:
    """weight = code * scale. codes int8 [N, K], scale float32 [N, K/32]."""

    codes_NK: Tensor
    scale_NG: Tensor

    def dequantize(self) -> Tensor:
        """float32 [N, K]."""
        codes: Tensor = self.codes_NK.unflatten(1, (-1, GROUP)).float()
        return codes.mul_(self.scale_NG.unsqueeze(-1)).flatten(1)
