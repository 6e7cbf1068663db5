"""Attention over paged KV for ragged rows per slot. Sources: Kwon et al. (2023), Dao et al. (2023, split KV)."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.tuning import attention_config

OP = "slipstream::"


def partial_floats(rows: int, heads: int, dim: int, splits: int) -> int:
    """Scratch of a launch that splits the keys: a sum, a maximum and a total for each row, query head and split."""
    padded = 1 << (dim - 1).bit_length()
    return rows * heads * splits * (padded + 2)


@torch.library.custom_op(OP + "paged_attention", mutates_args=("partial", "counters"))
def paged_attention(
    q_RND: Tensor,
    k_PSKD: Tensor,
    v_PSKD: Tensor,
    table_SP: Tensor,
    slot_R: Tensor,
    pos_R: Tensor,
    tree_R: Tensor | None,
    scale: float,
    partial: Tensor,
    counters: Tensor,
    pdl: bool = False,
    per_slot: int = 1,
    first_cell: int = 0,
    low_R: Tensor | None = None,
) -> Tensor:
    """softmax(q K^T * scale) V, [R, N, D]: row r sees cache positions 0..pos_R[r] of slot_R[r].

    With tree_R (int64 bit mask) pos_R is the slot's last committed position, and bit j shows position
    pos + 1 + j besides: in-flight row j of the slot. Rows of slot 0 give zeros. Rows of one slot should be
    neighbours: then they share what they read. k, v [pages, page size, K, D]; cells that no row may see can
    hold anything. table [slots, pages per slot]; slot, pos [R]: int32 or int64. partial, counters: a Workspace.
    per_slot: how many rows a slot has, a hint for the cut.
    first_cell: positions before it are hidden from all rows, whose own must not be among them. low_R [R], int32 or
    int64: the first position that a row with a sliding window sees, 0 or less for all; of a tree, not above pos + 1.
    """
    heads, dim = q_RND.shape[1], q_RND.shape[2]
    page_size, kv_heads = k_PSKD.shape[1], k_PSKD.shape[2]
    slots_R, at_R = slot_R.long(), pos_R.long()
    length = table_SP.shape[1] * page_size
    t_L = torch.arange(length, device=q_RND.device)
    seen_RL = (t_L <= at_R[:, None]) & (t_L >= first_cell)
    if low_R is not None:
        seen_RL = seen_RL & (t_L >= low_R[:, None])
    if tree_R is not None:
        j_RL = t_L - at_R[:, None] - 1
        seen_RL = seen_RL | ((j_RL >= 0) & (j_RL < 64) & (((tree_R[:, None] >> j_RL.clamp(0, 63)) & 1) != 0))
    page_RL = table_SP[slots_R].long().repeat_interleave(page_size, dim=1)
    wide = torch.float64 if q_RND.dtype == torch.float64 else torch.float32
    k_RLKD = k_PSKD[page_RL, t_L % page_size].to(wide)
    v_RLKD = torch.where(seen_RL[:, :, None, None], v_PSKD[page_RL, t_L % page_size].to(wide), 0.0)
    q_RKGD = q_RND.to(wide).view(-1, kv_heads, heads // kv_heads, dim)
    s_RKGL = torch.einsum("rkgd,rlkd->rkgl", q_RKGD, k_RLKD) * scale
    p_RKGL = torch.softmax(s_RKGL.masked_fill(~seen_RL[:, None, None], float("-inf")), dim=-1)
    o_RND = torch.einsum("rkgl,rlkd->rkgd", p_RKGL, v_RLKD).reshape(q_RND.shape)
    return torch.where((slots_R > 0)[:, None, None], o_RND, 0.0).to(q_RND.dtype)


@paged_attention.register_fake
def _(
    q_RND: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, table_SP: Tensor, slot_R: Tensor, pos_R: Tensor,
    tree_R: Tensor | None, scale: float, partial: Tensor, counters: Tensor, pdl: bool = False, per_slot: int = 1,
    first_cell: int = 0, low_R: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return torch.empty_like(q_RND)


@paged_attention.register_kernel("cuda")
def _(
    q_RND: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, table_SP: Tensor, slot_R: Tensor, pos_R: Tensor,
    tree_R: Tensor | None, scale: float, partial: Tensor, counters: Tensor, pdl: bool = False, per_slot: int = 1,
    first_cell: int = 0, low_R: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from slipstream.kernels.jit import attention

    rows, heads, dim = q_RND.shape
    c = attention_config(rows, dim, per_slot, q_RND.element_size())
    if c.splits > 1:
        need, tiles = partial_floats(rows, heads, dim, c.splits), rows * k_PSKD.shape[2]
        assert need <= partial.numel() and tiles <= counters.numel(), "the workspace is too small"
    out_RND = torch.empty_like(q_RND, memory_format=torch.contiguous_format)
    attention.launch_paged_attention(
        q_RND.contiguous(), k_PSKD, v_PSKD, out_RND, table_SP, slot_R.contiguous(), pos_R.contiguous(), tree_R,
        partial, counters,
        scale=scale, config=c, per_slot=per_slot, first_cell=first_cell,
        low=None if low_R is None else low_R.contiguous(), pdl=pdl,
    )  # fmt: skip
    return out_RND
