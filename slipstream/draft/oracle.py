"""Oracle drafting, for tests and benchmarks: proposes a given continuation, wrong tokens and all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.draft.protocol import Drafts, DraftView, FirstDraft, PrefillView
from slipstream.types import Admit, Request


class OracleDrafter:
    """`script(request)` gives the tokens to propose by absolute position (prompt included); -1 offers none.

    Planting a wrong token at a position decides what is accepted there, whatever the rounds look like.
    """

    taps: tuple[int, ...] = ()
    reads_hidden, rereads, lookahead = False, 0, False
    draft_vocab: int | None = None

    def __init__(
        self,
        script: Callable[[Request], Sequence[int]],
        *,
        slots: int,
        max_drafts: int,
        max_len: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.script = script
        self.max_drafts = max_drafts
        self.table_SL = torch.full((slots + 1, max_len + max_drafts + 2), -1, dtype=torch.int64, device=device)
        self.offset_K = torch.arange(1, max_drafts + 1, dtype=torch.int64, device=device)

    def admit(self, admit: Admit) -> None:
        tokens = list(self.script(admit.request))[: self.table_SL.shape[1]]
        self.table_SL[admit.slot] = -1
        self.table_SL[admit.slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)

    def prefill(self, view: PrefillView) -> None:
        del view

    def clear_pages(self, pages_P: Tensor) -> None:
        del pages_P

    def weight_bytes(self) -> int:
        return 0

    def extend(self, view: DraftView) -> FirstDraft:
        zero_B = torch.zeros_like(view.slot_B)
        return FirstDraft(token_B=zero_B, count_B=zero_B)

    def propose(self, first: FirstDraft, view: DraftView) -> Drafts:
        del first
        at_BK = (view.committed_B[:, None] + self.offset_K).clamp(max=self.table_SL.shape[1] - 1)
        token_BK = self.table_SL[view.slot_B[:, None], at_BK]
        count_B = (token_BK >= 0).to(torch.int64).cumprod(1).sum(1)
        return Drafts(token_BK=token_BK.clamp(min=0), count_B=count_B)
