"""The frame's compiled kernels on a GPU against the references on the CPU, and the nodes of a captured frame."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from slipstream.kernels import draft as ops_draft
from slipstream.kernels import frame as ops
from slipstream.kernels import suffix as ops_suffix
from tests.support.frame_kernel_cases import State, draft_memory, random_state, same_state, slot_list

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [(1, 0, 1), (1, 0, 4), (7, 1, 4), (32, 0, 4), (30, 34, 8), (200, 56, 4), (250, 6, 32)]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fresh memory holds the largest integer, so an element that nobody writes shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def packed(state: State, slot: Tensor, rows: int, width: int) -> tuple[Tensor, ...]:
    return ops.pack_rows(state.active, state.committed, state.draft_count, state.pending, slot, rows, width)


@pytest.mark.parametrize(("slots", "padding", "width"), SHAPES)
@pytest.mark.parametrize("synthetic", [None, 2.6])
def test_a_round(slots: int, padding: int, width: int, synthetic: float | None) -> None:
    state, slot = random_state(slots, width - 1, vocab=3, seed=width), slot_list(slots, padding)
    state.stop_ids[state.stop_ids < 2] = -1
    there, at = state.copy("cuda"), slot.cuda()
    for rows in (slot.shape[0] * width, slot.shape[0] + width // 2):
        want, got = packed(state, slot, rows, width), packed(there, at, rows, width)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.cpu(), b)
        target = torch.randint(0, 3, (rows,))
        record = ops.close_greedy(
            target.cuda(), got[5], got[4], at, *there.fields, there.key, there.child, synthetic
        )  # fmt: skip
        record_cpu = ops.close_greedy(
            target, want[5], want[4], slot, *state.fields, state.key, state.child, synthetic
        )  # fmt: skip
        assert torch.equal(record.cpu(), record_cpu) and same_state(there, state)
        emitted = torch.minimum(want[4], torch.full_like(slot, width)) * state.active[slot]
        token = torch.randint(0, 5, (slot.shape[0], width))
        verdict = (token, (emitted - 1).clamp(min=0), emitted, want[4])
        record = ops.close_round(*(t.cuda() for t in verdict), at, *there.fields)
        assert torch.equal(record.cpu(), ops.close_round(*verdict, slot, *state.fields)) and same_state(there, state)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize(("columns", "min_n", "max_n", "drafts"), [(60, 2, 5, 3), (9000, 2, 5, 7), (5000, 1, 12, 31)])
def test_ngram_draft(columns: int, min_n: int, max_n: int, drafts: int, gate: bool) -> None:
    slots = 30
    state, slot = random_state(slots, drafts, vocab=3, columns=columns, seed=max_n), slot_list(slots, 2)
    there, memory = state.copy("cuda"), draft_memory(slots, max_n)
    memory_cuda = [t.cuda() for t in memory]
    record = torch.randint(0, drafts + 1, (32, 8 + drafts))
    record_cuda, cost = record.cuda(), 1.0 + 0.11 * torch.arange(drafts + 1)

    def args(r: Tensor, at: Tensor, s: State) -> tuple[Tensor, ...]:
        return (r, at, s.active, s.committed, s.max_len, s.max_drafts, s.history, s.pending, s.draft_count)

    ops_draft.ngram_draft(*args(record, slot, state), *memory, cost, min_n, gate)
    ops_draft.ngram_draft(*args(record_cuda, slot.cuda(), there), *memory_cuda, cost.cuda(), min_n, gate)
    live = state.active > 0
    assert torch.equal(record_cuda.cpu(), record) and torch.equal(there.draft_count[1:].cpu(), state.draft_count[1:])
    assert torch.equal(there.pending.cpu()[live], state.pending[live])
    assert torch.equal(memory_cuda[2].cpu()[1:], memory[2][1:])
    for a, b in zip(memory_cuda[:2], memory[:2], strict=True):
        assert torch.allclose(a.cpu()[1:][live[1:]], b[1:][live[1:]], rtol=1e-5)
    assert (record[:, 5] > 0).any()


@pytest.mark.parametrize(("slots", "columns", "depth"), [(1, 2048, 24), (60, 3000, 24), (17, 90, 1), (5, 40_000, 64)])
def test_suffix_draft(slots: int, columns: int, depth: int) -> None:
    """The ranks, and the drafts that follow from them: votes are whole numbers, so both are equal to the last bit."""
    state, slot = random_state(slots, 3, vocab=3, columns=columns, seed=depth), slot_list(slots, 4)
    end, there = state.committed[slot], state.history.cuda()
    wide = state.history.shape[1]
    rank = ops_suffix.suffix_places(state.history, slot, end, wide, depth)
    assert torch.equal(rank, ops_suffix.suffix_places(there, slot.cuda(), end.cuda(), wide, depth).cpu())
    rule = ops_suffix.SuffixRule(depth=depth, places=32, factor=1.0, offset=1.0, min_prob=0.1)
    want = ops_suffix.suffix_draft(state.history, slot, end, wide, 7, rule)
    got = ops_suffix.suffix_draft(there, slot.cuda(), end.cuda(), wide, 7, rule)
    offered = torch.arange(7) < want[1][:, None]
    assert torch.equal(want[1], got[1].cpu()) and torch.equal(want[0][offered], got[0].cpu()[offered])
    assert int(want[1].max()) >= 2
