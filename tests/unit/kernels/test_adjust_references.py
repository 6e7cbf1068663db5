"""Ops of penalties, biases and log-probabilities against the definitions. Device code: adjust_interpreted_cases."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from slipstream.kernels import adjust as ops
from slipstream.kernels.logprobs import token_logprobs
from slipstream.logprobs import TOKEN_COLUMNS, read_tokens
from tests.support.adjust_cases import by_hand, random_adjusting, tally_by_hand


@pytest.mark.parametrize("tree", [False, True])
def test_rows_are_adjusted_token_by_token(tree: bool) -> None:
    case = random_adjusting(slots=5, vocab=61, drafts=5, tree=tree, seed=3)
    case.biases[1].remainder_(61)
    case.biases[0].clamp_(max=1)
    got = ops.adjust_rows(case.logits.double(), *case.rows, True, True)
    torch.testing.assert_close(got, by_hand(case))
    plain = case.slot % 3 == 0
    assert torch.equal(got[plain], case.logits[plain].double())
    assert torch.equal(ops.adjust_rows(case.logits, *case.rows, False, False), case.logits)


def test_a_row_does_not_see_its_neighbours() -> None:
    case = random_adjusting(slots=6, vocab=310, drafts=3)
    everything = ops.adjust_rows(case.logits, *case.rows, True, True)
    for r in (0, 7, case.slot.shape[0] - 1):
        slot, cell, *rest = case.rows
        alone = ops.adjust_rows(case.logits[r : r + 1], slot[r : r + 1], cell[r : r + 1], *rest, True, True)  # type: ignore[index]
        assert torch.equal(alone, everything[r : r + 1])


def test_tallies_are_of_prompt_and_output() -> None:
    case = random_adjusting(slots=7, vocab=40, drafts=3)
    slot = torch.tensor([2, 0, 5, 3, 1, 0])
    got = case.tally.clone()
    ops.recount_slots(got, slot, *case.penalties, *case.history)
    counts = [s for s in (1, 2, 5) if any(float(p[s]) != off for p, off in zip(case.penalties, (1, 0, 0), strict=True))]
    assert counts
    for s in range(1, 8):
        assert got[s].tolist() == (tally_by_hand(case, s) if s in counts else case.tally[s].tolist())
    before = got.clone()
    record = torch.tensor([[0, 2, 0, 0, 0, 0, 9, 9, 4], [0, 0, 0, 0, 0, 0, 9, 9, 9], [0, 3, 0, 0, 0, 0, 1, -1, 2]])
    ops.count_tokens(got, torch.tensor([counts[0], 3, counts[-1]]), *case.penalties, record, 6)
    want = before.clone()
    want[counts[0], 9] += 4
    want[counts[-1], [1, 2]] += 2
    assert torch.equal(got, want)


def test_log_probabilities_of_a_table_row() -> None:
    x = torch.log(torch.tensor([[0.5, 0.125, 0.25, 0.125], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64))
    table = torch.zeros(3, TOKEN_COLUMNS, dtype=torch.int64)
    token_logprobs(table, 1, x, torch.tensor([0, 1]), torch.tensor([1, 3]), torch.tensor([3, 1]))
    first, second = read_tokens(table[1:2].numpy(), 2), read_tokens(table[2:].numpy(), 0)
    assert first[0].rank == 3 and [i for i, _ in first[0].top] == [0, 2]
    assert [first[0].logprob, *(v for _, v in first[0].top)] == pytest.approx([-2.0794415, -0.6931472, -1.3862944])
    assert second[0].rank == 1 and second[0].top == () and second[0].logprob == pytest.approx(-0.9162907)
    assert len(read_tokens(table[1:2].numpy(), 20)[0].top) == 4, "a small vocabulary has no more"


def test_fakes_agree() -> None:
    checks = ("test_schema", "test_faketensor")
    case, op = random_adjusting(slots=3, vocab=310, drafts=2), torch.ops.slipstream
    opcheck(op.adjust_rows.default, (case.logits, *case.rows, True, True), test_utils=checks)
    slot = torch.tensor([1, 0, 2])
    opcheck(op.recount_slots.default, (case.tally, slot, *case.penalties, *case.history), test_utils=checks)
    record = torch.ones(3, 9, dtype=torch.int64)
    opcheck(op.count_tokens.default, (case.tally, slot, *case.penalties, record, 6), test_utils=checks)
    table, row = torch.zeros(5, TOKEN_COLUMNS, dtype=torch.int64), torch.tensor([1, 0])
    opcheck(op.token_logprobs.default, (table, 1, case.logits, row, row, row), test_utils=checks)
