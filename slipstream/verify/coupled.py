"""Coupled verification of seeded requests: the target's token is a fixed function of logits and position.

noise = hash(key, child, position, token id), so plain decoding and every way of drafting choose the same
token (Gumbel coupling: argmax(log p + Gumbel) = argmin(E / p)).
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.sampling.rng import PURPOSE_COUPLED, noise_from_words, race, stream_words
from slipstream.verify.rows import VerifyRows


def target_tokens(p_RV: Tensor, rows: VerifyRows) -> Tensor:
    """The target's token of each flat row, int64 [R]; rows that no active slot uses get some valid token.

    p_RV: target probabilities (any scale per row).
    """
    flat, vocab = p_RV.shape
    width = rows.row_of_BW.shape[1]
    depth_W = torch.arange(width, device=p_RV.device)
    words_BW = stream_words(
        rows.key_B.unsqueeze(1),
        rows.child_B.unsqueeze(1),
        rows.base_B.unsqueeze(1) + (depth_W + 1),
        0,
        PURPOSE_COUPLED,
    )
    # Grid to flat rows. Unused grid cells all go to one spare row, so that no real row is written twice.
    row_BW = torch.where(depth_W < rows.rows_B.unsqueeze(1), rows.row_of_BW, flat)
    words_R = torch.zeros(flat + 1, dtype=torch.int64, device=p_RV.device)
    words_R.scatter_(0, row_BW.flatten(), words_BW.flatten())
    return race(p_RV, noise_from_words(words_R[:flat], vocab, p_RV.dtype))
