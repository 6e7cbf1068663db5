"""The ops of sampled frames against the torch code of a CPU frame. Device code: sample_interpreted_cases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.library import opcheck

from slipstream.draft.choose import choose
from slipstream.kernels import sample
from slipstream.types import FinishCode
from tests.support.draft_views import sampled_view
from tests.support.frame_kernel_cases import same_state
from tests.support.sample_cases import REJECTION, op_frame, random_case, torch_frame


@pytest.mark.parametrize("synthetic", [None, 2.6])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("width", [1, 4])
def test_the_ops_are_process_verify_close(width: int, dense: bool, synthetic: float | None) -> None:
    """Every mode, filter and ban in one frame, over 2,000 rounds."""
    accepted, cut = set(), 0
    for seed in range(14):
        filtered = seed % 4 > 0
        case = random_case(slots=40, vocab=(1031, 640, 77)[seed % 3], width=width, seed=seed, filtered=filtered,
                           dense=dense)  # fmt: skip
        mine = case.to("cpu")
        processed, record = op_frame(mine, filtered=filtered, synthetic=synthetic)
        want, record_want = torch_frame(case, filtered=filtered, synthetic=synthetic)
        assert torch.equal(processed, want)
        assert torch.equal(record, record_want) and same_state(mine.state, case.state)
        accepted |= set(record[:, 2].tolist())
        cut += int((want == float("-inf")).sum() > (case.logits == float("-inf")).sum())
    assert cut >= 10 and (width == 1 or accepted >= {0, 1, 2})


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("filtered", [False, True])
def test_rows_without_a_finite_logit_end_their_slots(filtered: bool, dense: bool) -> None:
    """NaN, infinities, everything banned: no token, no draft accepted, in every mode; what came before stays."""
    codes, kept = set(), 0
    for seed in range(6):
        case = random_case(slots=40, vocab=77, width=3, seed=seed, filtered=filtered, dense=dense)
        for first, value in ((0, float("nan")), (3, float("-inf")), (5, float("inf"))):
            case.logits[first::7] = value
        case.logits[6::14, 9] = float("nan")
        mine = case.to("cpu")
        _, record = op_frame(mine, filtered=filtered)
        _, want = torch_frame(case, filtered=filtered)
        assert torch.equal(record[:, :6], want[:, :6]) and same_state(mine.state, case.state)
        bad = record[:, 4] == FinishCode.INVALID
        codes |= set(record[:, 4].tolist())
        kept += int((record[bad, 1] > 0).sum())
        assert bool((mine.state.active[case.slot[bad]] == 0).all())
        emitted = torch.arange(3) < record[:, 1:2]
        assert int(record[:, 6:][emitted].min()) >= 0
    assert codes == {0, 1, 2, 3} and kept > 0


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("filtered", [False, True])
def test_draft_choice_is_choose(part: bool, filtered: bool) -> None:
    """Tokens of every mode, and the laws of slots judged by rejection, over the whole vocabulary and a part of it."""
    kinds, ids, vocab = set(), torch.randperm(131)[:77].sort().values if part else None, 131
    for seed in range(6):
        case = random_case(slots=40, vocab=vocab, width=4, seed=seed, filtered=filtered, dense=True)
        slot, q = case.slot, case.q
        assert q is not None
        logits = torch.randn(slot.shape[0], 77 if part else vocab) * 3
        logits[slot == 1] = (torch.nan, torch.inf, -torch.inf)[seed % 3]  # no law: certain to be the first id
        before = q.zero_().clone() if part else q.clone()
        for step in (0, 2):
            want, law = choose(
                logits.clone(), sampled_view(case, slot, filtered=filtered, kernels=False), step, real=torch.float32,
                vocab=vocab, id_D=ids,
            )  # fmt: skip
            got, none = choose(
                logits.clone(), sampled_view(case, slot, filtered=filtered, kernels=True), step, real=torch.float32,
                vocab=vocab, id_D=ids,
            )  # fmt: skip
            assert none is None and law is not None and torch.equal(got, want)
            by_coin = (case.sampling.mode[slot] == REJECTION).nonzero()[:, 0]
            torch.testing.assert_close(q[slot[by_coin], step], law[by_coin], atol=1e-6, rtol=1e-5)
            before[slot[by_coin], step] = q[slot[by_coin], step]
            kinds |= set(case.sampling.mode[slot].tolist())
        assert torch.equal(q, before)
    assert kinds == {0, 1, 2}


def test_fakes_agree() -> None:
    checks = ("test_schema", "test_faketensor")
    case = random_case(slots=4, vocab=50, width=3, seed=1, dense=True)
    slot, pos, _, _, rows_B, row_of = case.packed
    state, s, ops = case.state, case.sampling, torch.ops.slipstream
    filters = (case.logits, slot, pos, *case.wanted, state.stop_ids, s.min_len, True)
    opcheck(ops.row_threshold.default, filters, test_utils=checks)
    peak, threshold, greedy = sample.row_threshold(*filters)
    race = (
        case.logits, peak, threshold, greedy, slot, pos, s.temperature, s.mode, state.key, state.child,
        state.committed, state.pending, case.q,
    )  # fmt: skip
    opcheck(ops.race_rows.default, race, test_utils=checks)
    laws = (s.temperature, s.mode, state.key, state.child, state.committed, case.q, 1, 50)
    opcheck(ops.draft_choice.default, (case.logits, None, peak, threshold, greedy, slot, *laws), test_utils=checks)
    args = (row_of, rows_B, case.slot, *state.fields, s.mode, state.key, state.child, case.q, None)
    opcheck(ops.close_sampled.default, (*sample.race_rows(*race), *args), test_utils=checks)


@pytest.mark.parametrize(
    ("filtered", "dense", "launches"), [(True, False, 7), (True, True, 8), (False, False, 5), (False, True, 6)]
)
def test_a_sampled_round_is_a_handful_of_launches(
    filtered: bool, dense: bool, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From logits to record. Counts what the CUDA path starts, without starting it."""
    pytest.importorskip("triton", reason="Triton is not installed (dev: pip install --no-deps 'triton>=3.9')")
    from slipstream.kernels.jit import filters as jit_filters
    from slipstream.kernels.jit import frame as jit_frame
    from slipstream.kernels.jit import sample as jit_sample

    started: list[str] = []

    class Started:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: started.append(self.name)

    for module in (jit_filters, jit_sample, jit_frame):
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Started(name))
    case = random_case(slots=4, vocab=50, width=3, seed=1, dense=dense)
    state, s = case.state, case.sampling
    slot, pos, _, _, rows_B, row_of = case.packed
    real, whole = torch.empty(slot.shape[0]), torch.empty(slot.shape[0], dtype=torch.int64)
    jit_filters.launch_row_threshold(
        case.logits, slot, pos, *case.wanted, state.stop_ids, s.min_len, real, real, whole,
        jit_filters.scratch(case.logits), filtered=filtered,
    )  # fmt: skip
    jit_sample.launch_race_rows(
        case.logits, real, real, whole, slot, pos, s.temperature, s.mode, state.key, state.child, state.committed,
        state.pending, case.q, whole, whole, real,
    )  # fmt: skip
    jit_frame.launch_close_sampled(
        whole, whole, real, row_of, rows_B, case.slot, *state.fields, s.mode, state.key, state.child, case.q, whole,
        None,
    )  # fmt: skip
    assert len(started) == launches, started
