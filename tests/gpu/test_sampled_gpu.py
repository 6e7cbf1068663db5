"""Sampled frames on a GPU: the compiled kernels against the torch code of a CPU frame, run on the same GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from slipstream.kernels import frame as ops_frame
from slipstream.kernels import sample
from slipstream.kernels.jit import filters
from slipstream.sampling.rng import PURPOSE_COUPLED, noise_from_words, race_noise, stream_words
from tests.support.frame_kernel_cases import same_state
from tests.support.sample_cases import COUPLED, GREEDY, REJECTION, op_frame, random_case, torch_frame

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN, or the largest integer, so an element that nobody writes shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("synthetic", [None, 2.6])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("vocab", [128_256, 49_152, 5003])
def test_tokens_are_those_of_the_torch_code(vocab: int, dense: bool, synthetic: float | None) -> None:
    """Every mode, filter, ban and temperature in one frame. Kept tokens, emitted tokens and state: bit for bit."""
    accepted = set()
    for seed in range(6):
        filtered, width = seed % 3 > 0, (1, 4, 3)[seed % 3]
        case = random_case(slots=15, vocab=vocab, width=width, seed=seed, filtered=filtered, dense=dense).to("cuda")
        mine = case.to("cuda")
        processed, record = op_frame(mine, filtered=filtered, synthetic=synthetic)
        want, record_want = torch_frame(case, filtered=filtered, synthetic=synthetic)
        differs = ((processed > float("-inf")) != (want > float("-inf"))).sum(1)
        assert not differs.any(), f"rows keep other tokens, so many: {differs.tolist()}"
        assert torch.equal(record, record_want) and same_state(mine.state, case.state)
        accepted |= set(record[:, 2].tolist())
    assert len(accepted) >= 3


@pytest.mark.parametrize(("name", "value"), [("LISTED", 64), ("BINS", 16)])
def test_the_search_over_the_whole_row(name: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, name, value)
    case = random_case(slots=15, vocab=50_257, width=2, seed=3).to("cuda")
    mine = case.to("cuda")
    assert torch.equal(op_frame(mine, filtered=True)[1], torch_frame(case, filtered=True)[1])


def test_a_row_does_not_see_its_neighbours() -> None:
    """Alone, in a small and in a large frame: the same bits, so that seeded output depends on no batch."""
    case = random_case(slots=31, vocab=128_256, width=4, seed=8).to("cuda")
    state, s = case.state, case.sampling
    slot, pos = case.packed[:2]

    def tokens(pick: Tensor) -> list[Tensor]:
        logits = case.logits[pick].clone()
        at = slot[pick], pos[pick]
        found = sample.row_threshold(logits, *at, *case.wanted, state.stop_ids, s.min_len, True)
        return [*found, *sample.race_rows(
            logits, *found, *at, s.temperature, s.mode, state.key, state.child, state.committed, state.pending, None
        )]  # fmt: skip

    everything = tokens(torch.arange(slot.shape[0], device="cuda"))
    for pick in (torch.tensor([5], device="cuda"), torch.randperm(slot.shape[0], device="cuda")[:17]):
        for got, want in zip(tokens(pick), everything, strict=True):
            assert torch.equal(got, want[pick])


def test_the_coupled_choice_is_that_of_the_noise() -> None:
    """Without filters and at temperature 1: argmax(log p + Gumbel), with the noise of sampling/rng.py."""
    rows, vocab = 64, 128_256
    zero = torch.zeros(rows + 1, dtype=torch.int64, device="cuda")
    key = torch.randint(-(2**62), 2**62, (rows + 1,), device="cuda")
    slot, mode = torch.arange(1, rows + 1, device="cuda"), zero + COUPLED
    logits = torch.randn(rows, vocab, device="cuda") * 3
    one = torch.ones(rows + 1, dtype=torch.float64, device="cuda")
    stops = torch.full((rows + 1, 16), -1, device="cuda")
    for pos in (torch.zeros(rows, dtype=torch.int64, device="cuda"), torch.arange(rows, device="cuda") * 37):
        found = sample.row_threshold(logits, slot, pos, one, zero, one, one * 0, stops, zero, False)
        got, _, _ = sample.race_rows(
            logits, *found, slot, pos, one, mode, key, zero, zero, zero[:, None].repeat(1, 4), None
        )
        noise = race_noise(key[slot], zero[slot], pos + 1, PURPOSE_COUPLED, vocab, torch.float32)
        assert torch.equal(got, ((logits - logits.amax(1, keepdim=True)).exp() / noise).argmax(1))
    words = stream_words(key, zero, zero, 0, PURPOSE_COUPLED)
    assert torch.allclose(
        noise_from_words(words, 4096, torch.float32).cpu(),
        noise_from_words(words.cpu(), 4096, torch.float32),
        rtol=1e-6,
    )


def law(p: Tensor) -> Tensor:
    """Of two tokens in a row, each from p: [V * V]."""
    return (p[:, None] * p).flatten()


def counts_of_rounds(*, dense: bool, wrong: bool, rounds: int = 40, slots: int = 4000) -> Tensor:
    """How often each pair of first tokens comes out of two rounds of rejection slots, drafts drawn from q.

    `wrong`: always the same draft, but verified as one drawn from q.
    """
    vocab, width, dev = 6, 4, "cuda"
    g = torch.Generator(device=dev).manual_seed(5 + dense)
    logits = torch.tensor([1.2, 0.3, -0.4, 0.9, -1.5, 0.0], device=dev)
    q = torch.softmax(torch.tensor([0.1, 1.4, 0.2, -0.6, 0.3, 0.5], device=dev), 0)
    s = slots + 1
    zero, one = torch.zeros(s, dtype=torch.int64, device=dev), torch.ones(s, dtype=torch.float64, device=dev)
    stops = torch.full((s, 16), -1, device=dev)
    seen = torch.zeros(vocab * vocab, dtype=torch.int64, device=dev)
    slot = torch.arange(1, s, device=dev)
    row_of = torch.arange(slots * width, device=dev).view(slots, width)
    law_SKV = q.expand(s, width - 1, vocab).contiguous() if dense else None
    depth = torch.arange(width, device=dev).repeat(slots)
    for _ in range(rounds):
        key = torch.randint(-(2**62), 2**62, (s,), device=dev, generator=g)
        committed, active = zero.clone(), torch.ones_like(zero)
        history, pending = torch.zeros(s, 12, dtype=torch.int64, device=dev), zero[:, None].repeat(1, width)
        for _ in range(2):
            drawn = torch.multinomial(q, s * (width - 1), replacement=True, generator=g).view(s, width - 1)
            pending[:, 1:] = 1 if wrong else drawn
            flat, slot_R = logits.expand(slots * width, vocab).contiguous(), slot.repeat_interleave(width)
            pos = committed[slot_R] + depth
            found = sample.row_threshold(flat, slot_R, pos, one, zero, one, one * 0, stops, zero, False)
            rows = sample.race_rows(
                flat, *found, slot_R, pos, one, zero + REJECTION, key, zero, committed, pending,
                law_SKV,
            )  # fmt: skip
            ops_frame.close_sampled(
                *rows, row_of, zero[1:] + width, slot, zero, active, committed, zero + 100, stops, history, pending,
                zero + REJECTION, key, zero, law_SKV, None,
            )  # fmt: skip
        seen += torch.bincount(history[1:, 1] * vocab + history[1:, 2], minlength=vocab * vocab)
    return seen.cpu()


@pytest.mark.parametrize("dense", [False, True])
def test_rejection_keeps_the_law(dense: bool) -> None:
    """160,000 sequences over 36 outcomes. dense=False: each draft counts as certain, whatever it was drawn from."""
    want = law(torch.softmax(torch.tensor([1.2, 0.3, -0.4, 0.9, -1.5, 0.0], dtype=torch.float64), 0))
    seen = counts_of_rounds(dense=dense, wrong=False)
    assert chisquare(seen, want * seen.sum()).pvalue > 1e-4


def test_the_law_test_can_fail() -> None:
    """Certain drafts, verified as if they were drawn from q."""
    want = law(torch.softmax(torch.tensor([1.2, 0.3, -0.4, 0.9, -1.5, 0.0], dtype=torch.float64), 0))
    seen = counts_of_rounds(dense=True, wrong=True)
    assert chisquare(seen, want * seen.sum()).pvalue < 1e-9


def test_filtered_and_greedy_rows_share_a_launch() -> None:
    """A greedy row among filtered ones is its argmax, a seeded row its law cut to what the filter keeps."""
    case = random_case(slots=12, vocab=49_152, width=1, seed=11).to("cuda")
    _, record = op_frame(case.to("cuda"), filtered=True)
    processed, _ = torch_frame(case, filtered=True)
    rows = case.packed[5][:, 0]
    for b in range(case.slot.shape[0]):
        if record[b, 1] > 0:
            token, row = int(record[b, 6]), int(rows[b])
            assert processed[row, token] > float("-inf")
            if int(case.sampling.mode[case.slot[b]]) == GREEDY:
                assert token == int(processed[row].argmax())
