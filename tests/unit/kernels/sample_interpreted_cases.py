"""The kernels of sampled frames on the CPU, in Triton's interpreter, against the torch code of a CPU frame.

Collected by test_kernels_interpreted.py only, in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.kernels import choice as ops_choice
from slipstream.kernels import frame as ops_frame
from slipstream.kernels import grammar as ops_grammar
from slipstream.kernels import sample as ops_sample
from slipstream.kernels.jit import choice, filters, frame, grammar, numbers, sample
from slipstream.sampling.rng import noise_from_words
from tests.support.frame_kernel_cases import same_state
from tests.support.sample_cases import Case, random_case, torch_frame

SLOTS = 5


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles per row also in a small vocabulary."""
    torch.manual_seed(0)
    for module in (filters, sample):
        monkeypatch.setattr(module, "TILE", 512)


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else -77, dtype=dtype)


def poisoned(memory: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.fill_(float("nan") if t.is_floating_point() else -77) for t in memory)


def kernel_threshold(case: Case, logits: Tensor, *, filtered: bool) -> tuple[Tensor, Tensor, Tensor]:
    slot, pos = case.packed[:2]
    rows = logits.shape[0]
    out = poison(rows), poison(rows), poison(rows, dtype=torch.int64)
    filters.launch_row_threshold(
        logits, slot, pos, *case.wanted, case.state.stop_ids, case.sampling.min_len, *out,
        poisoned(filters.scratch(logits)), filtered=filtered,
    )  # fmt: skip
    return out


def kernel_frame(case: Case, *, filtered: bool, synthetic: float | None = None) -> tuple[Tensor, Tensor]:
    """Processed logits and record; closes the round in `case`."""
    state, s = case.state, case.sampling
    slot, pos, _, _, rows_B, row_of = case.packed
    logits = case.logits.clone()
    peak, threshold, greedy = kernel_threshold(case, logits, filtered=filtered)
    rows = logits.shape[0]
    target, residual, p = poison(rows, dtype=torch.int64), poison(rows, dtype=torch.int64), poison(rows)
    sample.launch_race_rows(
        logits, peak, threshold, greedy, slot, pos, s.temperature, s.mode, state.key, state.child, state.committed,
        state.pending, case.q, target, residual, p,
    )  # fmt: skip
    record = poison(*row_of.shape, dtype=torch.int64).new_empty(row_of.shape[0], 6 + row_of.shape[1]).fill_(-77)
    frame.launch_close_sampled(
        target, residual, p, row_of, rows_B, case.slot, *state.fields, s.mode, state.key, state.child, case.q, record,
        None if synthetic is None else ops_frame.synthetic_parts(synthetic),
    )  # fmt: skip
    temperature = s.temperature[slot].float()
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    return torch.where(scaled >= threshold[:, None], scaled, float("-inf")), record


def same_frame(case: Case, *, filtered: bool, synthetic: float | None = None) -> Tensor:
    mine = case.to("cpu")
    processed, record = kernel_frame(mine, filtered=filtered, synthetic=synthetic)
    want, record_want = torch_frame(case, filtered=filtered, synthetic=synthetic)
    assert torch.equal(processed, want)
    assert torch.equal(record, record_want) and same_state(mine.state, case.state)
    return record


# The interpreter takes seconds a case: few slots, every combination of what is compiled differently.
@pytest.mark.parametrize(
    ("vocab", "width", "dense", "filtered", "synthetic"),
    [
        (1031, 2, False, True, None), (600, 2, True, True, None), (1031, 1, False, True, None),
        (1031, 3, False, False, None), (513, 2, True, False, 1.5), (600, 2, False, True, 1.6),
    ],
)  # fmt: skip
def test_every_mode_and_filter_in_one_frame(
    vocab: int, width: int, dense: bool, filtered: bool, synthetic: float | None
) -> None:
    case = random_case(slots=SLOTS, vocab=vocab, width=width, seed=vocab + width, filtered=filtered, dense=dense)
    case.sampling.mode[1:4] = torch.arange(3)
    case.sampling.temperature[1:4] = torch.tensor([0.0, 0.8, 0.9])
    same_frame(case, filtered=filtered, synthetic=synthetic)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows of NaN
@pytest.mark.parametrize("dense", [False, True])
def test_rows_without_a_finite_logit(dense: bool) -> None:
    case = random_case(slots=SLOTS, vocab=600, width=2, seed=4, filtered=True, dense=dense)
    case.sampling.mode[1:4] = torch.arange(3)
    case.sampling.temperature[1:4] = torch.tensor([0.0, 0.8, 0.9])
    case.logits[::3], case.logits[1::3] = float("nan"), float("-inf")
    mine = case.to("cpu")
    _, record = kernel_frame(mine, filtered=True)
    _, want = torch_frame(case, filtered=True)
    assert torch.equal(record[:, :6], want[:, :6]) and same_state(mine.state, case.state)
    assert {0, 3} <= set(record[:, 4].tolist())


def test_rows_that_do_not_fit() -> None:
    same_frame(random_case(slots=SLOTS, vocab=700, width=4, seed=2, rows=9), filtered=True)


@pytest.mark.parametrize(("listed", "bins"), [(8, 512), (4096, 4), (64, 32)])
def test_list_and_bins_decide_nothing_but_time(listed: int, bins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too short a list, too few bins: the search goes over the whole row."""
    monkeypatch.setattr(filters, "LISTED", listed)
    monkeypatch.setattr(filters, "BINS", bins)
    same_frame(random_case(slots=SLOTS, vocab=900, width=1, seed=3), filtered=True)


def test_all_equal_logits_stay_together() -> None:
    case = random_case(slots=SLOTS, vocab=900, width=1, seed=5)
    case.logits.fill_(-3.25)
    same_frame(case, filtered=True)


def test_a_row_does_not_see_its_neighbours() -> None:
    """The same slot alone and among others: the same bits, so that seeded output does not depend on the batch."""
    case = random_case(slots=3, vocab=1031, width=2, seed=6)
    alone = case.to("cpu")
    logits = case.logits.clone()
    peak, threshold, greedy = kernel_threshold(case, logits, filtered=True)
    for row in (0, 3):
        one = Case(
            state=alone.state, sampling=alone.sampling, slot=alone.slot,
            packed=tuple(t[row : row + 1] for t in alone.packed[:4]) + alone.packed[4:], logits=alone.logits, q=None,
        )  # fmt: skip
        got = kernel_threshold(one, case.logits[row : row + 1].clone(), filtered=True)
        assert [t.item() for t in got] == [t[row].item() for t in (peak, threshold, greedy)]


def test_noise_is_that_of_the_counter_rng() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def dump(word_ptr, out_ptr, V: tl.constexpr):
        i = tl.arange(0, V)
        tl.store(out_ptr + i, numbers.exponential(tl.load(word_ptr), i))

    words = torch.randint(-(2**62), 2**62, (1,))
    out = poison(1, 4096)
    dump[(1,)](words, out, V=4096)
    assert torch.allclose(out, noise_from_words(words, 4096, torch.float32), rtol=1e-6, atol=0)


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_draft_choice(part: bool, dense: bool) -> None:
    vocab, step = 1100, 2
    case = random_case(slots=SLOTS, vocab=vocab, width=4, seed=3, dense=True)
    ids = torch.randperm(vocab)[:700].sort().values if part else None
    slot, s, state = case.slot, case.sampling, case.state
    if not dense:  # a promise that nobody is judged by rejection
        s.mode.clamp_(max=1)
    logits = torch.randn(slot.shape[0], 700 if part else vocab) * 3
    s.mode[slot[0]] = 2 if dense else 1
    logits[0] = torch.nan
    q = case.q if dense else None
    never = torch.full_like(slot, 1 << 40)
    peak, threshold, greedy = ops_sample.row_threshold(
        logits, slot, never, *case.wanted, state.stop_ids, s.min_len, True
    )
    mine, out = None if q is None else q.clone(), torch.full_like(slot, -77)
    rest = (peak, threshold, greedy, slot, s.temperature, s.mode, state.key, state.child, state.committed)
    choice.launch_draft_choice(logits, ids, *rest, mine, out, step=step, vocab=vocab)
    assert torch.equal(out, ops_choice.draft_choice(logits, ids, *rest, q, step, vocab))
    if q is not None and mine is not None:
        assert torch.allclose(mine[1:], q[1:], atol=1e-7, rtol=1e-6) and (s.mode[slot] == 2).any()


@pytest.mark.parametrize("vocab", [1000, 1536])
def test_mask_rows(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "TILE", 512)
    slot, cell = torch.tensor([1, 1, 3, 2, 1, 0]), torch.tensor([4, 5, 9, 7, 99, 0])
    committed, masked = torch.tensor([0, 4, 7, 9]), torch.tensor([0, 1, 0, 1])
    mask = torch.randint(-(2**31), 2**31, (4, 3, -(-vocab // 32)), dtype=torch.int64).to(torch.int32)
    logits = torch.randn(6, vocab)
    got, want = logits.clone(), logits.clone()
    grammar.launch_mask_rows(got, slot, cell, committed, masked, mask)
    ops_grammar.masked_rows(want, slot, cell, committed, masked, mask)
    assert torch.equal(got, want) and got.isinf().any(1).tolist() == [True, True, True, False, True, False]
