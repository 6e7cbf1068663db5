"""One frame: build rows, target, process, verify, finish test, commit, draft, record.

A function of device state only. Python here branches on the plan (host facts), never on a tensor's value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.attention.delta import DeltaChunk, DeltaFrame, DeltaSpans
from slipstream.attention.paged import RowGrid, cache_slots
from slipstream.attention.protocol import TreeSight
from slipstream.attention.windows import WindowLayers
from slipstream.device.catch_up import CatchUp
from slipstream.device.logits import LogitStages
from slipstream.device.media import GivenRows, chunk_positions, row_positions
from slipstream.device.state import SlotState
from slipstream.device.target_cache import TargetCache, spans
from slipstream.device.tree import judge, judge_greedy, path_rows, place_rows, plant
from slipstream.draft.protocol import Drafter, DraftSlots, DraftView, InPlaceDrafter, PrefillView, TargetRows
from slipstream.draft.tree import TreeShape
from slipstream.kernels import frame as ops
from slipstream.kernels.draft import offer, offer_drafts
from slipstream.kernels.sample import argmax_rows, race_rows, row_threshold
from slipstream.kernels.schedule import allot, allot_drafts, offer_scheduled, offer_with_survivals
from slipstream.memory.kv import KVPages
from slipstream.memory.states import StatePool
from slipstream.sampling.custom import Processor
from slipstream.sampling.processors import process_logits
from slipstream.sampling.slot_params import SlotParams
from slipstream.types import NO_TOKEN, RECORD_COLUMNS, Admit, FramePlan, Stages
from slipstream.verify import DenseQ, OneHot, VerifyRows, verify

if TYPE_CHECKING:
    from slipstream.kernels.workspace import Workspace
    from slipstream.models.fused import FusedDecoder


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The verified rows of a frame: R flat rows over B slots, grid cells [B, W]; see `kernels.frame.packed_rows`.

    cell_R: where each row is kept in the cache, its position but for rows of trees; sight: what those see.
    """

    slot_R: Tensor
    pos_R: Tensor
    token_R: Tensor
    owner_R: Tensor
    rows_B: Tensor
    row_of_BW: Tensor
    cell_R: Tensor
    sight: TreeSight | None = None

    def grid(self) -> RowGrid:
        """For attention over the grid. A padded row stands at some cell of the last slot."""
        rows, (slots, width) = self.pos_R.shape[0], self.row_of_BW.shape
        last_R, seen_R = (self.pos_R, None) if self.sight is None else self.sight
        seen_BW, at_BW = (None, None) if seen_R is None else (seen_R[self.row_of_BW], self.pos_R[self.row_of_BW])
        if slots == 1 and rows == width:
            return RowGrid(pos_BW=last_R.view(1, width), seen_BW=seen_BW, at_BW=at_BW)
        depth_R = torch.arange(rows, device=self.pos_R.device) - self.row_of_BW[self.owner_R, 0]
        cell_of_R = self.owner_R * width + depth_R.clamp(max=width - 1)
        return RowGrid(
            pos_BW=last_R[self.row_of_BW], row_of_BW=self.row_of_BW, cell_of_R=cell_of_R, seen_BW=seen_BW, at_BW=at_BW
        )


def pack_rows(state: SlotState, slot_B: Tensor, *, rows: int, width: int, kernels: bool = False) -> Rows:
    """The pending rows of slots [B], at most `rows`. kernels: by the op, in one launch on a GPU.

    Where verification is scheduled, the rows beyond one per slot go to the likeliest drafts of all slots.
    """
    if state.survival_SK is not None and width > 1:
        share = allot_drafts if kernels else allot
        share(state.active_S, state.draft_count_S, state.survival_SK, slot_B, rows, width)
    pack = ops.pack_rows if kernels else ops.packed_rows
    slot_R, cell_R, token_R, owner_R, rows_B, row_of_BW = pack(
        state.active_S, state.committed_S, state.draft_count_S, state.pending_SW, slot_B, rows, width
    )
    pos_R, sight = cell_R, None
    if state.tree and width > 1:
        pos_R, sight = place_rows(state, slot_R, cell_R, kernels=kernels)
    return Rows(
        slot_R=slot_R, pos_R=pos_R, token_R=token_R, owner_R=owner_R, rows_B=rows_B, row_of_BW=row_of_BW, cell_R=cell_R,
        sight=sight,
    )  # fmt: skip


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
        block: bool = False,
        fused: FusedDecoder | None = None,
        workspace: Workspace | None = None,
        tree: TreeShape | None = None,
        catch_up: CatchUp | None = None,
        processors: Mapping[str, Processor] | None = None,
        states: StatePool | None = None,
        windows: WindowLayers | None = None,
    ) -> None:
        """block: block verification where drafts have a dense law. fused, workspace: on a GPU, the target's pass as
        kernels, and the kernels' scratch. tree: the drafts' shape, where they are no chain. catch_up: where a drafter
        with a cache of its own may be left out. states: of the target's recurrent layers, where it has some; windows:
        its layers with a sliding window, likewise."""
        self.model = model
        self.kv, self.states = kv, states
        self.state = state
        self.drafter = drafter
        self.synthetic, self.block, self.tree, self.catch_up = synthetic, block, tree, catch_up
        self.fused, self.workspace = fused, workspace
        self.kernels = workspace is not None
        self.clears_pages = not self.kernels  # the kernels never look at masked columns
        self.in_place = drafter if self.kernels and isinstance(drafter, InPlaceDrafter) else None
        self.taps = drafter.taps if drafter is not None else ()
        self.reads_hidden = drafter is not None and drafter.reads_hidden
        self.laws = state.laws() if self.kernels else None
        self.logit_stages = LogitStages(state, model.config.vocab_size, kernels=self.kernels, processors=processors)
        self.given = GivenRows(state, model.config.hidden_size, model.dtype, kernels=self.kernels)
        self.cache = TargetCache(
            kv, state, heads_per_kv=model.config.num_heads // model.config.num_kv_heads, windows=windows,
            workspace=workspace,
        )  # fmt: skip

    def admit(self, a: Admit) -> None:
        """A slot changes hands: what control pairs do not carry, on the device or beside it, follows."""
        self.given.admit(a)
        if self.drafter is not None:
            self.drafter.admit(a)
        if a.restores and self.states is not None:
            self.states.restore(a.slot, a.restores, a.absorbed)

    def decode(self, plan: FramePlan, slot_B: Tensor) -> Tensor:
        """Verify each slot's pending rows, commit what was accepted and draft for the next frame.

        The record [B, RECORD_COLUMNS + W], int64: see kernels/frame.py, and types.py for where survivals stand in it.
        """
        rows = pack_rows(self.state, slot_B, rows=plan.rows, width=plan.width, kernels=self.kernels)
        raw_RV, target_R, target = self._target(plan, rows, slot_B)
        logits_RV = self.logit_stages.adjust(plan, rows.slot_R, rows.cell_R, raw_RV)
        if self.tree is not None and rows.sight is not None:
            return self._finish_tree(plan, self.tree, target, raw_RV, logits_RV, target_R)
        return self._finish(
            plan,
            target,
            raw_RV,
            logits_RV,
            target_R,
            at=0,
            drafts=plan.drafts,
            len_ub=plan.len_ub,
            first_page=plan.first_page,
        )

    def read_missing(self, plan: FramePlan, slot_B: Tensor) -> None:
        """The drafter reads what frames without drafting have committed (plan.catch_up)."""
        assert self.catch_up is not None, "a plan asks to catch up where nothing was kept"
        self.catch_up.run(plan, slot_B, kernels=self.kernels)

    def _target(self, plan: FramePlan, rows: Rows, slot_B: Tensor) -> tuple[Tensor, Tensor | None, TargetRows]:
        """Logits [R, V] of the rows, and what the drafter asked for.

        Their argmax [R] too where the pass yields it, and then, in a greedy frame, alone.
        """
        table_SP, states = self.state.table_SP, self._states_of(rows, slot_B)
        rope_R = row_positions(self.state, rows.slot_R, rows.pos_R)
        if self.fused is not None and plan.rows <= self.fused.max_rows:
            wanted = plan.stages > Stages.GREEDY
            out = self.fused.run(
                rows.token_R, rows.slot_R, rope_R, table_SP, logits=wanted, taps=self.taps,
                hidden=self.reads_hidden, width=plan.rows // len(plan.decode), cell_R=rows.cell_R, sight=rows.sight,
                states=states,
            )  # fmt: skip
            if states is not None:
                states.commit()
            return out.logits_RV, None if wanted else out.target_R, self._rows(rows, slot_B, out.taps, out.hidden_RH)
        attention = self.cache.rows(
            plan, slot_B, slot_R=rows.slot_R, pos_R=rows.pos_R, cell_R=rows.cell_R, sight=rows.sight,
            grid=None if self.kernels else rows.grid(),
        )  # fmt: skip
        context = attention if states is None else states.beside(attention)
        hidden_RH, taps = self.model.forward(rows.token_R, rope_R, context, self.taps)
        if states is not None:
            states.commit()
        return self.model.logits(hidden_RH), None, self._rows(rows, slot_B, taps, hidden_RH)

    def _states_of(self, rows: Rows, slot_B: Tensor) -> DeltaFrame | None:
        """The context of recurrent layers over a frame's rows."""
        if self.states is None:
            return None
        return DeltaFrame(
            self.states, committed_S=self.state.committed_S, slot_B=slot_B, rows_B=rows.rows_B, owner_R=rows.owner_R,
            row_of_BW=rows.row_of_BW, kernels=self.kernels, pdl=self.fused is not None and self.fused.pdl,
        )  # fmt: skip

    def _rows(self, rows: Rows, slot_B: Tensor, taps: Sequence[Tensor], hidden_RH: Tensor | None) -> TargetRows:
        return TargetRows(
            slot_R=rows.slot_R, pos_R=rows.pos_R, token_R=rows.token_R, owner_R=rows.owner_R, slot_B=slot_B,
            rows_B=rows.rows_B, row_of_BW=rows.row_of_BW, taps=tuple(taps),
            hidden_RH=hidden_RH if self.reads_hidden else None,
        )  # fmt: skip

    def prefill(self, plan: FramePlan, *, last: bool) -> Tensor | None:
        """Read a chunk of prompt rows; the prompts that end in it sample their first token and start to decode.

        last: some prompt may end in it. The record then has a row for each, in order of the spans, and on a GPU
        padding up to plan.prefill_prompts; otherwise there is none.
        """
        state = self.state
        rows = (self.kernels and plan.prefill_rows) or sum(s.length for s in plan.prefill)
        places = ((self.kernels and plan.prefill_prompts) or sum(s.last for s in plan.prefill)) if last else 0
        slot_R, pos_R = state.chunk_slot_R[:rows], state.chunk_pos_R[:rows]
        row_B, last_B = state.last_row_B[:places], state.last_slot_B[:places]
        token_R = state.history_SL[slot_R, pos_R]
        cache_slot_R = cache_slots(state.table_SP, slot_R, pos_R, self.kv.page_size)
        hidden_RH, taps = self._read(plan, token_R, slot_R, pos_R)
        if self.drafter is not None:
            self.drafter.prefill(
                PrefillView(
                    slot_R=slot_R, pos_R=pos_R, token_R=token_R, cache_slot_R=cache_slot_R, table_SP=state.table_SP,
                    history_SL=state.history_SL, last_row_B=row_B, last_slot_B=last_B,
                    spans=[] if self.kernels else spans(plan), taps=tuple(taps),
                    hidden_RH=hidden_RH if self.reads_hidden else None,
                )
            )  # fmt: skip
        self.logit_stages.prompt(plan, slot_R, pos_R, hidden_RH, self.model.logits)
        if not places:
            return None
        hidden_BH = hidden_RH[row_B]
        index_B = torch.arange(places, device=state.device)
        ends = TargetRows(
            slot_R=last_B, pos_R=pos_R[row_B], token_R=token_R[row_B], owner_R=index_B, slot_B=last_B,
            rows_B=state.active_S[last_B], row_of_BW=index_B[:, None], taps=tuple(tap_RH[row_B] for tap_RH in taps),
            hidden_RH=hidden_BH if self.reads_hidden else None,
        )  # fmt: skip
        ending = [x for x in zip(plan.prefill, plan.prefill_first_page, strict=True) if x[0].last]
        self.logit_stages.admitted(plan, last_B)
        raw_BV = self.model.logits(hidden_BH)
        logits_BV = self.logit_stages.adjust(plan, last_B, ends.pos_R, raw_BV)
        return self._finish(
            plan, ends, raw_BV, logits_BV, None, at=self.logit_stages.ends_at, drafts=state.num_drafts,
            first_page=[f for _, f in ending],
            len_ub=state.history_SL.shape[1] if self.kernels else max(s.start + s.length for s, _ in ending) + 1,
        )  # fmt: skip

    def _read(self, plan: FramePlan, token_R: Tensor, slot_R: Tensor, pos_R: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Hidden states [R, H] of a chunk and what the drafter taps, by whichever pass takes that many rows."""
        table_SP = self.state.table_SP
        states: DeltaSpans | None = None
        if self.states is not None and self.kernels:
            states = DeltaChunk(self.states, slot_R=slot_R, pos_R=pos_R)
        elif self.states is not None:
            parts = [(s.slot, s.start, s.length) for s in plan.prefill]
            states = DeltaSpans(self.states, slot_R=slot_R, pos_R=pos_R, spans=parts)
        given, rope_3R = self.given.of(plan, token_R.shape[0]), chunk_positions(self.state, pos_R)
        hidden_RH: Tensor
        taps: Sequence[Tensor]
        if self.fused is not None and token_R.shape[0] <= self.fused.max_rows:
            hidden_RH, taps = self.fused.forward(
                token_R, slot_R, pos_R, table_SP, taps=self.taps, states=states, given=given,
                rope_3R=None if self.state.chunk_rope_3R is None else rope_3R,
            )  # fmt: skip
        else:
            attention = self.cache.chunk(plan, slot_R, pos_R)
            context = attention if states is None else states.beside(attention)
            more = {} if given is None else {"given": given}
            hidden_RH, taps = self.model.forward(token_R, rope_3R, context, self.taps, **more)
        if states is not None:
            states.commit()
        return hidden_RH, taps

    def _finish(
        self,
        plan: FramePlan,
        rows: TargetRows,
        raw_RV: Tensor,
        logits_RV: Tensor,
        target_R: Tensor | None,
        *,
        at: int,
        drafts: int,
        len_ub: int,
        first_page: Sequence[int],
    ) -> Tensor:
        """Process, verify, finish test, commit, draft, record: one path for decode, prefill and plain decoding."""
        state, slot_B, row_of_BW, rows_B = self.state, rows.slot_B, rows.row_of_BW, rows.rows_B
        sampled = plan.sampled or plan.min_tokens
        params = None
        fields = self._fields()
        record_BC: Tensor
        if self.kernels and sampled and not self.block:
            record_BC = self._close_sampled(plan, rows, logits_RV, fields)
        elif self.kernels and not sampled:
            target_R = argmax_rows(logits_RV, none=NO_TOKEN) if target_R is None else target_R
            record_BC = ops.close_greedy(
                target_R, row_of_BW, rows_B, slot_B, *fields, state.key_S, state.child_S, self.synthetic
            )
        else:
            params = state.params(slot_B)
            if sampled:
                logits_RV = self._process(plan, state.params(rows.slot_R), logits_RV, rows.slot_R, rows.pos_R)
            q = OneHot() if state.draft_q is None or not plan.rejection else DenseQ(q_BKV=state.draft_q[slot_B])
            verdict = verify(
                logits_RV,
                VerifyRows(
                    mode_B=params.mode, key_B=params.key, child_B=params.child, base_B=state.committed_S[slot_B],
                    row_of_BW=row_of_BW, rows_B=rows_B, draft_BK=state.pending_SW[slot_B, 1:], q=q,
                ),
                sampled=plan.sampled, coupled=plan.coupled, rejection=plan.rejection, synthetic=self.synthetic,
                block=self.block,
            )  # fmt: skip
            record_BC = ops.closed_round(
                verdict.tokens_BW, verdict.accepted_B, verdict.n_emitted_B, rows_B, slot_B, *fields
            )
        self.logit_stages.committed(plan, slot_B, record_BC, raw_RV, row_of_BW, at)
        return self._draft_next(plan, rows, record_BC, params, drafts=drafts, len_ub=len_ub, first_page=first_page)

    def _finish_tree(
        self, plan: FramePlan, shape: TreeShape, rows: TargetRows, raw_RV: Tensor, logits_RV: Tensor,
        target_R: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """As `_finish`, of a decode frame whose drafts are trees."""
        state, slot_B = self.state, rows.slot_B
        sampled, params = plan.sampled or plan.min_tokens, None
        if self.kernels and not sampled and self.synthetic is None:
            target_R = argmax_rows(logits_RV, none=NO_TOKEN) if target_R is None else target_R
            verdict = judge_greedy(state, shape, rows, target_R)
        else:
            params = state.params(slot_B)
            if sampled:
                logits_RV = self._process(plan, state.params(rows.slot_R), logits_RV, rows.slot_R, rows.pos_R)
            verdict = judge(state, plan, shape, rows, logits_RV, target_R, params, self.synthetic)
        self.cache.compact(slot_B, verdict)
        path = path_rows(state, rows, verdict)
        close = ops.close_round if self.kernels else ops.closed_round
        record_BC: Tensor = close(
            verdict.tokens_BW, verdict.accepted_B, verdict.n_emitted_B, rows.rows_B, slot_B, *self._fields()
        )
        row_BJ = rows.row_of_BW.gather(1, torch.nn.functional.pad(verdict.path_BK, (1, 0)))
        self.logit_stages.committed(plan, slot_B, record_BC, raw_RV, row_BJ, 0)
        return self._draft_next(
            plan, path, record_BC, params, drafts=plan.drafts, len_ub=plan.len_ub, first_page=plan.first_page
        )

    def _fields(self) -> tuple[Tensor, ...]:
        """The slot state that closing a round reads and writes."""
        state = self.state
        return (
            state.generation_S, state.active_S, state.committed_S, state.max_len_S, state.stop_ids_ST,
            state.history_SL, state.pending_SW,
        )  # fmt: skip

    def _draft_next(
        self,
        plan: FramePlan,
        rows: TargetRows,
        record_BC: Tensor,
        params: SlotParams | None,
        *,
        drafts: int,
        len_ub: int,
        first_page: Sequence[int],
    ) -> Tensor:
        """Draft for the next frame, and the record with what it says of that. rows: those that may have stayed, a
        chain. params: of slot_B, if known."""
        state, slot_B, sampled = self.state, rows.slot_B, plan.sampled or plan.min_tokens
        if drafts == 0:
            if self.drafter is not None:
                state.draft_count_S.index_fill_(0, slot_B, 0)  # those of the last round are spent
            if self.catch_up is not None:
                self.catch_up.keep(rows, record_BC[:, 1])
        elif self.in_place is not None:
            self.in_place.draft_slots(
                DraftSlots(
                    record_BC=record_BC, slot_B=slot_B, active_S=state.active_S, committed_S=state.committed_S,
                    max_len_S=state.max_len_S, max_drafts_S=state.max_drafts_S, history_SL=state.history_SL,
                    pending_SW=state.pending_SW, draft_count_S=state.draft_count_S,
                )
            )  # fmt: skip
        elif self.drafter is not None:
            live_B = state.active_S[slot_B] > 0
            view = DraftView(
                slot_B=torch.where(live_B, slot_B, 0),
                committed_B=torch.where(live_B, state.committed_S[slot_B], 0),
                drafted_B=record_BC[:, 3], accepted_B=record_BC[:, 2], emitted_B=record_BC[:, 1],
                rows=rows, history_SL=state.history_SL, committed_S=state.committed_S, table_SP=state.table_SP,
                params=params if sampled else None, laws=self.laws if sampled else None,
                len_ub=min(len_ub + 1, state.history_SL.shape[1]), first_page=first_page, drafts=drafts,
                sampled=plan.sampled, filtered=plan.filtered, rejection=plan.rejection, coupled=plan.coupled,
            )  # fmt: skip
            return self._draft(self.drafter, view, slot_B, record_BC)
        if state.survival_SK is not None:  # no drafts, no survivals
            none_BK = record_BC.new_zeros(record_BC.shape[0], state.survival_SK.shape[1])
            return torch.cat([record_BC[:, :RECORD_COLUMNS], none_BK, record_BC[:, RECORD_COLUMNS:]], 1)
        return record_BC

    def _close_sampled(
        self, plan: FramePlan, rows: TargetRows, logits_RV: Tensor, fields: tuple[Tensor, ...]
    ) -> Tensor:
        """Process, verify and close as kernels. Each row's slot says what it needs, so one graph has all of it."""
        state = self.state
        q_SKV = state.draft_q if plan.rejection else None
        peak_R, threshold_R, greedy_R = row_threshold(
            logits_RV, rows.slot_R, rows.pos_R, state.temperature_S, state.top_k_S, state.top_p_S, state.min_p_S,
            state.stop_ids_ST, state.min_len_S, plan.filtered,
        )  # fmt: skip
        target_R, residual_R, p_R = race_rows(
            logits_RV, peak_R, threshold_R, greedy_R, rows.slot_R, rows.pos_R, state.temperature_S, state.mode_S,
            state.key_S, state.child_S, state.committed_S, state.pending_SW, q_SKV,
        )  # fmt: skip
        record_BC: Tensor = ops.close_sampled(
            target_R, residual_R, p_R, rows.row_of_BW, rows.rows_B, rows.slot_B, *fields, state.mode_S, state.key_S,
            state.child_S, q_SKV, self.synthetic,
        )  # fmt: skip
        return record_BC

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

    def _draft(self, drafter: Drafter, view: DraftView, slot_B: Tensor, record_BC: Tensor) -> Tensor:
        state = self.state
        drafts = drafter.propose(drafter.extend(view), view)
        if drafts.tree is not None and self.tree is not None:
            plant(state, drafts.tree, self.tree, drafts.count_B, record_BC, slot_B)
            return record_BC
        where = (
            record_BC, slot_B, state.active_S, state.committed_S, state.max_len_S, state.max_drafts_S,
            state.pending_SW, state.draft_count_S,
        )  # fmt: skip
        if state.survival_SK is not None:
            assert drafts.confidence_BK is not None, "a drafter that schedules says how sure it is"
            put = offer_scheduled if self.kernels else offer_with_survivals
            record_BC = put(drafts.token_BK, drafts.count_B, drafts.confidence_BK, *where, state.survival_SK)
        else:
            (offer_drafts if self.kernels else offer)(drafts.token_BK, drafts.count_B, *where)
        if drafts.q_BKV is not None and state.draft_q is not None:
            state.draft_q[slot_B, : drafts.token_BK.shape[1]] = drafts.q_BKV
        return record_BC
