# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the op in kernels/logprobs.py is typed.)
"""Log-probabilities of chosen tokens and the likeliest beside them: tiles of each row, then one program per row.

A tile gives its maximum, its sum of exponentials, how many of its logits are above the chosen token's, and its own
likeliest tokens, found one after the other in registers. Rows that nobody asks for leave at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels.jit.numbers import exp, log
from slipstream.logprobs import MAX_LOGPROBS, TOKEN_COLUMNS

_NOWHERE = tl.constexpr(2147483647)
_TOP = tl.constexpr(MAX_LOGPROBS)
_COLUMNS = tl.constexpr(TOKEN_COLUMNS)

TILE = 4096
LISTED = 32
"""Places for a tile's likeliest tokens: MAX_LOGPROBS, rounded up."""


@triton.jit
def logprob_tiles_kernel(
    x_ptr, row_ptr, token_ptr, wanted_ptr, top_ptr, sum_ptr, above_ptr, best_ptr, where_ptr, M, V,
    BLOCK: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, M)."""
    tile = tl.program_id(0)
    m = tl.program_id(1)
    wanted = tl.load(wanted_ptr + m)
    if wanted > 0:
        row = x_ptr + tl.load(row_ptr + m).to(tl.int64) * V
        own = tl.load(row + tl.minimum(tl.maximum(tl.load(token_ptr + m), 0), V - 1)).to(tl.float32)
        i = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < V, other=float("-inf")).to(tl.float32)
        top = tl.max(x, axis=0)
        at = tile * M + m
        tl.store(top_ptr + at, top)
        tl.store(sum_ptr + at, tl.sum(tl.where(x > float("-inf"), exp(x - top), 0.0), axis=0))
        tl.store(above_ptr + at, tl.sum((x > own).to(tl.int32), axis=0))
        for k in tl.range(0, tl.minimum(wanted - 1, _TOP)):
            best = tl.max(x, axis=0)
            where = tl.min(tl.where(x == best, i, _NOWHERE), axis=0)
            tl.store(best_ptr + at.to(tl.int64) * KP + k, best)
            tl.store(where_ptr + at.to(tl.int64) * KP + k, where)
            x = tl.where(i == where, float("-inf"), x)


@triton.jit
def logprob_rows_kernel(
    x_ptr, row_ptr, token_ptr, wanted_ptr, top_ptr, sum_ptr, above_ptr, best_ptr, where_ptr, table_ptr, first, M, V,
    tiles, TB: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Grid (M,)."""
    m = tl.program_id(0)
    wanted = tl.load(wanted_ptr + m)
    if wanted > 0:
        t = tl.arange(0, TB)
        known = t < tiles
        tops = tl.load(top_ptr + t * M + m, mask=known, other=float("-inf"))
        top = tl.max(tops, axis=0)
        sums = tl.load(sum_ptr + t * M + m, mask=known & (tops > float("-inf")), other=0.0)
        total = tl.sum(sums * exp(tl.where(known, tops, top) - top), axis=0)
        total = top + log(total)
        above = tl.sum(tl.load(above_ptr + t * M + m, mask=known, other=0), axis=0)
        token = tl.minimum(tl.maximum(tl.load(token_ptr + m), 0), V - 1)
        own = tl.load(x_ptr + tl.load(row_ptr + m).to(tl.int64) * V + token).to(tl.float32)
        out = table_ptr + (first + m).to(tl.int64) * _COLUMNS
        tl.store(out, (own - total).to(tl.float64).to(tl.int64, bitcast=True))
        tl.store(out + 1, above.to(tl.int64) + 1)
        k = tl.arange(0, KP)
        tl.store(out + 2 + k, tl.zeros([KP], tl.int64) - 1, mask=k < _TOP)
        some = tl.minimum(wanted - 1, _TOP)
        c = tl.arange(0, TB * KP)
        listed = (c // KP < tiles) & (c % KP < some)
        place = ((c // KP) * M + m).to(tl.int64) * KP + c % KP
        value = tl.load(best_ptr + place, mask=listed, other=float("-inf"))
        where = tl.load(where_ptr + place, mask=listed, other=2147483647)
        tl.debug_barrier()  # all places are -1 before the found ones are written
        for j in tl.range(0, some):
            best = tl.max(value, axis=0)
            found = tl.min(tl.where(value == best, where, _NOWHERE), axis=0)
            if best > float("-inf"):
                tl.store(out + 2 + j, found.to(tl.int64))
                tl.store(out + 2 + _TOP + j, (best - total).to(tl.float64).to(tl.int64, bitcast=True))
            value = tl.where(where == found, float("-inf"), value)


def launch_token_logprobs(table, first, x, row, token, wanted):
    count, vocab = row.shape[0], x.shape[1]
    tiles = triton.cdiv(vocab, TILE)
    top, total = (torch.empty(tiles, count, dtype=torch.float32, device=x.device) for _ in range(2))
    above = torch.empty(tiles, count, dtype=torch.int32, device=x.device)
    best = torch.empty(tiles, count, LISTED, dtype=torch.float32, device=x.device)
    where = torch.empty_like(best, dtype=torch.int32)
    logprob_tiles_kernel[(tiles, count)](
        x, row, token, wanted, top, total, above, best, where, count, vocab, BLOCK=TILE, KP=LISTED, num_warps=8
    )
    logprob_rows_kernel[(count,)](
        x, row, token, wanted, top, total, above, best, where, table, first, count, vocab, tiles,
        TB=triton.next_power_of_2(tiles), KP=LISTED,
    )  # fmt: skip
