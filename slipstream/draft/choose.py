"""A drafter's choice of one token per slot, by the slot's own kind of verification."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.draft.protocol import DraftView
from slipstream.sampling.processors import process_logits
from slipstream.sampling.rng import PURPOSE_COUPLED, PURPOSE_DRAFT, race, race_noise
from slipstream.types import MAX_DRAFTS, VerifyMode


def choose(
    logits_BD: Tensor,
    view: DraftView,
    step: int,
    *,
    real: torch.dtype,
    vocab: int,
    id_D: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Draft `step` of every slot [B], and its law q [B, V] when some slot is judged by rejection.

    Greedy slots take the argmax; seeded ones share the target's noise at the position; the others sample from q, the
    very tensor that the verifier gets. The slot's filters apply as they do to the target. logits_BD: over the
    target's vocabulary (V = `vocab`), or over a part of it whose ids are id_D; overwritten. real: q's type.
    """
    greedy_B = logits_BD.argmax(1)
    if id_D is not None:
        greedy_B = id_D[greedy_B]
    if not view.sampled:
        return greedy_B, None
    p = view.params
    assert p is not None, "a sampled frame has parameters"
    logits_BD = process_logits(logits_BD, p.temperature, p.top_k, p.top_p, p.min_p, None, filtered=view.filtered)
    law_BV = logits_BD.to(real).softmax(1)
    if id_D is not None:
        law_BV = law_BV.new_zeros(law_BV.shape[0], vocab).index_copy_(1, id_D, law_BV)
    token_B = greedy_B
    if view.coupled:
        noise_BV = race_noise(p.key, p.child, view.committed_B + step + 1, PURPOSE_COUPLED, vocab, real)
        token_B = torch.where(p.mode == VerifyMode.COUPLED, race(law_BV, noise_BV), token_B)
    if not view.rejection:
        return token_B, None
    # Keyed by round and node, not by position: a rejected draft's noise is never drawn again.
    node_B = view.committed_B * (MAX_DRAFTS + 1) + step
    noise_BV = race_noise(p.key, p.child, node_B, PURPOSE_DRAFT, vocab, real)
    token_B = torch.where(p.mode == VerifyMode.REJECTION, race(law_BV, noise_BV), token_B)
    return token_B, law_BV
