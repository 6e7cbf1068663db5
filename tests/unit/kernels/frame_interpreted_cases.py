"""The frame's Triton kernels on the CPU, in Triton's interpreter, against the references.

Collected by test_kernels_interpreted.py only, in a process of its own.
"""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels import draft as ops_draft
from slipstream.kernels import frame as ops
from slipstream.kernels import schedule as ops_schedule
from slipstream.kernels import suffix as ops_suffix
from slipstream.kernels import tree as ops_tree
from slipstream.kernels.jit import draft, frame, schedule, suffix, tree
from slipstream.types import SURVIVAL_ONE
from tests.support.frame_kernel_cases import (
    State,
    draft_memory,
    random_state,
    same_state,
    slot_list,
    survival_case,
)
from tests.support.tree_cases import random_paths, random_rounds, random_trees

SLOTS, PADDING = 20, 4
B = SLOTS + PADDING


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def unwritten(*shape: int) -> torch.Tensor:
    return torch.full(shape, -77)


def packed(state: State, slot: torch.Tensor, rows: int, width: int) -> tuple[torch.Tensor, ...]:
    return ops.packed_rows(state.active, state.committed, state.draft_count, state.pending, slot, rows, width)


@pytest.mark.parametrize(("rows", "width"), [(B, 1), (B * 4, 4), (B + 9, 4), (B * 2, 2), (B * 4 + 50, 4)])
def test_pack_rows(rows: int, width: int) -> None:
    state, slot = random_state(SLOTS, 3), slot_list(SLOTS, PADDING)
    want = packed(state, slot, rows, width)
    got = [unwritten(*t.shape) for t in want]
    frame.launch_pack_rows(state.active, state.committed, state.draft_count, state.pending, slot, *got)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    total = int(want[4].sum())
    assert int(state.active[slot].sum()) <= total <= rows
    assert (want[0] == 0).sum() == rows - total


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("active", [0, 1])
def test_pack_rows_of_a_lone_slot(width: int, active: int) -> None:
    state, slot = random_state(2, 3), torch.tensor([2])
    state.active[2], state.draft_count[2] = active, 2
    want = packed(state, slot, width, width)
    got = [unwritten(*t.shape) for t in want]
    frame.launch_pack_rows(state.active, state.committed, state.draft_count, state.pending, slot, *got)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_close_round(width: int) -> None:
    state = random_state(SLOTS, 3, seed=width)
    slot, mine = slot_list(SLOTS, PADDING), state.copy()
    rows = packed(state, slot, B * width, width)[4]
    emitted = torch.minimum(rows, torch.randint(1, width + 1, (B,)))
    token = torch.where(torch.arange(width) < emitted[:, None], torch.randint(0, 6, (B, width)), 0)
    state.stop_ids[slot[0], 9] = mine.stop_ids[slot[0], 9] = token[0, 0]
    token[1::5, 0], token[2::5, -1] = -1, -1
    record = unwritten(B, 6 + width)
    frame.launch_close_round(token, (emitted - 1).clamp(min=0), emitted, rows, slot, *mine.fields, record)
    want = ops.closed_round(token, (emitted - 1).clamp(min=0), emitted, rows, slot, *state.fields)
    assert torch.equal(record, want) and same_state(mine, state)
    assert set(want[:, 4].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("synthetic", [None, 1.0, 2.6, 4.0])
@pytest.mark.parametrize("width", [1, 4])
def test_close_greedy(width: int, synthetic: float | None) -> None:
    state, slot = random_state(SLOTS, 3, seed=5), slot_list(SLOTS, PADDING)
    mine = state.copy()
    *_, rows, row_of = packed(state, slot, B * width, width)
    target, record = torch.randint(-1, 3, (B * width,)), unwritten(B, 6 + width)
    mine.pending.remainder_(3), state.pending.remainder_(3)
    parts = None if synthetic is None else ops.synthetic_parts(synthetic)
    frame.launch_close_greedy(target, row_of, rows, slot, *mine.fields, mine.key, mine.child, record, parts)
    want = ops.close_greedy(target, row_of, rows, slot, *state.fields, state.key, state.child, synthetic)
    assert torch.equal(record, want) and same_state(mine, state)
    if width > 1 and synthetic in (None, 2.6):
        assert len(set(want[:, 2].tolist())) >= 3


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (2, 5)])
def test_ngram_draft(gate: bool, min_n: int, max_n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "BLOCK", 32)  # several steps per history
    state, slot = random_state(SLOTS, 3, vocab=3, columns=90, seed=max_n), slot_list(SLOTS, PADDING)
    mine, memory = state.copy(), draft_memory(SLOTS, max_n)
    theirs = [t.clone() for t in memory]
    record = torch.randint(0, 4, (B, 10))
    want, cost = record.clone(), torch.tensor([1.0, 1.1, 1.3, 1.4])

    def args(r: torch.Tensor, s: State) -> tuple[torch.Tensor, ...]:
        return (r, slot, s.active, s.committed, s.max_len, s.max_drafts, s.history, s.pending, s.draft_count)

    draft.launch_ngram_draft(*args(record, mine), *memory, cost, min_n=min_n, gate=gate)
    ops_draft.ngram_draft(*args(want, state), *theirs, cost, min_n, gate)
    live = state.active > 0
    assert torch.equal(record, want) and torch.equal(mine.draft_count[1:], state.draft_count[1:])
    assert torch.equal(mine.pending[live], state.pending[live]) and torch.equal(mine.history, state.history)
    assert torch.equal(memory[2][1:], theirs[2][1:])
    for a, b in zip(memory[:2], theirs[:2], strict=True):
        assert torch.allclose(a[1:], b[1:], rtol=1e-6)
    assert len(set(want[:, 5].tolist())) >= 3 and not live.all()


@pytest.mark.parametrize("drafts", [1, 3])
def test_offer_drafts(drafts: int) -> None:
    state, slot = random_state(SLOTS, 3, seed=2), slot_list(SLOTS, PADDING)
    mine, record = state.copy(), torch.randint(0, 4, (B, 10))
    want, token, wish = record.clone(), torch.randint(0, 90, (B, drafts)), torch.randint(0, drafts + 1, (B,))

    def rest(s: State) -> tuple[torch.Tensor, ...]:
        return slot, s.active, s.committed, s.max_len, s.max_drafts, s.pending, s.draft_count

    draft.launch_offer(token, wish, record, *rest(mine))
    ops_draft.offer(token, wish, want, *rest(state))
    assert torch.equal(record, want) and same_state(mine, state)
    assert len(set(want[:, 5].tolist())) > 1 and not (state.active[slot] > 0).all()


@pytest.mark.parametrize(("slots", "padding", "drafts"), [(SLOTS, PADDING, 7), (1, 0, 3), (3, 40, 1)])
def test_allot_drafts(slots: int, padding: int, drafts: int) -> None:
    """Every budget, from none to more than there are drafts; survivals beyond a slot's drafts are stale."""
    first, slot = random_state(slots, drafts, seed=drafts), slot_list(slots, padding)
    first.active[1] = 1
    survival = survival_case(slots, drafts)
    least, most = int(first.active.sum()), slots * (drafts + 1)
    cut = set()
    for rows in range(least, most + 2, 1 + (most - least) // 5):
        for width in (drafts + 1, 2):
            want, got = first.copy(), first.copy()
            ops_schedule.allot(want.active, want.draft_count, survival, slot, rows, width)
            schedule.launch_allot(got.active, got.draft_count, survival, slot, rows=rows, width=width)
            assert same_state(got, want)
            assert least + int((want.draft_count * want.active).sum()) <= rows
            cut.add(int(want.draft_count.sum()))
    assert len(cut) > 1 or slots == 1


@pytest.mark.parametrize(("drafts", "most"), [(1, 1), (3, 3), (2, 5)])
def test_offer_scheduled(drafts: int, most: int) -> None:
    state, slot = random_state(SLOTS, most, seed=2), slot_list(SLOTS, PADDING)
    mine, record = state.copy(), torch.randint(0, 4, (B, 6 + most + 1))
    token, wish = torch.randint(0, 90, (B, drafts)), torch.randint(0, drafts + 1, (B,))
    logit = 3 * torch.randn(B, drafts)
    logit[::5, 0], logit[3] = float("nan"), -float("inf")
    want_survival, got_survival = survival_case(SLOTS, most), survival_case(SLOTS, most)
    got = unwritten(B, 6 + most + most + 1)

    def rest(s: State) -> tuple[torch.Tensor, ...]:
        return slot, s.active, s.committed, s.max_len, s.max_drafts, s.pending, s.draft_count

    schedule.launch_offer(token, wish, logit, record, *rest(mine), got_survival, got)
    want = ops_schedule.offer_with_survivals(token, wish, logit, record, *rest(state), want_survival)
    assert same_state(mine, state)
    assert torch.equal(got[:, :6], want[:, :6]) and torch.equal(got[:, 6 + most :], record[:, 6:])
    assert torch.equal(want[:, 6 + most :], record[:, 6:]) and torch.equal(
        want[:, 6 : 6 + most] > 0, got[:, 6 : 6 + most] > 0
    )
    assert torch.allclose(got[:, 6 : 6 + most].double(), want[:, 6 : 6 + most].double(), rtol=1e-6, atol=1)
    assert torch.allclose(got_survival.double(), want_survival.double(), rtol=1e-6, atol=1)
    assert torch.equal(got_survival[slot], got[:, 6 : 6 + most])
    assert ((got_survival > 0).sum(1)[1:] == state.draft_count[1:]).all() and int(got_survival.max()) < SURVIVAL_ONE


@pytest.mark.parametrize(("columns", "depth"), [(94, 24), (61, 3), (20, 1)])
def test_suffix_places(columns: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "BLOCK", 32)
    state, slot = random_state(SLOTS, 3, vocab=2, columns=90, seed=depth), slot_list(SLOTS, PADDING)
    end = state.committed[slot].clamp(max=columns - 1)
    rank = unwritten(B, columns)
    suffix.launch_suffix_places(state.history, slot, end, rank, depth=depth)
    assert torch.equal(rank, ops_suffix.suffix_places(state.history, slot, end, columns, depth))
    assert int(rank.max()) >= min(depth, 4) * columns


@pytest.mark.parametrize("nodes", [2, 9, 64])
def test_tree_rows(nodes: int) -> None:
    committed, depth, seen = random_trees(SLOTS, nodes)
    slot = torch.randint(0, SLOTS + 1, (3 * 128 + 5,))
    cell = committed[slot] + torch.randint(0, nodes, slot.shape)
    got = [unwritten(*slot.shape) for _ in range(3)]
    tree.launch_tree_rows(slot, cell, committed, depth, seen, *got)
    for a, b in zip(got, ops_tree.placed_rows(slot, cell, committed, depth, seen), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("page", "depth", "heads", "dim"), [(1, 4, 2, 12), (3, 1, 1, 8), (16, 7, 3, 40), (5, 20, 2, 64)]
)
def test_compact_path(page: int, depth: int, heads: int, dim: int) -> None:
    """Paths whose nodes move onto one another; the rest of the cache, NaN in the sink, stays as it is."""
    case = random_paths(SLOTS, PADDING, depth, page=page, shape=(heads, dim))
    want, got = case.data.clone(), case.data.clone()
    ops_tree.moved_path(want, *case[1:])
    tree.launch_compact_path(got, *case[1:])
    assert torch.equal(got.nan_to_num(99), want.nan_to_num(99)) and not torch.equal(want[:, :, 1:], case.data[:, :, 1:])


@pytest.mark.parametrize(("drafts", "rule"), [
    (1, (24, 32, 1.0, 0.0, 0.1)), (5, (3, 20, 1.0, 2.0, 0.0)), (7, (24, 32, 0.5, 1.0, 0.34)),
    (3, (40, 9, 1.0, 0.0, 1.0)),
])  # fmt: skip
def test_suffix_walk(drafts: int, rule: tuple[int, int, float, float, float]) -> None:
    depth, places, *rest = rule
    state, slot = random_state(7, 3, vocab=2 + drafts % 2, columns=90, seed=drafts), slot_list(7, 1)
    end, columns = state.committed[slot], state.history.shape[1]
    rank = ops_suffix.suffix_places(state.history, slot, end, columns, depth).topk(places, 1).values
    token, count, score = unwritten(8, drafts), unwritten(8), torch.full((8,), -7.0, dtype=torch.float64)
    limit = ops_suffix.draft_limits(depth, rest[0], rest[1], drafts, device=rank.device)
    limit = torch.cat([limit, torch.tensor([rest[2]], dtype=torch.float64)])
    suffix.launch_suffix_walk(rank, state.history, slot, end, limit, token, count, score, columns=columns)
    want = ops_suffix.suffix_walk(rank, state.history, slot, end, columns, drafts, depth, *rest)
    offered = torch.arange(drafts) < want[1][:, None]
    assert torch.equal(count, want[1]) and torch.equal(score, want[2])
    assert torch.equal(token[offered], want[0][offered]) and int(offered.sum()) > 2


@pytest.mark.parametrize("shape", [(20, 4, 16, 4, 16), (7, 1, 64, 9, 64), (5, 2, 9, 3, 5), (3, 0, 2, 1, 2)])
def test_walk_trees(shape: tuple[int, int, int, int, int]) -> None:
    case = random_rounds(*shape)
    want = ops_tree.walked_trees(*case)
    got = [unwritten(*t.shape) for t in want]
    tree.launch_walk_trees(*case[:-1], *got)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
