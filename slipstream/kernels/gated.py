"""What stands between the products of hybrid layers, one launch each: the gated norm behind a delta net; qk-norm,
partial rotation and KV write before gated attention; the gate behind it. Sources: arXiv 2412.06464, 2505.06708."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.rope import cache_cells, head_norm, rotate

OP = "slipstream::"


@torch.library.custom_op(OP + "gated_norm", mutates_args=())
def gated_norm(o_RND: Tensor, z_RM: Tensor, gain_D: Tensor, eps: float, pdl: bool = False) -> Tensor:
    """RMSNorm of each head, rounded to o's dtype, times gain, times silu(z): [R, N * D], as z_RM is."""
    wide = _wide(o_RND)
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(o_RND.dtype) * gain_D
    return (_wide(normed) * F.silu(_wide(z_RM)).view(o_RND.shape)).to(o_RND.dtype).flatten(1)


@torch.library.custom_op(OP + "gated_rope_write", mutates_args=("k_PSKD", "v_PSKD"))
def gated_rope_write(
    qkv_RM: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, cos_LT: Tensor, sin_LT: Tensor, q_gain_D: Tensor, k_gain_D: Tensor,
    table_SP: Tensor, slot_R: Tensor, rope_pos_R: Tensor, kv_pos_R: Tensor, heads: int, eps: float, gated: bool,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    """As `rope_kv_write`, where only the first 2 T dimensions of a head turn (cos, sin [positions, T]), and where each
    query has its gate behind it (gated): qkv_RM holds [q | gate] of each head, then k, then v. q [R, heads, D]."""
    kv_heads, dim = k_PSKD.shape[2], k_PSKD.shape[3]
    size = heads * dim * (2 if gated else 1)
    q_RND = _wide(qkv_RM[:, :size].view(qkv_RM.shape[0], heads, -1)[..., :dim])
    k_RKD, v_RKD = _wide(qkv_RM[:, size:]).view(qkv_RM.shape[0], 2, kv_heads, dim).unbind(1)
    q_RND, k_RKD = head_norm(q_RND, q_gain_D, eps), head_norm(k_RKD, k_gain_D, eps)
    at_R = rope_pos_R.long().clamp(0, cos_LT.shape[0] - 1)
    cos, sin, turned = cos_LT[at_R].unsqueeze(1), sin_LT[at_R].unsqueeze(1), 2 * cos_LT.shape[1]

    def turn(x: Tensor) -> Tensor:
        return torch.cat((rotate(x[..., :turned], cos, sin), x[..., turned:]), -1)

    page_R, cell_R = cache_cells(table_SP, slot_R, kv_pos_R, k_PSKD.shape[1])
    k_PSKD[page_R, cell_R] = turn(k_RKD).to(k_PSKD.dtype)
    v_PSKD[page_R, cell_R] = v_RKD.to(v_PSKD.dtype)
    return turn(q_RND).to(qkv_RM.dtype)


@torch.library.custom_op(OP + "gate_mul", mutates_args=())
def gate_mul(o_RND: Tensor, qkv_RM: Tensor, pdl: bool = False) -> Tensor:
    """o * sigmoid(gate), [R, N * D]; qkv_RM as in `gated_rope_write`."""
    rows, heads, dim = o_RND.shape
    gate_RND = qkv_RM[:, : heads * 2 * dim].view(rows, heads, 2 * dim)[..., dim:]
    return (_wide(o_RND) * _wide(gate_RND).sigmoid()).to(o_RND.dtype).flatten(1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


@gated_norm.register_fake
def _(o_RND: Tensor, z_RM: Tensor, gain_D: Tensor, eps: float, pdl: bool = False) -> Tensor:
    return o_RND.new_empty(o_RND.shape[0], o_RND.shape[1] * o_RND.shape[2])


@gated_rope_write.register_fake
def _(
    qkv_RM: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, cos_LT: Tensor, sin_LT: Tensor, q_gain_D: Tensor, k_gain_D: Tensor,
    table_SP: Tensor, slot_R: Tensor, rope_pos_R: Tensor, kv_pos_R: Tensor, heads: int, eps: float, gated: bool,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    return qkv_RM.new_empty(qkv_RM.shape[0], heads, k_PSKD.shape[3])


@gate_mul.register_fake
def _(o_RND: Tensor, qkv_RM: Tensor, pdl: bool = False) -> Tensor:
    return o_RND.new_empty(o_RND.shape[0], o_RND.shape[1] * o_RND.shape[2])


@gated_norm.register_kernel("cuda")
def _(o_RND: Tensor, z_RM: Tensor, gain_D: Tensor, eps: float, pdl: bool = False) -> Tensor:
    from slipstream.kernels.jit import gated

    out_RM = o_RND.new_empty(o_RND.shape[0], o_RND.shape[1] * o_RND.shape[2])
    gated.launch_gated_norm(o_RND.contiguous(), z_RM, gain_D, out_RM, eps=eps, pdl=pdl)
    return out_RM


@gated_rope_write.register_kernel("cuda")
def _(
    qkv_RM: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, cos_LT: Tensor, sin_LT: Tensor, q_gain_D: Tensor, k_gain_D: Tensor,
    table_SP: Tensor, slot_R: Tensor, rope_pos_R: Tensor, kv_pos_R: Tensor, heads: int, eps: float, gated: bool,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    from slipstream.kernels.jit import gated as jit

    out_RND = qkv_RM.new_empty(qkv_RM.shape[0], heads, k_PSKD.shape[3])
    jit.launch_gated_rope_write(
        qkv_RM.contiguous(), out_RND, k_PSKD, v_PSKD, cos_LT, sin_LT, q_gain_D, k_gain_D, table_SP, slot_R.contiguous(),
        rope_pos_R.contiguous(), kv_pos_R.contiguous(), heads=heads, eps=eps, gated=gated, pdl=pdl,
    )  # fmt: skip
    return out_RND


@gate_mul.register_kernel("cuda")
def _(o_RND: Tensor, qkv_RM: Tensor, pdl: bool = False) -> Tensor:
    from slipstream.kernels.jit import gated

    out_RM = o_RND.new_empty(o_RND.shape[0], o_RND.shape[1] * o_RND.shape[2])
    gated.launch_gate_mul(o_RND.contiguous(), qkv_RM, out_RM, pdl=pdl)
    return out_RM
