"""A drafter's choice of one token per slot, by the slot's own kind of verification."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.draft.protocol import DraftView
from slipstream.kernels.choice import draft_choice
from slipstream.kernels.sample import row_threshold
from slipstream.sampling.processors import process_logits
from slipstream.sampling.rng import PURPOSE_COUPLED, PURPOSE_DRAFT, race, race_noise
from slipstream.sampling.slot_params import SlotLaws
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

    Where the view has `laws` the law is written there instead.

    Greedy slots take the argmax; seeded ones share the target's noise at the position; the others sample from q, the
    very tensor that the verifier gets. The slot's filters apply as they do to the target. logits_BD: over the
    target's vocabulary (V = `vocab`), or over a part of it whose ids are id_D; overwritten. real: q's type.
    """
    if view.laws is not None and view.sampled:
        return _by_kernels(logits_BD, view, view.laws, step, vocab=vocab, id_D=id_D), None
    greedy_B = logits_BD.argmax(1)
    if id_D is not None:
        greedy_B = id_D[greedy_B]
    if not view.sampled:
        return greedy_B, None
    p = view.params
    assert p is not None, "a sampled frame has parameters"
    logits_BD = process_logits(logits_BD, p.temperature, p.top_k, p.top_p, p.min_p, None, filtered=view.filtered)
    law_BV = logits_BD.to(real).softmax(1)
    # No law at all (a row that is not finite) would be none to judge by: such a draft is certain to be the first id.
    sound_B = law_BV[:, 0].isfinite()
    law_BV.masked_fill_(~sound_B[:, None], 0.0)[:, 0] += (~sound_B).to(real)
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


def _by_kernels(
    logits_BD: Tensor, view: DraftView, laws: SlotLaws, step: int, *, vocab: int, id_D: Tensor | None
) -> Tensor:
    p = laws.params
    # No position is below any min_len there: stop ids are banned from the target's choice only.
    far_B = torch.full_like(view.slot_B, 1 << 40)
    peak_B, threshold_B, greedy_B = row_threshold(
        logits_BD, view.slot_B, far_B, p.temperature, p.top_k, p.top_p, p.min_p, laws.stop_ids_ST, laws.min_len_S,
        view.filtered,
    )  # fmt: skip
    token_B: Tensor = draft_choice(
        logits_BD, id_D, peak_B, threshold_B, greedy_B, view.slot_B, p.temperature, p.mode, p.key, p.child,
        view.committed_S, laws.q_SKV if view.rejection else None, step, vocab,
    )  # fmt: skip
    return token_B
