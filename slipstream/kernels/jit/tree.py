# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the ops in kernels/tree.py are typed.)
"""Where the nodes of draft trees stand, and the accepted path's way to its place in the cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["R"])
def tree_rows_kernel(
    slot_ptr, cell_ptr, committed_ptr, depth_ptr, seen_ptr, pos_out, past_out, seen_out, R, W: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(R, BLOCK),)."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = r < R
    slot = tl.load(slot_ptr + r, mask=ok, other=0)
    base = tl.load(committed_ptr + slot, mask=ok, other=0)
    node = tl.minimum(tl.maximum(tl.load(cell_ptr + r, mask=ok, other=0) - base, 0), W - 1)
    at = slot * W + node
    tl.store(pos_out + r, base + tl.load(depth_ptr + at, mask=ok, other=0), mask=ok)
    tl.store(past_out + r, base - 1, mask=ok)
    tl.store(seen_out + r, tl.load(seen_ptr + at, mask=ok, other=0), mask=ok)


@triton.jit(do_not_specialize=["pages"])
def compact_path_kernel(
    data_ptr, table_ptr, slot_ptr, committed_ptr, path_ptr, accepted_ptr, pages, table_width, page_size,
    K: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B, layers * 2, cdiv(N, BLOCK)); N numbers per cache cell. A program moves its columns of all K nodes."""
    b = tl.program_id(0)
    slot = tl.load(slot_ptr + b)
    accepted = tl.load(accepted_ptr + b).to(tl.int32)
    i = tl.arange(0, KP)
    mine = (i < accepted) & (i < K) & (slot > 0)
    base = tl.load(committed_ptr + slot)
    source = base + tl.load(path_ptr + b * K + i, mask=mine, other=0)
    target = base + 1 + i
    reach = tl.cast(table_width, tl.int64) * page_size
    mine = mine & (source < reach) & (target < reach)
    row = table_ptr + slot * table_width
    from_page = tl.load(row + source // page_size, mask=mine, other=0).to(tl.int64)
    to_page = tl.load(row + target // page_size, mask=mine, other=0).to(tl.int64)
    start = tl.program_id(1).to(tl.int64) * pages
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = mine[:, None] & (column < N)[None, :]
    from_cell = (start + from_page) * page_size + source % page_size
    to_cell = (start + to_page) * page_size + target % page_size
    moved = tl.load(data_ptr + from_cell[:, None] * N + column[None, :], inside, other=0.0)
    tl.debug_barrier()  # every thread has read before any of them writes
    tl.store(data_ptr + to_cell[:, None] * N + column[None, :], moved, inside)


@triton.jit
def walk_trees_kernel(
    target_ptr, row_of_ptr, nodes_ptr, slot_ptr, parent_ptr, pending_ptr, path_ptr, accepted_ptr, tokens_ptr,
    emitted_ptr, N: tl.constexpr, NP: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Grid (B,). All nodes of a slot in registers; one step of the walk per level."""
    b = tl.program_id(0)
    n = tl.arange(0, NP)
    inside = n < N
    slot = tl.load(slot_ptr + b)
    nodes = tl.load(nodes_ptr + b)
    target = tl.load(target_ptr + tl.load(row_of_ptr + b * N + n, mask=inside, other=0), mask=inside, other=0)
    parent = tl.load(parent_ptr + slot * W + n, mask=inside, other=-1)
    token = tl.load(pending_ptr + slot * W + n, mask=inside, other=-1)
    live = inside & (n < nodes)
    at = b * 0
    accepted = b * 0
    for k in range(K):
        want = tl.sum(tl.where(n == at, target, 0), axis=0)
        right = live & (parent == at) & (token == want)
        found = tl.min(tl.where(right, n, NP), axis=0)
        moved = found < NP
        tl.store(path_ptr + b * K + k, tl.where(moved, found, 0).to(tl.int64))
        tl.store(tokens_ptr + b * (K + 1) + k, tl.where(moved | ((accepted == k) & (nodes > 0)), want, 0))
        at = tl.where(moved, found, at)
        accepted += moved.to(tl.int32)
    last = tl.sum(tl.where(n == at, target, 0), axis=0)
    tl.store(tokens_ptr + b * (K + 1) + K, tl.where((accepted == K) & (nodes > 0), last, 0))
    tl.store(accepted_ptr + b, accepted.to(tl.int64))
    tl.store(emitted_ptr + b, tl.where(nodes > 0, accepted + 1, 0).to(tl.int64))


def launch_walk_trees(target, row_of, nodes, slot, parent, pending, path, accepted, tokens, emitted):
    slots, n = row_of.shape
    walk_trees_kernel[(slots,)](
        target, row_of, nodes, slot, parent, pending, path, accepted, tokens, emitted, N=n,
        NP=max(4, triton.next_power_of_2(n)), W=parent.shape[1], K=path.shape[1], num_warps=1,
    )  # fmt: skip


def launch_tree_rows(slot, cell, committed, depth, seen, pos_out, past_out, seen_out):
    rows = slot.shape[0]
    tree_rows_kernel[(triton.cdiv(rows, 128),)](
        slot, cell, committed, depth, seen, pos_out, past_out, seen_out, rows, W=depth.shape[1], BLOCK=128, num_warps=4
    )


def launch_compact_path(data, table, slot, committed, path, accepted):
    layers, two, pages, page_size, heads, dim = data.shape
    n, depth = heads * dim, path.shape[1]
    deep = triton.next_power_of_2(depth)
    block = min(triton.next_power_of_2(n), max(32, 2048 // deep))
    compact_path_kernel[(slot.shape[0], layers * two, triton.cdiv(n, block))](
        data, table, slot, committed, path, accepted, pages, table.shape[1], page_size, K=depth, KP=deep, N=n,
        BLOCK=block, num_warps=4,
    )  # fmt: skip
