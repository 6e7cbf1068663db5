"""N-gram (prompt lookup) drafting: the longest suffix of a slot's own history that occurred before.

Source: Saxena, "Prompt Lookup Decoding" (2023). Tensor operations only, so it runs inside the frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.draft.protocol import Drafts, DraftSlots, DraftView, FirstDraft, PrefillView
from slipstream.errors import ConfigError
from slipstream.kernels.draft import learn, lookup, ngram_draft, paying
from slipstream.types import MAX_DRAFTS, Admit

ROW_COST = (1.0, 1.1, 1.3, 1.4)
"""Relative time of a frame with 1, 2, 3, 4 rows per slot; later rows cost as much as the last step."""


class NgramDrafter:
    """Drafts what followed the most recent of the longest earlier matches (min_n..max_n tokens).

    A match close to the end repeats with its period. Each slot keeps its acceptance per match length and
    offers the number of drafts that pays by `row_cost` (1 + p + ... + p^j over the cost of j + 1 rows);
    that looks at past rounds only, so it cannot bias the output. gate=False always offers everything.
    """

    taps: tuple[int, ...] = ()
    reads_hidden, rereads, lookahead = False, 0, False
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
        if not type(min_n) is type(max_n) is int or not 1 <= min_n <= max_n <= 64:
            raise ConfigError(f"n-gram lengths min_n={min_n}, max_n={max_n} must satisfy 1 <= min_n <= max_n <= 64")
        if not isinstance(gate, bool):
            raise ConfigError(f"gate={gate!r} must be True or False")
        if isinstance(row_cost, str) or not isinstance(row_cost, Sequence) or len(row_cost) < 2:
            raise ConfigError(f"row_cost={row_cost!r} must be a list of at least two numbers")
        if not all(type(cost) in (int, float) and 0 < cost < float("inf") for cost in row_cost):
            raise ConfigError(f"row_cost={row_cost!r} must be numbers above 0")
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
        self.matched_S[admit.slot : admit.slot + 1] = 0  # a slice is filled; one element would be copied from the host

    def prefill(self, view: PrefillView) -> None:
        del view

    def clear_pages(self, pages_P: Tensor) -> None:
        del pages_P

    def weight_bytes(self) -> int:
        return 0

    def extend(self, view: DraftView) -> FirstDraft:
        """Update the slots' acceptance; the match itself belongs to `propose`."""
        if self.gate:
            learn(self.hits_SN, self.tries_SN, self.matched_S, view.slot_B, view.drafted_B, view.accepted_B)
        zero_B = torch.zeros_like(view.slot_B)
        return FirstDraft(token_B=zero_B, count_B=zero_B)

    def propose(self, first: FirstDraft, view: DraftView) -> Drafts:
        del first
        history_BL = view.history_SL[:, : view.len_ub][view.slot_B]
        token_BK, matched_B = lookup(history_BL, view.committed_B, self.min_n, self.max_n, self.offset_K)
        count_B = torch.full_like(matched_B, self.max_drafts)
        if self.gate:
            self.matched_S[view.slot_B] = matched_B
            hits_B, tries_B = self.hits_SN[view.slot_B, matched_B], self.tries_SN[view.slot_B, matched_B]
            count_B = paying(hits_B, tries_B, self.power_W, self.cost_W)
        return Drafts(token_BK=token_BK, count_B=torch.where(matched_B > 0, count_B, 0))

    def draft_slots(self, slots: DraftSlots) -> None:
        """`extend`, `propose` and the limits on what is offered, in one launch."""
        ngram_draft(
            slots.record_BC, slots.slot_B, slots.active_S, slots.committed_S, slots.max_len_S, slots.max_drafts_S,
            slots.history_SL, slots.pending_SW, slots.draft_count_S, self.hits_SN, self.tries_SN, self.matched_S,
            self.cost_W, self.min_n, self.gate,
        )  # fmt: skip
