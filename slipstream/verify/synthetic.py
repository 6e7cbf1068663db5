"""Synthetic acceptance for benchmarks: only the decision how many drafts are accepted is replaced."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.sampling.rng import PURPOSE_SYNTHETIC, coin
from slipstream.verify.rows import VerifyRows


def synthetic_accepted(rows: VerifyRows, mean_length: float) -> Tensor:
    """Accepted drafts, int64 [B]: floor or ceil of mean_length - 1, so that 1 + accepted has that mean.

    mean_length: acceptance length with the bonus token, at least 1. A slot with fewer verified drafts
    accepts all of them, which lowers the mean.
    """
    whole = math.floor(mean_length - 1.0)
    u_B = coin(rows.key_B, rows.child_B, rows.base_B, 0, PURPOSE_SYNTHETIC)
    drawn_B = whole + (u_B < mean_length - 1.0 - whole).to(torch.int64)
    return torch.minimum(drawn_B, (rows.rows_B - 1).clamp(min=0))
