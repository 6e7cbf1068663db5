# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the ops in kernels/attention.py are typed.)
"""Attention over paged KV for ragged rows per slot, split over the sequence, merged in the same launch.

A tile is the query heads of one KV head for up to ROWS consecutive rows of one slot, counted from the slot's first
row. Each row has a program; those whose row opens no tile end at once, and come last where slots have STEP rows each.
Program `split` takes key blocks split, split + SPLITS, ...; so which keys meet in one partial sum depends on a row's
own position only, never on its neighbours, and partial results are merged in the order of `split`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tlx


@triton.jit
def _opens(slot_ptr, first, slot, ROWS: tl.constexpr):
    """Whether a multiple of ROWS rows of the same slot stands right before row `first`."""
    back = tl.arange(0, 16)
    run, more = 0, 16
    while more == 16:
        at = first - run - 1 - back
        near = tl.load(slot_ptr + at, mask=at >= 0, other=-1)
        more = tl.min(tl.where(near != slot, back, 16), axis=0)
        run += more
    return run % ROWS == 0


@triton.jit
def _tile(
    first, slot, head, split,
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, slot_ptr, pos_ptr, tree_ptr, low_ptr, ws_ptr, cnt_ptr,
    R, table_width, scale,
    N: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    ROWS: tl.constexpr, BT: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, TREE: tl.constexpr,
    SKIP: tl.constexpr, LOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Split `split` of the tile that opens at row `first`."""
    m = tl.arange(0, ROWS * GP)
    d = tl.arange(0, DP)
    d_in = d < D
    near = tl.arange(0, ROWS)
    near_slot = tl.load(slot_ptr + first + near, mask=first + near < R, other=-1)
    count = tl.min(tl.where(near_slot != slot, near, ROWS), axis=0)
    row = first + m // GP
    lane = m % GP
    mine = (m // GP < count) & (lane < G)
    cell = mine[:, None] & d_in[None, :]
    at = (row.to(tl.int64) * N + head * G + lane)[:, None] * D + d[None, :]
    pos = tl.load(pos_ptr + row, mask=mine, other=-1).to(tl.int32)
    tree = tl.zeros([ROWS * GP], tl.int64)
    length = tl.max(pos, axis=0) + 1
    if TREE:
        # pos is here the last committed position; bit j of `tree` shows in-flight row j of the slot.
        tree = tl.load(tree_ptr + row, mask=mine, other=0)
        bit = tl.arange(0, 64)
        flying = ((tree[:, None] >> bit[None, :].to(tl.int64)) & 1) != 0
        length += tl.max(tl.max(tl.where(flying, bit[None, :] + 1, 0), axis=1), axis=0)
    blocks = tl.cdiv(length, BT)
    begin = split
    if LOW:
        # Idle lanes must not widen the window. A split without a block in it adds nothing, and is merged all the same.
        low = tl.load(low_ptr + row, mask=mine, other=2147483647).to(tl.int32)
        lowest = tl.maximum(tl.min(low, axis=0), 0)
        begin += tl.cdiv(tl.maximum(lowest // BT - split, 0), SPLITS) * SPLITS
    live = tl.minimum(blocks, SPLITS)
    pages = table_ptr + slot.to(tl.int64) * table_width
    if PDL:
        tlx.gdc_wait()
    if slot == 0:
        if split == 0:
            tl.store(out_ptr + at, tl.zeros([ROWS * GP, DP], out_ptr.dtype.element_ty), mask=cell)
    elif split < live:
        q = tl.load(q_ptr + at, mask=cell, other=0.0)
        top = tl.full([ROWS * GP], float("-inf"), tl.float32)
        total = tl.zeros([ROWS * GP], tl.float32)
        acc = tl.zeros([ROWS * GP, DP], tl.float32)
        for block in tl.range(begin, blocks, SPLITS):
            t = block * BT + tl.arange(0, BT)
            there = t < length
            if LOW:
                there = there & (t >= lowest)
            if PAGE % BT == 0:
                # One page for the block: a scalar, so that keys are one load away, not two.
                page = tl.load(pages + block * BT // PAGE)
            else:
                page = tl.load(pages + t // PAGE, mask=there, other=0)
            kv = (page.to(tl.int64) * PAGE + t % PAGE) * (KH * D) + head * D
            # Cells outside of what the tile sees may hold anything, NaN too: they are read as zero.
            k = tl.load(k_ptr + kv[None, :] + d[:, None], mask=there[None, :] & d_in[:, None], other=0.0)
            full = there & (t >= SKIP)
            v = tl.load(v_ptr + kv[:, None] + d[None, :], mask=full[:, None] & d_in[None, :], other=0.0)
            see = (t[None, :] <= pos[:, None]) & (t[None, :] >= SKIP)
            if LOW:
                see = see & (t[None, :] >= low[:, None])
            if TREE:
                j = t[None, :] - pos[:, None] - 1
                shown = (tree[:, None] >> tl.minimum(tl.maximum(j, 0), 63).to(tl.int64)) & 1
                see = see | ((j >= 0) & (j < 64) & (shown != 0))
            s = tl.dot(q, k, input_precision="ieee") * (scale * 1.4426950408889634)
            s = tl.where(see, s, float("-inf"))
            new = tl.maximum(top, tl.max(s, axis=1))
            safe = tl.where(new == float("-inf"), 0.0, new)
            p = tl.exp2(s - safe[:, None])
            keep = tl.exp2(top - safe)
            total = total * keep + tl.sum(p, axis=1)
            if TREE:
                # A hole that nobody here sees may be uninitialised; 0 * NaN would spread.
                v = tl.where((tl.max(see.to(tl.int32), axis=0) > 0)[:, None], v, 0.0).to(v_ptr.dtype.element_ty)
            acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            top = new
        if live == 1:
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=cell)
        else:
            # Scratch per (row, query head, split): D sums; behind all of those, the maxima and the totals.
            place = (row.to(tl.int64) * N + head * G + lane) * SPLITS
            stats = ws_ptr + tl.cast(R, tl.int64) * (N * SPLITS * DP)
            wide = mine[:, None] & (d[None, :] < DP)
            tl.store(ws_ptr + (place + split)[:, None] * DP + d[None, :], acc, mask=wide)
            tl.store(stats + (place + split) * 2, top, mask=mine)
            tl.store(stats + (place + split) * 2 + 1, total, mask=mine)
            tl.debug_barrier()  # every thread's stores precede the one thread's release
            ticket = tl.atomic_add(cnt_ptr + first * KH + head, 1, sem="acq_rel", scope="gpu")
            if ticket == live - 1:
                # Unrolled, so that all reads are in flight at once.
                top = tl.full([ROWS * GP], float("-inf"), tl.float32)
                for i in tl.static_range(SPLITS):
                    there = mine & (m * 0 + i < live)
                    one = tl.load(stats + (place + i) * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
                    top = tl.maximum(top, one)
                safe = tl.where(top == float("-inf"), 0.0, top)
                total = tl.zeros([ROWS * GP], tl.float32)
                acc = tl.zeros([ROWS * GP, DP], tl.float32)
                for i in tl.static_range(SPLITS):
                    there = mine & (m * 0 + i < live)
                    one = tl.load(stats + (place + i) * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
                    sums = tl.load(stats + (place + i) * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
                    part = tl.load(
                        ws_ptr + (place + i)[:, None] * DP + d[None, :], mask=wide & there[:, None], other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
                    weight = tl.exp2(one - safe)
                    total += weight * sums
                    acc += weight[:, None] * part
                acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
                tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=cell)
                tl.store(cnt_ptr + first * KH + head, 0)  # ready for the next launch


@triton.jit(do_not_specialize=["R"])
def paged_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, slot_ptr, pos_ptr, tree_ptr, low_ptr, ws_ptr, cnt_ptr,
    R, table_width, scale,
    N: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, BT: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    TREE: tl.constexpr, SKIP: tl.constexpr, LOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(R, STEP), KH, SPLITS * STEP); DP and GP are D and G rounded up to powers of two. Positions below SKIP
    are hidden; with LOW also those below the row's own first one, and blocks that no row of the tile sees are not
    read."""
    if PDL:
        tlx.gdc_launch_dependents()
    first = tl.program_id(0) * STEP + tl.program_id(2) // SPLITS
    # Slots, positions and tables are written before the chain of dependent launches begins, so they may be read
    # before the wait; q and the newest keys and values may not.
    slot = tl.load(slot_ptr + first, mask=first < R, other=-1)
    if slot >= 0:
        # A program without a tile does not wait for the launch in front either: row 0's does.
        if _opens(slot_ptr, first, slot, ROWS):
            _tile(first, slot, tl.program_id(1), tl.program_id(2) % SPLITS, q_ptr, k_ptr, v_ptr, out_ptr, table_ptr,
                  slot_ptr, pos_ptr, tree_ptr, low_ptr, ws_ptr, cnt_ptr, R, table_width, scale, N, KH, D, DP, G, GP,
                  ROWS, BT, PAGE, SPLITS, TREE, SKIP, LOW, PDL)  # fmt: skip


def rows_per_tile(group: int, queries: int) -> int:
    """Rows of one slot that share a tile of `queries` query heads; the matrix instruction takes 16."""
    return max(1, queries // triton.next_power_of_2(group))


def launch_paged_attention(
    q, k, v, out, table, slot, pos, tree, ws, counters, *, scale, config, per_slot=1, first_cell=0, low=None, pdl=False
):  # fmt: skip
    """Launch; see kernels/attention.py for the shapes."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    c = config
    tile = rows_per_tile(group, c.queries)
    step = 1
    while step * 2 <= min(tile, per_slot):
        step *= 2
    paged_attention_kernel[(triton.cdiv(rows, step), kv_heads, c.splits * step)](
        q, k, v, out, table, slot, pos, tree, low, ws, counters,
        rows, table.shape[1], scale,
        N=heads, KH=kv_heads, D=dim, DP=max(16, triton.next_power_of_2(dim)), G=group,
        GP=triton.next_power_of_2(group), ROWS=tile, STEP=step, BT=c.block, PAGE=k.shape[1], SPLITS=c.splits,
        TREE=tree is not None, SKIP=first_cell, LOW=low is not None,
        PDL=pdl, num_warps=c.warps, num_stages=c.stages, launch_pdl=pdl,
    )  # fmt: skip
