"""Suffix drafting against its formula in plain Python: counting occurrences in the text, no ranks, no tensors."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.draft.ngram import NgramDrafter
from slipstream.draft.suffix import PLACES, SuffixDrafter
from slipstream.errors import ConfigError
from tests.unit.draft.test_ngram import view

K = 5


def by_counting(
    text: list[int], *, depth: int, factor: float, offset: float, min_prob: float, places: int = PLACES
) -> tuple[list[int], float]:
    """Drafts and score: for every m the places where the last m tokens stood before vote, token by token."""
    n = len(text)

    def common(j: int) -> int:
        m = 0
        while m < min(depth, j + 1) and text[j - m] == text[n - 1 - m]:
            m += 1
        return m

    voters = sorted(((common(j), j) for j in range(n - 1) if common(j)), reverse=True)[:places]
    best: tuple[list[int], float] = ([], 0.0)
    for m in range(depth, 0, -1):
        places_left = [j for length, j in voters if length >= m]
        drafts: list[int] = []
        prob, score = 1.0, 0.0
        while len(drafts) < min(K, int(factor * m + offset)):
            places_left = [j for j in places_left if j + 1 + len(drafts) < n]
            votes = Counter(text[j + 1 + len(drafts)] for j in places_left)
            if not votes:
                break
            token, count = votes.most_common(1)[0]  # of equals the first that was counted
            prob *= count / len(places_left)
            if prob < min_prob:
                break
            places_left = [j for j in places_left if text[j + 1 + len(drafts)] == token]
            drafts.append(token)
            score += prob
        if score > best[1]:
            best = drafts, score
    return best


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.0, 1.0, 2.5]),
    st.sampled_from([0.0, 0.1, 0.34, 0.5, 1.0]),
)
def test_equals_counting(histories: list[list[int]], depth: int, factor: float, offset: float, min_prob: float) -> None:
    if factor * depth + offset < 1:
        return
    rule = {"factor": factor, "offset": offset, "min_prob": min_prob}
    drafter = SuffixDrafter(max_drafts=K, depth=depth, **rule)
    v = view(histories)
    drafts = drafter.propose(drafter.extend(v), v)
    for i, text in enumerate(histories):
        want, _ = by_counting(text, depth=depth, **rule)
        assert drafts.token_BK[i, : int(drafts.count_B[i])].tolist() == want


def test_long_random_streams_with_more_places_than_vote() -> None:
    """Four tokens, 400 places: far more than `PLACES` match, and the best of them decide."""
    g = torch.Generator().manual_seed(3)
    offered = 0
    for vocab in (2, 4, 9):
        texts = [torch.randint(0, vocab, (400 - 7 * i,), generator=g).tolist() for i in range(6)]
        drafter = SuffixDrafter(max_drafts=K)
        v = view(texts)
        drafts = drafter.propose(drafter.extend(v), v)
        for i, text in enumerate(texts):
            want, _ = by_counting(text, depth=24, factor=1.0, offset=0.0, min_prob=0.1)
            assert drafts.token_BK[i, : int(drafts.count_B[i])].tolist() == want
            offered += len(want)
    assert offered > 20


def test_the_majority_wins_over_the_latest() -> None:
    text = [7, 1, 2, 3, 5, 8, 1, 2, 3, 6, 9, 1, 2, 4, 5, 0, 1, 2]
    v = view([text])
    suffix, ngram = SuffixDrafter(max_drafts=K), NgramDrafter(slots=2, max_drafts=K, gate=False)
    drafts = suffix.propose(suffix.extend(v), v)
    # Two tokens match, so two drafts: 3 by two votes of three, then of equals the latest.
    assert drafts.token_BK[0, : int(drafts.count_B[0])].tolist() == [3, 6]
    assert int(ngram.propose(ngram.extend(v), v).token_BK[0, 0]) == 4


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"depth": 0}, "depth=0"),
        ({"depth": 2.5}, "depth=2.5"),
        ({"factor": -1.0}, r"factor=-1\.0"),
        ({"min_prob": 1.5}, r"min_prob=1\.5"),
        ({"min_prob": "high"}, "min_prob='high'"),
        ({"factor": 0.0}, r"factor=0\.0"),
        ({"max_drafts": 99}, "num_drafts=99"),
    ],
)
def test_bad_options(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SuffixDrafter(**{"max_drafts": 3, **options})  # type: ignore[arg-type]
