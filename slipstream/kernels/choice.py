"""A drafter's choice of one token per slot on the device, over slot state by slot id, and the law that it came from.

What `draft.choose` does in torch, for many launches fewer: `kernels.sample.row_threshold`, then this. The law goes
straight to where the verifier reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.sample import scaled_logits
from slipstream.sampling.rng import PURPOSE_COUPLED, PURPOSE_DRAFT, noise_from_words, race, stream_words
from slipstream.types import MAX_DRAFTS, VerifyMode

OP = "slipstream::"


@torch.library.custom_op(OP + "draft_choice", mutates_args=("q_SKV",))
def draft_choice(
    logits_BD: Tensor, id_D: Tensor | None, peak_B: Tensor, threshold_B: Tensor, greedy_B: Tensor, slot_B: Tensor,
    temperature_S: Tensor, mode_S: Tensor, key_S: Tensor, child_S: Tensor, committed_S: Tensor, q_SKV: Tensor | None,
    step: int, vocab: int,
) -> Tensor:  # fmt: skip
    """Draft `step` of every slot, int64 [B], as the target's id: the argmax, the seeded choice, or a draw from the law.

    logits_BD: float32, raw, over the target's vocabulary or over the part of it whose ids are id_D [D]; not finite ones
    are no law, and such a draft is certain to be the first id. peak, threshold, greedy: of `row_threshold`. q_SKV
    [S, K, V]: rows [slot, step] of slots judged by rejection get their law at the ids; elsewhere they must be zero
    already. None promises that there is no such slot. vocab: V.
    """
    scaled_BD, _ = scaled_logits(logits_BD, temperature_S[slot_B])
    weight_BD = torch.where(scaled_BD >= threshold_B[:, None], (scaled_BD - peak_B[:, None]).exp(), 0.0)
    mode_B, key_B, child_B, base_B = (t[slot_B] for t in (mode_S, key_S, child_S, committed_S))
    by_coin_B = mode_B == VerifyMode.REJECTION
    words_B = torch.where(
        mode_B == VerifyMode.COUPLED,
        stream_words(key_B, child_B, base_B + (step + 1), 0, PURPOSE_COUPLED),
        # Keyed by round and node, not by position: a rejected draft's noise is never drawn again.
        stream_words(key_B, child_B, base_B * (MAX_DRAFTS + 1) + step, 0, PURPOSE_DRAFT),
    )
    noise_BD = noise_from_words(words_B, vocab, torch.float32)
    noise_BD = noise_BD if id_D is None else noise_BD[:, id_D]
    if q_SKV is not None:
        sum_B1 = weight_BD.sum(1, keepdim=True)
        first_D = torch.zeros_like(weight_BD[0])
        first_D[0] = 1.0
        law_BD = torch.where(sum_B1 > 0, weight_BD / sum_B1, first_D)
        weight_BD = torch.where(by_coin_B[:, None], law_BD, weight_BD)
        at_D = torch.arange(vocab, device=slot_B.device) if id_D is None else id_D
        at = (slot_B[:, None], torch.full_like(slot_B, step)[:, None], at_D)
        q_SKV[at] = torch.where(by_coin_B[:, None], weight_BD.to(q_SKV.dtype), q_SKV[at])
    won_B = torch.where(mode_B == VerifyMode.GREEDY, greedy_B, race(weight_BD, noise_BD))
    return won_B.clone() if id_D is None else id_D[won_B]


@draft_choice.register_fake
def _(
    logits_BD: Tensor, id_D: Tensor | None, peak_B: Tensor, threshold_B: Tensor, greedy_B: Tensor, slot_B: Tensor,
    temperature_S: Tensor, mode_S: Tensor, key_S: Tensor, child_S: Tensor, committed_S: Tensor, q_SKV: Tensor | None,
    step: int, vocab: int,
) -> Tensor:  # fmt: skip
    return torch.empty_like(greedy_B)


@draft_choice.register_kernel("cuda")
def _(
    logits_BD: Tensor, id_D: Tensor | None, peak_B: Tensor, threshold_B: Tensor, greedy_B: Tensor, slot_B: Tensor,
    temperature_S: Tensor, mode_S: Tensor, key_S: Tensor, child_S: Tensor, committed_S: Tensor, q_SKV: Tensor | None,
    step: int, vocab: int,
) -> Tensor:  # fmt: skip
    from slipstream.kernels.jit import choice

    out_B = torch.empty_like(greedy_B)
    choice.launch_draft_choice(
        logits_BD.contiguous(), id_D, peak_B, threshold_B, greedy_B, slot_B.contiguous(), temperature_S, mode_S, key_S,
        child_S, committed_S, q_SKV, out_B, step=step, vocab=vocab,
    )  # fmt: skip
    return out_B
