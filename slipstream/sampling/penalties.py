"""Penalties on what has been said, and biases. Tokens are counted where they are: on the device, in a tally per slot.

A tally is one int32 per token of the vocabulary: twice the times that it stands in the output, plus one if it stands
in the prompt. Every output token is counted once, when its round is committed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def penalized_slots(repetition_S: Tensor, presence_S: Tensor, frequency_S: Tensor) -> Tensor:
    """Which slots count what they say: some penalty is on. bool [S]."""
    return (repetition_S != 1) | (presence_S != 0) | (frequency_S != 0)


def recount(
    tally_SV: Tensor, slot_B: Tensor, counts_S: Tensor, history_SL: Tensor, prompt_len_S: Tensor, committed_S: Tensor
) -> None:
    """Count the slots' known tokens from nothing: the first prompt_len are the prompt, the rest up to the bonus token
    output (there is some where a request was preempted). Slots that do not count (counts_S) are left alone.
    """
    slot_B = torch.where(counts_S[slot_B], slot_B, 0)  # the sink's tally is anything
    place_L = torch.arange(history_SL.shape[1], device=slot_B.device)
    token_BL = history_SL[slot_B].clamp(0, tally_SV.shape[1] - 1)
    known_BL = place_L <= committed_S[slot_B][:, None]
    prompt_BL = known_BL & (place_L < prompt_len_S[slot_B][:, None])
    own_BV = torch.zeros(slot_B.shape[0], tally_SV.shape[1], dtype=tally_SV.dtype, device=slot_B.device)
    own_BV.scatter_reduce_(1, token_BL, prompt_BL.to(own_BV.dtype), reduce="amax")
    own_BV.scatter_add_(1, token_BL, 2 * (known_BL & ~prompt_BL).to(own_BV.dtype))
    tally_SV[slot_B] = own_BV


def count(tally_SV: Tensor, slot_B: Tensor, counts_S: Tensor, token_BW: Tensor, emitted_B: Tensor) -> None:
    """Count the first emitted_B tokens of each slot's round as output. An id below 0 is no token."""
    width_W = torch.arange(token_BW.shape[1], device=slot_B.device)
    more_BW = (width_W < emitted_B[:, None]) & counts_S[slot_B][:, None] & (token_BW >= 0)
    at_BW = slot_B[:, None].expand_as(token_BW), token_BW.clamp(0, tally_SV.shape[1] - 1)
    tally_SV.index_put_(at_BW, 2 * more_BW.to(tally_SV.dtype), accumulate=True)


def row_tallies(tally_SV: Tensor, slot_R: Tensor, node_R: Tensor, pending_SW: Tensor, seen_SW: Tensor | None) -> Tensor:
    """The tally [R, V] that holds where a row chooses: its slot's, and the drafts on the way to it as output.

    node_R: the row's place in its round, 0 for the bonus token, which the tally has already. seen_SW: bit j says that
    a node sees node j (itself and its ancestors); None where drafts are a chain.
    """
    node_W = torch.arange(pending_SW.shape[1], device=slot_R.device)
    if seen_SW is None:
        sees_RW = node_W <= node_R[:, None]
    else:
        seen_R = seen_SW[slot_R, node_R.clamp(0, pending_SW.shape[1] - 1)]
        sees_RW = (seen_R[:, None] >> node_W) & 1 > 0
    drafts_RW = 2 * (sees_RW & (node_W > 0)).to(tally_SV.dtype)
    token_RW = pending_SW[slot_R].clamp(0, tally_SV.shape[1] - 1)
    return tally_SV[slot_R].scatter_add_(1, token_RW, drafts_RW)


def penalize(
    logits_RV: Tensor, tally_RV: Tensor, repetition_R: Tensor, presence_R: Tensor, frequency_R: Tensor
) -> Tensor:
    """Repetition (Keskar et al. 2019, arXiv 1909.05858, with the sign of the logit) over prompt and output, then
    frequency and presence over the output. A row with every penalty off comes out as it is, bit for bit.
    """
    repetition_R1, presence_R1, frequency_R1 = (
        t.to(logits_RV.dtype)[:, None] for t in (repetition_R, presence_R, frequency_R)
    )
    times_RV = (tally_RV >> 1).to(logits_RV.dtype)
    repeated_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    out_RV = torch.where(tally_RV > 0, repeated_RV, logits_RV)
    return out_RV - frequency_R1 * times_RV - presence_R1 * (times_RV > 0)


def add_biases(logits_RV: Tensor, count_R: Tensor, id_RN: Tensor, value_RN: Tensor) -> Tensor:
    """Add each row's first `count` values at their ids, in place; an id stands there once."""
    some_RN = torch.arange(id_RN.shape[1], device=id_RN.device) < count_R[:, None]
    value_RN = torch.where(some_RN, value_RN, 0.0).to(logits_RV.dtype)
    # Unused places add zero to token 0.
    return logits_RV.scatter_add_(1, torch.where(some_RN, id_RN, 0), value_RN)
