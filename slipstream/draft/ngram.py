"""N-gram (prompt lookup) drafting: the longest suffix of a slot's own history that occurred before.

Source: Saxena, "Prompt Lookup Decoding" (2023). Tensor operations only, so it runs inside the frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.draft.protocol import Drafts, DraftView, FirstDraft, PrefillView
from slipstream.errors import ConfigError
from slipstream.types import MAX_DRAFTS, Admit

ROW_COST = (1.0, 1.1, 1.3, 1.4)
"""Relative time of a frame with 1, 2, 3, 4 rows per slot; later rows cost as much as the last step."""

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.5, 1.0
MEMORY, FORGET = 0.9, 0.995
"""Weight of older rounds when a slot's acceptance is updated; per-frame return to the prior."""


class NgramDrafter:
    """Drafts what followed the most recent of the longest earlier matches (min_n..max_n tokens).

    A match close to the end repeats with its period. Each slot keeps its acceptance per match length and
    offers the number of drafts that pays by `row_cost` (1 + p + ... + p^j over the cost of j + 1 rows);
    that looks at past rounds only, so it cannot bias the output. gate=False always offers everything.
    """

    taps: tuple[int, ...] = ()
    draft_vocab: int | None = None

    def __init__(
        self,
        *,
        slots: int,
        max_drafts: int,
        min_n: int = 2,
        max_n: int = 5,
        gate: bool = True,
        row_cost: Sequence[float] = ROW_COST,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 1 <= min_n <= max_n <= 64:
            raise ConfigError(f"n-gram lengths min_n={min_n}, max_n={max_n} must satisfy 1 <= min_n <= max_n <= 64")
        if not 1 <= max_drafts <= MAX_DRAFTS:
            raise ConfigError(f"num_drafts={max_drafts} must be between 1 and {MAX_DRAFTS} for n-gram drafting")
        self.max_drafts = max_drafts
        self.min_n, self.max_n, self.gate = min_n, max_n, gate
        last = row_cost[-1] - row_cost[-2]
        costs = [
            row_cost[i] if i < len(row_cost) else row_cost[-1] + last * (i - len(row_cost) + 1)
            for i in range(max_drafts + 1)
        ]
        self.cost_W = torch.tensor(costs, dtype=torch.float32, device=device)
        self.power_W = torch.arange(max_drafts + 1, dtype=torch.float32, device=device)
        self.offset_K = torch.arange(max_drafts, dtype=torch.int64, device=device)
        # Accepted and judged drafts by match length, exponentially weighted.
        self.hits_SN = torch.zeros(slots + 1, max_n + 1, device=device)
        self.tries_SN = torch.zeros(slots + 1, max_n + 1, device=device)
        self.matched_S = torch.zeros(slots + 1, dtype=torch.int64, device=device)

    def admit(self, admit: Admit) -> None:
        self.hits_SN[admit.slot] = 0
        self.tries_SN[admit.slot] = 0
        self.matched_S[admit.slot] = 0

    def prefill(self, view: PrefillView) -> None:
        del view

    def clear_pages(self, pages_P: Tensor) -> None:
        del pages_P

    def weight_bytes(self) -> int:
        return 0

    def extend(self, view: DraftView) -> FirstDraft:
        """Update the slots' acceptance; the match itself belongs to `propose`."""
        if self.gate:
            matched_B = self.matched_S[view.slot_B]
            hits_BN, tries_BN = self.hits_SN[view.slot_B] * FORGET, self.tries_SN[view.slot_B] * FORGET
            one_BN = torch.zeros_like(hits_BN).scatter_(1, matched_B[:, None], 1.0)
            judged_B = torch.minimum(view.accepted_B + 1, view.drafted_B)
            keep_BN = 1 - one_BN * (1 - MEMORY) * (judged_B > 0)[:, None]
            self.hits_SN[view.slot_B] = hits_BN * keep_BN + one_BN * view.accepted_B[:, None]
            self.tries_SN[view.slot_B] = tries_BN * keep_BN + one_BN * judged_B[:, None]
        zero_B = torch.zeros_like(view.slot_B)
        return FirstDraft(token_B=zero_B, count_B=zero_B)

    def propose(self, first: FirstDraft, view: DraftView) -> Drafts:
        del first
        history_BL = view.history_SL[:, : view.len_ub][view.slot_B]
        end_B = view.committed_B  # index of the last known token
        length_BL = match_lengths(history_BL, end_B, self.max_n)
        columns = history_BL.shape[1]
        column_L = torch.arange(columns, device=history_BL.device)
        usable_BL = (length_BL >= self.min_n) & (column_L < end_B[:, None])
        rank_BL = torch.where(usable_BL, length_BL * columns + column_L, -1)
        best_B = rank_BL.amax(1)
        found_B = best_B >= 0
        at_B = torch.where(found_B, best_B % columns, 0)
        matched_B = torch.where(found_B, torch.div(best_B, columns, rounding_mode="floor"), 0)
        period_B = (end_B - at_B).clamp(min=1)
        source_BK = at_B[:, None] + 1 + self.offset_K % period_B[:, None]
        token_BK = history_BL.gather(1, source_BK.clamp(max=columns - 1))
        count_B = torch.where(found_B, self.max_drafts, 0)
        if self.gate:
            self.matched_S[view.slot_B] = matched_B
            hits_B = self.hits_SN[view.slot_B, matched_B] + PRIOR_ACCEPTANCE * PRIOR_WEIGHT
            accept_B = hits_B / (self.tries_SN[view.slot_B, matched_B] + PRIOR_WEIGHT)
            gain_BW = (accept_B[:, None] ** self.power_W).cumsum(1) / self.cost_W
            count_B = torch.where(found_B, gain_BW.argmax(1), 0)
        return Drafts(token_BK=token_BK, count_B=count_B)


def match_lengths(history_BL: Tensor, end_B: Tensor, max_n: int) -> Tensor:
    """Length [B, L] (at most max_n) of the longest common suffix of history[:j+1] and history[:end+1]."""
    alive_BL = history_BL == history_BL.gather(1, end_B[:, None])
    length_BL = alive_BL.to(torch.int64)
    for i in range(1, max_n):
        if i >= history_BL.shape[1]:
            break
        token_B1 = history_BL.gather(1, (end_B - i).clamp(min=0)[:, None])
        same_BL = (history_BL == token_B1) & (end_B >= i)[:, None]
        alive_BL = torch.cat([torch.zeros_like(alive_BL[:, :i]), alive_BL[:, i:] & same_BL[:, :-i]], 1)
        length_BL = length_BL + alive_BL
    return length_BL
