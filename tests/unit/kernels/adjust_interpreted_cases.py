"""Penalties, biases, tallies and log-probabilities as kernels on the CPU, in Triton's interpreter.

Collected by test_kernels_interpreted.py only, in a process of its own.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.kernels import adjust as ops
from slipstream.kernels import logprobs as ops_logprobs
from slipstream.kernels.jit import adjust, logprobs
from slipstream.logprobs import MAX_LOGPROBS, TOKEN_COLUMNS, read_tokens
from tests.support.adjust_cases import random_adjusting


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles per row also in a small vocabulary."""
    monkeypatch.setattr(adjust, "TILE", 256)
    monkeypatch.setattr(adjust, "COUNT_BLOCK", 16)
    monkeypatch.setattr(logprobs, "TILE", 128)


@pytest.mark.parametrize(("penalties", "biases"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("tree", [False, True])
def test_adjust_rows(tree: bool, penalties: bool, biases: bool) -> None:
    case = random_adjusting(slots=5, vocab=517, drafts=4, tree=tree, seed=int(tree))
    got = torch.full_like(case.logits, float("nan"))
    adjust.launch_adjust_rows(case.logits, got, *case.rows, penalties=penalties, biases=biases)
    want = ops.adjust_rows(case.logits, *case.rows, penalties, biases)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)
    plain = case.slot % 3 == 0
    assert torch.equal(got[plain], case.logits[plain]) and not torch.equal(got[~plain], case.logits[~plain])


def test_tallies() -> None:
    """Whole histories, then rounds of which some slots emit nothing; the sink stands in the list several times."""
    case = random_adjusting(slots=9, vocab=83, drafts=3)
    slot = torch.tensor([4, 0, 1, 8, 0, 3, 2])
    want = case.tally.clone()
    ops.recount_slots(want, slot, *case.penalties, *case.history)
    got = case.tally.clone()
    adjust.launch_recount_slots(got, slot, *case.penalties, *case.history)
    assert torch.equal(got[1:], want[1:]) and not torch.equal(want[1:], case.tally[1:])
    record = torch.randint(0, 83, (7, 6 + 4))
    record[:, 1] = torch.tensor([4, 0, 1, 2, 0, 0, 3])
    record[3, 6:] = 11  # the same token in one round
    ops.count_tokens(want, slot, *case.penalties, record, 6)
    adjust.launch_count_tokens(got, slot, *case.penalties, record, first=6)
    assert torch.equal(got[1:], want[1:])


@pytest.mark.parametrize("vocab", [517, 11])
def test_token_logprobs(vocab: int) -> None:
    torch.manual_seed(vocab)
    x = torch.randn(6, vocab) * 5
    x[2, 3:7] = float("-inf")
    row, token = torch.tensor([0, 2, 2, 5, 1]), torch.randint(0, vocab, (5,))
    wanted = torch.tensor([1, MAX_LOGPROBS + 1, 0, 4, 21])
    got, want = (torch.full((9, TOKEN_COLUMNS), -77) for _ in range(2))
    logprobs.launch_token_logprobs(got, 3, x, row, token, wanted)
    ops_logprobs.token_logprobs(want, 3, x, row, token, wanted)
    assert (got[[0, 1, 2, 5, 8]] == -77).all(), "rows of others, and those that nobody asked for, are left alone"
    for n, top in ((3, 0), (4, 20), (6, 3), (7, 20)):
        [a], [b] = (read_tokens(t[n : n + 1].numpy(), top) for t in (got, want))
        assert a.rank == b.rank and np.isclose(a.logprob, b.logprob, atol=1e-5)
        finite = [p for p in b.top if np.isfinite(p[1])]
        assert [i for i, _ in a.top] == [i for i, _ in finite]
        assert np.allclose([v for _, v in a.top], [v for _, v in finite], atol=1e-5)
