# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the ops in kernels/adjust.py are typed.)
"""Penalties and biases of a frame's rows in one launch, and the tallies that penalties read."""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 2048
COUNT_BLOCK = 2048


@triton.jit
def _penalties(repetition_ptr, presence_ptr, frequency_ptr, slot):
    """The slot's three penalties in float32, and whether any is on."""
    repetition = tl.load(repetition_ptr + slot).to(tl.float32)
    presence = tl.load(presence_ptr + slot).to(tl.float32)
    frequency = tl.load(frequency_ptr + slot).to(tl.float32)
    return repetition, presence, frequency, (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)


@triton.jit
def adjust_rows_kernel(
    x_ptr, out_ptr, slot_ptr, cell_ptr, committed_ptr, pending_ptr, seen_ptr, tally_ptr, repetition_ptr, presence_ptr,
    frequency_ptr, bias_count_ptr, bias_id_ptr, bias_value_ptr, V, PW, N,
    NP: tl.constexpr, BLOCK: tl.constexpr, TREE: tl.constexpr, PENALTIES: tl.constexpr, BIASES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, R): a copy of the row's tile where its slot asks for nothing."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    i = tile * BLOCK + tl.arange(0, BLOCK)
    ok = i < V
    at = row.to(tl.int64) * V + i
    x = tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32)
    if PENALTIES:
        repetition, presence, frequency, some = _penalties(repetition_ptr, presence_ptr, frequency_ptr, slot)
        if some:
            tally = tl.load(tally_ptr + slot * V + i, mask=ok, other=0)
            node = (tl.load(cell_ptr + row) - tl.load(committed_ptr + slot)).to(tl.int32)
            node = tl.minimum(tl.maximum(node, 0), PW - 1)
            if TREE:
                seen = tl.load(seen_ptr + slot * PW + node)
            # A node comes after all that it sees.
            for j in tl.range(1, node + 1):
                mine = i == tl.load(pending_ptr + slot * PW + j)
                if TREE:
                    mine = mine & (((seen >> j) & 1) > 0)
                tally += tl.where(mine, 2, 0)
            times = (tally >> 1).to(tl.float32)
            x = tl.where(tally > 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
            x = x - frequency * times - tl.where(times > 0, presence, 0.0)
    tl.store(out_ptr + at, x, mask=ok)
    if BIASES:
        count = tl.load(bias_count_ptr + slot)
        if count > 0:
            n = tl.arange(0, NP)
            token = tl.load(bias_id_ptr + slot * N + n, mask=n < count, other=-1)
            here = (token >= tile * BLOCK) & (token < tile * BLOCK + BLOCK) & (token < V)
            value = tl.load(bias_value_ptr + slot * N + n, mask=here, other=0.0).to(tl.float32)
            tl.debug_barrier()  # the tile is written by all threads, and read back by others
            spot = out_ptr + row.to(tl.int64) * V + token
            tl.store(spot, tl.load(spot, mask=here, other=0.0) + value, mask=here)


@triton.jit
def count_tokens_kernel(
    tally_ptr, slot_ptr, repetition_ptr, presence_ptr, frequency_ptr, record_ptr, V, C, W, FIRST: tl.constexpr,
    WP: tl.constexpr,
):  # fmt: skip
    """Grid (B,): every token of the slot's record, once."""
    b = tl.program_id(0)
    slot = tl.load(slot_ptr + b)
    _, _, _, some = _penalties(repetition_ptr, presence_ptr, frequency_ptr, slot)
    if some:
        w = tl.arange(0, WP)
        emitted = tl.load(record_ptr + b * C + 1)
        token = tl.load(record_ptr + b * C + FIRST + w, mask=(w < emitted) & (w < W), other=-1)
        tl.atomic_add(tally_ptr + slot * V + token, 2, mask=(token >= 0) & (token < V))


@triton.jit
def recount_slots_kernel(
    tally_ptr, slot_ptr, repetition_ptr, presence_ptr, frequency_ptr, history_ptr, prompt_len_ptr, committed_ptr, V, L,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B,): the slot's whole tally in one program, cleared, then counted from history."""
    slot = tl.load(slot_ptr + tl.program_id(0))
    _, _, _, some = _penalties(repetition_ptr, presence_ptr, frequency_ptr, slot)
    if some:
        own = tally_ptr + slot * V
        i = tl.arange(0, BLOCK)
        zero = tl.zeros([BLOCK], tl.int32)
        for first in tl.range(0, V, BLOCK):
            tl.store(own + first + i, zero, mask=first + i < V)
        tl.debug_barrier()  # cleared by all threads before any counts
        known = tl.load(committed_ptr + slot) + 1
        prompt = tl.load(prompt_len_ptr + slot)
        for first in tl.range(0, known, BLOCK):
            place = first + i
            token = tl.load(history_ptr + slot * L + place, mask=place < known, other=-1)
            real = (token >= 0) & (token < V)
            tl.atomic_or(own + token, zero + 1, mask=real & (place < prompt))
            tl.atomic_add(own + token, zero + 2, mask=real & (place >= prompt))


def launch_adjust_rows(
    x, out, slot, cell, committed, pending, seen, tally, repetition, presence, frequency, bias_count, bias_id,
    bias_value, *, penalties, biases,
):  # fmt: skip
    """seen: None where drafts are chains."""
    rows, vocab = x.shape
    width = bias_id.shape[1]
    adjust_rows_kernel[(triton.cdiv(vocab, TILE), rows)](
        x, out, slot, cell, committed, pending, pending if seen is None else seen, tally, repetition, presence,
        frequency, bias_count, bias_id, bias_value, vocab, pending.shape[1], width, NP=triton.next_power_of_2(width),
        BLOCK=TILE, TREE=seen is not None, PENALTIES=penalties, BIASES=biases,
    )  # fmt: skip


def launch_count_tokens(tally, slot, repetition, presence, frequency, record, *, first):
    slots, columns = record.shape
    count_tokens_kernel[(slots,)](
        tally, slot, repetition, presence, frequency, record, tally.shape[1], columns, columns - first, FIRST=first,
        WP=max(4, triton.next_power_of_2(columns - first)), num_warps=1,
    )  # fmt: skip


def launch_recount_slots(tally, slot, repetition, presence, frequency, history, prompt_len, committed):
    recount_slots_kernel[(slot.shape[0],)](
        tally, slot, repetition, presence, frequency, history, prompt_len, committed, tally.shape[1], history.shape[1],
        BLOCK=COUNT_BLOCK, num_warps=8,
    )  # fmt: skip
