"""EAGLE-3 drafting as a chain (Li et al. 2025, arXiv 2503.01840).

The feature of position i meets the token of position i + 1. That row is kept at cache position i + 1, so that a page
holds nothing that depends on a token beyond it and pages can be shared with the target's; position 0 holds no row.
Rows of rejected drafts are overwritten: by the drafts of the next round, then by its verified rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.attention.paged import PagedAttention, PrefillAttention, RowGrid, cache_slots
from slipstream.attention.protocol import AttentionContext
from slipstream.draft.choose import choose
from slipstream.draft.eagle3_model import Eagle3Model, load_eagle3
from slipstream.draft.protocol import Drafts, DraftView, FirstDraft, PrefillView
from slipstream.memory.kv import KVPages
from slipstream.types import Admit

if TYPE_CHECKING:
    from slipstream.kernels.workspace import Workspace

FIRST_CELL = 1
"""The first cache position that holds a row."""


class Eagle3Drafter:
    """Feeds the verified rows to the head (`extend`), whose last output is the first draft; then the head feeds itself.

    k drafts take k passes. Its pages have the target's ids and page table.
    """

    reads_hidden, rereads, lookahead = False, 1, True

    def __init__(
        self,
        model: Eagle3Model,
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
        self.taps = model.taps
        self.draft_vocab: int | None = model.vocab_size
        self.heads_per_kv = model.config.num_heads // model.config.num_kv_heads
        self.rotary = model.rotary(max_len + max_drafts + 1)

    @staticmethod
    def load(folder: Path, values: Mapping[str, Any], target: Any, *, seed: int | None = None) -> Eagle3Model:
        return load_eagle3(folder, values, target, seed=seed)

    def admit(self, admit: Admit) -> None:
        """Nothing to forget: all of its state is in the pages, which the new owner prefills."""

    def clear_pages(self, pages_P: Tensor) -> None:
        self.kv.clear(pages_P)

    def weight_bytes(self) -> int:
        return self.max_drafts * self.model.pass_bytes() + self.model.fc.bytes()

    def prefill(self, view: PrefillView) -> None:
        """Rows of a prompt. The last one's token is not sampled yet: `extend` writes that row again."""
        cell_R = torch.where(view.slot_R > 0, view.pos_R + 1, 0)
        token_R = view.history_SL[view.slot_R, cell_R]
        cache_slot_R = cache_slots(view.table_SP, view.slot_R, cell_R, self.kv.page_size)
        attention: AttentionContext
        if self.workspace is None:
            spans, at = [], 0
            for slot, start, length, first_page in view.spans:
                end = at + length
                span = self._paged(
                    RowGrid(pos_BW=cell_R[at:end].view(1, -1)), cache_slot_R[at:end], view.table_SP[slot : slot + 1],
                    start + length + 1, (first_page,),
                )  # fmt: skip
                spans.append((length, span))
                at = end
            attention = PrefillAttention(spans)
        else:
            # Chunks have many rows: split over the keys they would need more scratch than there is.
            attention = self._kernel(view.table_SP, view.slot_R, cell_R, cache_slot_R, per_slot=cell_R.shape[0])
        self.model.forward(token_R, self.model.fuse(view.taps), view.pos_R, self.rotary, attention)

    def extend(self, view: DraftView) -> FirstDraft:
        """One row for each position that the round committed, with the target's own features."""
        rows = view.rows
        kept_R = rows.pos_R < view.committed_S[rows.slot_R]
        slot_R = torch.where(kept_R, rows.slot_R, 0)
        cell_R = torch.where(kept_R, rows.pos_R + 1, 0)
        width = rows.row_of_BW.shape[1]
        depth_R = torch.arange(rows.pos_R.shape[0], device=cell_R.device) - rows.row_of_BW[rows.owner_R, 0]
        grid = RowGrid(
            pos_BW=cell_R[rows.row_of_BW], row_of_BW=rows.row_of_BW,
            cell_of_R=rows.owner_R * width + depth_R.clamp(max=width - 1),
        )  # fmt: skip
        attention = self._attention(view, grid, slot_R, cell_R, rows.slot_B, view.len_ub)
        state_RH, normed_RH = self.model.forward(
            view.history_SL[slot_R, cell_R], self.model.fuse(rows.taps), rows.pos_R, self.rotary, attention
        )
        last_B = rows.row_of_BW.gather(1, (view.emitted_B - 1).clamp(min=0)[:, None])[:, 0]
        token_B, q_BV = self._choose(normed_RH[last_B], view, 0)
        count_B = (view.slot_B > 0).to(torch.int64) * self.max_drafts
        return FirstDraft(token_B=token_B, count_B=count_B, q_BV=q_BV, state_BH=state_RH[last_B])

    def propose(self, first: FirstDraft, view: DraftView) -> Drafts:
        assert first.state_BH is not None, "extend gives a state"
        token_B, state_BH = first.token_B, first.state_BH
        tokens, laws = [token_B], [first.q_BV]
        for step in range(1, self.max_drafts):
            token_B, state_BH, q_BV = self._step(token_B, state_BH, view, step)
            tokens.append(token_B)
            laws.append(q_BV)
        dense = [q for q in laws if q is not None]
        return Drafts(
            token_BK=torch.stack(tokens, 1), count_B=first.count_B, q_BKV=torch.stack(dense, 1) if dense else None
        )

    def _step(
        self, token_B: Tensor, state_BH: Tensor, view: DraftView, step: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Draft `step`: the last draft's token with the head's own state, one position further."""
        cell_B = torch.where(view.slot_B > 0, view.committed_B + step, 0)
        attention = self._attention(
            view, RowGrid(pos_BW=cell_B[:, None]), view.slot_B, cell_B, view.slot_B, view.len_ub + step
        )
        state_BH, normed_BH = self.model.forward(token_B, state_BH, cell_B - 1, self.rotary, attention)
        token_B, q_BV = self._choose(normed_BH, view, step)
        return token_B, state_BH, q_BV

    def _choose(self, normed_BH: Tensor, view: DraftView, step: int) -> tuple[Tensor, Tensor | None]:
        model = self.model
        return choose(model.logits(normed_BH), view, step, real=self.real, vocab=model.vocab_size, id_D=model.id_D)

    def _attention(
        self, view: DraftView, grid: RowGrid, slot_R: Tensor, cell_R: Tensor, slot_B: Tensor, len_ub: int
    ) -> AttentionContext:
        cache_slot_R = cache_slots(view.table_SP, slot_R, cell_R, self.kv.page_size)
        if self.workspace is not None:
            return self._kernel(view.table_SP, slot_R, cell_R, cache_slot_R)
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
        self, table_SP: Tensor, slot_R: Tensor, cell_R: Tensor, cache_slot_R: Tensor, per_slot: int = 1
    ) -> AttentionContext:
        from slipstream.attention.kernel import KernelAttention

        assert self.workspace is not None
        return KernelAttention(
            self.kv, table_SP=table_SP, slot_R=slot_R, pos_R=cell_R, cache_slot_R=cache_slot_R,
            workspace=self.workspace, first_cell=FIRST_CELL, per_slot=per_slot,
        )  # fmt: skip
