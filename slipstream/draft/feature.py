"""Drafting a chain from the target's features: what EAGLE-3 and MTP heads have in common.

Sources: Li et al. 2024 (arXiv 2401.15077) and 2025 (arXiv 2503.01840); DeepSeek-V3 (arXiv 2412.19437), section 2.2.

The feature of position i meets the token of position i + 1. That row is kept at cache position i + 1, so that a page
holds nothing that depends on a token beyond it and pages can be shared with the target's; position 0 holds no row.
Rows of rejected drafts are overwritten: by the drafts of the next round, then by its verified rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from slipstream.attention.paged import PagedAttention, RowGrid, cache_slots, span_attention
from slipstream.attention.protocol import AttentionContext, TreeSight
from slipstream.draft.choose import choose
from slipstream.draft.protocol import Drafts, DraftView, FirstDraft, PrefillView, TargetRows
from slipstream.kernels.eagle import feature_rows, learnt_rows
from slipstream.memory.kv import KVPages
from slipstream.models.config import ModelConfig
from slipstream.models.rope import RotaryTable
from slipstream.types import Admit

if TYPE_CHECKING:
    from slipstream.kernels.workspace import Workspace

FIRST_CELL = 1
"""The first cache position that holds a row."""


@dataclass(frozen=True, kw_only=True)
class HeadOutput:
    """state_BH: what the next step reads. logits_BD: over the draft vocabulary; overwriting them is allowed.

    token_B: their argmax as the target's ids, where the pass yields it; the logits may then be unwritten memory.
    """

    state_BH: Tensor
    logits_BD: Tensor
    token_B: Tensor | None = None


class FeatureHead(Protocol):
    """Weights and formulas of a head; rows, caches and sampling are the drafter's.

    taps, reads_hidden: what of the target it reads, as in `protocol.Drafter`. config: sizes of its decoder layers.
    id_D: the target's ids of the draft vocabulary, None where it is all of the `vocab_size` tokens.
    """

    taps: tuple[int, ...]
    reads_hidden: bool
    config: ModelConfig
    vocab_size: int
    id_D: Tensor | None

    def rotary(self, positions: int) -> RotaryTable: ...

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """What the first step reads [R, H], from the target's features [R, Ht]: taps, then hidden states if read."""
        ...

    def forward(
        self,
        token_R: Tensor,
        x_RH: Tensor,
        pos_R: Tensor,
        rotary: RotaryTable,
        attn: AttentionContext,
        wanted_B: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What the next step reads [B, H], and what `logits` reads [B, H], of the rows wanted_B [B], else of all.

        x_RH: from `fuse`, or the last step's. Keys and values of all rows are kept.
        """
        ...

    def logits(self, normed_RH: Tensor) -> Tensor:
        """[R, D] over the draft vocabulary."""
        ...

    def fused(self, kv: KVPages, workspace: Workspace, *, positions: int, first_cell: int) -> FusedPass | None:
        """On a GPU: its pass for few rows as fused kernels, None where they do not fit it."""
        ...

    def pass_bytes(self) -> int:
        """Bytes of weights that one draft pass streams."""
        ...

    def fuse_bytes(self) -> int:
        """Bytes of weights that `fuse` streams."""
        ...


class FusedPass(Protocol):
    """A head's pass over at most max_rows rows against paged KV."""

    max_rows: int

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """As `FeatureHead.fuse`."""
        ...

    def run(
        self,
        token_R: Tensor,
        x_RH: Tensor,
        slot_R: Tensor,
        cell_R: Tensor,
        table_SP: Tensor,
        *,
        last_B: Tensor | None = None,
        logits: bool,
        per_slot: int = 1,
        rope_R: Tensor | None = None,
        sight: TreeSight | None = None,
    ) -> HeadOutput:
        """Rows of slot 0 are padding. last_B [B]: the rows whose output is wanted, all where it is None.

        logits=False: only the choice is wanted. per_slot: rows of one slot. rope_R, sight: of rows of trees, the cell
        that each is rotated for, and what it sees.
        """
        ...


class FeatureDrafter:
    """Feeds the verified rows to the head (`extend`), whose last output is the first draft; then the head feeds itself.

    k drafts take k passes. Its pages have the target's ids and page table.
    """

    rereads, lookahead = 1, True

    def __init__(
        self,
        model: FeatureHead,
        *,
        kv: KVPages,
        max_drafts: int,
        max_len: int,
        slots: int = 0,
        real: torch.dtype = torch.float32,
        workspace: Workspace | None = None,
    ) -> None:
        """max_len: longest sequence. slots: unused, it keeps nothing per slot. real: the type of q.

        workspace: on a GPU, the kernels' scratch.
        """
        self.model, self.kv, self.max_drafts, self.real, self.workspace = model, kv, max_drafts, real, workspace
        self.taps, self.reads_hidden = model.taps, model.reads_hidden
        self.draft_vocab: int | None = model.vocab_size
        self.heads_per_kv = model.config.num_heads // model.config.num_kv_heads
        self.rotary = model.rotary(max_len + max_drafts + 1)
        self.fused: FusedPass | None = None
        if workspace is not None:
            self.fused = model.fused(kv, workspace, positions=max_len + max_drafts + 2, first_cell=FIRST_CELL)

    def admit(self, admit: Admit) -> None:
        """Nothing to forget: all of its state is in the pages, which the new owner prefills."""

    def clear_pages(self, pages_P: Tensor) -> None:
        self.kv.clear(pages_P)

    def weight_bytes(self) -> int:
        return self.max_drafts * self.model.pass_bytes() + self.model.fuse_bytes()

    def prefill(self, view: PrefillView) -> None:
        """Rows of a prompt. The last one's token is not sampled yet: `extend` writes that row again."""
        cell_R = torch.where(view.slot_R > 0, view.pos_R + 1, 0)
        token_R = view.history_SL[view.slot_R, cell_R]
        cache_slot_R = cache_slots(view.table_SP, view.slot_R, cell_R, self.kv.page_size)
        attention: AttentionContext
        if self.workspace is None:
            attention = span_attention(
                self.kv, [(slot, start + 1, length, first) for slot, start, length, first in view.spans], pos_R=cell_R,
                cache_slot_R=cache_slot_R, table_SP=view.table_SP, heads_per_kv=self.heads_per_kv,
                first_cell=FIRST_CELL,
            )  # fmt: skip
        else:
            from slipstream.attention.kernel import ChunkAttention

            attention = ChunkAttention(
                self.kv, table_SP=view.table_SP, slot_R=view.slot_R, pos_R=cell_R, cache_slot_R=cache_slot_R,
                heads_per_kv=self.heads_per_kv, first_cell=FIRST_CELL,
            )  # fmt: skip
        none_B = view.slot_R[:0]
        self.model.forward(token_R, self.model.fuse(self._features(view)), view.pos_R, self.rotary, attention, none_B)

    def extend(self, view: DraftView) -> FirstDraft:
        out = self._learn(view, logits=view.sampled)
        token_B, q_BV = self._choose(out, view, 0)
        count_B = torch.full_like(view.slot_B, min(self.max_drafts, view.drafts))
        return FirstDraft(token_B=token_B, count_B=count_B, q_BV=q_BV, state_BH=out.state_BH)

    def _features(self, rows: TargetRows | PrefillView) -> tuple[Tensor, ...]:
        if not self.reads_hidden:
            return rows.taps
        assert rows.hidden_RH is not None, "the frame gives what the drafter asked for"
        return (*rows.taps, rows.hidden_RH)

    def _learn(self, view: DraftView, *, logits: bool) -> HeadOutput:
        """One row for each position that the round committed, with the target's own features; output of the last."""
        rows = view.rows
        learn = learnt_rows if self.workspace is None else feature_rows
        slot_R, cell_R, token_R = learn(rows.slot_R, rows.pos_R, view.committed_S, view.history_SL)
        last_B = rows.row_of_BW.gather(1, (view.emitted_B - 1).clamp(min=0)[:, None])[:, 0]
        width = rows.row_of_BW.shape[1]
        if self.fused is not None and slot_R.shape[0] <= self.fused.max_rows:
            return self.fused.run(
                token_R, self.fused.features(self._features(rows)), slot_R, cell_R, view.table_SP, last_B=last_B,
                logits=logits, per_slot=width,
            )  # fmt: skip
        depth_R = torch.arange(slot_R.shape[0], device=slot_R.device) - rows.row_of_BW[rows.owner_R, 0]
        grid = RowGrid(
            pos_BW=cell_R[rows.row_of_BW], row_of_BW=rows.row_of_BW,
            cell_of_R=rows.owner_R * width + depth_R.clamp(max=width - 1),
        )  # fmt: skip
        attention = self._attention(view, grid, slot_R, cell_R, rows.slot_B, view.len_ub)
        return self._run(token_R, self.model.fuse(self._features(rows)), cell_R, attention, last_B)

    def propose(self, first: FirstDraft, view: DraftView) -> Drafts:
        assert first.state_BH is not None, "extend gives a state"
        token_B, state_BH = first.token_B, first.state_BH
        tokens, laws = [token_B], [first.q_BV]
        step_K1 = torch.arange(self.max_drafts, device=token_B.device)[:, None]
        cell_KB = torch.where(view.slot_B > 0, view.committed_B + step_K1, 0)
        for step in range(1, min(self.max_drafts, view.drafts)):
            token_B, state_BH, q_BV = self._step(token_B, state_BH, cell_KB[step], view, step)
            tokens.append(token_B)
            laws.append(q_BV)
        dense = [q for q in laws if q is not None]
        return Drafts(
            token_BK=torch.stack(tokens, 1), count_B=first.count_B, q_BKV=torch.stack(dense, 1) if dense else None
        )

    def _step(
        self, token_B: Tensor, state_BH: Tensor, cell_B: Tensor, view: DraftView, step: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Draft `step`: the last draft's token with the head's own state, one position further."""
        if self.fused is not None and token_B.shape[0] <= self.fused.max_rows:
            out = self.fused.run(token_B, state_BH, view.slot_B, cell_B, view.table_SP, logits=view.sampled)
        else:
            attention = self._attention(
                view, RowGrid(pos_BW=cell_B[:, None]), view.slot_B, cell_B, view.slot_B, view.len_ub + step
            )
            out = self._run(token_B, state_BH, cell_B, attention, None)
        token_B, q_BV = self._choose(out, view, step)
        return token_B, out.state_BH, q_BV

    def _run(
        self, token_R: Tensor, x_RH: Tensor, cell_R: Tensor, attention: AttentionContext, last_B: Tensor | None
    ) -> HeadOutput:
        """One pass in plain operations; its output is that of the rows last_B [B], all of them where it is None."""
        state_BH, normed_BH = self.model.forward(token_R, x_RH, cell_R - FIRST_CELL, self.rotary, attention, last_B)
        return HeadOutput(state_BH=state_BH, logits_BD=self.model.logits(normed_BH))

    def _choose(self, out: HeadOutput, view: DraftView, step: int) -> tuple[Tensor, Tensor | None]:
        if out.token_B is not None and not view.sampled:
            return out.token_B, None
        model = self.model
        return choose(out.logits_BD, view, step, real=self.real, vocab=model.vocab_size, id_D=model.id_D)

    def _attention(
        self, view: DraftView, grid: RowGrid, slot_R: Tensor, cell_R: Tensor, slot_B: Tensor, len_ub: int
    ) -> AttentionContext:
        cache_slot_R = cache_slots(view.table_SP, slot_R, cell_R, self.kv.page_size)
        if self.workspace is not None:
            return self._kernel(view.table_SP, slot_R, cell_R, cache_slot_R, grid.pos_BW.shape[1])
        reach = min(len_ub, view.table_SP.shape[1] * self.kv.page_size)
        return self._paged(grid, cache_slot_R, view.table_SP[slot_B], reach, view.first_page)

    def _paged(
        self, grid: RowGrid, cache_slot_R: Tensor, table_BP: Tensor, len_ub: int, first_page: Sequence[int]
    ) -> PagedAttention:
        return PagedAttention(
            self.kv, grid=grid, cache_slot_R=cache_slot_R, table_BP=table_BP, len_ub=len_ub,
            heads_per_kv=self.heads_per_kv, mask_dtype=self.kv.data.dtype, first_page=first_page,
            first_cell=FIRST_CELL,
        )  # fmt: skip

    def _kernel(
        self,
        table_SP: Tensor,
        slot_R: Tensor,
        cell_R: Tensor,
        cache_slot_R: Tensor,
        per_slot: int,
        sight: TreeSight | None = None,
    ) -> AttentionContext:
        from slipstream.attention.kernel import KernelAttention

        assert self.workspace is not None
        return KernelAttention(
            self.kv, table_SP=table_SP, slot_R=slot_R, pos_R=cell_R, cache_slot_R=cache_slot_R,
            workspace=self.workspace, first_cell=FIRST_CELL, per_slot=per_slot, sight=sight,
        )  # fmt: skip
