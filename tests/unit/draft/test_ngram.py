"""N-gram drafting against a brute-force reading of its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.draft.ngram import NgramDrafter
from slipstream.draft.protocol import DraftView
from slipstream.errors import ConfigError
from slipstream.kernels.draft import match_lengths
from slipstream.sampling.slot_params import SlotParams
from tests.support.draft_views import no_rows

K = 4


def brute(history: list[int], min_n: int, max_n: int) -> list[int] | None:
    """The longest suffix of min_n..max_n tokens that occurred before, its most recent occurrence, continued."""
    n = len(history)
    for length in range(min(max_n, n - 1), min_n - 1, -1):
        suffix = history[n - length :]
        for end in range(n - 1, length - 1, -1):  # occurrence is history[end - length : end]
            if history[end - length : end] == suffix:
                extended = list(history)
                for i in range(K):
                    extended.append(extended[end + i])
                return extended[n:]
    return None


def view(histories: list[list[int]], *, drafted: int = 0, accepted: int = 0) -> DraftView:
    longest = max(len(h) for h in histories)
    table = torch.full((len(histories) + 1, longest + 3), 7)
    for i, h in enumerate(histories):
        table[i + 1, : len(h)] = torch.tensor(h)
    b = len(histories)
    zero = torch.zeros(b, dtype=torch.int64)
    real = torch.zeros(b)
    params = SlotParams(mode=zero, key=zero, child=zero, temperature=real, top_k=zero, top_p=real, min_p=real)
    return DraftView(
        slot_B=torch.arange(1, b + 1), committed_B=torch.tensor([len(h) - 1 for h in histories]),
        drafted_B=zero + drafted, accepted_B=zero + accepted, emitted_B=zero + accepted + 1,
        rows=no_rows(zero), history_SL=table, committed_S=zero, table_SP=zero[:, None],
        params=params, laws=None,
        len_ub=longest + 2, first_page=(), drafts=K, sampled=False, filtered=False, rejection=False, coupled=False,
    )  # fmt: skip


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_equals_brute_force(histories: list[list[int]], min_n: int, more: int) -> None:
    drafter = NgramDrafter(slots=8, max_drafts=K, min_n=min_n, max_n=min_n + more, gate=False)
    v = view(histories)
    drafts = drafter.propose(drafter.extend(v), v)
    for i, h in enumerate(histories):
        want = brute(h, min_n, min_n + more)
        assert int(drafts.count_B[i]) == (0 if want is None else K)
        if want is not None:
            assert drafts.token_BK[i].tolist() == want


@given(st.lists(st.integers(0, 2), min_size=2, max_size=20), st.integers(1, 6))
def test_match_lengths(history: list[int], max_n: int) -> None:
    end = len(history) - 1
    lengths = match_lengths(torch.tensor([history]), torch.tensor([end]), max_n)[0].tolist()
    for j in range(len(history)):
        n = 0
        while n < max_n and j - n >= 0 and end - n >= 0 and history[j - n] == history[end - n]:
            n += 1
        assert lengths[j] == n


def test_gate_follows_acceptance_and_recovers() -> None:
    drafter = NgramDrafter(slots=2, max_drafts=3)
    h = [1, 2, 3, 4, 1, 2, 3]

    def frames(n: int, drafted: int, accepted: int) -> int:
        count = 0
        for _ in range(n):
            v = view([h], drafted=drafted, accepted=accepted)
            count = int(drafter.propose(drafter.extend(v), v).count_B[0])
        return count

    assert frames(1, 0, 0) > 0, "an unknown slot starts with drafts"
    assert frames(20, 3, 0) == 0, "nothing accepted: it stops"
    assert frames(2000, 0, 0) > 0, "and is tried again later"
    assert frames(12, 3, 3) == 3


@pytest.mark.parametrize("options", [{"min_n": 0}, {"min_n": 3, "max_n": 2}, {"max_drafts": 0}, {"max_drafts": 99}])
def test_bad_options(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=str(next(reversed(options.values())))):
        NgramDrafter(**{"slots": 2, "max_drafts": 3, **options})
