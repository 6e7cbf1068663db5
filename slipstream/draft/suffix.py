"""Suffix drafting: the continuation that most earlier occurrences of a slot's own ending agree on.

Source: Oliaro et al., "SuffixDecoding" (arXiv 2411.04975), the per-request half; tensor operations of fixed shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.draft.protocol import Drafts, DraftView, FirstDraft, PrefillView
from slipstream.errors import ConfigError
from slipstream.kernels.suffix import SuffixRule, suffix_draft
from slipstream.types import MAX_DRAFTS, Admit

PLACES = 32
"""Earlier occurrences that vote: those that match the most tokens, of equals the latest."""


class SuffixDrafter:
    """Drafts by votes of the prompt's and output's earlier occurrences (see `kernels.suffix.walk`).

    A match of m tokens offers at most factor * m + offset drafts, each of estimated probability min_prob at least;
    depth: the longest match that counts. The estimate is the share of occurrences, whose continuation is known, that
    agree. (A suffix tree with unlimited counts differs where more than `PLACES` occurrences match, and in counting
    occurrences that end with the text.) The count offered follows from history alone, so it cannot bias the output.
    """

    taps: tuple[int, ...] = ()
    reads_hidden, rereads, lookahead = False, 0, False
    draft_vocab: int | None = None
    options = ("depth", "factor", "offset", "min_prob")

    def __init__(
        self,
        *,
        slots: int = 0,
        max_drafts: int,
        depth: int = 24,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
        device: torch.device | str = "cpu",
    ) -> None:
        """slots, device: unused, it keeps nothing. Raises ConfigError for options outside their limits."""
        del slots, device
        if not 1 <= max_drafts <= MAX_DRAFTS:
            raise ConfigError(f"num_drafts={max_drafts} must be between 1 and {MAX_DRAFTS} for suffix drafting")
        if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= 64:
            raise ConfigError(f"depth={depth!r} must be a whole number from 1 to 64")
        for name, value, low, high in (
            ("factor", factor, 0.0, MAX_DRAFTS), ("offset", offset, -64.0, MAX_DRAFTS), ("min_prob", min_prob, 0.0, 1.0)
        ):  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise ConfigError(f"{name}={value!r} must be a number from {low:g} to {high:g}")
        if factor * depth + offset < 1:
            raise ConfigError(f"factor={factor} and offset={offset} leave no draft at any depth up to {depth}")
        self.max_drafts = max_drafts
        self.rule = SuffixRule(
            depth=depth, places=PLACES, factor=float(factor), offset=float(offset), min_prob=float(min_prob)
        )

    def admit(self, admit: Admit) -> None:
        """Nothing to forget: all that it reads is the slot's history."""

    def prefill(self, view: PrefillView) -> None:
        del view

    def clear_pages(self, pages_P: Tensor) -> None:
        del pages_P

    def weight_bytes(self) -> int:
        return 0

    def extend(self, view: DraftView) -> FirstDraft:
        """Nothing to learn: `propose` reads history."""
        zero_B = torch.zeros_like(view.slot_B)
        return FirstDraft(token_B=zero_B, count_B=zero_B)

    def propose(self, first: FirstDraft, view: DraftView) -> Drafts:
        del first
        columns = min(view.len_ub, view.history_SL.shape[1])
        token_BK, count_B, _ = suffix_draft(
            view.history_SL, view.slot_B, view.committed_B, columns, self.max_drafts, self.rule
        )
        return Drafts(token_BK=token_BK, count_B=count_B)
