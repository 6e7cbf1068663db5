"""One frame: build rows, target, process, verify, finish test, commit, draft, record.

A function of device state only. Python here branches on the plan (host facts), never on a tensor's value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.attention.paged import PagedAttention, PrefillAttention, RowGrid, cache_slots
from slipstream.attention.protocol import AttentionContext
from slipstream.device.state import SlotState
from slipstream.draft.protocol import Drafter, DraftView, PrefillView
from slipstream.memory.kv import KVPages
from slipstream.sampling.processors import process_logits
from slipstream.sampling.slot_params import SlotParams
from slipstream.types import FinishCode, FramePlan, PrefillSpan
from slipstream.verify import DenseQ, OneHot, VerifyRows, verify

if TYPE_CHECKING:
    from slipstream.kernels.workspace import Workspace
    from slipstream.models.fused import FusedDecoder

RECORD_COLUMNS = 6


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The verified rows of a frame: R flat rows over B slots, grid cells [B, W].

    rows_B: rows each slot got, 0 when it is not active. depth_R: 0 is the bonus token, i the i-th draft.
    Padded rows stand at slot 0, position 0.
    """

    slot_R: Tensor
    pos_R: Tensor
    token_R: Tensor
    owner_R: Tensor
    rows_B: Tensor
    grid: RowGrid


@dataclass(frozen=True, kw_only=True)
class Record:
    """What goes down the output ring: per slot generation, emitted tokens and counts (int64)."""

    generation_B: Tensor
    token_BW: Tensor
    n_emitted_B: Tensor
    accepted_B: Tensor
    drafted_B: Tensor
    finish_B: Tensor
    next_drafts_B: Tensor

    def pack(self) -> Tensor:
        """int64 [B, RECORD_COLUMNS + W]: generation, emitted, accepted, drafted, finish, next drafts, tokens."""
        counts = (
            self.generation_B, self.n_emitted_B, self.accepted_B, self.drafted_B, self.finish_B, self.next_drafts_B,
        )  # fmt: skip
        return torch.cat([torch.stack(counts, 1), self.token_BW], 1)


def pack_rows(state: SlotState, slot_B: Tensor, *, rows: int, width: int) -> Rows:
    """Pack at most `rows` rows: one for every active slot's bonus token, then its drafts, in slot order.

    What is left out depends on how many drafts there are, never on which tokens they are, so truncation
    cannot bias the output.
    """
    device = slot_B.device
    slots = slot_B.shape[0]
    active_B = state.active_S[slot_B]
    committed_B = state.committed_S[slot_B]
    extra_B = state.draft_count_S[slot_B].clamp(max=width - 1) * active_B
    room_B = rows - active_B.sum() - (extra_B.cumsum(0) - extra_B)
    rows_B = active_B + torch.minimum(room_B.clamp(min=0), extra_B)
    end_B = rows_B.cumsum(0)
    start_B = end_B - rows_B
    row_R = torch.arange(rows, device=device)
    owner_R = torch.searchsorted(end_B, row_R, right=True).clamp(max=slots - 1)
    depth_R = row_R - start_B[owner_R]
    live_R = row_R < end_B[-1]
    depth_R = torch.where(live_R, depth_R, 0)
    slot_R = torch.where(live_R, slot_B[owner_R], 0)
    pos_R = torch.where(live_R, committed_B[owner_R] + depth_R, 0)
    token_R = torch.where(live_R, state.pending_SW[slot_R, depth_R], 0)
    if rows == width and slots == 1:
        grid = RowGrid(pos_BW=pos_R.view(1, width))
    else:
        depth_W = torch.arange(width, device=device)
        row_of_BW = (start_B[:, None] + torch.minimum(depth_W, (rows_B - 1).clamp(min=0)[:, None])).clamp(max=rows - 1)
        grid = RowGrid(pos_BW=pos_R[row_of_BW], row_of_BW=row_of_BW, cell_of_R=owner_R * width + depth_R)
    return Rows(slot_R=slot_R, pos_R=pos_R, token_R=token_R, owner_R=owner_R, rows_B=rows_B, grid=grid)


class Frame:
    """Owns the target, its cache and the drafter; runs decode frames and prefill chunks over slot state."""

    def __init__(
        self,
        *,
        model: Any,
        kv: KVPages,
        state: SlotState,
        drafter: Drafter | None,
        synthetic: float | None = None,
        fused: FusedDecoder | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        """fused, workspace: on a GPU, the target's pass as kernels, and the kernels' scratch."""
        self.model = model
        self.kv = kv
        self.state = state
        self.drafter = drafter
        self.synthetic = synthetic
        self.fused, self.workspace = fused, workspace
        self.clears_pages = workspace is None  # the kernels never look at masked columns
        self.heads_per_kv = model.config.num_heads // model.config.num_kv_heads

    def decode(self, plan: FramePlan, slot_B: Tensor) -> Record:
        """Verify each slot's pending rows, commit what was accepted and draft for the next frame."""
        state = self.state
        rows = pack_rows(state, slot_B, rows=plan.rows, width=plan.width)
        logits_RV, target_R = self._target(plan, rows, slot_B)
        row_of_BW = rows.grid.row_of_BW
        if row_of_BW is None:
            row_of_BW = torch.arange(plan.rows, device=slot_B.device).view(1, -1)
        return self._finish(
            plan, slot_B, logits_RV, target_R, rows.owner_R, rows.pos_R, row_of_BW, rows.rows_B,
            fresh=False, len_ub=plan.len_ub, first_page=plan.first_page,
        )  # fmt: skip

    def _target(self, plan: FramePlan, rows: Rows, slot_B: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [R, V] of the rows; their argmax too where the pass yields it, and then, in a greedy frame, alone."""
        table_SP = self.state.table_SP
        if self.fused is not None and plan.rows <= self.fused.max_rows:
            wanted = plan.sampled or plan.min_tokens
            out = self.fused.run(rows.token_R, rows.slot_R, rows.pos_R, table_SP, logits=wanted)
            return out.logits_RV, None if wanted else out.target_R
        cache_slot_R = cache_slots(table_SP, rows.slot_R, rows.pos_R, self.kv.page_size)
        attention: AttentionContext
        if self.workspace is not None:
            from slipstream.attention.kernel import KernelAttention

            attention = KernelAttention(
                self.kv, table_SP=table_SP, slot_R=rows.slot_R, pos_R=rows.pos_R, cache_slot_R=cache_slot_R,
                workspace=self.workspace,
            )  # fmt: skip
        else:
            attention = PagedAttention(
                self.kv, grid=rows.grid, cache_slot_R=cache_slot_R, table_BP=table_SP[slot_B], len_ub=plan.len_ub,
                heads_per_kv=self.heads_per_kv, mask_dtype=self.kv.data.dtype, first_page=plan.first_page,
            )  # fmt: skip
        hidden_RH, _ = self.model.forward(rows.token_R, rows.pos_R, attention)
        return self.model.logits(hidden_RH), None

    def prefill(self, plan: FramePlan, spans: Sequence[PrefillSpan], num_last: int) -> Record | None:
        """Run prompt rows; the num_last spans with `last` sample their first token and start to decode."""
        state, device = self.state, self.state.device
        total = sum(s.length for s in spans)
        slot_R, pos_R = state.chunk_slot_R[:total], state.chunk_pos_R[:total]
        token_R = state.history_SL[slot_R, pos_R]
        cache_slot_R = cache_slots(state.table_SP, slot_R, pos_R, self.kv.page_size)
        attentions, at = [], 0
        for span, first_page in zip(spans, plan.prefill_first_page, strict=True):
            end = at + span.length
            attention = PagedAttention(
                self.kv,
                grid=RowGrid(pos_BW=pos_R[at:end].view(1, -1)),
                cache_slot_R=cache_slot_R[at:end],
                table_BP=state.table_SP[span.slot : span.slot + 1],
                len_ub=span.start + span.length,
                heads_per_kv=self.heads_per_kv,
                mask_dtype=self.kv.data.dtype,
                first_page=(first_page,) if self.clears_pages else (),
                clean=not self.clears_pages,
            )
            attentions.append((span.length, attention))
            at = end
        hidden_RH, _ = self.model.forward(token_R, pos_R, PrefillAttention(attentions))
        if self.drafter is not None:
            packed = [(s.slot, s.start, s.length, f) for s, f in zip(spans, plan.prefill_first_page, strict=True)]
            self.drafter.prefill(
                PrefillView(
                    token_R=token_R,
                    pos_R=pos_R,
                    cache_slot_R=cache_slot_R,
                    table_SP=state.table_SP,
                    spans=packed,
                )
            )
        if num_last == 0:
            return None
        row_B, last_B = state.last_row_B[:num_last], state.last_slot_B[:num_last]
        logits_BV = self.model.logits(hidden_RH[row_B])
        one_B = torch.ones_like(last_B)
        index_B = torch.arange(last_B.shape[0], device=device)
        return self._finish(
            plan, last_B, logits_BV, None, index_B, pos_R[row_B], index_B[:, None], one_B,
            fresh=True,
            len_ub=max(s.start + s.length for s in spans if s.last) + 1,
            first_page=tuple(f for s, f in zip(spans, plan.prefill_first_page, strict=True) if s.last),
        )  # fmt: skip

    def _finish(
        self,
        plan: FramePlan,
        slot_B: Tensor,
        logits_RV: Tensor,
        target_R: Tensor | None,
        owner_R: Tensor,
        pos_R: Tensor,
        row_of_BW: Tensor,
        rows_B: Tensor,
        *,
        fresh: bool,
        len_ub: int,
        first_page: Sequence[int],
    ) -> Record:
        """Process, verify, finish test, commit, draft, record: one path for decode, prefill and plain decoding."""
        state = self.state
        params = state.params(slot_B)
        base_B = state.committed_S[slot_B]
        if plan.sampled or plan.min_tokens:
            logits_RV = self._process(plan, params.take(owner_R), logits_RV, slot_B[owner_R], pos_R)
        q = OneHot() if state.draft_q is None or not plan.rejection else DenseQ(q_BKV=state.draft_q[slot_B])
        verdict = verify(
            logits_RV,
            VerifyRows(
                mode_B=params.mode, key_B=params.key, child_B=params.child, base_B=base_B,
                row_of_BW=row_of_BW, rows_B=rows_B, draft_BK=state.pending_SW[slot_B, 1:], q=q,
            ),
            sampled=plan.sampled, coupled=plan.coupled, rejection=plan.rejection, synthetic=self.synthetic,
            target_R=target_R,
        )  # fmt: skip
        token_BW = verdict.tokens_BW
        n_emitted_B, finish_B = self._finish_test(slot_B, token_BW, verdict.n_emitted_B, base_B)
        accepted_B = torch.minimum(verdict.accepted_B, n_emitted_B)
        drafted_B = (rows_B - 1).clamp(min=0)
        self._commit(slot_B, token_BW, n_emitted_B, finish_B, base_B)
        next_drafts_B = torch.zeros_like(slot_B)
        if self.drafter is not None:
            live_B = state.active_S[slot_B] > 0
            view = DraftView(
                slot_B=torch.where(live_B, slot_B, 0),
                committed_B=torch.where(live_B, state.committed_S[slot_B], 0),
                drafted_B=drafted_B, accepted_B=accepted_B, fresh_B=torch.full_like(live_B, fresh),
                history_SL=state.history_SL, table_SP=state.table_SP, params=params,
                len_ub=min(len_ub + 1, state.history_SL.shape[1]), first_page=first_page,
                sampled=plan.sampled, filtered=plan.filtered, rejection=plan.rejection, coupled=plan.coupled,
            )  # fmt: skip
            next_drafts_B = self._draft(self.drafter, view, slot_B, live_B)
        return Record(
            generation_B=state.generation_S[slot_B], token_BW=token_BW, n_emitted_B=n_emitted_B,
            accepted_B=accepted_B, drafted_B=drafted_B, finish_B=finish_B, next_drafts_B=next_drafts_B,
        )  # fmt: skip

    def _process(self, plan: FramePlan, params: SlotParams, logits_RV: Tensor, slot_R: Tensor, pos_R: Tensor) -> Tensor:
        """Row r chooses the token of position pos + 1; stop ids are banned until min_len tokens exist."""
        state = self.state
        ban = (state.stop_ids_ST[slot_R], pos_R + 1 < state.min_len_S[slot_R]) if plan.min_tokens else None
        return process_logits(
            logits_RV,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            ban,
            filtered=plan.filtered,
        )

    def _finish_test(
        self, slot_B: Tensor, token_BW: Tensor, n_emitted_B: Tensor, base_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cut at the earliest stop token or at max_len; returns emitted counts and FinishCodes [B]."""
        state = self.state
        width = token_BW.shape[1]
        depth_W = torch.arange(width, device=slot_B.device)
        stop_BW = (token_BW[:, :, None] == state.stop_ids_ST[slot_B][:, None, :]).any(2)
        full_BW = base_B[:, None] + depth_W + 2 >= state.max_len_S[slot_B][:, None]
        end_BW = (stop_BW | full_BW) & (depth_W < n_emitted_B[:, None])
        cut_B = torch.where(end_BW, depth_W, width).amin(1)
        ended_B = cut_B < width
        at_B1 = cut_B.clamp(max=width - 1)[:, None]
        code_B = torch.where(stop_BW.gather(1, at_B1)[:, 0], int(FinishCode.STOP), int(FinishCode.LENGTH))
        return torch.where(ended_B, cut_B + 1, n_emitted_B), torch.where(ended_B, code_B, int(FinishCode.NONE))

    def _commit(self, slot_B: Tensor, token_BW: Tensor, n_emitted_B: Tensor, finish_B: Tensor, base_B: Tensor) -> None:
        state = self.state
        depth_W = torch.arange(token_BW.shape[1], device=slot_B.device)
        emitted_BW = depth_W < n_emitted_B[:, None]
        target_BW = torch.where(emitted_BW, slot_B[:, None], 0)
        at_BW = torch.where(emitted_BW, base_B[:, None] + 1 + depth_W, 0)
        state.history_SL.index_put_((target_BW, at_BW), token_BW)
        last_B1 = (n_emitted_B - 1).clamp(min=0)[:, None]
        bonus_B = torch.where(n_emitted_B > 0, token_BW.gather(1, last_B1)[:, 0], state.pending_SW[slot_B, 0])
        state.pending_SW[slot_B, 0] = bonus_B
        state.committed_S[slot_B] = base_B + n_emitted_B
        state.active_S[slot_B] *= finish_B == int(FinishCode.NONE)

    def _draft(self, drafter: Drafter, view: DraftView, slot_B: Tensor, live_B: Tensor) -> Tensor:
        state = self.state
        drafts = drafter.propose(drafter.extend(view), view)
        k = drafts.token_BK.shape[1]
        # Never more than the slot asked for, nor than fit before max_len (the bonus row fills one place).
        fits_B = (state.max_len_S[slot_B] - view.committed_B - 2).clamp(min=0)
        count_B = torch.minimum(torch.minimum(drafts.count_B, state.max_drafts_S[slot_B]), fits_B)
        count_B = torch.where(live_B, count_B, 0)
        state.pending_SW[slot_B, 1 : k + 1] = drafts.token_BK
        state.draft_count_S[slot_B] = count_B
        if drafts.q_BKV is not None and state.draft_q is not None:
            state.draft_q[slot_B, :k] = drafts.q_BKV
        return count_B
