"""Parts of a `DraftView` for drafters that do not look at them."""

from __future__ import annotations

from torch import Tensor

from slipstream.draft.protocol import TargetRows


def no_rows(zero_B: Tensor) -> TargetRows:
    """One row per slot, all padding."""
    return TargetRows(
        slot_R=zero_B, pos_R=zero_B, token_R=zero_B, owner_R=zero_B, slot_B=zero_B, rows_B=zero_B,
        row_of_BW=zero_B[:, None],
    )  # fmt: skip
