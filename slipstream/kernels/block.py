"""What a block drafter needs around its products: its block's rows, its context's keys and values, its Markov chain.

Sources: DFlash (arXiv 2602.06036); Su et al. (2021); head-wise RMSNorm as in Qwen3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.norm import rstd
from slipstream.kernels.rope import cache_cells, head_norm, rotate

OP = "slipstream::"


@torch.library.custom_op(OP + "block_rows", mutates_args=())
def block_rows(
    slot_B: Tensor, committed_B: Tensor, history_SL: Tensor, table_SP: Tensor, page_size: int, mask_token: int,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """token, slot, pos, last [B * rows] and anchor [B], int64: the rows of blocks at committed, committed + 1, ...

    The anchor is the token at position committed, the others are mask_token. last: the block's end, which every row of
    it sees up to; positions that the slot has no pages for are left out, they went to the sink.
    """
    anchor_B = history_SL[slot_B, committed_B]
    token_BT = torch.full((slot_B.shape[0], rows), mask_token, dtype=torch.int64, device=slot_B.device)
    token_BT[:, 0] = anchor_B
    pos_BT = committed_B[:, None] + torch.arange(rows, device=slot_B.device)
    owned_B1 = (table_SP[slot_B] > 0).sum(1, keepdim=True) * page_size
    last_B1 = torch.minimum(pos_BT[:, -1:], owned_B1 - 1).clamp(min=0)
    slot_R, last_R = (x.repeat_interleave(rows) for x in (slot_B, last_B1[:, 0]))
    return token_BT.flatten(), slot_R, pos_BT.flatten(), last_R, anchor_B


@torch.library.custom_op(OP + "context_write", mutates_args=("cache_E2PSKD",))
def context_write(
    kv_RM: Tensor, cache_E2PSKD: Tensor, cos_LD: Tensor, sin_LD: Tensor, gain_ED: Tensor, table_SP: Tensor,
    slot_R: Tensor, pos_R: Tensor, eps: float, bias_M: Tensor | None = None, sq_TR: Tensor | None = None,
    width: int = 1, norm_eps: float = 0.0, pdl: bool = False,
) -> None:  # fmt: skip
    """Keys and values of context rows, all E layers of the draft at once, to their cells of the cache.

    kv_RM [R, E * 2 K D]: of each layer the keys, then the values. It becomes rstd * kv + bias first; rstd as in
    `rope_kv_write`, whose other terms these are: keys are normed per head with gain_ED and rotated. cache [E, 2, pages,
    page size, K, D]. Rows of slot 0, or at positions that the table does not cover, are written to the sink.
    """
    layers, _, _, page_size, kv_heads, dim = cache_E2PSKD.shape
    wide_RM = kv_RM if kv_RM.dtype == torch.float64 else kv_RM.float()
    if sq_TR is not None:
        wide_RM = wide_RM * rstd(sq_TR, width, norm_eps, wide_RM.dtype)
    if bias_M is not None:
        wide_RM = wide_RM + bias_M.to(wide_RM.dtype)
    at_R = pos_R.long().clamp(0, cos_LD.shape[0] - 1)
    cos_R1D, sin_R1D = cos_LD[at_R].unsqueeze(1), sin_LD[at_R].unsqueeze(1)
    page_R, cell_R = cache_cells(table_SP, slot_R, pos_R, page_size)
    for layer, kv_R2KD in enumerate(wide_RM.view(-1, layers, 2, kv_heads, dim).unbind(1)):
        k_RKD = rotate(head_norm(kv_R2KD[:, 0], gain_ED[layer], eps), cos_R1D, sin_R1D)
        cache_E2PSKD[layer, 0, page_R, cell_R] = k_RKD.to(cache_E2PSKD.dtype)
        cache_E2PSKD[layer, 1, page_R, cell_R] = kv_R2KD[:, 1].to(cache_E2PSKD.dtype)


@torch.library.custom_op(OP + "markov_next", mutates_args=("token_BK",))
def markov_next(
    best_TB: Tensor, where_TB: Tensor, w_VR: Tensor, token_BK: Tensor, step: int, pdl: bool = False
) -> Tensor:
    """`argmax_finish` into token_BK [:, step], int64, and that token's row of w [B, r]: what the next step reads."""
    top_B = best_TB.amax(0)
    token_B = torch.where(best_TB == top_B, where_TB.long(), w_VR.shape[0] - 1).amin(0)
    token_BK[:, step] = token_B
    return w_VR[token_B]


@block_rows.register_fake
def _(
    slot_B: Tensor, committed_B: Tensor, history_SL: Tensor, table_SP: Tensor, page_size: int, mask_token: int,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    token, slot, pos, last = (slot_B.new_empty(slot_B.shape[0] * rows) for _ in range(4))
    return token, slot, pos, last, slot_B.new_empty(slot_B.shape[0])


@context_write.register_fake
def _(
    kv_RM: Tensor, cache_E2PSKD: Tensor, cos_LD: Tensor, sin_LD: Tensor, gain_ED: Tensor, table_SP: Tensor,
    slot_R: Tensor, pos_R: Tensor, eps: float, bias_M: Tensor | None = None, sq_TR: Tensor | None = None,
    width: int = 1, norm_eps: float = 0.0, pdl: bool = False,
) -> None:  # fmt: skip
    return None


@markov_next.register_fake
def _(
    best_TB: Tensor, where_TB: Tensor, w_VR: Tensor, token_BK: Tensor, step: int, pdl: bool = False
) -> Tensor:  # fmt: skip
    return w_VR.new_empty(token_BK.shape[0], w_VR.shape[1])


@block_rows.register_kernel("cuda")
def _(
    slot_B: Tensor, committed_B: Tensor, history_SL: Tensor, table_SP: Tensor, page_size: int, mask_token: int,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from slipstream.kernels.jit import block

    token, slot, pos, last = (slot_B.new_empty(slot_B.shape[0] * rows) for _ in range(4))
    anchor_B = slot_B.new_empty(slot_B.shape[0])
    block.launch_block_rows(
        slot_B.contiguous(), committed_B.contiguous(), history_SL, table_SP, token, slot, pos, last, anchor_B,
        page_size=page_size, mask_token=mask_token,
    )  # fmt: skip
    return token, slot, pos, last, anchor_B


@context_write.register_kernel("cuda")
def _(
    kv_RM: Tensor, cache_E2PSKD: Tensor, cos_LD: Tensor, sin_LD: Tensor, gain_ED: Tensor, table_SP: Tensor,
    slot_R: Tensor, pos_R: Tensor, eps: float, bias_M: Tensor | None = None, sq_TR: Tensor | None = None,
    width: int = 1, norm_eps: float = 0.0, pdl: bool = False,
) -> None:  # fmt: skip
    from slipstream.kernels.jit import block

    block.launch_context_write(
        kv_RM.contiguous(), cache_E2PSKD, cos_LD, sin_LD, gain_ED, table_SP, slot_R.contiguous(), pos_R.contiguous(),
        eps=eps, bias=bias_M, sq=sq_TR, width=width, norm_eps=norm_eps, pdl=pdl,
    )  # fmt: skip


@markov_next.register_kernel("cuda")
def _(
    best_TB: Tensor, where_TB: Tensor, w_VR: Tensor, token_BK: Tensor, step: int, pdl: bool = False
) -> Tensor:  # fmt: skip
    from slipstream.kernels.jit import block

    out_BR = w_VR.new_empty(token_BK.shape[0], w_VR.shape[1])
    block.launch_markov_next(best_TB, where_TB, w_VR, token_BK, out_BR, step=step, pdl=pdl)
    return out_BR
