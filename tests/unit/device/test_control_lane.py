"""The lane up: a plan as pairs, the ring that carries them, and the arena they land in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from slipstream.device.control import ControlWriter
from slipstream.device.frame import pack_rows
from slipstream.device.staging import RecordRing, UploadRing
from slipstream.device.state import SlotState
from slipstream.models.mrope import Media
from slipstream.types import Admit, Drop, FramePlan, PageAppend, PrefillSpan, Request, SamplingParams

CPU = torch.device("cpu")


def make(drafts: int = 3) -> tuple[SlotState, ControlWriter, UploadRing]:
    state = SlotState(
        max_slots=4, max_len=32, pages_per_slot=6, num_drafts=drafts, chunk_rows=16, device=CPU, real=torch.float64
    )
    writer = ControlWriter(state.offset, state.shapes, num_drafts=drafts)
    return state, writer, UploadRing(state.arena, slots=3, capacity=state.arena.numel())


def admit(slot: int, generation: int, tokens: tuple[int, ...] = (5, 6, 7), **params: object) -> Admit:
    request = Request(
        request_id="a", prompt_token_ids=tokens, params=SamplingParams(**params), key=-(2**62) - 5, stop_ids=(9, 3),
        max_len=20, num_drafts=2, child=1,
    )  # fmt: skip
    return Admit(slot=slot, generation=generation, request=request, tokens=tokens, start=0, pages=(4, 2))


def test_an_admitted_slot_holds_its_request() -> None:
    state, writer, ring = make()
    state.table_SP[2] = 99
    state.history_SL[3] = 7  # a neighbour
    before = state.arena.clone()
    ring.send(
        writer.pairs(FramePlan(seq=0, admits=(admit(2, 8, temperature=0.7, top_p=0.3, min_p=0.01, min_tokens=4),)))
    )
    p = state.params(torch.tensor([2]))
    assert (p.mode.item(), p.key.item(), p.child.item(), p.top_k.item()) == (2, -(2**62) - 5, 1, -1)
    assert (p.temperature.item(), p.top_p.item(), p.min_p.item()) == (0.7, 0.3, 0.01)
    assert state.history_SL[2, :3].tolist() == [5, 6, 7]
    assert state.table_SP[2].tolist() == [4, 2, 0, 0, 0, 0]
    assert state.stop_ids_ST[2].tolist() == [9, 3] + [-1] * 14
    values = (
        state.generation_S,
        state.active_S,
        state.committed_S,
        state.max_len_S,
        state.min_len_S,
        state.max_drafts_S,
    )
    assert [v[2].item() for v in values] == [8, 0, 2, 20, 7, 2]
    assert torch.equal(
        state.history_SL[3],
        before[state.offset["history"] :].view(-1)[3 * state.history_SL.shape[1] :][: state.history_SL.shape[1]],
    )
    changed = (state.arena != before).nonzero().flatten().tolist()
    assert all(any(o + 2 * w <= c < o + 3 * w for o, w in fields(state)) for c in changed), "only slot 2's cells change"


def fields(state: SlotState) -> list[tuple[int, int]]:
    per_slot = [n for n, s in state.shapes.items() if s[0] == 5]
    return [(state.offset[n], state.shapes[n][1] if len(state.shapes[n]) > 1 else 1) for n in per_slot]


def test_later_rows_of_a_plan_win() -> None:
    """The old owner's drop, then the new owner, then its last chunk: in the end the slot is active."""
    state, writer, ring = make()
    plan = FramePlan(
        seq=1, drops=(Drop(slot=2, generation=7),), admits=(admit(2, 8),),
        pages=(PageAppend(slot=2, first=2, pages=(5,)),),
        prefill=(PrefillSpan(slot=2, start=0, length=3, last=True),), prefill_first_page=(-1,),
    )  # fmt: skip
    cells, _ = writer.pairs(plan)
    assert len(np.unique(cells)) == len(cells)
    state, writer, ring = make()
    ring.send(writer.pairs(plan))
    assert state.active_S.tolist() == [0, 0, 1, 0, 0]
    assert state.table_SP[2, :4].tolist() == [4, 2, 5, 0]
    assert state.chunk_slot_R[:3].tolist() == [2, 2, 2] and state.chunk_pos_R[:3].tolist() == [0, 1, 2]
    assert (state.last_row_B[0].item(), state.last_slot_B[0].item()) == (2, 2)


def test_a_chunk_is_padded_with_the_sink() -> None:
    """What an earlier, larger chunk left behind the rows and behind the ends of prompts is gone."""
    state, writer, ring = make()
    for field in (state.chunk_slot_R, state.chunk_pos_R, state.last_row_B, state.last_slot_B):
        field.fill_(3)
    plan = FramePlan(
        seq=1,
        prefill=(
            PrefillSpan(slot=2, start=4, length=2, last=True), PrefillSpan(slot=1, start=0, length=1, last=False),
        ),
        prefill_first_page=(-1, -1), prefill_rows=6, prefill_prompts=3,
    )  # fmt: skip
    ring.send(writer.pairs(plan))
    assert state.chunk_slot_R[:6].tolist() == [2, 2, 1, 0, 0, 0]
    assert state.chunk_pos_R[:6].tolist() == [4, 5, 0, 0, 0, 0]
    assert state.last_row_B[:3].tolist() == [1, 0, 0] and state.last_slot_B[:3].tolist() == [2, 0, 0]


def test_what_pictures_leave_behind_is_cleared() -> None:
    """Offsets and marks of a chunk's rows: said where a prompt has some, cleared once by the next chunk of text."""
    state = SlotState(
        max_slots=4, max_len=32, pages_per_slot=6, num_drafts=0, chunk_rows=16, device=CPU, pictures=True, given=True
    )
    writer = ControlWriter(state.offset, state.shapes, num_drafts=0)
    ring = UploadRing(state.arena, slots=3, capacity=state.arena.numel())
    positions = np.array([[0, 1, 1, 3, 4], [0, 1, 1, 3, 4], [0, 1, 2, 3, 4]])
    media = Media(positions=positions, delta=0, embeds=torch.zeros(2, 8), places=np.array([1, 2]), key="")
    with_picture = admit(2, 8, tokens=(5, 9, 9, 6, 7))
    with_picture = replace(with_picture, request=replace(with_picture.request, media=media))

    def read(spans: list[tuple[int, int, int]], rows: int, **more: object) -> int:
        plan = FramePlan(
            seq=0, prefill=tuple(PrefillSpan(slot=s, start=a, length=n, last=False) for s, a, n in spans),
            prefill_first_page=(-1,) * len(spans), prefill_rows=rows, **more,
        )  # fmt: skip
        pairs = writer.pairs(plan)
        ring.send(pairs)
        return len(pairs[0])

    assert state.chunk_given_R is not None and state.chunk_rope_3R is not None
    state.chunk_given_R[:8] = state.chunk_rope_3R[:, :8] = 7
    said = read([(1, 0, 2), (2, 1, 4)], 8, admits=(admit(1, 7), with_picture))
    assert said > 4 * 8
    assert state.chunk_given_R[:8].tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert state.chunk_rope_3R[:, :8].tolist() == [[0, 0, 0, -1, 0, 0, 0, 0]] * 2 + [[0] * 8]
    assert read([(1, 2, 1)], 2) == 2 * 2 + 4 * 6, "rows and their slots; what stood behind them too"
    assert not state.chunk_given_R.any() and not state.chunk_rope_3R.any()
    assert read([(1, 3, 2)], 2) == 2 * 2, "text behind text says nothing"


def test_steady_decode_sends_nothing() -> None:
    _, writer, ring = make()
    plan = FramePlan(seq=0, decode=(1, 3), rows=2, width=1)
    assert len(writer.pairs(plan)[0]) == 2
    assert len(writer.pairs(plan)[0]) == 0
    at = ring.at
    ring.send(writer.pairs(plan))
    assert ring.at == at


def test_rings_keep_what_is_not_collected() -> None:
    down = RecordRing(slots=3, rows=4, columns=2, device=CPU)
    marks = [down.receive(torch.full((2, 2), i)) for i in range(3)]
    assert [down.read(at, 2, 2) for at in marks] == [[[i, i], [i, i]] for i in range(3)]
    first = down.read(marks[0], 2, 2)
    down.receive(torch.full((2, 2), 9))
    assert first == [[0, 0], [0, 0]], "a record that was read is a copy"


def test_packing_keeps_to_the_row_budget() -> None:
    state, _, _ = make()
    state.active_S[1:5] = torch.tensor([1, 0, 1, 1])
    state.committed_S[1:5] = torch.tensor([10, 11, 12, 13])
    state.draft_count_S[1:5] = torch.tensor([3, 3, 3, 1])
    state.pending_SW[1:5] = torch.arange(100, 116).view(4, 4)
    slots = torch.tensor([1, 2, 3, 4])
    full = pack_rows(state, slots, rows=16, width=4)
    assert full.rows_B.tolist() == [4, 0, 4, 2]
    assert full.token_R.tolist() == [100, 101, 102, 103, 108, 109, 110, 111, 112, 113] + [0] * 6
    assert full.pos_R.tolist() == [10, 11, 12, 13, 12, 13, 14, 15, 13, 14] + [0] * 6
    assert full.slot_R.tolist() == [1] * 4 + [3] * 4 + [4] * 2 + [0] * 6
    tight = pack_rows(state, slots, rows=6, width=4)
    assert tight.rows_B.tolist() == [4, 0, 1, 1], "every active slot keeps its bonus row, drafts go in slot order"
    narrow = pack_rows(state, slots, rows=8, width=2)
    assert narrow.rows_B.tolist() == [2, 0, 2, 2]
