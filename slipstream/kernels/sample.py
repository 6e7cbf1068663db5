"""Choosing tokens on the device: argmax, filters and the exponential race, over slot state by slot id.

A frame's sampled rows go through `row_threshold` (ban, temperature, min-p, top-k, top-p), `race_rows` (each row's
token) and `kernels.frame.close_sampled`. Every row reads its own parameters and its own logits only, and no sum's order
depends on R. The logits are the only [R, V] tensor: scaled logits, probabilities and noise stay in registers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.sampling.processors import ban_stop_ids, filter_threshold
from slipstream.sampling.rng import PURPOSE_COUPLED, PURPOSE_EMIT, noise_from_words, race, stream_words
from slipstream.types import MIN_TEMPERATURE, NO_TOKEN, VerifyMode

OP = "slipstream::"


@torch.library.custom_op(OP + "argmax_rows", mutates_args=())
def argmax_rows(x_RV: Tensor, pdl: bool = False, none: int = 0) -> Tensor:
    """Index of each row's maximum, int64 [R]; the lowest on ties; `none` where the maximum is NaN or infinite."""
    return finite_argmax(x_RV, none)


@torch.library.custom_op(OP + "argmax_finish", mutates_args=())
def argmax_finish(best_TR: Tensor, where_TR: Tensor, vocab: int, pdl: bool = False, none: int = 0) -> Tensor:
    """Token of each row, int64 [R], from the tiles' best logits and their ids (`stream_head`); none: as above."""
    top_R = best_TR.amax(0)
    token_R = torch.where(best_TR == top_R, where_TR.long(), vocab - 1).amin(0)
    return torch.where(top_R.isfinite(), token_R, none)


@torch.library.custom_op(OP + "row_threshold", mutates_args=("logits_RV",))
def row_threshold(
    logits_RV: Tensor, slot_R: Tensor, pos_R: Tensor, temperature_S: Tensor, top_k_S: Tensor, top_p_S: Tensor,
    min_p_S: Tensor, stop_ids_ST: Tensor, min_len_S: Tensor, filtered: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Peak and threshold [R], float32, of the scaled logits, and their argmax [R], int64 (the lowest id on ties).

    logits_RV: float32, raw; ids that the slot bans at position pos + 1 become -inf in it. A row keeps the tokens whose
    logit / temperature is at least the threshold: those of `sampling.processors.process_logits`. filtered=False
    promises that every filter is off; the threshold is then -inf. temperature, top_p, min_p: float64 [S].
    """
    ban_stop_ids(logits_RV, stop_ids_ST[slot_R], pos_R + 1 < min_len_S[slot_R])
    scaled_RV, greedy_R = scaled_logits(logits_RV, temperature_S[slot_R])
    peak_R, token_R = scaled_RV.amax(1), scaled_RV.argmax(1)
    if not filtered:
        return peak_R, torch.full_like(peak_R, float("-inf")), token_R
    top_p_R, min_p_R = (t[slot_R].to(torch.float32) for t in (top_p_S, min_p_S))
    threshold_R1 = filter_threshold(
        scaled_RV, torch.where(greedy_R, 0, top_k_S[slot_R]), torch.where(greedy_R, 1.0, top_p_R),
        torch.where(greedy_R, 0.0, min_p_R),
    )  # fmt: skip
    return peak_R, threshold_R1[:, 0].contiguous(), token_R


def finite_argmax(x_RV: Tensor, none: int) -> Tensor:
    """Index of each row's maximum, int64 [R]; the lowest on ties; `none` where the maximum is NaN or infinite."""
    top_R, index_R = x_RV.max(-1)
    return torch.where(top_R.isfinite(), index_R, none)


def scaled_logits(logits_RV: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    """logits / temperature, and which rows are greedy: those are left as they are."""
    greedy_R = temperature_R <= 0
    scale_R = torch.where(greedy_R, 1.0, temperature_R.to(torch.float32).clamp(min=MIN_TEMPERATURE))
    return logits_RV / scale_R[:, None], greedy_R


@torch.library.custom_op(OP + "race_rows", mutates_args=())
def race_rows(
    logits_RV: Tensor, peak_R: Tensor, threshold_R: Tensor, greedy_R: Tensor, slot_R: Tensor, pos_R: Tensor,
    temperature_S: Tensor, mode_S: Tensor, key_S: Tensor, child_S: Tensor, committed_S: Tensor, pending_SW: Tensor,
    q_SKV: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What each row emits if the round ends there: target [R], residual [R], int64, and p [R], float32.

    target: by the slot's mode greedy_R, the coupled choice (verify/coupled.py), or a draw from p, the softmax of the
    kept logits. Under rejection also residual, a draw from what p has beyond q (verify/rejection.py), and the row's
    draft's p; in other modes the target and 0. A row whose peak is not finite has NO_TOKEN, NO_TOKEN and 0. The row's
    place in the round is pos - committed; it judges pending[place + 1]. q_SKV: the drafters' law, None when drafts are
    certain.
    Weights are exp(logit - peak), without the sum below them: a race does not see a factor.
    """
    vocab = logits_RV.shape[1]
    scaled_RV, _ = scaled_logits(logits_RV, temperature_S[slot_R])
    weight_RV = torch.where(scaled_RV >= threshold_R[:, None], (scaled_RV - peak_R[:, None]).exp(), 0.0)
    mode_R, key_R, child_R, base_R = (t[slot_R] for t in (mode_S, key_S, child_S, committed_S))
    depth_R = pos_R - base_R
    coupled_R = mode_R == VerifyMode.COUPLED
    words_R = torch.where(
        coupled_R,
        stream_words(key_R, child_R, pos_R + 1, 0, PURPOSE_COUPLED),
        stream_words(key_R, child_R, base_R, depth_R, PURPOSE_EMIT),
    )
    noise_RV = noise_from_words(words_R, vocab, torch.float32)
    target_R = torch.where(mode_R == VerifyMode.GREEDY, greedy_R, race(weight_RV, noise_RV.clone()))

    by_coin_R = mode_R == VerifyMode.REJECTION
    last = pending_SW.shape[1] - 1
    judges_R = (depth_R >= 0) & (depth_R < last)
    draft_R = torch.where(judges_R, pending_SW[slot_R, (depth_R + 1).clamp(0, last)], -1)
    sum_R1 = weight_RV.sum(1, keepdim=True)
    if q_SKV is None:
        id_V = torch.arange(vocab, device=logits_RV.device)
        rest_RV = torch.where(id_V == draft_R[:, None], 0.0, weight_RV)
    else:
        held_R = (depth_R >= 0) & (depth_R < q_SKV.shape[1])
        q_RV = q_SKV[slot_R, depth_R.clamp(0, q_SKV.shape[1] - 1)].to(torch.float32)
        rest_RV = (weight_RV / sum_R1 - torch.where(held_R[:, None], q_RV, 0.0)).clamp_(min=0.0)
    some_R = by_coin_R & (rest_RV.amax(1) > 0)
    residual_R = torch.where(some_R, race(rest_RV, noise_RV), target_R)
    p_R = (weight_RV / sum_R1).gather(1, draft_R.clamp(0, vocab - 1)[:, None])[:, 0]
    some_R = peak_R.isfinite()
    target_R, residual_R = (torch.where(some_R, t, NO_TOKEN) for t in (target_R, residual_R))
    return target_R, residual_R, torch.where(by_coin_R & some_R, p_R, 0.0)


@argmax_rows.register_fake
def _(x_RV: Tensor, pdl: bool = False, none: int = 0) -> Tensor:
    return x_RV.new_empty(x_RV.shape[0], dtype=torch.int64)


@argmax_finish.register_fake
def _(best_TR: Tensor, where_TR: Tensor, vocab: int, pdl: bool = False, none: int = 0) -> Tensor:
    return best_TR.new_empty(best_TR.shape[1], dtype=torch.int64)


@row_threshold.register_fake
def _(
    logits_RV: Tensor, slot_R: Tensor, pos_R: Tensor, temperature_S: Tensor, top_k_S: Tensor, top_p_S: Tensor,
    min_p_S: Tensor, stop_ids_ST: Tensor, min_len_S: Tensor, filtered: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows = logits_RV.shape[0]
    return logits_RV.new_empty(rows), logits_RV.new_empty(rows), slot_R.new_empty(rows)


@race_rows.register_fake
def _(
    logits_RV: Tensor, peak_R: Tensor, threshold_R: Tensor, greedy_R: Tensor, slot_R: Tensor, pos_R: Tensor,
    temperature_S: Tensor, mode_S: Tensor, key_S: Tensor, child_S: Tensor, committed_S: Tensor, pending_SW: Tensor,
    q_SKV: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(greedy_R), torch.empty_like(greedy_R), torch.empty_like(peak_R)


@argmax_rows.register_kernel("cuda")
def _(x_RV: Tensor, pdl: bool = False, none: int = 0) -> Tensor:
    from slipstream.kernels.jit import sample

    rows, vocab = x_RV.shape
    best_TR = x_RV.new_empty(-(-vocab // sample.TILE), rows, dtype=torch.float32)
    where_TR = torch.empty_like(best_TR, dtype=torch.int32)
    out_R = x_RV.new_empty(rows, dtype=torch.int64)
    sample.launch_argmax_tiles(x_RV.contiguous(), best_TR, where_TR, pdl=pdl)
    sample.launch_argmax_finish(best_TR, where_TR, out_R, vocab=vocab, none=none, pdl=pdl)
    return out_R


@argmax_finish.register_kernel("cuda")
def _(best_TR: Tensor, where_TR: Tensor, vocab: int, pdl: bool = False, none: int = 0) -> Tensor:
    from slipstream.kernels.jit import sample

    out_R = best_TR.new_empty(best_TR.shape[1], dtype=torch.int64)
    sample.launch_argmax_finish(best_TR, where_TR, out_R, vocab=vocab, none=none, pdl=pdl)
    return out_R


@row_threshold.register_kernel("cuda")
def _(
    logits_RV: Tensor, slot_R: Tensor, pos_R: Tensor, temperature_S: Tensor, top_k_S: Tensor, top_p_S: Tensor,
    min_p_S: Tensor, stop_ids_ST: Tensor, min_len_S: Tensor, filtered: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from slipstream.kernels.jit import filters

    assert logits_RV.dtype == torch.float32 and logits_RV.is_contiguous(), "the ban is written into the logits"
    peak_R, threshold_R = (logits_RV.new_empty(logits_RV.shape[0]) for _ in range(2))
    token_R = torch.empty_like(peak_R, dtype=torch.int64)
    filters.launch_row_threshold(
        logits_RV, slot_R.contiguous(), pos_R.contiguous(), temperature_S, top_k_S, top_p_S, min_p_S, stop_ids_ST,
        min_len_S, peak_R, threshold_R, token_R, filters.scratch(logits_RV), filtered=filtered,
    )  # fmt: skip
    return peak_R, threshold_R, token_R


@race_rows.register_kernel("cuda")
def _(
    logits_RV: Tensor, peak_R: Tensor, threshold_R: Tensor, greedy_R: Tensor, slot_R: Tensor, pos_R: Tensor,
    temperature_S: Tensor, mode_S: Tensor, key_S: Tensor, child_S: Tensor, committed_S: Tensor, pending_SW: Tensor,
    q_SKV: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from slipstream.kernels.jit import sample

    target_R, residual_R, p_R = torch.empty_like(greedy_R), torch.empty_like(greedy_R), torch.empty_like(peak_R)
    sample.launch_race_rows(
        logits_RV, peak_R, threshold_R, greedy_R, slot_R.contiguous(), pos_R.contiguous(), temperature_S, mode_S,
        key_S, child_S, committed_S, pending_SW, q_SKV, target_R, residual_R, p_R,
    )  # fmt: skip
    return target_R, residual_R, p_R
