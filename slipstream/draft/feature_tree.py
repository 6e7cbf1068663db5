"""A head that drafts from features, drafting a tree (EAGLE-2: Li et al. 2024, arXiv 2406.16858, section 4).

The verified rows give the first level. Each later pass feeds the `topk` best nodes of a level, which see the committed
rows and their own ancestors; the best nodes of all levels are the drafts. A node's row is kept behind the committed
ones, at committed + 1 + its number among those that were fed, and is forgotten: the next round's verified rows, with
the target's features, are written over it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.attention.paged import RowGrid, cache_slots
from slipstream.attention.protocol import AttentionContext, TreeSight
from slipstream.draft.feature import FIRST_CELL, FeatureDrafter, FeatureHead, HeadOutput
from slipstream.draft.protocol import Drafts, DraftView, FirstDraft
from slipstream.draft.tree import Level, TreeShape, expand, expand_root, rerank


class Frontier(NamedTuple):
    """The nodes that are fed next, K of each slot, and where. int64 but state.

    token_BK: their tokens, the target's ids. state_BKH: the head's output at their parents. cell_BK: where their rows
    are kept; rope_BK: the cell that they are rotated for; seen_BK: bit j for the row at committed + 1 + j. own_K: bits
    of their own rows.
    """

    token_BK: Tensor
    state_BKH: Tensor
    cell_BK: Tensor
    rope_BK: Tensor
    seen_BK: Tensor
    own_K: Tensor


class FeatureTreeDrafter(FeatureDrafter):
    """As FeatureDrafter; `levels` passes of the head per round. Drafts are the likeliest nodes, never sampled."""

    def __init__(self, model: FeatureHead, *, shape: TreeShape, max_len: int, max_drafts: int, **options: Any) -> None:
        """shape: of the trees; max_drafts: total - 1. The rest as in FeatureDrafter."""
        super().__init__(model, max_len=max_len + shape.levels, max_drafts=max_drafts, **options)
        assert max_drafts == shape.total - 1, f"{max_drafts} drafts, a tree of {shape.total} nodes"
        self.shape, self.draft_vocab = shape, None

    def weight_bytes(self) -> int:
        return self.shape.levels * self.model.pass_bytes() + self.model.fuse_bytes()

    def extend(self, view: DraftView) -> FirstDraft:
        out = self._learn(view, logits=True)
        count_B = torch.full_like(view.slot_B, min(self.max_drafts, view.drafts))
        token_B, id_D = out.token_B, self.model.id_D
        if token_B is None:
            token_B = out.logits_BD.argmax(1)
            token_B = token_B if id_D is None else id_D[token_B]
        return FirstDraft(token_B=token_B, count_B=count_B, state_BH=out.state_BH, logits_BD=out.logits_BD)

    def propose(self, first: FirstDraft, view: DraftView) -> Drafts:
        assert first.logits_BD is not None and first.state_BH is not None, "extend gives logits and a state"
        level = expand_root(first.logits_BD.log_softmax(1), self.shape.topk)
        frontier = self._first_frontier(level, first.state_BH, view)
        levels = [level]
        for _ in range(1, self.shape.levels):
            out = self._feed(frontier, view)
            level = expand(out.logits_BD.log_softmax(1).unflatten(0, frontier.token_BK.shape), level)
            frontier = self._next_frontier(level, out.state_BH, frontier)
            levels.append(level)
        root_B = view.history_SL[view.slot_B, view.committed_B]
        tree = rerank(levels, self.shape.total, root_B, self.model.id_D)
        return Drafts(token_BK=tree.token_BN[:, 1:], count_B=first.count_B, tree=tree)

    def _first_frontier(self, level: Level, state_BH: Tensor, view: DraftView) -> Frontier:
        """The children of the root: all have its state."""
        k, token_BK = self.shape.topk, self._tokens(level)
        step_K = torch.arange(k, device=token_BK.device)
        live_B1 = (view.slot_B > 0)[:, None]
        cell_BK = torch.where(live_B1, view.committed_B[:, None] + 1 + step_K, 0)
        own_K = torch.ones_like(step_K) << step_K
        return Frontier(
            token_BK=token_BK, state_BKH=state_BH[:, None].expand(-1, k, -1), cell_BK=cell_BK,
            rope_BK=torch.where(live_B1, view.committed_B[:, None] + 1, 0).expand(-1, k),
            seen_BK=own_K.expand_as(token_BK), own_K=own_K,
        )  # fmt: skip

    def _next_frontier(self, level: Level, state_RH: Tensor, last: Frontier) -> Frontier:
        """The best nodes of a level, whose parents were `last`. The same for every level: no step number."""
        k = self.shape.topk
        parent_BK = torch.div(level.frontier_BK, k, rounding_mode="floor")
        live_BK = (last.cell_BK > 0).to(torch.int64)
        own_K = last.own_K << k
        state_BKH = state_RH.unflatten(0, parent_BK.shape)
        return Frontier(
            token_BK=self._tokens(level),
            state_BKH=state_BKH.gather(1, parent_BK[:, :, None].expand_as(state_BKH)),
            cell_BK=last.cell_BK + k * live_BK, rope_BK=last.rope_BK + live_BK,
            seen_BK=last.seen_BK.gather(1, parent_BK) | own_K, own_K=own_K,
        )  # fmt: skip

    def _tokens(self, level: Level) -> Tensor:
        draft_BK, id_D = level.frontier(level.draft_BC), self.model.id_D
        return draft_BK if id_D is None else id_D[draft_BK]

    def _feed(self, frontier: Frontier, view: DraftView) -> HeadOutput:
        """One pass of the head over the frontier, B * K rows in order."""
        k = frontier.token_BK.shape[1]
        token_R, state_RH = frontier.token_BK.flatten(), frontier.state_BKH.flatten(0, 1)
        cell_R, rope_R = frontier.cell_BK.flatten(), frontier.rope_BK.flatten()
        slot_R = view.slot_B[:, None].expand(-1, k).flatten()
        past_BK = view.committed_B[:, None].expand(-1, k)
        sight = TreeSight(past_R=past_BK.flatten(), seen_R=frontier.seen_BK.flatten())
        if self.fused is not None and token_R.shape[0] <= self.fused.max_rows:
            return self.fused.run(
                token_R, state_RH, slot_R, cell_R, view.table_SP, logits=True, per_slot=k, rope_R=rope_R, sight=sight
            )
        cache_slot_R = cache_slots(view.table_SP, slot_R, cell_R, self.kv.page_size)
        attention: AttentionContext
        if self.workspace is not None:
            attention = self._kernel(view.table_SP, slot_R, cell_R, cache_slot_R, k, sight)
        else:
            reach = min(view.len_ub + self.shape.expanded, view.table_SP.shape[1] * self.kv.page_size)
            attention = self._paged(
                RowGrid(pos_BW=past_BK, seen_BW=frontier.seen_BK), cache_slot_R, view.table_SP[view.slot_B], reach,
                view.first_page,
            )  # fmt: skip
        state_RH, normed_RH = self.model.forward(token_R, state_RH, rope_R - FIRST_CELL, self.rotary, attention)
        return HeadOutput(state_BH=state_RH, logits_BD=self.model.logits(normed_RH))
