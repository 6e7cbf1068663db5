"""Masks of grammars over a frame's logits, by slot state: rows of slots without one are left as they are."""

from __future__ import annotations

import torch
from torch import Tensor

OP = "slipstream::"


def masked_rows(
    logits_RV: Tensor, slot_R: Tensor, cell_R: Tensor, committed_S: Tensor, masked_S: Tensor, mask_SWN: Tensor
) -> None:
    """Write -inf, in place, at the tokens that a row's mask forbids.

    cell_R: where each row is kept in the cache; its mask is mask[slot, cell - committed], N 32-bit words (int32) of
    which bit t % 32 of word t // 32 allows token t. masked_S: 0 for slots without a grammar.
    """
    rows, vocab = logits_RV.shape
    place_R = (cell_R - committed_S[slot_R]).clamp(0, mask_SWN.shape[1] - 1)
    byte_RB = mask_SWN[slot_R, place_R].view(torch.uint8)
    bit_8 = 2 ** torch.arange(8, dtype=torch.uint8, device=logits_RV.device)
    forbidden_RV = ((byte_RB[:, :, None] & bit_8) == 0).view(rows, -1)[:, :vocab]
    logits_RV.masked_fill_(forbidden_RV & (masked_S[slot_R] != 0)[:, None], float("-inf"))


@torch.library.custom_op(OP + "mask_rows", mutates_args=("logits_RV",))
def mask_rows(
    logits_RV: Tensor, slot_R: Tensor, cell_R: Tensor, committed_S: Tensor, masked_S: Tensor, mask_SWN: Tensor
) -> None:
    """`masked_rows` in one launch."""
    masked_rows(logits_RV, slot_R, cell_R, committed_S, masked_S, mask_SWN)


@mask_rows.register_fake
def _(
    logits_RV: Tensor, slot_R: Tensor, cell_R: Tensor, committed_S: Tensor, masked_S: Tensor, mask_SWN: Tensor
) -> None:
    return None


@mask_rows.register_kernel("cuda")
def _(
    logits_RV: Tensor, slot_R: Tensor, cell_R: Tensor, committed_S: Tensor, masked_S: Tensor, mask_SWN: Tensor
) -> None:
    from slipstream.kernels.jit import grammar

    assert logits_RV.is_contiguous(), "the mask is written into the logits"
    grammar.launch_mask_rows(logits_RV, slot_R.contiguous(), cell_R.contiguous(), committed_S, masked_S, mask_SWN)
