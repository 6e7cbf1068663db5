"""What verification reads and returns. B slots, W rows per slot, K drafts, R flat rows, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class OneHot:
    """Drafts chosen without randomness (argmax, n-gram): q is a point mass on the draft token."""


@dataclass(frozen=True)
class DenseQ:
    """Drafts sampled from q_BKV [B, >= W - 1, V], probabilities; the very tensor they were sampled from."""

    q_BKV: Tensor


@dataclass(frozen=True, kw_only=True)
class VerifyRows:
    """One round of B slots. All tensors int64.

    mode_B: VerifyMode. key_B, child_B: noise key and child index of the request.
    base_B: committed length at the start of the round, i.e. the position of the row at depth 0. It chooses
    the token of position base + 1. For a prefill of n tokens it is n - 1.
    row_of_BW: flat row of slot b at depth w; any valid row where w >= rows_B.
    rows_B: 1 + verified drafts, 0 for an inactive slot.
    draft_BK: draft tokens, K >= W - 1; row w judges draft w. Entries past rows_B - 1 are ignored.
    """

    mode_B: Tensor
    key_B: Tensor
    child_B: Tensor
    base_B: Tensor
    row_of_BW: Tensor
    rows_B: Tensor
    draft_BK: Tensor
    q: OneHot | DenseQ


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """accepted_B: accepted drafts. tokens_BW: accepted drafts, then the target's own token, then zeros.

    n_emitted_B: accepted + 1, or 0 for an inactive slot. All int64.
    """

    accepted_B: Tensor
    tokens_BW: Tensor
    n_emitted_B: Tensor
