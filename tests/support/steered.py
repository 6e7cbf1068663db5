"""A drafter from tables whose confidences give away its first draft: what looks ahead is biased as much as can be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.draft.choose import choose
from slipstream.draft.protocol import Drafts, DraftView, FirstDraft, PrefillView
from slipstream.types import Admit


class SteeredDrafter:
    """Drafts from one fixed law per step, whatever came before.

    Behind a first draft `tell` it says to be sure, behind any other it has no hope; the first has the chance `first`.
    """

    taps: tuple[int, ...] = ()
    reads_hidden, lookahead, rereads, confident, cuts = False, False, 0, True, False

    def __init__(
        self, *, slots: int, max_drafts: int, max_len: int, device: torch.device, law_KV: Tensor, tell: int,
        first: float = 0.3,
    ) -> None:  # fmt: skip
        del slots, max_len
        self.max_drafts, self.law_KV, self.tell = max_drafts, law_KV.to(device), tell
        self.draft_vocab: int | None = law_KV.shape[1]
        self.first = torch.logit(torch.tensor(first)).item()

    def admit(self, admit: Admit) -> None:
        pass

    def prefill(self, view: PrefillView) -> None:
        pass

    def clear_pages(self, pages_P: Tensor) -> None:
        pass

    def weight_bytes(self) -> int:
        return 0

    def extend(self, view: DraftView) -> FirstDraft:
        zero_B = torch.zeros_like(view.slot_B)
        return FirstDraft(token_B=zero_B, count_B=zero_B)

    def propose(self, first: FirstDraft, view: DraftView) -> Drafts:
        slots, vocab = view.slot_B.shape[0], self.law_KV.shape[1]
        tokens, laws = [], []
        for step in range(self.max_drafts):
            logits_BV = self.law_KV[step].log().expand(slots, -1).clone()
            token_B, law_BV = choose(logits_BV, view, step, real=torch.float32, vocab=vocab)
            tokens.append(token_B)
            laws += [] if law_BV is None else [law_BV]
        token_BK = torch.stack(tokens, 1)
        sure_B1 = torch.where(token_BK[:, :1] == self.tell, 4.0, -4.0)
        confidence_BK = torch.cat([torch.full_like(sure_B1, self.first), sure_B1.expand(-1, self.max_drafts - 1)], 1)
        return Drafts(
            token_BK=token_BK, count_B=(view.slot_B > 0).long() * self.max_drafts,
            q_BKV=torch.stack(laws, 1) if laws else None, confidence_BK=confidence_BK,
        )  # fmt: skip


def steered(law_KV: Tensor, tell: int, **how: Any) -> Any:
    """As `LLM(draft=)` takes it."""
    return lambda **options: SteeredDrafter(law_KV=law_KV, tell=tell, **how, **options)
