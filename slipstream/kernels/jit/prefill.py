# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the op in kernels/prefill.py is typed.)
"""Attention of many prompt rows over paged KV: one program per tile of rows and KV head, keys streamed past it.

A tile holds up to ROWS consecutive rows of one slot with all query heads of a KV head. A row's result depends on its
own position only: keys come in the same blocks whatever tile it sits in, and blocks beyond its position change nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _stream(
    acc, top, total, q, pos, k_ptr, v_ptr, pages, head, begin, end, length, factor,
    KH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BT: tl.constexpr, EDGE: tl.constexpr,
    SKIP: tl.constexpr, WINDOW: tl.constexpr, lowest,
):  # fmt: skip
    """Key blocks begin..end - 1 into the running softmax. EDGE: some keys are not visible to every row."""
    d = tl.arange(0, DP)
    for block in tl.range(begin, end):
        t = block * BT + tl.arange(0, BT)
        if EDGE:
            inside = (t < length) & (t >= SKIP)
            if WINDOW > 0:
                inside = inside & (t >= lowest)
            page = tl.load(pages + t // PAGE, mask=inside, other=0)
        else:
            page = tl.load(pages + t // PAGE)
        kv = (page.to(tl.int64) * PAGE + t % PAGE) * (KH * D) + head * D
        if EDGE or DP != D:
            # Cells outside of what the tile sees may hold anything, NaN too: they are read as zero.
            if not EDGE:
                inside = (t < length) & (t >= SKIP)
            k = tl.load(k_ptr + kv[None, :] + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
            v = tl.load(v_ptr + kv[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        else:
            k = tl.load(k_ptr + kv[None, :] + d[:, None])
            v = tl.load(v_ptr + kv[:, None] + d[None, :])
        s = tl.dot(q, k, input_precision="ieee")
        if EDGE:
            see = (t[None, :] <= pos[:, None]) & (t[None, :] >= SKIP)
            if WINDOW > 0:
                see = see & (t[None, :] > pos[:, None] - WINDOW)
            s = tl.where(see, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, axis=1) * factor)
        # Idle lanes of the tile have seen nothing: their maximum is still -inf.
        safe = tl.where(new == float("-inf"), 0.0, new)
        # Said, not left to the compiler: it would fuse where nothing is masked and not at an edge, and which of a row's
        # blocks are an edge's depends on its tile.
        p = tl.exp2(tl.fma(s, tl.full(s.shape, factor, tl.float32), tl.broadcast_to(-safe[:, None], s.shape)))
        keep = tl.exp2(top - safe)
        total = total * keep + tl.sum(p, axis=1)
        acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new
    return acc, top, total


@triton.jit
def prefill_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, slot_ptr, pos_ptr, tile_ptr, R, table_width, scale,
    N: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    ROWS: tl.constexpr, BT: tl.constexpr, PAGE: tl.constexpr, SKIP: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KH); DP (at least 16) and GP are D and G rounded up to powers of two. Keys below SKIP are hidden,
    with WINDOW > 0 also those that many or more positions before a row's own."""
    # From the last tile on: late rows see most keys, so the long programs start first.
    first = tl.load(tile_ptr + tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int32)
    head = tl.program_id(1)
    if first < R:
        slot = tl.load(slot_ptr + first)
        near = tl.arange(0, ROWS)
        near_slot = tl.load(slot_ptr + first + near, mask=first + near < R, other=-1)
        count = tl.min(tl.where(near_slot != slot, near, ROWS), axis=0)
        m = tl.arange(0, ROWS * GP)
        d = tl.arange(0, DP)
        row = first + m // GP
        lane = m % GP
        mine = (m // GP < count) & (lane < G)
        cell = mine[:, None] & (d < D)[None, :]
        at = (row.to(tl.int64) * N + head * G + lane)[:, None] * D + d[None, :]
        acc = tl.zeros([ROWS * GP, DP], tl.float32)
        total = tl.zeros([ROWS * GP], tl.float32)
        if slot > 0:
            pos = tl.load(pos_ptr + row, mask=mine, other=-1).to(tl.int32)
            length = tl.max(pos, axis=0) + 1
            # Idle lanes see nothing; they must not shorten what all rows see.
            whole = (tl.min(tl.where(mine, pos, length), axis=0) + 1) // BT
            q = tl.load(q_ptr + at, mask=cell, other=0.0)
            pages = table_ptr + slot.to(tl.int64) * table_width
            factor = scale * 1.4426950408889634
            top = tl.full([ROWS * GP], float("-inf"), tl.float32)
            begin = whole * 0
            lowest = whole * 0
            if SKIP > 0 or WINDOW > 0:
                # The blocks before the first one that every row sees whole.
                begin = tl.minimum(whole, 1 if SKIP > 0 else 0)
                start = whole * 0
                if WINDOW > 0:
                    lowest = tl.maximum(tl.min(tl.where(mine, pos, length), axis=0) - WINDOW + 1, 0)
                    start = lowest // BT
                    begin = tl.maximum(begin, tl.cdiv(tl.maximum(length - WINDOW, 0), BT))
                    begin = tl.minimum(begin, tl.cdiv(length, BT))
                    whole = tl.maximum(whole, begin)
                acc, top, total = _stream(
                    acc, top, total, q, pos, k_ptr, v_ptr, pages, head, start, begin, length, factor,
                    KH=KH, D=D, DP=DP, PAGE=PAGE, BT=BT, EDGE=True, SKIP=SKIP, WINDOW=WINDOW, lowest=lowest,
                )  # fmt: skip
            acc, top, total = _stream(
                acc, top, total, q, pos, k_ptr, v_ptr, pages, head, begin, whole, length, factor,
                KH=KH, D=D, DP=DP, PAGE=PAGE, BT=BT, EDGE=False, SKIP=SKIP, WINDOW=WINDOW, lowest=lowest,
            )  # fmt: skip
            acc, top, total = _stream(
                acc, top, total, q, pos, k_ptr, v_ptr, pages, head, whole, tl.cdiv(length, BT), length, factor,
                KH=KH, D=D, DP=DP, PAGE=PAGE, BT=BT, EDGE=True, SKIP=SKIP, WINDOW=WINDOW, lowest=lowest,
            )  # fmt: skip
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=cell)


def launch_prefill_attention(
    q, k, v, out, table, slot, pos, tile, *, scale, rows_per_tile, config, first_cell=0, window=0
):  # fmt: skip
    """Launch; see kernels/prefill.py for the shapes."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    prefill_attention_kernel[(tile.shape[0], kv_heads)](
        q, k, v, out, table, slot, pos, tile, rows, table.shape[1], scale,
        N=heads, KH=kv_heads, D=dim, DP=max(16, triton.next_power_of_2(dim)), G=group, GP=triton.next_power_of_2(group),
        ROWS=rows_per_tile, BT=config.block, PAGE=k.shape[1], SKIP=first_cell, WINDOW=window,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
