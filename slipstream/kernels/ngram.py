"""N-gram match over the slots' token history. Source: Saxena, "Prompt Lookup Decoding" (2023)."""

from __future__ import annotations

import torch
from torch import Tensor

OP = "slipstream::"


@torch.library.custom_op(OP + "ngram_match", mutates_args=())
def ngram_match(history_SL: Tensor, slot_B: Tensor, end_B: Tensor, columns: int, min_n: int, max_n: int) -> Tensor:
    """length * columns + j for the longest, then latest, earlier match that ends at j < end; -1 without one.

    history_SL: tokens, int64; only the first `columns` count. end_B: index of the slot's last known token.
    The match is the longest common suffix (min_n..max_n tokens) of history[:j + 1] and history[:end + 1].
    """
    history_BL = history_SL[:, :columns][slot_B]
    column_L = torch.arange(columns, device=history_SL.device)
    alive_BL = (column_L < end_B[:, None]).clone()
    length_BL = torch.zeros_like(history_BL)
    for i in range(min(max_n, columns)):
        last_B1 = history_BL.gather(1, (end_B - i).clamp(min=0)[:, None])
        shifted_BL = torch.nn.functional.pad(history_BL, (i, 0), value=-1)[:, :columns]
        alive_BL &= (shifted_BL == last_B1) & (column_L >= i) & (end_B >= i)[:, None]
        length_BL += alive_BL
    rank_BL = torch.where(length_BL >= min_n, length_BL * columns + column_L, -1)
    return rank_BL.amax(1)


@ngram_match.register_fake
def _(history_SL: Tensor, slot_B: Tensor, end_B: Tensor, columns: int, min_n: int, max_n: int) -> Tensor:
    return torch.empty_like(slot_B, dtype=torch.int64)


@ngram_match.register_kernel("cuda")
def _(history_SL: Tensor, slot_B: Tensor, end_B: Tensor, columns: int, min_n: int, max_n: int) -> Tensor:
    from slipstream.kernels.jit import ngram

    out_B = torch.full(slot_B.shape, -1, dtype=torch.int64, device=slot_B.device)
    ngram.launch_ngram_match(history_SL, slot_B, end_B, out_B, columns=columns, min_n=min_n, max_n=max_n)
    return out_B
