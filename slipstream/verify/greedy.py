"""Greedy verification: the target's token is its argmax; a draft is accepted when it equals that token."""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.sample import finite_argmax
from slipstream.types import NO_TOKEN


def target_tokens(logits_RV: Tensor) -> Tensor:
    """Argmax of each row, int64 [R]; the lowest index on ties; NO_TOKEN where it is not finite."""
    return finite_argmax(logits_RV, NO_TOKEN)


def matches(target_BW: Tensor, draft_BK: Tensor) -> Tensor:
    """Which drafts equal the target's token of the row that judges them, bool [B, W - 1]."""
    drafts = target_BW.shape[1] - 1
    return target_BW[:, :drafts] == draft_BK[:, :drafts]
