# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the op in kernels/suffix.py is typed.)
"""Matches of a history's end: one program per slot and block of places."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK, WARPS = 1024, 4


@triton.jit
def suffix_places_kernel(
    history_ptr, slot_ptr, end_ptr, rank_ptr, L, COLUMNS, DEPTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (B, blocks). L: columns of history; COLUMNS: columns of rank, at most L."""
    b = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(end_ptr + b).to(tl.int32)
    own = history_ptr + tl.load(slot_ptr + b) * L
    alive = j < end
    length = tl.zeros([BLOCK], tl.int32)
    if tl.program_id(1) * BLOCK < end:
        for i in range(DEPTH):
            last = tl.load(own + tl.maximum(end - i, 0))
            token = tl.load(own + j - i, mask=alive & (j >= i), other=-1)
            alive = alive & (token == last)
            length += alive.to(tl.int32)
    rank = tl.where(length > 0, length.to(tl.int64) * COLUMNS + j, -1)
    tl.store(rank_ptr + b * COLUMNS + j, rank, mask=j < COLUMNS)


def launch_suffix_places(history, slot, end, rank, *, depth):
    slots, columns = rank.shape
    suffix_places_kernel[(slots, triton.cdiv(columns, BLOCK))](
        history, slot, end, rank, history.shape[1], columns, DEPTH=depth, BLOCK=BLOCK, num_warps=WARPS
    )
