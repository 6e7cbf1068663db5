"""Slot state: the truth about running requests, one row per slot. Slot 0 is the sink and never active."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.sampling.slot_params import SlotParams
from slipstream.types import MAX_STOP_IDS, Admit, Drop, PageAppend


class SlotState:
    """Device tensors, S = max_slots + 1 rows each.

    generation_S: who owns the slot. active_S: decodes. committed_S: tokens whose KV is final.
    history_SL: tokens known, the first committed + 1 are valid (the bonus token is the last of them).
    pending_SW: column 0 the bonus token, then the drafts for the next frame; draft_count_S of them are valid.
    draft_q: the drafters' probabilities [S, K, V], or None while drafts are certain (one-hot).
    table_SP: page ids by position // page_size, 0 (the sink) where none.
    """

    def __init__(
        self,
        *,
        max_slots: int,
        max_len: int,
        pages_per_slot: int,
        num_drafts: int,
        device: torch.device,
        real: torch.dtype = torch.float32,
        draft_vocab: int | None = None,
    ) -> None:
        s = max_slots + 1

        def whole(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def number(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=real, device=device)

        self.device = device
        self.num_drafts = num_drafts
        self.generation_S = whole(s)
        self.active_S = torch.zeros(s, dtype=torch.bool, device=device)
        self.committed_S = whole(s)
        self.max_len_S = whole(s)
        self.min_len_S = whole(s)
        self.history_SL = whole(s, max_len + num_drafts + 2)
        self.pending_SW = whole(s, num_drafts + 1)
        self.draft_count_S = whole(s)
        self.max_drafts_S = whole(s)
        self.draft_q = number(s, num_drafts, draft_vocab) if draft_vocab and num_drafts else None
        self.table_SP = whole(s, pages_per_slot)
        self.stop_ids_ST = torch.full((s, MAX_STOP_IDS), -1, dtype=torch.int64, device=device)
        self.mode_S = whole(s)
        self.key_S = whole(s)
        self.child_S = whole(s)
        self.temperature_S = number(s)
        self.top_k_S = whole(s)
        self.top_p_S = number(s)
        self.min_p_S = number(s)

    def drop(self, drops: Sequence[Drop]) -> None:
        if not drops:
            return
        slot, generation = self._columns([(d.slot, d.generation) for d in drops])
        self.active_S[slot] &= self.generation_S[slot] != generation

    def admit(self, admits: Sequence[Admit]) -> None:
        """Give slots to requests. They stay inactive until their last prefill chunk."""
        for a in admits:
            params, request, n = a.request.params, a.request, len(a.tokens)
            slot = a.slot
            self.generation_S[slot] = a.generation
            self.active_S[slot] = False
            self.committed_S[slot] = n - 1
            self.max_len_S[slot] = request.max_len
            self.min_len_S[slot] = len(request.prompt_token_ids) + params.min_tokens
            self.history_SL[slot, :n] = torch.tensor(a.tokens, dtype=torch.int64)
            self.draft_count_S[slot] = 0
            limit = self.num_drafts if request.num_drafts is None else min(request.num_drafts, self.num_drafts)
            self.max_drafts_S[slot] = limit
            stops = list(request.stop_ids) + [-1] * (MAX_STOP_IDS - len(request.stop_ids))
            self.stop_ids_ST[slot] = torch.tensor(stops, dtype=torch.int64)
            self.mode_S[slot] = int(request.mode)
            self.key_S[slot] = request.key
            self.child_S[slot] = a.request.child
            self.temperature_S[slot] = params.temperature
            self.top_k_S[slot] = params.top_k
            self.top_p_S[slot] = params.top_p
            self.min_p_S[slot] = params.min_p
            self.table_SP[slot] = 0
            self.table_SP[slot, : len(a.pages)] = torch.tensor(a.pages, dtype=torch.int64)

    def append_pages(self, appends: Sequence[PageAppend]) -> None:
        for p in appends:
            self.table_SP[p.slot, p.first : p.first + len(p.pages)] = torch.tensor(p.pages, dtype=torch.int64)

    def params(self, slot: Tensor) -> SlotParams:
        """Gather the sampling state of `slot` [B] or [R]."""
        return SlotParams(
            mode=self.mode_S,
            key=self.key_S,
            child=self.child_S,
            temperature=self.temperature_S,
            top_k=self.top_k_S,
            top_p=self.top_p_S,
            min_p=self.min_p_S,
        ).take(slot)

    def _columns(self, rows: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
        return torch.tensor(rows, dtype=torch.int64, device=self.device).unbind(1)
