"""Bias, qk-norm, rotary embedding and KV write. Sources: Su et al. (2021); head-wise RMSNorm as in Qwen3."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.norm import rstd

OP = "slipstream::"


@torch.library.custom_op(OP + "rope_kv_write", mutates_args=("k_PSKD", "v_PSKD"))
def rope_kv_write(
    qkv_RM: Tensor,
    k_PSKD: Tensor,
    v_PSKD: Tensor,
    cos_LD: Tensor,
    sin_LD: Tensor,
    q_gain_D: Tensor | None,
    k_gain_D: Tensor | None,
    table_SP: Tensor,
    slot_R: Tensor,
    rope_pos_R: Tensor,
    kv_pos_R: Tensor,
    heads: int,
    eps: float,
    bias_M: Tensor | None = None,
    sq_TR: Tensor | None = None,
    width: int = 1,
    norm_eps: float = 0.0,
    pdl: bool = False,
) -> Tensor:
    """Rotated q [R, heads, D]; the rows' k and v go to the cache.

    qkv_RM [R, (heads + 2 K) D]; k, v [pages, page size, K, D], changed in place; cos, sin [positions, D / 2]
    float32, rope positions clamp to them; gains [D] or None: RMSNorm of each q and k head before the rotation.
    table [slots, pages per slot], slot, positions [R]: int32 or int64. A row of slot 0, or with a cache position
    that the table does not cover, is written to page 0, the sink. Before all else qkv becomes rstd * qkv + bias;
    rstd = rsqrt(sum(sq) / width + norm_eps), or 1 without sq_TR.
    """
    kv_heads, dim = k_PSKD.shape[2], k_PSKD.shape[3]
    wide_RM = qkv_RM if qkv_RM.dtype == torch.float64 else qkv_RM.float()
    if sq_TR is not None:
        wide_RM = wide_RM * rstd(sq_TR, width, norm_eps, wide_RM.dtype)
    if bias_M is not None:
        wide_RM = wide_RM + bias_M.to(wide_RM.dtype)
    wide_RND = wide_RM.view(qkv_RM.shape[0], -1, dim)
    q_RND, k_RKD = wide_RND[:, :heads], wide_RND[:, heads : heads + kv_heads]
    if q_gain_D is not None and k_gain_D is not None:
        q_RND, k_RKD = head_norm(q_RND, q_gain_D, eps), head_norm(k_RKD, k_gain_D, eps)
    at_R = rope_pos_R.long().clamp(0, cos_LD.shape[0] - 1)
    cos_R1D, sin_R1D = cos_LD[at_R].unsqueeze(1), sin_LD[at_R].unsqueeze(1)
    page_R, cell_R = cache_cells(table_SP, slot_R, kv_pos_R, k_PSKD.shape[1])
    k_PSKD[page_R, cell_R] = rotate(k_RKD, cos_R1D, sin_R1D).to(k_PSKD.dtype)
    v_PSKD[page_R, cell_R] = wide_RND[:, heads + kv_heads :].to(v_PSKD.dtype)
    return rotate(q_RND, cos_R1D, sin_R1D).to(qkv_RM.dtype)


def head_norm(x_RND: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """RMSNorm over each head."""
    return x_RND * torch.rsqrt(x_RND.square().mean(-1, keepdim=True) + eps) * gain_D.to(x_RND.dtype)


def rotate(x_RND: Tensor, cos_R1D: Tensor, sin_R1D: Tensor) -> Tensor:
    """Rotation of the two halves of each head."""
    a, b = x_RND.chunk(2, dim=-1)
    return torch.cat([a * cos_R1D - b * sin_R1D, b * cos_R1D + a * sin_R1D], dim=-1)


def cache_cells(table_SP: Tensor, slot_R: Tensor, pos_R: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Page and cell of each row, int64 [R]; page 0, cell 0 where the table covers no such position."""
    slot_R, pos_R = slot_R.long(), pos_R.long()
    inside_R = (slot_R > 0) & (pos_R >= 0) & (pos_R < table_SP.shape[1] * page_size)
    safe_R = torch.where(inside_R, pos_R, 0)
    page_R = table_SP[slot_R, torch.div(safe_R, page_size, rounding_mode="floor")].long()
    return torch.where(inside_R, page_R, 0), safe_R % page_size


@rope_kv_write.register_fake
def _(
    qkv_RM: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, cos_LD: Tensor, sin_LD: Tensor, q_gain_D: Tensor | None,
    k_gain_D: Tensor | None, table_SP: Tensor, slot_R: Tensor, rope_pos_R: Tensor, kv_pos_R: Tensor, heads: int,
    eps: float, bias_M: Tensor | None = None, sq_TR: Tensor | None = None, width: int = 1, norm_eps: float = 0.0,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    return qkv_RM.new_empty(qkv_RM.shape[0], heads, k_PSKD.shape[3])


@rope_kv_write.register_kernel("cuda")
def _(
    qkv_RM: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, cos_LD: Tensor, sin_LD: Tensor, q_gain_D: Tensor | None,
    k_gain_D: Tensor | None, table_SP: Tensor, slot_R: Tensor, rope_pos_R: Tensor, kv_pos_R: Tensor, heads: int,
    eps: float, bias_M: Tensor | None = None, sq_TR: Tensor | None = None, width: int = 1, norm_eps: float = 0.0,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    from slipstream.kernels.jit import rope

    q_RND = qkv_RM.new_empty(qkv_RM.shape[0], heads, k_PSKD.shape[3])
    rope.launch_rope_kv_write(
        qkv_RM.contiguous(), q_RND, k_PSKD, v_PSKD, cos_LD, sin_LD, q_gain_D, k_gain_D, table_SP,
        slot_R.contiguous(), rope_pos_R.contiguous(), kv_pos_R.contiguous(), heads=heads, eps=eps,
        bias=bias_M, sq=sq_TR, width=width, norm_eps=norm_eps, pdl=pdl,
    )  # fmt: skip
    return q_RND
