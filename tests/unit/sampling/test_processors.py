"""Logits processors against a sort-based reference and transformers' warpers; edges; independence of rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slipstream.sampling.processors import MIN_TEMPERATURE, filter_threshold, process_logits

INF = math.inf


def by_sorting(logits_V: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """One row, written as the definitions say."""
    x = logits_V.clone()
    if temperature == 0:
        return x
    x /= temperature
    p = x.softmax(0)
    if min_p > 0:
        x[p < min_p * p.max()] = -INF
    if 0 < top_k < len(x):
        x[x < x.sort(descending=True).values[top_k - 1]] = -INF
    if top_p < 1:
        order = x.sort(descending=True).indices
        p = x.double().softmax(0)[order]
        x[order[p.cumsum(0) - p >= top_p]] = -INF
    return x


def process(logits_RV: Tensor, rows: list[tuple[float, int, float, float]], **kw: object) -> Tensor:
    t, k, p, m = zip(*rows, strict=True)
    ban = kw.get("ban")
    return process_logits(
        logits_RV.clone(),
        torch.tensor(t),
        torch.tensor(k),
        torch.tensor(p, dtype=torch.float64),
        torch.tensor(m, dtype=torch.float64),
        ban,  # type: ignore[arg-type]
        filtered=bool(kw.get("filtered", True)),
    )


ROWS = [
    (0.0, 3, 0.5, 0.5), (1.0, -1, 0.9, 0.0), (0.7, 0, 1.0, 0.1), (0.2, 1, 0.5, 0.0), (3.0, 50, 0.99, 0.01),
    (1.0, 7, 0.3, 0.02), (1.0, 10**9, 1e-6, 0.0), (1.0, 4, 1.0, 1.0), (1.3, 20, 0.8, 0.0), (1.0, -1, 1.0, 0.0),
]  # fmt: skip


def same_support(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got == -INF, want == -INF)
    live = want > -INF
    torch.testing.assert_close(got[live], want[live], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 5, 300, 49_152])
def test_equals_the_sort_based_reference(vocab: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(vocab)
    for scale in (0.5, 3.0, 12.0):
        logits_RV = torch.randn(len(ROWS), vocab, generator=g, dtype=dtype) * scale - 5
        got = process(logits_RV, ROWS)
        assert got.dtype == dtype
        for r, row in enumerate(ROWS):
            same_support(got[r], by_sorting(logits_RV[r], *row))
        assert torch.equal(got[0], logits_RV[0])  # greedy: untouched
        assert torch.equal(got[-1], logits_RV[-1])  # all off
        assert (got > -INF).any(1).all()


@given(
    st.integers(0, 10**6),
    st.integers(2, 60),
    st.floats(0.05, 5.0),
    st.integers(-1, 70),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
)
def test_random_parameters(seed: int, vocab: int, t: float, k: int, p: float, m: float) -> None:
    t, p, m = (float(torch.tensor(v, dtype=torch.float32)) for v in (t, p, m))
    logits_V = torch.randn(vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 4
    got, want = process(logits_V[None], [(t, k, p, m)])[0], by_sorting(logits_V, t, k, p, m)
    # A token whose bound lies within rounding of it may go either way; it must be the only one.
    differ = (got == -INF) != (want == -INF)
    if differ.any():
        assert differ.sum() == 1
        x = by_sorting(logits_V, t, k, 1.0, m).softmax(0).sort(descending=True).values.cumsum(0)
        ratio = (logits_V / t).softmax(0)
        assert (x - p).abs().min() < 1e-9 or (ratio / ratio.max() - m).abs().min() < 1e-9
    live = (got > -INF) & (want > -INF)
    torch.testing.assert_close(got[live], want[live])


def test_equals_transformers_in_the_same_order() -> None:
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits_RV = torch.randn(6, 2000, generator=torch.Generator().manual_seed(8)) * 3
    for t, k, p, m in ((0.8, 40, 0.9, 0.02), (1.5, 300, 0.6, 0.001), (1.0, 5, 0.95, 0.3)):
        want = logits_RV.clone()
        for warp in (TemperatureLogitsWarper(t), MinPLogitsWarper(m), TopKLogitsWarper(k), TopPLogitsWarper(p)):
            want = warp(torch.zeros(6, 1, dtype=torch.int64), want)
        same_support(process(logits_RV, [(t, k, p, m)] * 6), want)


def test_each_filter_works_on_the_renormalised_rest() -> None:
    logits_V = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    # top-2 leaves 4/7 and 3/7: top-p 0.55 then keeps one token; of the whole it would keep two.
    assert (process(logits_V[None], [(1.0, 2, 0.55, 0.0)])[0] > -INF).tolist() == [True, False, False, False]
    assert (process(logits_V[None], [(1.0, 0, 0.55, 0.0)])[0] > -INF).tolist() == [True, True, False, False]
    # min-p 0.5 leaves three; their first two weigh 7/9 < 0.78 < 1.
    assert (process(logits_V[None], [(1.0, 0, 0.77, 0.4)])[0] > -INF).tolist() == [True, True, False, False]
    assert (process(logits_V[None], [(1.0, 0, 0.78, 0.4)])[0] > -INF).tolist() == [True, True, True, False]


def test_ties_stay_together() -> None:
    logits_V = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0])
    assert (process(logits_V[None], [(1.0, 2, 1.0, 0.0)])[0] > -INF).tolist() == [False, True, True, False, True]
    assert (process(logits_V[None], [(1.0, 0, 0.3, 0.0)])[0] > -INF).tolist() == [False, True, True, False, True]
    flat = torch.zeros(1, 1000)
    for row in ((1.0, 3, 1.0, 0.0), (1.0, 0, 0.01, 0.0), (1.0, 0, 1.0, 1.0)):
        assert (process(flat, [row]) == 0).all()
    assert (process(torch.tensor([[0.0, -0.0, -1.0]]), [(1.0, 1, 1.0, 0.0)])[0] > -INF).tolist() == [True, True, False]


def test_rows_that_are_masked_already() -> None:
    logits_V = torch.tensor([-INF, 3.0, -INF, 1.0, -INF])
    for row in ((1.0, 4, 0.9999, 0.0), (1.0, -1, 1.0, 0.0), (0.5, 2, 1.0, 0.0)):
        assert (process(logits_V[None], [row])[0] > -INF).tolist() == [False, True, False, True, False]
    assert (process(logits_V[None], [(1.0, 1, 1.0, 0.0)])[0] > -INF).tolist() == [False, True, False, False, False]


def test_extreme_temperatures_stay_finite() -> None:
    logits_RV = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)) * 1000
    got = process(logits_RV, [(1e-30, -1, 0.9, 0.0), (MIN_TEMPERATURE, -1, 1.0, 0.0), (100.0, 0, 1.0, 0.0)])
    assert torch.isfinite(got[1:]).all()
    p_RV = got.softmax(1)
    assert not p_RV.isnan().any()
    assert torch.equal(p_RV[:2].argmax(1), logits_RV[:2].argmax(1))
    assert (p_RV[:2].amax(1) == 1).all()


def test_min_tokens_bans_stop_ids_first() -> None:
    logits_RV = torch.zeros(4, 10)
    logits_RV[:, 0], logits_RV[:, 7] = 9.0, 5.0
    ids_RS = torch.full((4, 16), -1)
    ids_RS[0, :3] = torch.tensor([0, 0, 7])
    ids_RS[1, :2] = torch.tensor([7, 2_000_000_000])  # an id outside the vocabulary can never be drawn
    ids_RS[2, :2] = torch.tensor([0, 7])
    ids_RS[3, 3] = 0
    active_R = torch.tensor([True, True, False, True])
    greedy, sampled = (0.0, -1, 1.0, 0.0), (1.0, 1, 1.0, 0.0)
    for filtered in (False, True):
        got = process(logits_RV, [greedy] * 4, ban=(ids_RS, active_R), filtered=filtered)
        assert [(row == -INF).nonzero().flatten().tolist() for row in got] == [[0, 7], [7], [], [0]]
        assert got[got > -INF].sum() == logits_RV.sum() - 9 - 5 - 5 - 9
    # The filters see the row without the banned ids: top-1 keeps the best of the rest.
    got = process(logits_RV, [sampled] * 4, ban=(ids_RS, active_R))
    assert (got > -INF).sum(1).tolist() == [8, 1, 1, 1]
    assert got[3].argmax() == 7


def test_unfiltered_only_scales() -> None:
    logits_RV = torch.randn(2, 30)
    got = process(logits_RV, [(0.5, 3, 0.1, 0.9), (0.0, 3, 0.1, 0.9)], filtered=False)
    assert torch.equal(got, logits_RV / torch.tensor([[0.5], [1.0]]))


def test_updates_in_place() -> None:
    logits_RV = torch.randn(1, 30)
    one = torch.ones(1)
    assert process_logits(logits_RV, one, one.long() * 2, one, one * 0, None, filtered=True) is logits_RV
    assert (logits_RV > -INF).sum() == 2


@pytest.mark.parametrize("vocab", [300, 49_152])
def test_a_row_is_bit_equal_alone_and_in_a_batch(vocab: int) -> None:
    logits_RV = torch.randn(len(ROWS), vocab, generator=torch.Generator().manual_seed(3)) * 2
    together = process(logits_RV, ROWS)
    for r, row in enumerate(ROWS):
        assert torch.equal(process(logits_RV[r : r + 1], [row])[0], together[r])


def test_threshold_is_a_logit_of_the_row() -> None:
    logits_RV = torch.randn(5, 777, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    off = torch.ones(5, dtype=torch.float64)
    for k in (1, 10, 776, 777):
        threshold = filter_threshold(logits_RV, torch.full((5,), k), off, off * 0)
        assert torch.equal(threshold, logits_RV.sort(descending=True).values[:, k - 1 : k])


def test_traceable_without_data() -> None:
    with FakeTensorMode():
        one = torch.ones(3)
        ban = (torch.zeros(3, 16, dtype=torch.int64), torch.zeros(3, dtype=torch.bool))
        got = process_logits(torch.rand(3, 50), one, one.long(), one, one, ban, filtered=True)
        assert got.shape == (3, 50)
