"""A decode frame over draft trees: where the nodes stand, verification and commit, and the accepted path as a chain.

Slot state holds each slot's pending tree (device/state.py). Node n, breadth first, is kept at cache position
committed + n, rotated for committed + its depth, and sees the committed positions and its ancestors. After
verification the accepted nodes' keys and values move together; the drafter then sees a chain of accepted rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.attention.protocol import TreeSight
from slipstream.device.state import SlotState
from slipstream.draft.protocol import TargetRows
from slipstream.draft.tree import DraftTree, TreeShape, seen_bits
from slipstream.kernels import tree as ops
from slipstream.memory.kv import KVPages
from slipstream.sampling.slot_params import SlotParams
from slipstream.types import FramePlan
from slipstream.verify import TreeRows, TreeVerdict, verify_tree


def place_rows(state: SlotState, slot_R: Tensor, cell_R: Tensor, *, kernels: bool) -> tuple[Tensor, TreeSight]:
    """Positions [R] of rows kept at cell_R, and what they see."""
    place = ops.tree_rows if kernels else ops.placed_rows
    pos_R, past_R, seen_R = place(slot_R, cell_R, state.committed_S, state.depth_SW, state.seen_SW)
    return pos_R, TreeSight(past_R=past_R, seen_R=seen_R)


def judge(
    state: SlotState,
    plan: FramePlan,
    shape: TreeShape,
    rows: TargetRows,
    logits_RV: Tensor,
    target_R: Tensor | None,
    params: SlotParams,
    synthetic: float | None,
) -> TreeVerdict:
    """Each slot's pending tree by its own rule: greedy, coupled, or target-only, as its drafts are the likeliest."""
    slot_B, (_, width) = rows.slot_B, rows.row_of_BW.shape
    return verify_tree(
        logits_RV,
        TreeRows(
            mode_B=params.mode, key_B=params.key, child_B=params.child, base_B=state.committed_S[slot_B],
            row_of_BN=rows.row_of_BW, nodes_B=rows.rows_B, parent_BN=state.parent_SW[slot_B, :width],
            token_BN=state.pending_SW[slot_B, :width], depth=min(shape.depth, width - 1), fan=shape.topk,
        ),
        sampled=plan.sampled, coupled=plan.coupled, rejection=plan.rejection, target_R=target_R, synthetic=synthetic,
    )  # fmt: skip


def judge_greedy(state: SlotState, shape: TreeShape, rows: TargetRows, target_R: Tensor) -> TreeVerdict:
    """`judge` where every slot is greedy, in one launch. target_R: the rows' argmax."""
    path_BK, accepted_B, tokens_BW, n_emitted_B = ops.walk_trees(
        target_R, rows.row_of_BW, rows.rows_B, rows.slot_B, state.parent_SW, state.pending_SW,
        min(shape.depth, rows.row_of_BW.shape[1] - 1),
    )  # fmt: skip
    return TreeVerdict(path_BK=path_BK, accepted_B=accepted_B, tokens_BW=tokens_BW, n_emitted_B=n_emitted_B)


def path_rows(state: SlotState, rows: TargetRows, verdict: TreeVerdict) -> TargetRows:
    """The root and the accepted nodes as the rows of a chain: B * (depth + 1) flat rows. Call it before the commit."""
    slot_B = rows.slot_B
    node_BJ = torch.nn.functional.pad(verdict.path_BK, (1, 0))
    slots, width = node_BJ.shape
    step_J = torch.arange(width, device=slot_B.device)
    live_BJ = step_J < verdict.n_emitted_B[:, None]
    row_R = rows.row_of_BW.gather(1, node_BJ).flatten()
    index_R = torch.arange(slots * width, device=slot_B.device)
    return TargetRows(
        slot_R=torch.where(live_BJ, slot_B[:, None], 0).flatten(),
        pos_R=torch.where(live_BJ, state.committed_S[slot_B][:, None] + step_J, 0).flatten(),
        token_R=rows.token_R[row_R], owner_R=torch.div(index_R, width, rounding_mode="floor"), slot_B=slot_B,
        rows_B=verdict.n_emitted_B, row_of_BW=index_R.view(slots, width),
        taps=tuple(tap_RH[row_R] for tap_RH in rows.taps),
        hidden_RH=None if rows.hidden_RH is None else rows.hidden_RH[row_R],
    )  # fmt: skip


def compact(
    kv: KVPages, table_SP: Tensor, state: SlotState, slot_B: Tensor, verdict: TreeVerdict, *, kernels: bool
) -> None:
    """The accepted nodes' keys and values to their own positions. Call it before the commit."""
    move = ops.compact_path if kernels else ops.moved_path
    move(kv.data, table_SP, slot_B, state.committed_S, verdict.path_BK, verdict.accepted_B)


def plant(
    state: SlotState, tree: DraftTree, shape: TreeShape, count_B: Tensor, record_BC: Tensor, slot_B: Tensor
) -> None:
    """Make trees the slots' pending rows; say in state and record how many of their drafts the next frame may verify.

    Of the count_B that the drafter offers those that fit before max_len by their depth, and what the slot asked for; a
    slot that has ended gets none. They are always the first ones, breadth first, so that no node is without its parent.
    """
    state.pending_SW[slot_B, 1:] = tree.token_BN[:, 1:]
    state.parent_SW[slot_B] = tree.parent_BN
    state.depth_SW[slot_B] = tree.depth_BN
    state.seen_SW[slot_B] = seen_bits(tree.parent_BN, shape.depth)
    room_B = (state.max_len_S[slot_B] - state.committed_S[slot_B] - 2).clamp(min=0)
    # A tree that fits by its depth may have more nodes than places are left: rows past the limit have pages.
    fits_B = torch.minimum((tree.depth_BN[:, 1:] <= room_B[:, None]).sum(1), count_B)
    count_B = torch.where(state.active_S[slot_B] > 0, torch.minimum(fits_B, state.max_drafts_S[slot_B]), 0)
    state.draft_count_S[slot_B] = count_B
    record_BC[:, 5] = count_B
