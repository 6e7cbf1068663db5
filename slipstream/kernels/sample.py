"""Argmax, the exponential race and greedy verification on the device.

The race draws from p as argmax(p / E) with E = Exp(1) noise hashed from (word, token id); the kernel makes the
noise in registers, so p is the only [R, V] tensor of coupled and of rejection verification.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.sampling.rng import noise_from_words, race

OP = "slipstream::"


@torch.library.custom_op(OP + "argmax_rows", mutates_args=())
def argmax_rows(x_RV: Tensor, pdl: bool = False) -> Tensor:
    """Index of each row's maximum, int64 [R]; the lowest on ties."""
    return x_RV.argmax(-1)


@torch.library.custom_op(OP + "argmax_finish", mutates_args=())
def argmax_finish(best_TR: Tensor, where_TR: Tensor, vocab: int, pdl: bool = False) -> Tensor:
    """Token of each row, int64 [R], from the tiles' best logits and their ids (`stream_head`)."""
    top_R = best_TR.amax(0)
    return torch.where(best_TR == top_R, where_TR.long(), vocab - 1).amin(0)


@torch.library.custom_op(OP + "race_tokens", mutates_args=())
def race_tokens(
    p_RV: Tensor, row_B: Tensor, words_B: Tensor, refused_B: Tensor, judged_B: Tensor, draft_B: Tensor,
    q_BKV: Tensor | None,
) -> Tensor:  # fmt: skip
    """Winner of each slot's race, int64 [B]; no ties to speak of, the lowest id on one.

    Weights are p[row]; where refused_B (bool) they are max(p - q[judged], 0), or without q_BKV p less the token
    draft_B; and p again where that leaves nothing. words_B: int64 of `sampling.rng.stream_words`. p float32.
    """
    p_BV = p_RV.index_select(0, row_B)
    refused_B1 = refused_B.unsqueeze(1)
    if q_BKV is None:
        id_V = torch.arange(p_RV.shape[1], device=p_RV.device)
        rest_BV = torch.where((id_V == draft_B.unsqueeze(1)) & refused_B1, 0.0, p_BV)
    else:
        q_BV = q_BKV[torch.arange(row_B.shape[0], device=row_B.device), judged_B].to(p_RV.dtype)
        rest_BV = torch.where(refused_B1, (p_BV - q_BV).clamp(min=0.0), p_BV)
    empty_B1 = rest_BV.amax(1, keepdim=True) <= 0
    weights_BV = torch.where(empty_B1, p_BV, rest_BV)
    return race(weights_BV, noise_from_words(words_B, p_RV.shape[1], p_RV.dtype))


@torch.library.custom_op(OP + "greedy_verify", mutates_args=())
def greedy_verify(
    target_R: Tensor, row_of_BW: Tensor, rows_B: Tensor, draft_BK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """accepted [B], tokens [B, W], emitted [B], all int64, as `verify.rows.Verdict` has them.

    target_R: argmax of each row. Draft w is judged by row w; rows_B: 1 + drafts to judge, 0 for an inactive slot.
    """
    width = row_of_BW.shape[1]
    at_W = torch.arange(width, device=rows_B.device)
    target_BW = target_R[row_of_BW]
    draft_BW = torch.nn.functional.pad(draft_BK[:, : width - 1], (0, width - min(width - 1, draft_BK.shape[1])))
    good_BW = (target_BW == draft_BW) & (at_W < (rows_B - 1).unsqueeze(1)) & (at_W < width - 1)
    accepted_B = good_BW.to(torch.int64).cumprod(1).sum(1)
    last_B1 = target_BW.gather(1, accepted_B.unsqueeze(1))
    emitted_B = torch.where(rows_B > 0, accepted_B + 1, 0)
    tokens_BW = torch.where(at_W < accepted_B.unsqueeze(1), draft_BW, last_B1)
    return accepted_B, torch.where(at_W < emitted_B.unsqueeze(1), tokens_BW, 0), emitted_B


@argmax_rows.register_fake
def _(x_RV: Tensor, pdl: bool = False) -> Tensor:
    return x_RV.new_empty(x_RV.shape[0], dtype=torch.int64)


@argmax_finish.register_fake
def _(best_TR: Tensor, where_TR: Tensor, vocab: int, pdl: bool = False) -> Tensor:
    return best_TR.new_empty(best_TR.shape[1], dtype=torch.int64)


@race_tokens.register_fake
def _(
    p_RV: Tensor, row_B: Tensor, words_B: Tensor, refused_B: Tensor, judged_B: Tensor, draft_B: Tensor,
    q_BKV: Tensor | None,
) -> Tensor:  # fmt: skip
    return torch.empty_like(row_B, dtype=torch.int64)


@greedy_verify.register_fake
def _(target_R: Tensor, row_of_BW: Tensor, rows_B: Tensor, draft_BK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(rows_B), torch.empty_like(row_of_BW), torch.empty_like(rows_B)


@argmax_rows.register_kernel("cuda")
def _(x_RV: Tensor, pdl: bool = False) -> Tensor:
    from slipstream.kernels.jit import sample

    rows, vocab = x_RV.shape
    best_TR = x_RV.new_empty(-(-vocab // sample.TILE), rows, dtype=torch.float32)
    where_TR = torch.empty_like(best_TR, dtype=torch.int32)
    out_R = x_RV.new_empty(rows, dtype=torch.int64)
    sample.launch_argmax_tiles(x_RV.contiguous(), best_TR, where_TR, pdl=pdl)
    sample.launch_argmax_finish(best_TR, where_TR, out_R, vocab=vocab, pdl=pdl)
    return out_R


@argmax_finish.register_kernel("cuda")
def _(best_TR: Tensor, where_TR: Tensor, vocab: int, pdl: bool = False) -> Tensor:
    from slipstream.kernels.jit import sample

    out_R = best_TR.new_empty(best_TR.shape[1], dtype=torch.int64)
    sample.launch_argmax_finish(best_TR, where_TR, out_R, vocab=vocab, pdl=pdl)
    return out_R


@race_tokens.register_kernel("cuda")
def _(
    p_RV: Tensor, row_B: Tensor, words_B: Tensor, refused_B: Tensor, judged_B: Tensor, draft_B: Tensor,
    q_BKV: Tensor | None,
) -> Tensor:  # fmt: skip
    from slipstream.kernels.jit import sample

    best = p_RV.new_empty(2, -(-p_RV.shape[1] // sample.TILE), row_B.shape[0], dtype=torch.float32)
    where = torch.empty_like(best, dtype=torch.int32)
    out_B = torch.empty_like(row_B, dtype=torch.int64)
    sample.launch_race(
        p_RV.contiguous(), row_B, words_B, refused_B, judged_B, draft_B,
        None if q_BKV is None else q_BKV.contiguous(), best, where, out_B,
    )  # fmt: skip
    return out_B


@greedy_verify.register_kernel("cuda")
def _(target_R: Tensor, row_of_BW: Tensor, rows_B: Tensor, draft_BK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from slipstream.kernels.jit import sample

    accepted_B, emitted_B = torch.empty_like(rows_B), torch.empty_like(rows_B)
    tokens_BW = torch.empty(row_of_BW.shape, dtype=torch.int64, device=rows_B.device)
    sample.launch_greedy_verify(
        target_R, row_of_BW.contiguous(), rows_B, draft_BK.contiguous(), accepted_B, tokens_BW, emitted_B
    )
    return accepted_B, tokens_BW, emitted_B
