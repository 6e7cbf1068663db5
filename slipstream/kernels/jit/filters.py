# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the op in kernels/sample.py is typed.)
"""Stop-id ban, and the logit that min-p, top-k and top-p keep a row's tokens from: what sampling/processors.py finds.

Four launches, each split over the vocabulary but the last, none of which sorts:

peaks      the tiles' maxima and minima, after the ban
histogram  how many tokens lie in each of BINS equal steps below the peak
gather     a few bins must hold the threshold: their tokens go to a list, what lies above is counted and weighed
threshold  bisection over the bits of the float on that list

The bins are an estimate, the weights are not: masses are the integers of sampling/processors.py, and the last launch
checks that the list does hold the threshold. Where it does not, or where it is too short (ties, huge top_k with top_p),
it bisects over the whole row: slower, the same answer. Rows without a filter leave at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels.jit.numbers import exp, log
from slipstream.types import MIN_TEMPERATURE

_COLDEST = tl.constexpr(MIN_TEMPERATURE)
_NOWHERE = tl.constexpr(2147483647)
_WIDEST = tl.constexpr(64.0)  # logits further below the peak share the last bin: no top-p threshold lies there
_SLACK = tl.constexpr(2.0**-10)  # of the estimated mass, on either side of top_p

TILE = 4096
BINS = 512
"""The last but one takes the far end, the last one what is -inf. A tile's histogram costs time in proportion."""
LISTED = 8192
"""Tokens in a row's list: several bins of a flat row over 128k tokens."""
SEARCH_BLOCK = 4096


@triton.jit
def row_scale(temperature_ptr, slot):
    """What the slot's logits are divided by: its temperature, 1 for a greedy slot."""
    t = tl.load(temperature_ptr + slot).to(tl.float32)
    return tl.where(t > 0, tl.maximum(t, _COLDEST), 1.0)


@triton.jit
def _filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, slot, V):
    """top_k (0: off), top_p as float64 (1: off), log of min_p (-inf: off)."""
    greedy = tl.load(temperature_ptr + slot) <= 0
    k = tl.load(top_k_ptr + slot)
    k = tl.where(greedy | (k <= 0) | (k >= V), 0, k)
    # Through float32, where the reference takes it.
    p = tl.load(top_p_ptr + slot).to(tl.float32).to(tl.float64)
    p = tl.where(greedy | (p >= 1.0), 1.0, p)
    low = tl.load(min_p_ptr + slot).to(tl.float32)
    return k, p, log(tl.where(greedy, 0.0, tl.minimum(low, 1.0)))


@triton.jit
def _tiles(best_ptr, low_ptr, row, R, tiles, TB: tl.constexpr):
    """The row's largest and least finite logit."""
    t = tl.arange(0, TB)
    best = tl.load(best_ptr + t * R + row, mask=t < tiles, other=float("-inf"))
    low = tl.load(low_ptr + t * R + row, mask=t < tiles, other=float("inf"))
    return tl.max(best, axis=0), tl.min(low, axis=0)


@triton.jit
def _bins_per_unit(peak, low, BINS: tl.constexpr):
    return (BINS - 2.0) / tl.maximum(tl.minimum(peak - low, _WIDEST), 1e-20)


@triton.jit
def _bin(x, peak, per_unit, BINS: tl.constexpr):
    """Bin of x, never smaller for a smaller x."""
    below = (peak - x) * per_unit
    below = tl.where(below > 0, below, 0.0)  # NaN too: an index must stay inside
    return tl.where(x == float("-inf"), BINS - 1, tl.minimum(below, BINS - 2.0).to(tl.int32))


@triton.jit
def _mass(x, peak, cut, unit):
    """The token's weight in whole units, 0 below the cut."""
    return tl.where(x >= cut, exp(x - peak) * unit, 0.0).to(tl.int64)


@triton.jit
def _order(x):
    """int32 in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["R"])
def peaks_kernel(
    logits_ptr, slot_ptr, pos_ptr, temperature_ptr, stop_ptr, min_len_ptr, best_ptr, where_ptr, low_ptr, count_ptr,
    filled_ptr, R, V, T, BLOCK: tl.constexpr, BINS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, R). Writes the ban into the logits; clears the row's bins for the next launch."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    i = tile * BLOCK + tl.arange(0, BLOCK)
    own = logits_ptr + row.to(tl.int64) * V
    x = tl.load(own + i, mask=i < V, other=float("-inf"))
    if tl.load(pos_ptr + row) + 1 < tl.load(min_len_ptr + slot):
        for t in range(T):
            stop = tl.load(stop_ptr + slot * T + t)
            x = tl.where(i == stop, float("-inf"), x)
            mine = (stop >= tile * BLOCK) & (stop < tl.minimum((tile + 1) * BLOCK, V))
            tl.store(own + stop, float("-inf"), mask=mine)
    x = tl.div_rn(x, row_scale(temperature_ptr, slot))
    top = tl.max(x, axis=0)
    at = tile * R + row
    tl.store(best_ptr + at, top)
    tl.store(where_ptr + at, tl.min(tl.where(x == top, i, _NOWHERE), axis=0))
    if SEARCH:
        tl.store(low_ptr + at, tl.min(tl.where(x > float("-inf"), x, float("inf")), axis=0))
        if tile == 0:
            tl.store(count_ptr + row * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
            tl.store(filled_ptr + row, 0)


@triton.jit(do_not_specialize=["R", "tiles"])
def histogram_kernel(
    logits_ptr, slot_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, best_ptr, low_ptr, count_ptr, R, V, tiles,
    BLOCK: tl.constexpr, BINS: tl.constexpr, TB: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, R)."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    k, p, _ = _filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, slot, V)
    if (k > 0) | (p < 1.0):
        peak, low = _tiles(best_ptr, low_ptr, row, R, tiles, TB)
        i = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row.to(tl.int64) * V + i, mask=i < V, other=float("-inf"))
        x = tl.div_rn(x, row_scale(temperature_ptr, slot))
        found = tl.histogram(_bin(x, peak, _bins_per_unit(peak, low, BINS), BINS), BINS)
        b = tl.arange(0, BINS)
        tl.atomic_add(count_ptr + row * BINS + b, found, mask=(found > 0) & (b < BINS - 1))


@triton.jit
def _bracket(count_ptr, row, peak, low, k, p, cut, BINS: tl.constexpr):
    """First and last bin of those that should hold the threshold."""
    per_unit = _bins_per_unit(peak, low, BINS)
    b = tl.arange(0, BINS)
    count = tl.load(count_ptr + row * BINS + b, mask=b < BINS - 1, other=0)
    kth = tl.sum((tl.cumsum(count, axis=0) < k).to(tl.int32), axis=0)
    kth = tl.minimum(kth, BINS - 2)
    # Of the tokens that min-p and top-k leave, by the middle of each bin.
    limit = tl.minimum(_bin(cut, peak, per_unit, BINS), BINS - 2)
    limit = tl.where(k > 0, tl.minimum(kth, limit), limit)
    mass = tl.where(b <= limit, count.to(tl.float32) * tl.exp(-(b + 0.5) / per_unit), 0.0)
    running = tl.cumsum(mass, axis=0)
    goal = tl.sum(mass, axis=0) * p.to(tl.float32)
    first = tl.sum((running < goal * (1.0 - _SLACK)).to(tl.int32), axis=0) - 1
    last = tl.sum((running < goal * (1.0 + _SLACK)).to(tl.int32), axis=0) + 1
    first = tl.where(p < 1.0, tl.minimum(tl.maximum(first, 0), limit), kth)
    last = tl.where(k > 0, kth, tl.minimum(last, limit))
    return first, last


@triton.jit(do_not_specialize=["R", "tiles"])
def gather_kernel(
    logits_ptr, slot_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, best_ptr, low_ptr, count_ptr, list_ptr,
    filled_ptr, above_ptr, mass_ptr, total_ptr, R, V, tiles, unit,
    BLOCK: tl.constexpr, BINS: tl.constexpr, LISTED: tl.constexpr, TB: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, R). Per tile: tokens above the bracket, their mass, and the mass that min-p leaves."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    k, p, log_min = _filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, slot, V)
    if (k > 0) | (p < 1.0):
        peak, low = _tiles(best_ptr, low_ptr, row, R, tiles, TB)
        cut = peak + log_min
        first, last = _bracket(count_ptr, row, peak, low, k, p, cut, BINS)
        i = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row.to(tl.int64) * V + i, mask=i < V, other=float("-inf"))
        x = tl.div_rn(x, row_scale(temperature_ptr, slot))
        bin = _bin(x, peak, _bins_per_unit(peak, low, BINS), BINS)
        mass = _mass(x, peak, cut, unit)
        at = tile * R + row
        tl.store(above_ptr + at, tl.sum((bin < first).to(tl.int32), axis=0))
        tl.store(mass_ptr + at, tl.sum(tl.where(bin < first, mass, 0), axis=0))
        tl.store(total_ptr + at, tl.sum(mass, axis=0))
        inside = ((bin >= first) & (bin <= last)).to(tl.int32)
        # The list's order depends on who comes first; nothing that is read from it does.
        found = tl.sum(inside, axis=0)
        place = tl.atomic_add(filled_ptr + row, found) + tl.cumsum(inside, axis=0) - 1
        tl.store(list_ptr + row * LISTED + place, x, mask=(inside > 0) & (place < LISTED))


@triton.jit
def _weigh(ptr, n, scale, peak, cut, unit, least, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Number or mass of the n values whose order is `least` or more."""
    total = tl.zeros([BLOCK], tl.int64)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.div_rn(tl.load(ptr + i, mask=i < n, other=float("-inf")), scale)
        weight = _mass(x, peak, cut, unit) if MASS else tl.full([BLOCK], 1, tl.int64)
        total += tl.where((i < n) & (_order(x) >= least), weight, 0)
    return tl.sum(total, axis=0)


@triton.jit
def _search(ptr, n, scale, peak, cut, unit, base, goal, low, high, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Largest order from which on the values, with `base` above them, weigh at least the goal."""
    while low < high:
        mid = (low + high + 1) >> 1
        enough = base + _weigh(ptr, n, scale, peak, cut, unit, mid.to(tl.int32), MASS, BLOCK) >= goal
        low = tl.where(enough, mid, low)
        high = tl.where(enough, high, mid - 1)
    return low


@triton.jit
def _value(order):
    order = order.to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["R", "tiles"])
def threshold_kernel(
    logits_ptr, slot_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, best_ptr, where_ptr, low_ptr, list_ptr,
    filled_ptr, above_ptr, mass_ptr, total_ptr, peak_out, threshold_out, token_out, R, V, tiles, unit,
    BLOCK: tl.constexpr, LISTED: tl.constexpr, TB: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Grid (R,): the row's peak, the lowest id that has it, and its threshold."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    t = tl.arange(0, TB)
    tile = t * R + row
    best = tl.load(best_ptr + tile, mask=t < tiles, other=float("-inf"))
    at = tl.load(where_ptr + tile, mask=t < tiles, other=2147483647)
    peak = tl.max(best, axis=0)
    token = tl.min(tl.where(best == peak, at, _NOWHERE), axis=0)
    tl.store(peak_out + row, peak)
    tl.store(token_out + row, tl.minimum(token, V - 1).to(tl.int64))  # a row of NaN has no maximum
    cut = peak * 0.0 + float("-inf")
    if SEARCH:
        k, p, log_min = _filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, slot, V)
        cut = peak + log_min
        if (k > 0) | (p < 1.0):
            own = logits_ptr + row.to(tl.int64) * V
            own_scale = row_scale(temperature_ptr, slot)
            far = _order(peak * 0.0 + float("-inf")).to(tl.int64)
            above = tl.sum(tl.load(above_ptr + tile, mask=t < tiles, other=0), axis=0).to(tl.int64)
            mass = tl.sum(tl.load(mass_ptr + tile, mask=t < tiles, other=0), axis=0)
            total = tl.sum(tl.load(total_ptr + tile, mask=t < tiles, other=0), axis=0)
            n = tl.load(filled_ptr + row)
            i = tl.arange(0, LISTED)
            ptr = list_ptr + row.to(tl.int64) * LISTED
            scale = own_scale * 0.0 + 1.0
            listed = _order(tl.load(ptr + i, mask=i < tl.minimum(n, LISTED), other=float("-inf")))
            high = tl.max(listed, axis=0).to(tl.int64)
            low = tl.min(tl.where(i < n, listed, _NOWHERE), axis=0).to(tl.int64)
            if n > LISTED:
                ptr, n, scale = own, V, own_scale
                low, high = far, _order(peak).to(tl.int64)
                above, mass = above * 0, mass * 0
            if k > 0:
                kth = _search(ptr, n, scale, peak, cut, unit, above, k, low, high, False, BLOCK)
                kth = tl.where(above + n >= k, kth, far)  # fewer finite logits than k: all stay
                cut = tl.maximum(cut, _value(kth))
            if p < 1.0:
                held = _weigh(ptr, n, scale, peak, cut, unit, far.to(tl.int32), True, BLOCK)
                total = tl.where(k > 0, mass + held, total)
                exact = total.to(tl.float64) * p
                goal = exact.to(tl.int64)
                goal = goal + (goal.to(tl.float64) < exact).to(tl.int64)
                goal = tl.maximum(tl.minimum(goal, total), 1)
                if (mass >= goal) | (mass + held < goal):
                    ptr, n, scale = own, V, own_scale
                    low, high = far, _order(peak).to(tl.int64)
                    mass = mass * 0
                nucleus = _search(ptr, n, scale, peak, cut, unit, mass, goal, low, high, True, BLOCK)
                cut = tl.maximum(cut, _value(nucleus))
    tl.store(threshold_out + row, cut)


def mass_unit(vocab):
    """As fine as a sum of `vocab` of them allows in 63 bits; see sampling/processors.py."""
    return 2.0 ** (62 - vocab.bit_length())


def scratch(logits):
    """What the launches hand on, by tile and row; any content."""
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE)

    def new(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device=logits.device)

    best, low, listed = (new(*s, dtype=torch.float32) for s in ((tiles, rows), (tiles, rows), (rows, LISTED)))
    mass, total = (new(tiles, rows, dtype=torch.int64) for _ in range(2))
    return best, new(tiles, rows), low, new(rows, BINS), listed, new(rows), new(tiles, rows), mass, total


def launch_row_threshold(
    logits, slot, pos, temperature, top_k, top_p, min_p, stops, min_len, peak, threshold, token, memory, *, filtered
):  # fmt: skip
    """memory: as `scratch` makes it."""
    rows, vocab = logits.shape
    best, where, low, count, listed, filled, above, mass, total = memory
    tiles = best.shape[0]
    unit, tb = mass_unit(vocab), triton.next_power_of_2(tiles)
    peaks_kernel[(tiles, rows)](
        logits, slot, pos, temperature, stops, min_len, best, where, low, count, filled, rows, vocab, stops.shape[1],
        BLOCK=TILE, BINS=BINS, SEARCH=filtered, num_warps=4,
    )  # fmt: skip
    wanted = (temperature, top_k, top_p, min_p)
    if filtered:
        histogram_kernel[(tiles, rows)](
            logits, slot, *wanted, best, low, count, rows, vocab, tiles, BLOCK=TILE, BINS=BINS, TB=tb, num_warps=4
        )
        gather_kernel[(tiles, rows)](
            logits, slot, *wanted, best, low, count, listed, filled, above, mass, total, rows, vocab, tiles, unit,
            BLOCK=TILE, BINS=BINS, LISTED=LISTED, TB=tb, num_warps=4,
        )  # fmt: skip
    threshold_kernel[(rows,)](
        logits, slot, *wanted, best, where, low, listed, filled, above, mass, total, peak, threshold, token, rows,
        vocab, tiles, unit, BLOCK=SEARCH_BLOCK, LISTED=LISTED, TB=tb, SEARCH=filtered, num_warps=8,
    )  # fmt: skip
