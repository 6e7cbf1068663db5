"""What a frame of draft trees does to its rows and its cache, one launch each: where nodes stand; the accepted path.

Node n of a slot, breadth first, is kept at cache position committed + n, and rotated at committed + its depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.rope import cache_cells
from slipstream.types import MAX_TREE_NODES

OP = "slipstream::"


def placed_rows(
    slot_R: Tensor, cell_R: Tensor, committed_S: Tensor, depth_SW: Tensor, seen_SW: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """position, last committed position, seen nodes (bits) of rows kept at cell_R; int64 [R]. See device/state.py."""
    base_R = committed_S[slot_R]
    node_R = (cell_R - base_R).clamp(0, depth_SW.shape[1] - 1)
    return base_R + depth_SW[slot_R, node_R], base_R - 1, seen_SW[slot_R, node_R]


def moved_path(
    data: Tensor, table_SP: Tensor, slot_B: Tensor, committed_S: Tensor, path_BK: Tensor, accepted_B: Tensor
) -> None:
    """Keys and values of the accepted nodes path_BK[:, :accepted] move to committed + 1, + 2 ...: the sequence's own.

    data [layers, 2, pages, page size, K, D]. path_BK: nodes in order, each number larger than the one before it.
    committed_S: lengths before this round's commit; the root stands at `committed` already. All sources are read
    before anything is written: a node's new place may be another's old one.
    """
    slots, depth = path_BK.shape
    step_K = torch.arange(1, depth + 1, device=data.device)
    moves_BK = (step_K <= accepted_B[:, None]) & (slot_B > 0)[:, None]
    base_B1, slot_R = committed_S[slot_B][:, None], slot_B.repeat_interleave(depth)
    flat = data.flatten(0, 1).flatten(1, 2)
    cells = []
    for node_BK in (path_BK, step_K.expand_as(path_BK)):
        at_R = torch.where(moves_BK, base_B1 + node_BK, -1).reshape(slots * depth)
        page_R, cell_R = cache_cells(table_SP, slot_R, at_R, data.shape[3])
        cells.append(page_R * data.shape[3] + cell_R)
    flat.index_copy_(1, cells[1], flat.index_select(1, cells[0]))


Walked = tuple[Tensor, Tensor, Tensor, Tensor]


def walked_trees(
    target_R: Tensor, row_of_BN: Tensor, nodes_B: Tensor, slot_B: Tensor, parent_SW: Tensor, pending_SW: Tensor,
    depth: int,
) -> Walked:  # fmt: skip
    """Greedy verification of trees: path [B, depth], accepted [B], tokens [B, depth + 1], emitted [B]; int64.

    From the root to the first child whose token is its parent's target, until there is none; then the last node's
    target. The fields are those of verify.TreeVerdict. target_R: each row's argmax; nodes_B: nodes in use.
    """
    nodes = row_of_BN.shape[1]
    node_N = torch.arange(nodes, device=slot_B.device)
    parent_BN, token_BN = parent_SW[slot_B, :nodes], pending_SW[slot_B, :nodes]
    target_BN, at_B1 = target_R[row_of_BN], torch.zeros_like(nodes_B)[:, None]
    path, moves = [], []
    for _ in range(depth):
        right_BN = (token_BN == target_BN.gather(1, at_B1)) & (parent_BN == at_B1) & (node_N < nodes_B[:, None])
        next_B1 = torch.where(right_BN, node_N, nodes).amin(1, keepdim=True)
        moves.append(next_B1 < nodes)
        path.append(torch.where(moves[-1], next_B1, 0))
        at_B1 = torch.where(moves[-1], next_B1, at_B1)
    path_BK, accepted_B = torch.cat(path, 1), torch.cat(moves, 1).sum(1)
    emitted_B = torch.where(nodes_B > 0, accepted_B + 1, 0)
    step_W = torch.arange(depth + 1, device=slot_B.device)
    drafts_BW = torch.nn.functional.pad(token_BN.gather(1, path_BK), (0, 1))
    tokens_BW = torch.where(step_W < accepted_B[:, None], drafts_BW, target_BN.gather(1, at_B1))
    return path_BK, accepted_B, torch.where(step_W < emitted_B[:, None], tokens_BW, 0), emitted_B


@torch.library.custom_op(OP + "walk_trees", mutates_args=())
def walk_trees(
    target_R: Tensor, row_of_BN: Tensor, nodes_B: Tensor, slot_B: Tensor, parent_SW: Tensor, pending_SW: Tensor,
    depth: int,
) -> Walked:  # fmt: skip
    """`walked_trees` in one launch."""
    return walked_trees(target_R, row_of_BN, nodes_B, slot_B, parent_SW, pending_SW, depth)


@torch.library.custom_op(OP + "tree_rows", mutates_args=())
def tree_rows(
    slot_R: Tensor, cell_R: Tensor, committed_S: Tensor, depth_SW: Tensor, seen_SW: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`placed_rows` in one launch."""
    return placed_rows(slot_R, cell_R, committed_S, depth_SW, seen_SW)


@torch.library.custom_op(OP + "compact_path", mutates_args=("data",))
def compact_path(
    data: Tensor, table_SP: Tensor, slot_B: Tensor, committed_S: Tensor, path_BK: Tensor, accepted_B: Tensor
) -> None:
    """`moved_path` in one launch."""
    moved_path(data, table_SP, slot_B, committed_S, path_BK, accepted_B)


@tree_rows.register_fake
def _(
    slot_R: Tensor, cell_R: Tensor, committed_S: Tensor, depth_SW: Tensor, seen_SW: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows = slot_R.shape[0]
    return cell_R.new_empty(rows), cell_R.new_empty(rows), cell_R.new_empty(rows)


@compact_path.register_fake
def _(data: Tensor, table_SP: Tensor, slot_B: Tensor, committed_S: Tensor, path_BK: Tensor, accepted_B: Tensor) -> None:
    return None


@walk_trees.register_fake
def _(
    target_R: Tensor, row_of_BN: Tensor, nodes_B: Tensor, slot_B: Tensor, parent_SW: Tensor, pending_SW: Tensor,
    depth: int,
) -> Walked:  # fmt: skip
    slots = slot_B.shape[0]
    each = [slot_B.new_empty(slots) for _ in range(2)]
    return slot_B.new_empty(slots, depth), each[0], slot_B.new_empty(slots, depth + 1), each[1]


@walk_trees.register_kernel("cuda")
def _(
    target_R: Tensor, row_of_BN: Tensor, nodes_B: Tensor, slot_B: Tensor, parent_SW: Tensor, pending_SW: Tensor,
    depth: int,
) -> Walked:  # fmt: skip
    from slipstream.kernels.jit import tree

    slots = slot_B.shape[0]
    path_BK, tokens_BW = slot_B.new_empty(slots, depth), slot_B.new_empty(slots, depth + 1)
    accepted_B, emitted_B = slot_B.new_empty(slots), slot_B.new_empty(slots)
    tree.launch_walk_trees(
        target_R.contiguous(), row_of_BN.contiguous(), nodes_B.contiguous(), slot_B.contiguous(), parent_SW, pending_SW,
        path_BK, accepted_B, tokens_BW, emitted_B,
    )  # fmt: skip
    return path_BK, accepted_B, tokens_BW, emitted_B


@tree_rows.register_kernel("cuda")
def _(
    slot_R: Tensor, cell_R: Tensor, committed_S: Tensor, depth_SW: Tensor, seen_SW: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from slipstream.kernels.jit import tree

    out = [cell_R.new_empty(slot_R.shape[0]) for _ in range(3)]
    tree.launch_tree_rows(slot_R.contiguous(), cell_R.contiguous(), committed_S, depth_SW, seen_SW, *out)
    return out[0], out[1], out[2]


@compact_path.register_kernel("cuda")
def _(data: Tensor, table_SP: Tensor, slot_B: Tensor, committed_S: Tensor, path_BK: Tensor, accepted_B: Tensor) -> None:
    from slipstream.kernels.jit import tree

    assert path_BK.shape[1] < MAX_TREE_NODES, f"a path of {path_BK.shape[1]} nodes; at most {MAX_TREE_NODES - 1}"
    tree.launch_compact_path(
        data, table_SP, slot_B.contiguous(), committed_S, path_BK.contiguous(), accepted_B.contiguous()
    )
