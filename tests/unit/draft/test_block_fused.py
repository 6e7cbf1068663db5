"""A block drafter's round as a GPU runs it, each kernel by its definition, is the round in plain operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.draft.block_fused import FusedBlock
from slipstream.kernels.tuning import PassConfig
from slipstream.models.linear import Dense
from tests.support.block_cases import KINDS, LIBRARY, BlockCase
from tests.support.kernel_cases import relative_error


@pytest.mark.parametrize(
    ("slots", "cut"), [(1, PassConfig()), (5, PassConfig()), (5, LIBRARY)], ids=("one slot", "streamed", "library")
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_round_is_the_plain_one(kind: str, slots: int, cut: PassConfig) -> None:
    with torch.inference_mode():
        case = BlockCase(kind, slots=slots, bias=slots == 5)
        options = {"confidence_threshold": 0.5} if case.model.confidence is not None else {}
        full = case.model.max_drafts
        for drafts, wanted, sampled in (
            (full, full, False), (full, full, True), (full - 1, full - 1, False), (full, 2, True),
        ):  # fmt: skip
            view = replace(case.sampled() if sampled else case.view, drafts=wanted)
            plain, fused = (case.drafter(x, drafts=drafts, **options) for x in (None, cut))
            want, got = case.round(plain, view), case.round(fused, view)
            alive = view.slot_B > 0
            assert torch.equal(got.token_BK[alive], want.token_BK[alive])
            assert torch.equal(got.count_B[alive], want.count_B[alive])
            assert (want.q_BKV is None) == (got.q_BKV is None) == (not sampled)
            if got.q_BKV is not None and want.q_BKV is not None:
                torch.testing.assert_close(got.q_BKV[alive], want.q_BKV[alive], atol=2e-4, rtol=1e-3)
            assert relative_error(case.written(fused), case.written(plain)) < 1e-5


def test_tokens_depend_on_the_token_before() -> None:
    """The case can tell a chain from independent choices: without the bias its drafts are others."""
    with torch.inference_mode():
        case = BlockCase("vanilla", slots=2)
        drafter = case.drafter(PassConfig(), drafts=5)
        chained = case.round(drafter, case.view).token_BK
        case.model.markov = None
        assert not torch.equal(case.round(drafter, case.view).token_BK, chained)


def test_more_slots_than_a_streaming_product_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        case = BlockCase("gated", slots=4)
        want = case.round(case.drafter(None, drafts=4), case.view).token_BK
        monkeypatch.setattr("slipstream.draft.block_fused.MAX_STREAM_ROWS", 3)
        got = case.round(case.drafter(PassConfig(), drafts=4), case.view).token_BK
        assert torch.equal(got[:3], want[:3])


def test_what_does_not_fit() -> None:
    with torch.inference_mode():
        assert not FusedBlock.fits(BlockCase("vanilla", slots=1, dtype=torch.float64).model)
        model = BlockCase("vanilla", slots=1).model
        assert FusedBlock.fits(model)
        head = model.head
        assert isinstance(head, Dense)
        model.head = Dense(head.weight_NK, torch.zeros(head.weight_NK.shape[0]))
        assert not FusedBlock.fits(model)
