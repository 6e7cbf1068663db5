# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the op in kernels/ngram.py is typed.)
"""Longest earlier match of a slot's last tokens, most recent first."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["columns", "stride"])
def ngram_match_kernel(
    history_ptr, slot_ptr, end_ptr, out_ptr, columns, stride, min_n, MAX_N: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (B, cdiv(columns, BLOCK)); out holds -1 before. A maximum is the same in every order of arrival."""
    b = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    end = tl.load(end_ptr + b).to(tl.int32)
    if first < end:
        own = history_ptr + tl.load(slot_ptr + b).to(tl.int64) * stride
        j = first + tl.arange(0, BLOCK)
        alive = j < end
        length = tl.zeros([BLOCK], tl.int32)
        for i in tl.static_range(MAX_N):
            last = tl.load(own + tl.maximum(end - i, 0))
            token = tl.load(own + j - i, mask=alive & (j >= i), other=-1)
            alive = alive & (j >= i) & (token == last) & (j * 0 + end >= i)
            length += alive.to(tl.int32)
        rank = tl.where(length >= min_n, length.to(tl.int64) * columns + j, -1)
        tl.atomic_max(out_ptr + b, tl.max(rank, axis=0))


def launch_ngram_match(history, slot, end, out, *, columns, min_n, max_n):
    block = 1024
    ngram_match_kernel[(slot.shape[0], triton.cdiv(columns, block))](
        history, slot, end, out, columns, history.shape[1], min_n, MAX_N=max_n, BLOCK=block, num_warps=4
    )
