"""From raw logits to the logits that verification samples: stop-token ban, temperature, min-p, top-k, top-p.

Filters find a threshold per row by radix search over the bits of the float (a histogram per digit), not by
sorting the vocabulary. All sums are of integers, so a row's result depends neither on its neighbours nor
on the order in which a device adds. A token whose logit equals the threshold is kept: ties stay together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.types import MIN_TEMPERATURE

_DIGIT_BITS = 11


def process_logits(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    ban_stop: tuple[Tensor, Tensor] | None,
    *,
    filtered: bool,
) -> Tensor:
    """Processed logits [R, V]; masked tokens are -inf. Overwrites and returns `logits_RV`.

    logits_RV: float32 or float64. temperature_R: 0 marks a greedy row, which only the ban touches.
    top_k_R (int64, off at <= 0), top_p_R (off at >= 1), min_p_R (off at <= 0): applied in the order min-p,
    top-k, top-p, each on the renormalised rest. top-p keeps a token while the mass strictly above it is
    below top_p; the most likely token always stays.
    ban_stop: (stop ids [R, 16] int64, negative entries are padding; active [R] bool): those ids are masked
    first in active rows (min_tokens), in greedy rows too.
    filtered: False promises that every filter is off in every row, and skips the search.
    """
    if ban_stop is not None:
        logits_RV = ban_stop_ids(logits_RV, *ban_stop)
    greedy_R = temperature_R <= 0
    scale_R = torch.where(greedy_R, 1.0, temperature_R.clamp(min=MIN_TEMPERATURE)).to(logits_RV.dtype)
    logits_RV.div_(scale_R.unsqueeze(1))
    if not filtered:
        return logits_RV
    threshold_R1 = filter_threshold(
        logits_RV,
        torch.where(greedy_R, 0, top_k_R),
        torch.where(greedy_R, 1.0, top_p_R),
        torch.where(greedy_R, 0.0, min_p_R),
    )
    # Add an infinite penalty by min(): several times cheaper on the CPU than masked_fill_.
    bound_RV = _at_least(logits_RV, threshold_R1).sub_(0.5).mul_(float("inf"))
    return torch.minimum(logits_RV, bound_RV, out=logits_RV)


def _at_least(x: Tensor, threshold: Tensor) -> Tensor:
    """x >= threshold as 1.0 and 0.0, in x's dtype (float comparisons vectorise, bool ones do not)."""
    return torch.ge(x, threshold, out=torch.empty_like(x))


def ban_stop_ids(logits_RV: Tensor, stop_ids_RS: Tensor, active_R: Tensor) -> Tensor:
    """Write -inf at the stop ids [R, S] of active rows, in place; negative ids are padding."""
    # amin: padding writes +inf, which changes nothing, so an id may repeat and id 0 may be a real stop id.
    vocab = logits_RV.shape[1]
    real_RS = (stop_ids_RS >= 0) & (stop_ids_RS < vocab) & active_R.unsqueeze(1)
    ceiling_RS = torch.where(real_RS, float("-inf"), float("inf")).to(logits_RV.dtype)
    return logits_RV.scatter_reduce_(1, stop_ids_RS.clamp(0, vocab - 1), ceiling_RS, reduce="amin")


def filter_threshold(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Smallest logit [R, 1] that min-p, top-k and top-p keep together; -inf where all are off."""
    vocab, dtype = logits_RV.shape[1], logits_RV.dtype
    rank_RV = _descending_bits(logits_RV)
    peak_R1 = logits_RV.amax(dim=1, keepdim=True)
    min_p_R1 = min_p_R.to(dtype).clamp(0.0, 1.0).unsqueeze(1)
    threshold_R1 = peak_R1 + min_p_R1.log()  # log 0 = -inf: off

    want_R = torch.where(top_k_R > 0, top_k_R, vocab).clamp(max=vocab)
    count_RV = torch.ones(rank_RV.shape, dtype=torch.int32, device=rank_RV.device)
    kth_R1 = _from_descending_bits(_search(rank_RV, count_RV, want_R.unsqueeze(1)), dtype)
    threshold_R1 = torch.maximum(threshold_R1, kth_R1)

    # Mass in whole units, as fine as a sum of `vocab` of them allows in 63 bits.
    unit = 2.0 ** (62 - vocab.bit_length())
    weight_RV = (logits_RV - peak_R1).exp_().mul_(unit).mul_(_at_least(logits_RV, threshold_R1))
    mass_RV = weight_RV.to(torch.int64)
    total_R1 = mass_RV.sum(dim=1, keepdim=True)
    top_p_R1 = top_p_R.to(torch.float64).unsqueeze(1)
    goal_R1 = (total_R1.to(torch.float64) * top_p_R1).ceil().to(torch.int64)
    goal_R1 = torch.minimum(goal_R1, total_R1).clamp_(min=1)
    nucleus_R1 = _from_descending_bits(_search(rank_RV, mass_RV, goal_R1), dtype)
    return torch.maximum(threshold_R1, torch.where(top_p_R1 >= 1, float("-inf"), nucleus_R1))


def _descending_bits(x: Tensor) -> Tensor:
    """Signed integers of x's size whose order is the opposite of the floats'."""
    return _flip_negative((-x).view(torch.int32 if x.dtype == torch.float32 else torch.int64))


def _from_descending_bits(rank: Tensor, dtype: torch.dtype) -> Tensor:
    return -_flip_negative(rank).view(dtype)


def _flip_negative(bits: Tensor) -> Tensor:
    """Between the sign-magnitude order of floats and that of integers; its own inverse."""
    info = torch.iinfo(bits.dtype)
    return bits ^ (bits >> (info.bits - 1)).bitwise_and_(info.max)


def _search(rank_RV: Tensor, weight_RV: Tensor, goal_R1: Tensor) -> Tensor:
    """Smallest rank [R, 1] for which the ranks up to it weigh at least `goal` (1 to the row's weight).

    Radix search from the top digit: one histogram per digit, with an outer bin on either side for the ranks
    before and after the interval still in question, so that every prefix sum is one over the whole row.
    """
    left = torch.iinfo(rank_RV.dtype).bits - _DIGIT_BITS
    half = 1 << (_DIGIT_BITS - 1)
    near_RV = rank_RV >> left  # signed: digits -half .. half - 1
    index_RV = near_RV.add_(half + 1).to(torch.int64, copy=True)
    bin_R1 = _first_bin(index_RV, weight_RV, goal_R1, 2 * half).to(rank_RV.dtype)
    low_R1 = (bin_R1 - (half + 1)) << left
    # Clamp before subtracting: the difference of two far ranks overflows. From here on near = rank - low,
    # -1 for everything before the interval, its width for everything after it.
    torch.maximum(rank_RV, low_R1 - 1, out=near_RV)
    # In float64 the top digit's end overflows too, so its last rank is the clamp and what lies beyond goes one up.
    last_R1 = low_R1 + ((1 << left) - 1)
    torch.minimum(near_RV, last_R1, out=near_RV).sub_(low_R1)
    near_RV.add_((rank_RV > last_R1).to(near_RV.dtype))
    digit_RV = torch.empty_like(near_RV)
    while left > 0:
        digit_bits = min(_DIGIT_BITS, left)
        left -= digit_bits
        torch.bitwise_right_shift(near_RV, left, out=digit_RV)
        index_RV.copy_(digit_RV.add_(1))
        bin_R1 = _first_bin(index_RV, weight_RV, goal_R1, 1 << digit_bits).to(rank_RV.dtype)
        step_R1 = (bin_R1 - 1) << left
        low_R1 = low_R1 + step_R1
        if left > 0:
            near_RV.sub_(step_R1).clamp_(-1, 1 << left)
    return low_R1


def _first_bin(index_RV: Tensor, weight_RV: Tensor, goal_R1: Tensor, bins: int) -> Tensor:
    """First histogram bin [R, 1] at which the running weight reaches the goal; two outer bins."""
    heights = torch.zeros(index_RV.shape[0], bins + 2, dtype=weight_RV.dtype, device=index_RV.device)
    heights.scatter_add_(1, index_RV, weight_RV)
    return (heights.cumsum(1) < goal_R1).sum(dim=1, keepdim=True)
