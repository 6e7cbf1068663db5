"""The engine's own random numbers: joint law of 7 tokens over at least 3 rounds, by chi-square.

A tiny model: the law of the next token depends on the token before. Tens of thousands of slots decode at
once with the real `verify`; each test has a control of the same size that must be rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

import slipstream.verify.rejection as rejection
from slipstream.sampling.rng import PURPOSE_DRAFT, race, race_noise
from slipstream.types import VerifyMode
from slipstream.verify import verify
from tests.support.verify_kit import grid_rows

VOCAB, TOKENS, DRAFTS = 3, 7, 2
CELLS = VOCAB**TOKENS
DETECT = 0.02
# drafters.md, section 6 (b): to detect a total variation d over K cells, 4 N d^2 = 5 sqrt(2 K).
SLOTS = math.ceil(5 * math.sqrt(2 * CELLS) / (4 * DETECT**2))

TARGET = torch.tensor([[0.45, 0.32, 0.23], [0.21, 0.5, 0.29], [0.35, 0.25, 0.4]])
DRAFT = torch.tensor([[0.3, 0.5, 0.2], [0.4, 0.3, 0.3], [0.2, 0.3, 0.5]])


def keys() -> tuple[Tensor, Tensor]:
    """Noise keys and children: neighbours are two children of one request."""
    key_B = torch.randint(-(2**63), 2**63 - 1, (-(-SLOTS // 2),), generator=torch.Generator().manual_seed(5))
    return key_B.repeat_interleave(2)[:SLOTS], torch.arange(SLOTS) % 2


def decode(
    mode: VerifyMode,
    choose: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor],
    *,
    dense_q: bool,
    drafts: int = DRAFTS,
    base_of: Callable[[Tensor], Tensor] = lambda length_B: length_B - 1,
) -> tuple[Tensor, Tensor]:
    """First TOKENS tokens of every slot after a prompt of one token 0, and the rounds each slot took.

    choose(previous token, key, child, base, step) is the drafter.
    """
    key_B, child_B = keys()
    history_BL = torch.zeros(SLOTS, 1 + TOKENS + drafts + 1, dtype=torch.int64)
    length_B = torch.ones(SLOTS, dtype=torch.int64)
    rounds_B = torch.zeros(SLOTS, dtype=torch.int64)
    while bool((length_B <= TOKENS).any()):
        last_B1 = history_BL.gather(1, (length_B - 1).unsqueeze(1))
        base_B = base_of(length_B)
        path = [last_B1.squeeze(1)]
        for step in range(drafts):
            path.append(choose(path[-1], key_B, child_B, base_B, step))
        path_BW = torch.stack(path, 1)
        active_B = length_B <= TOKENS
        rows = grid_rows(
            SLOTS, drafts + 1, path_BW[:, 1:],
            mode=mode, key_B=key_B, child_B=child_B, base_B=base_B,
            rows_B=active_B * (drafts + 1), q_BKV=DRAFT[path_BW[:, :-1]] if dense_q else None,
        )  # fmt: skip
        verdict = verify(
            TARGET[path_BW].flatten(0, 1).log(), rows,
            sampled=True, coupled=mode is VerifyMode.COUPLED, rejection=mode is VerifyMode.REJECTION,
        )  # fmt: skip
        slot_BW = torch.arange(drafts + 1) + length_B.unsqueeze(1)
        emitted_BW = torch.arange(drafts + 1) < verdict.n_emitted_B.unsqueeze(1)
        old_BW = history_BL.gather(1, slot_BW.clamp(max=history_BL.shape[1] - 1))
        history_BL.scatter_(
            1, slot_BW.clamp(max=history_BL.shape[1] - 1), torch.where(emitted_BW, verdict.tokens_BW, old_BW)
        )
        length_B = length_B + verdict.n_emitted_B
        rounds_B = rounds_B + active_B
    return history_BL[:, 1 : 1 + TOKENS], rounds_B


def p_value(tokens_BL: Tensor) -> float:
    """Chi-square of the joint law of all TOKENS tokens; every cell expects at least 5 by choice of TARGET."""
    index_B = torch.zeros(SLOTS, dtype=torch.int64)
    for i in range(TOKENS):
        index_B = index_B * VOCAB + tokens_BL[:, i]
    law = TARGET[0].double()
    for _ in range(TOKENS - 1):
        law = (law.view(-1, VOCAB).unsqueeze(-1) * TARGET.double()).flatten()
    expected = law / law.sum() * SLOTS
    assert expected.min() >= 5
    counts = torch.bincount(index_B, minlength=CELLS).double()
    return float(chi2.sf(float(((counts - expected) ** 2 / expected).sum()), CELLS - 1))


def sampled_draft(prev_B: Tensor, key_B: Tensor, child_B: Tensor, base_B: Tensor, step: int) -> Tensor:
    noise_BV = race_noise(key_B, child_B, base_B, PURPOSE_DRAFT, VOCAB, torch.float32, step)
    return race(DRAFT[prev_B], noise_BV)


def argmax_draft(prev_B: Tensor, key_B: Tensor, child_B: Tensor, base_B: Tensor, step: int) -> Tensor:
    return DRAFT[prev_B].argmax(1)


ACCEPTED = 1e-3
REJECTED = 1e-9


@pytest.mark.parametrize("dense_q", [True, False])
def test_rejection_has_the_law_of_the_target(dense_q: bool) -> None:
    tokens_BL, rounds_B = decode(VerifyMode.REJECTION, sampled_draft if dense_q else argmax_draft, dense_q=dense_q)
    assert rounds_B.min() >= 3
    assert rounds_B.max() > 3
    assert p_value(tokens_BL) > ACCEPTED


def test_control_argmax_draft_judged_with_softmax_q() -> None:
    assert p_value(decode(VerifyMode.REJECTION, argmax_draft, dense_q=True)[0]) < REJECTED


def test_control_no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "chain_residual", lambda p, q: p)
    assert p_value(decode(VerifyMode.REJECTION, sampled_draft, dense_q=True)[0]) < REJECTED


def test_control_draft_sampled_from_another_law_than_q() -> None:
    def other(prev_B: Tensor, key_B: Tensor, child_B: Tensor, base_B: Tensor, step: int) -> Tensor:
        noise_BV = race_noise(key_B, child_B, base_B, PURPOSE_DRAFT, VOCAB, torch.float32, step)
        return race(DRAFT[prev_B] ** 2, noise_BV)

    assert p_value(decode(VerifyMode.REJECTION, other, dense_q=True)[0]) < REJECTED


def test_control_coins_that_come_up_again() -> None:
    """Every round keyed alike: the coins that ended one round decide the next one too."""
    tokens_BL, _ = decode(VerifyMode.REJECTION, sampled_draft, dense_q=True, base_of=torch.zeros_like)
    assert p_value(tokens_BL) < REJECTED


def test_coupled_has_the_law_of_the_target_over_seeds() -> None:
    tokens_BL, _ = decode(VerifyMode.COUPLED, argmax_draft, dense_q=False)
    assert p_value(tokens_BL) > ACCEPTED
    plain_BL, _ = decode(VerifyMode.COUPLED, argmax_draft, dense_q=False, drafts=0)
    assert torch.equal(tokens_BL, plain_BL)


def test_control_coupled_noise_without_position() -> None:
    tokens_BL, _ = decode(VerifyMode.COUPLED, argmax_draft, dense_q=False, drafts=0, base_of=torch.zeros_like)
    assert p_value(tokens_BL) < REJECTED
