"""Greedy verification: the target's token is its argmax; a draft is accepted when it equals that token."""

from __future__ import annotations

from torch import Tensor


def target_tokens(logits_RV: Tensor) -> Tensor:
    """Argmax of each row, int64 [R]; the lowest index on ties."""
    return logits_RV.argmax(dim=-1)


def matches(target_BW: Tensor, draft_BK: Tensor) -> Tensor:
    """Which drafts equal the target's token of the row that judges them, bool [B, W - 1]."""
    drafts = target_BW.shape[1] - 1
    return target_BW[:, :drafts] == draft_BK[:, :drafts]
