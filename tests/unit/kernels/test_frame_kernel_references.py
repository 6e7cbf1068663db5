"""The frame ops against the code of a CPU frame: verification, drafter, fakes. Device code: frame_interpreted_cases."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from slipstream.draft.ngram import NgramDrafter
from slipstream.draft.protocol import DraftSlots, DraftView, InPlaceDrafter
from slipstream.kernels import draft as ops_draft
from slipstream.kernels import frame as ops
from slipstream.kernels import registry
from slipstream.kernels.tree import moved_path, walked_trees
from slipstream.sampling.slot_params import SlotParams
from slipstream.types import FinishCode
from slipstream.verify import OneHot, TreeRows, VerifyRows, verify, verify_tree
from tests.support.draft_views import no_rows
from tests.support.frame_kernel_cases import draft_memory, random_state, same_state, slot_list, survival_case
from tests.support.tree_cases import random_paths, random_rounds, random_trees

SLOTS, DRAFTS = 40, 3


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("synthetic", [None, 1.0, 1.75, 2.3, 4.0])
def test_close_greedy_is_verify_then_close(width: int, synthetic: float | None) -> None:
    mine, theirs = random_state(SLOTS, DRAFTS, seed=width), random_state(SLOTS, DRAFTS, seed=width)
    slot = slot_list(SLOTS, 5)
    *_, rows, row_of = ops.packed_rows(*mine[1:3], mine.draft_count, mine.pending, slot, 70, width)
    target = torch.randint(-1, 4, (70,))
    zero, real = torch.zeros_like(slot), torch.zeros(slot.shape[0])
    rows_in = VerifyRows(
        mode_B=zero, key_B=theirs.key[slot], child_B=theirs.child[slot], base_B=theirs.committed[slot],
        row_of_BW=row_of, rows_B=rows, draft_BK=theirs.pending[slot, 1:], q=OneHot(),
    )  # fmt: skip
    verdict = verify(
        real[:, None], rows_in, sampled=False, coupled=False, rejection=False, synthetic=synthetic, target_R=target
    )
    want = ops.closed_round(verdict.tokens_BW, verdict.accepted_B, verdict.n_emitted_B, rows, slot, *theirs.fields)
    got = ops.close_greedy(target, row_of, rows, slot, *mine.fields, mine.key, mine.child, synthetic)
    assert torch.equal(got, want) and same_state(mine, theirs)
    assert set(want[:, 4].tolist()) == {int(c) for c in FinishCode}
    if width == 4:
        assert len(set(want[:, 2].tolist())) > 1 or synthetic == 1.0


def test_synthetic_parts_split_the_coin_where_the_float_rule_does() -> None:
    for mean in (1.0, 1.25, 2.3, 3.999999, 3.0000000001):
        whole, share = ops.synthetic_parts(mean)
        part = mean - 1.0 - whole
        for n in (0, share - 1, share, 2**53 - 1):
            if 0 <= n < 2**53:
                assert (n * 2.0**-53 < part) == (n < share)


@pytest.mark.parametrize("gate", [True, False])
def test_ngram_draft_is_extend_propose_and_the_limits(gate: bool) -> None:
    state, want = random_state(SLOTS, DRAFTS, seed=3, vocab=3), random_state(SLOTS, DRAFTS, seed=3, vocab=3)
    slot = slot_list(SLOTS, 4)
    record = torch.randint(0, 4, (slot.shape[0], 10))
    one, two = (NgramDrafter(slots=SLOTS, max_drafts=DRAFTS, max_n=4, gate=gate) for _ in range(2))
    for drafter in (one, two):
        drafter.hits_SN, drafter.tries_SN, drafter.matched_S = draft_memory(SLOTS, 4)
    assert isinstance(one, InPlaceDrafter)
    live = want.active[slot] > 0
    zero, real = torch.zeros_like(slot), torch.zeros(slot.shape[0])
    view = DraftView(
        slot_B=torch.where(live, slot, 0), committed_B=torch.where(live, want.committed[slot], 0),
        drafted_B=record[:, 3].clone(), accepted_B=record[:, 2].clone(), emitted_B=record[:, 1].clone(),
        rows=no_rows(zero), history_SL=want.history, committed_S=want.committed,
        table_SP=zero[:, None], len_ub=want.history.shape[1], first_page=(), drafts=DRAFTS, sampled=False,
        filtered=False, laws=None,
        params=SlotParams(mode=zero, key=zero, child=zero, temperature=real, top_k=zero, top_p=real, min_p=real),
        rejection=False, coupled=False,
    )  # fmt: skip
    drafts = two.propose(two.extend(view), view)
    count = torch.minimum(drafts.count_B, want.max_drafts[slot])
    count = torch.minimum(count, (want.max_len[slot] - want.committed[slot] - 2).clamp(min=0)) * live
    want.pending[slot, 1:] = drafts.token_BK
    want.draft_count[slot] = count
    one.draft_slots(
        DraftSlots(
            record_BC=record, slot_B=slot, active_S=state.active, committed_S=state.committed, max_len_S=state.max_len,
            max_drafts_S=state.max_drafts, history_SL=state.history, pending_SW=state.pending,
            draft_count_S=state.draft_count,
        )
    )  # fmt: skip
    assert same_state(state, want) and torch.equal(record[:, 5], count)
    for name in ("hits_SN", "tries_SN", "matched_S"):
        assert torch.equal(getattr(one, name)[1:], getattr(two, name)[1:])
    assert len(set(count.tolist())) >= 3


def test_fakes_and_schemas() -> None:
    checks = ("test_schema", "test_faketensor")
    state, slot = random_state(6, DRAFTS), slot_list(6, 2)
    cost = torch.tensor([1.0, 1.1, 1.3, 1.4])
    registry.load()
    library = torch.ops.slipstream
    pack = (state.active, state.committed, state.draft_count, state.pending, slot, 20, 4)
    opcheck(library.pack_rows.default, pack, test_utils=checks)
    *_, rows, row_of = ops.packed_rows(*pack)
    verdict = (torch.randint(0, 5, (8, 4)), (rows - 1).clamp(min=0), rows)
    opcheck(library.close_round.default, (*verdict, rows, slot, *state.copy().fields), test_utils=checks)
    s = state.copy()
    greedy = (torch.randint(0, 5, (20,)), row_of, rows, slot, *s.fields, s.key, s.child)
    for synthetic in (None, 2.5):
        opcheck(library.close_greedy.default, (*greedy, synthetic), test_utils=checks)
    committed, depth, seen = random_trees(6, 5)
    where = (slot, committed[slot] + 1, committed, depth, seen)
    opcheck(library.tree_rows.default, where, test_utils=checks)
    opcheck(library.walk_trees.default, random_rounds(6, 2, 9, 3, 9), test_utils=checks)
    opcheck(library.compact_path.default, tuple(random_paths(6, 2, 3)), test_utils=checks)
    s = state.copy()
    offered = (torch.zeros(8, 3).long(), torch.ones(8).long(), torch.zeros(8, 10).long(), slot)
    rest = (s.active, s.committed, s.max_len, s.max_drafts, s.pending, s.draft_count)
    opcheck(library.offer_drafts.default, (*offered, *rest), test_utils=checks)
    s, survival = state.copy(), survival_case(6, DRAFTS)
    rest = (s.active, s.committed, s.max_len, s.max_drafts, s.pending, s.draft_count, survival)
    opcheck(library.offer_scheduled.default, (*offered[:2], torch.zeros(8, 3), *offered[2:], *rest), test_utils=checks)
    opcheck(library.allot_drafts.default, (s.active, s.draft_count, survival, slot, 12, 4), test_utils=checks)
    opcheck(
        library.ngram_draft.default,
        (
            torch.zeros(8, 10, dtype=torch.int64), slot, s.active, s.committed, s.max_len, s.max_drafts, s.history,
            s.pending, s.draft_count, *draft_memory(6, 5), cost, 2, True,
        ),
        test_utils=checks,
    )  # fmt: skip


def test_a_match_of_length_zero_is_none() -> None:
    history = torch.tensor([[1, 2, 3, 9, 9]])
    token, matched = ops_draft.lookup(history, torch.tensor([2]), 1, 3, torch.arange(2))
    assert matched.tolist() == [0] and token.shape == (1, 2)


@pytest.mark.parametrize("page", [1, 3, 16])
def test_a_path_moves_to_its_own_positions(page: int) -> None:
    """Cell by cell in plain Python; what is not the path's stays, and so does the sink."""
    case = random_paths(5, 2, 6, page=page)
    want, got = case.data.clone(), case.data.clone()
    for slot, path, accepted in zip(case.slot.tolist(), case.path.tolist(), case.accepted.tolist(), strict=True):
        base = int(case.committed[slot])

        def cell(at: int, slot: int = slot) -> tuple[int, int]:
            return int(case.table[slot, at // page]), at % page

        for i in range(accepted if slot else 0):
            (p, c), (q, d) = cell(base + path[i]), cell(base + 1 + i)
            want[:, :, q, d] = case.data[:, :, p, c]
    moved_path(got, *case[1:])
    assert torch.equal(got.nan_to_num(99), want.nan_to_num(99))
    assert not torch.equal(got[:, :, 1:], case.data[:, :, 1:])


@pytest.mark.parametrize("shape", [(40, 4, 16, 4, 16), (20, 1, 64, 9, 64), (20, 2, 9, 3, 5)])
def test_the_greedy_walk_is_the_verifiers(shape: tuple[int, int, int, int, int]) -> None:
    target, row_of, used, slot, parent, pending, depth = case = random_rounds(*shape)
    none, width = torch.zeros_like(used), row_of.shape[1]
    want = verify_tree(
        torch.nn.functional.one_hot(target, 2).float(),
        TreeRows(
            mode_B=none, key_B=none, child_B=none, base_B=none, row_of_BN=row_of, nodes_B=used,
            parent_BN=parent[slot, :width], token_BN=pending[slot, :width], depth=depth, fan=width,
        ),
        sampled=False, coupled=False, rejection=False,
    )  # fmt: skip
    path, accepted, tokens, emitted = walked_trees(*case)
    assert torch.equal(path, want.path_BK) and torch.equal(accepted, want.accepted_B)
    assert torch.equal(tokens, want.tokens_BW) and torch.equal(emitted, want.n_emitted_B)
    assert int(accepted.max()) >= min(depth, 2) and (accepted == 0).any()
