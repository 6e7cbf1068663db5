"""What heads that draft from features need around their products: the rows they learn from, and what they read first.

Source: Li et al. (2025), section 3.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

OP = "slipstream::"


def learnt_rows(
    slot_R: Tensor, pos_R: Tensor, committed_S: Tensor, history_SL: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """slot, cell, token of the head's rows, int64 [R]: the target's row at pos meets the token of pos + 1.

    cell: pos + 1, where the row is kept. Rows that the sequence did not keep (pos not below committed), and padding
    (slot 0), become slot 0, cell 0.
    """
    kept_R = (slot_R > 0) & (pos_R < committed_S[slot_R])
    slot_R, cell_R = torch.where(kept_R, slot_R, 0), torch.where(kept_R, pos_R + 1, 0)
    return slot_R, cell_R, history_SL[slot_R, cell_R]


@torch.library.custom_op(OP + "feature_rows", mutates_args=())
def feature_rows(
    slot_R: Tensor, pos_R: Tensor, committed_S: Tensor, history_SL: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`learnt_rows` in one launch."""
    return learnt_rows(slot_R, pos_R, committed_S, history_SL)


@torch.library.custom_op(OP + "join_norms", mutates_args=())
def join_norms(
    token_R: Tensor, embed_VH: Tensor, x_RH: Tensor, embed_gain_H: Tensor, gain_H: Tensor, eps: float, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """[norm(embed[token]), norm(x)] [R, 2 H], and norm(x) once more [R, H]; both in x's dtype.

    With pdl this kernel opens a chain of dependent launches, as `norm_prepare` does.
    """
    normed_RH = _norm(x_RH, gain_H, eps)
    return torch.cat([_norm(embed_VH[token_R], embed_gain_H, eps), normed_RH], -1), normed_RH


def _norm(x_RH: Tensor, gain_H: Tensor, eps: float) -> Tensor:
    wide = x_RH if x_RH.dtype == torch.float64 else x_RH.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain_H.to(wide.dtype)).to(x_RH.dtype)


@feature_rows.register_fake
def _(slot_R: Tensor, pos_R: Tensor, committed_S: Tensor, history_SL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = slot_R.shape[0]
    return slot_R.new_empty(rows), slot_R.new_empty(rows), slot_R.new_empty(rows)


@join_norms.register_fake
def _(
    token_R: Tensor, embed_VH: Tensor, x_RH: Tensor, embed_gain_H: Tensor, gain_H: Tensor, eps: float, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    rows, hidden = x_RH.shape
    return x_RH.new_empty(rows, 2 * hidden), x_RH.new_empty(rows, hidden)


@feature_rows.register_kernel("cuda")
def _(slot_R: Tensor, pos_R: Tensor, committed_S: Tensor, history_SL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from slipstream.kernels.jit import eagle

    slot, cell, token = (slot_R.new_empty(slot_R.shape[0]) for _ in range(3))
    eagle.launch_feature_rows(slot_R.contiguous(), pos_R.contiguous(), committed_S, history_SL, slot, cell, token)
    return slot, cell, token


@join_norms.register_kernel("cuda")
def _(
    token_R: Tensor, embed_VH: Tensor, x_RH: Tensor, embed_gain_H: Tensor, gain_H: Tensor, eps: float, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    from slipstream.kernels.jit import eagle

    rows, hidden = x_RH.shape
    joined, normed_RH = x_RH.new_empty(rows, 2 * hidden), x_RH.new_empty(rows, hidden)
    eagle.launch_join_norms(
        token_R.contiguous(), embed_VH, x_RH.contiguous(), embed_gain_H, gain_H, joined, normed_RH, eps=eps, pdl=pdl
    )
    return joined, normed_RH
