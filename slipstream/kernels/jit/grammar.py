# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the op in kernels/grammar.py is typed.)
"""Masks of grammars: one program per row and tile, which leaves at once where the slot has none."""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 4096


@triton.jit(do_not_specialize=["R"])
def mask_rows_kernel(
    logits_ptr, slot_ptr, cell_ptr, committed_ptr, masked_ptr, mask_ptr, R, V, W, N, BLOCK: tl.constexpr
):
    """Grid (cdiv(V, BLOCK), R)."""
    row = tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    if tl.load(masked_ptr + slot) != 0:
        place = tl.load(cell_ptr + row) - tl.load(committed_ptr + slot)
        place = tl.minimum(tl.maximum(place, 0), W - 1)
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < V
        word = tl.load(mask_ptr + (slot * W + place) * N + i // 32, mask=inside, other=-1)
        forbidden = ((word >> (i % 32)) & 1) == 0
        low = tl.full([BLOCK], float("-inf"), tl.float32)
        tl.store(logits_ptr + row.to(tl.int64) * V + i, low, mask=inside & forbidden)


def launch_mask_rows(logits, slot, cell, committed, masked, mask):
    """logits [R, V]; mask [S, W, N], int32."""
    rows, vocab = logits.shape
    _, width, words = mask.shape
    mask_rows_kernel[(triton.cdiv(vocab, TILE), rows)](
        logits, slot, cell, committed, masked, mask, rows, vocab, width, words, BLOCK=TILE, num_warps=4
    )
