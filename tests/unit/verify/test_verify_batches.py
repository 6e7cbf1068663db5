"""What a verdict looks like, and that it depends on nothing but the slot's own rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slipstream.types import VerifyMode
from slipstream.verify import DenseQ, OneHot, Verdict, VerifyRows, verify
from tests.support.verify_kit import grid_rows

GREEDY, COUPLED, REJECTION = VerifyMode
ALL = {"sampled": True, "coupled": True, "rejection": True}


def fields(verdict: Verdict) -> list[Tensor]:
    return [verdict.accepted_B, verdict.tokens_BW, verdict.n_emitted_B]


def test_greedy_accepts_the_argmax_prefix() -> None:
    logits_RV = torch.full((8, 6), -1.0)
    logits_RV[torch.arange(8), torch.tensor([3, 1, 4, 5, 2, 0, 1, 1])] = 1.0
    rows = grid_rows(2, 4, torch.tensor([[3, 1, 5], [2, 0, 1]]), mode=GREEDY)
    verdict = verify(logits_RV, rows, sampled=False, coupled=False, rejection=False)
    assert verdict.accepted_B.tolist() == [2, 3]
    assert verdict.tokens_BW.tolist() == [[3, 1, 4, 0], [2, 0, 1, 1]]
    assert verdict.n_emitted_B.tolist() == [3, 4]
    assert all(t.dtype == torch.int64 for t in fields(verdict))


def test_rows_bound_what_is_verified() -> None:
    """Drafts beyond rows - 1 are not looked at, an inactive slot emits nothing, and pads may hold anything."""
    logits_RV = torch.full((12, 6), -1.0)
    logits_RV[:, 3] = 1.0
    draft_BK = torch.tensor([[3, 3, 3], [3, 3, -5], [3, 3, 99]])
    for mode in VerifyMode:
        rows = grid_rows(3, 4, draft_BK, mode=mode, rows_B=torch.tensor([0, 1, 3]))
        verdict = verify(logits_RV * 1e3, rows, **ALL)
        assert verdict.accepted_B.tolist() == [0, 0, 2]
        assert verdict.n_emitted_B.tolist() == [0, 1, 3]
        assert verdict.tokens_BW.tolist() == [[0] * 4, [3, 0, 0, 0], [3, 3, 3, 0]]


def test_ties_go_to_the_lowest_index_in_every_flag_combination() -> None:
    logits_RV = torch.zeros(2, 50)
    logits_RV[:, :7] = -1.0
    rows = grid_rows(1, 2, torch.tensor([[7]]), mode=GREEDY)
    for flags in ({"sampled": False, "coupled": False, "rejection": False}, ALL, ALL | {"coupled": False}):
        assert verify(logits_RV, rows, **flags).tokens_BW.tolist() == [[7, 7]]


def mixed(seed: int, dense: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, VerifyRows]:
    """Ragged slots of all modes, their flat rows shuffled and some rows nobody's."""
    g = torch.Generator().manual_seed(seed)
    batch, width, vocab = 9, 4, 11
    rows_B = torch.tensor([4, 0, 1, 2, 3, 4, 4, 3, 2])
    flat = int(rows_B.sum()) + 3
    order = torch.randperm(flat, generator=g)
    start_B = rows_B.cumsum(0) - rows_B
    last_B = (rows_B - 1).clamp(min=0)
    row_of_BW = order[start_B[:, None] + torch.minimum(torch.arange(width), last_B[:, None])]
    logits_RV = torch.randn(flat, vocab, generator=g, dtype=dtype) * 2
    logits_RV[torch.rand(flat, vocab, generator=g) < 0.2] = -torch.inf
    logits_RV[:, 0] = logits_RV[:, 0].clamp(min=-1)
    draft_BK = torch.randint(0, vocab, (batch, width + 2), generator=g)
    # Likely drafts, so that all accepted counts come up.
    likely_BK = logits_RV[row_of_BW].argmax(2)[:, :3]
    draft_BK[:, :3] = torch.where(torch.rand(batch, 3, generator=g) < 0.7, likely_BK, draft_BK[:, :3])
    q = DenseQ(torch.randn(batch, width + 1, vocab, generator=g, dtype=dtype).softmax(2)) if dense else OneHot()
    return logits_RV, VerifyRows(
        mode_B=torch.randint(0, 3, (batch,), generator=g),
        key_B=torch.randint(-(2**63), 2**63 - 1, (batch,), generator=g),
        child_B=torch.randint(0, 4, (batch,), generator=g),
        base_B=torch.randint(0, 1000, (batch,), generator=g),
        row_of_BW=row_of_BW,
        rows_B=rows_B,
        draft_BK=draft_BK,
        q=q,
    )


def only(rows: VerifyRows, b: int) -> VerifyRows:
    one = {f.name: getattr(rows, f.name) for f in dataclasses.fields(rows)}
    cut = {name: t[b : b + 1] for name, t in one.items() if isinstance(t, Tensor)}
    q = DenseQ(rows.q.q_BKV[b : b + 1]) if isinstance(rows.q, DenseQ) else rows.q
    return VerifyRows(**cut, q=q)


@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_a_verdict_is_the_same_alone_and_in_a_batch(seed: int, dense: bool, dtype: torch.dtype) -> None:
    logits_RV, rows = mixed(seed, dense, dtype)
    kept = logits_RV.clone()
    together = verify(logits_RV, rows, **ALL)
    assert torch.equal(logits_RV, kept)
    for b in range(9):
        mode = int(rows.mode_B[b])
        flags = {"sampled": mode != GREEDY, "coupled": mode == COUPLED, "rejection": mode == REJECTION}
        mine, width = only(rows, b), max(1, int(rows.rows_B[b]))
        # Own flat rows only, and no wider than needed.
        own = logits_RV[mine.row_of_BW[0, :width]]
        mine = dataclasses.replace(mine, row_of_BW=torch.arange(width).view(1, width))
        alone = verify(own, mine, **flags)
        assert alone.accepted_B[0] == together.accepted_B[b]
        assert alone.n_emitted_B[0] == together.n_emitted_B[b]
        assert torch.equal(alone.tokens_BW[0], together.tokens_BW[b, :width])
        assert not together.tokens_BW[b, int(together.n_emitted_B[b]) :].any()


def test_greedy_rows_in_a_sampled_batch_are_the_argmax() -> None:
    """Also where two logits differ by less than a probability can show."""
    logits_RV = torch.zeros(4, 1000)
    logits_RV[:, 700] = 1e-8
    rows = grid_rows(4, 1, mode=GREEDY)
    rows.mode_B[1:] = torch.tensor([COUPLED, REJECTION, GREEDY])
    tokens = verify(logits_RV, rows, **ALL).tokens_BW[:, 0].tolist()
    assert tokens[0] == tokens[3] == 700


def test_a_real_vocabulary_is_bit_equal_alone_and_in_a_batch() -> None:
    logits_RV = torch.randn(8, 50_000, generator=torch.Generator().manual_seed(1)) * 3
    for mode in VerifyMode:
        rows = grid_rows(8, 1, mode=mode, base_B=torch.arange(8) + 40)
        together = verify(logits_RV, rows, **ALL).tokens_BW
        for b in range(8):
            alone = dataclasses.replace(only(rows, b), row_of_BW=torch.zeros(1, 1, dtype=torch.int64))
            assert verify(logits_RV[b : b + 1], alone, **ALL).tokens_BW[0] == together[b]


def decode(logits_LV: Tensor, mode: VerifyMode, drafts: int, draft_of: Tensor | None, key: int) -> list[int]:
    """Tokens at positions 1 .. L - 1 with `drafts` drafts a round taken from draft_of [L] (by position)."""
    length, total = 1, len(logits_LV)
    out: list[int] = []
    while length < total:
        base = length - 1
        here = min(drafts, total - 1 - length)
        draft_BK = torch.zeros(1, 1, dtype=torch.int64)
        if here and draft_of is not None:
            draft_BK = draft_of[length : length + here].unsqueeze(0)
        rows = grid_rows(1, here + 1, draft_BK, mode=mode, key_B=torch.tensor([key]), base_B=torch.tensor([base]))
        flags = {"sampled": mode != GREEDY, "coupled": mode == COUPLED, "rejection": False}
        verdict = verify(logits_LV[base : base + here + 1], rows, **flags)
        new = verdict.tokens_BW[0, : int(verdict.n_emitted_B)].tolist()
        out += new
        length += len(new)
    return out


@given(st.integers(0, 10**6), st.integers(1, 7), st.floats(0, 1), st.sampled_from([GREEDY, COUPLED]))
def test_drafts_never_change_greedy_and_seeded_output(
    seed: int, drafts: int, share_right: float, mode: VerifyMode
) -> None:
    g = torch.Generator().manual_seed(seed)
    logits_LV = torch.randn(24, 13, generator=g, dtype=torch.float64)
    plain = decode(logits_LV, mode, 0, None, seed)
    right_L = torch.tensor([0, *plain])
    noise_L = torch.randint(0, 13, (24,), generator=g)
    draft_L = torch.where(torch.rand(24, generator=g) < share_right, right_L, noise_L)
    assert decode(logits_LV, mode, drafts, draft_L, seed) == plain


def test_seeded_output_depends_on_seed_and_child() -> None:
    logits_LV = torch.zeros(40, 100)
    first = decode(logits_LV, COUPLED, 0, None, 1)
    assert first == decode(logits_LV, COUPLED, 0, None, 1)
    assert first != decode(logits_LV, COUPLED, 0, None, 2)
    assert len(set(first)) > 20  # positions differ too
    one = grid_rows(1, 1, mode=COUPLED)
    children = [
        verify(logits_LV[:1], dataclasses.replace(one, child_B=torch.tensor([c])), **ALL).tokens_BW.item()
        for c in range(20)
    ]
    assert len(set(children)) > 10


@pytest.mark.parametrize("mean", [1.0, 1.4, 2.5, 3.0, 4.0])
@pytest.mark.parametrize("mode", list(VerifyMode))
def test_synthetic_acceptance(mean: float, mode: VerifyMode) -> None:
    batch, width, vocab = 4000, 4, 5
    g = torch.Generator().manual_seed(3)
    logits_RV = torch.randn(batch * width, vocab, generator=g)
    draft_BK = torch.randint(0, vocab, (batch, 3), generator=g)
    rows_B = torch.full((batch,), width)
    rows_B[:3] = torch.tensor([0, 1, 2])
    rows = grid_rows(batch, width, draft_BK, mode=mode, rows_B=rows_B)
    verdict = verify(logits_RV, rows, **ALL, synthetic=mean)
    full = verdict.n_emitted_B[3:].double()
    assert full.mean() == pytest.approx(mean, abs=0.03)
    assert set(full.tolist()) <= {mean // 1, mean // 1 + 1}
    assert verdict.n_emitted_B[0] == 0
    assert verdict.n_emitted_B[1] == 1
    assert verdict.n_emitted_B[2] <= 2
    b = torch.arange(3, batch)
    kept_BK = torch.arange(3) < verdict.accepted_B[b, None]
    assert torch.equal(verdict.tokens_BW[b, :3][kept_BK], draft_BK[b][kept_BK])
    if mode is GREEDY:
        want = logits_RV.view(batch, width, vocab)[b, verdict.accepted_B[b]].argmax(1)
        assert torch.equal(verdict.tokens_BW[b, verdict.accepted_B[b]], want)
    # Another round of the same request draws another count.
    later = dataclasses.replace(rows, base_B=rows.base_B + 2)
    a, b = (verify(logits_RV, r, **ALL, synthetic=1.5).accepted_B[3:] for r in (rows, later))
    assert 0.4 < (a != b).double().mean() < 0.6


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("synthetic", [None, 2.5])
def test_traceable_without_data(dense: bool, width: int, synthetic: float | None) -> None:
    """No host read and no shape that depends on data: fake tensors have neither."""
    with FakeTensorMode():
        q_BKV = torch.rand(3, 4, 20) if dense else None
        rows = grid_rows(3, width, torch.zeros(3, 5, dtype=torch.int64), q_BKV=q_BKV)
        verdict = verify(torch.rand(3 * width, 20), rows, **ALL, synthetic=synthetic)
        assert verdict.tokens_BW.shape == (3, width)
        assert verdict.accepted_B.shape == verdict.n_emitted_B.shape == (3,)
