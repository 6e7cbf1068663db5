"""Block verification: exact laws of one round, and the law of many rounds with the engine's own coins."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

import slipstream.verify.rejection as rejection
from slipstream.sampling.rng import PURPOSE_ACCEPT, PURPOSE_DRAFT, coin, race, race_noise
from slipstream.types import MAX_DRAFTS, VerifyMode
from slipstream.verify import DenseQ, VerifyRows, verify
from tests.support.verify_kit import continued, grid_rows, random_tables, round_law, sequence_law, total_variation


@pytest.mark.parametrize("shape", [(3, 2, False), (3, 2, True), (2, 3, False), (3, 3, True)])
@pytest.mark.parametrize("seed", [10, 20])
def test_one_round_is_exact_and_accepts_at_least_as_much(shape: tuple[int, int, bool], seed: int) -> None:
    vocab, depth, zeros = shape
    target, draft = random_tables(vocab, depth, seed, zeros), random_tables(vocab, depth, seed + 1, zeros)
    mean = {}
    for block in (True, False):
        law = round_law(
            target,
            lambda x: math.prod(float(draft[d][x[: d + 1]]) for d in range(depth)),
            lambda prefix: draft[len(prefix)][prefix],
            depth,
            block=block,
        )
        assert total_variation(continued(law, target), sequence_law(target)) < 1e-12
        mean[block] = sum(a * float(part.sum()) for a, part in enumerate(law))
    assert mean[True] >= mean[False] - 1e-12


def test_control_softmax_q_with_argmax_drafts() -> None:
    target, draft = random_tables(3, 2, 10), random_tables(3, 2, 11)
    law = round_law(
        target,
        lambda x: float(all(x[d] == int(draft[d][x[:d]].argmax()) for d in range(2))),
        lambda prefix: draft[len(prefix)][prefix],
        2,
        block=True,
    )
    assert total_variation(continued(law, target), sequence_law(target)) > 0.01


def test_other_slots_and_shorter_blocks() -> None:
    """Greedy and seeded slots of the same batch are judged as without block verification, and a slot with fewer
    drafts as if the frame were narrower."""
    g = torch.Generator().manual_seed(1)
    p, q = (torch.rand(6, n, 7, generator=g, dtype=torch.float64) ** 2 for n in (4, 3))
    p, q = p / p.sum(2, keepdim=True), q / q.sum(2, keepdim=True)
    x_BK = torch.randint(0, 7, (6, 3), generator=g)
    modes = torch.tensor([VerifyMode.GREEDY, VerifyMode.COUPLED] + [VerifyMode.REJECTION] * 4)
    rows_B = torch.tensor([4, 3, 4, 3, 2, 1])
    rows = grid_rows(6, 4, x_BK, q_BKV=q, rows_B=rows_B)
    rows = VerifyRows(**{**vars(rows), "mode_B": modes})
    flags = {"sampled": True, "coupled": True, "rejection": True}
    got = verify(p.flatten(0, 1).log(), rows, block=True, **flags)
    plain = verify(p.flatten(0, 1).log(), rows, **flags)
    assert torch.equal(got.tokens_BW[:2], plain.tokens_BW[:2])
    for b in range(2, 6):
        width = int(rows_B[b])
        lone = VerifyRows(
            mode_B=modes[b : b + 1], key_B=rows.key_B[b : b + 1], child_B=rows.child_B[:1], base_B=rows.base_B[:1],
            row_of_BW=torch.arange(width)[None], rows_B=rows_B[b : b + 1], draft_BK=x_BK[b : b + 1],
            q=DenseQ(q[b : b + 1]),
        )  # fmt: skip
        want = verify(p[b, :width].log(), lone, block=True, **flags)
        assert int(got.accepted_B[b]) == int(want.accepted_B)
        assert got.tokens_BW[b, :width].tolist() == want.tokens_BW[0].tolist()


VOCAB, TOKENS, DRAFTS, SAMPLES = 3, 6, 3, 60_000


def tables() -> tuple[Tensor, Tensor]:
    p = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.7, 0.2]], dtype=torch.float64)
    q = torch.tensor([[0.3, 0.4, 0.3], [0.5, 0.3, 0.2], [0.3, 0.2, 0.5]], dtype=torch.float64)
    return p, q


def p_value_of_rounds(block: bool) -> float:
    """Chi-square of the first six tokens over as many rounds as it takes, all slots drafted from q(. | last token)."""
    p_VV, q_VV = tables()
    g = torch.Generator().manual_seed(5)
    key_B = torch.randint(-(2**62), 2**62, (SAMPLES,), generator=g)
    zero_B = torch.zeros(SAMPLES, dtype=torch.int64)
    history_BL = torch.zeros(SAMPLES, TOKENS + DRAFTS + 2, dtype=torch.int64)
    base_B = zero_B.clone()
    column_L = torch.arange(history_BL.shape[1])
    for _ in range(TOKENS):
        last_B = history_BL.gather(1, base_B[:, None])[:, 0]
        path, laws = [last_B], []
        for step in range(DRAFTS):
            q_BV = q_VV[path[-1]]
            node_B = base_B * (MAX_DRAFTS + 1) + step
            path.append(race(q_BV, race_noise(key_B, zero_B, node_B, PURPOSE_DRAFT, VOCAB, torch.float64)))
            laws.append(q_BV)
        draft_BK = torch.stack(path[1:], 1)
        rows = grid_rows(SAMPLES, DRAFTS + 1, draft_BK, key_B=key_B, base_B=base_B, q_BKV=torch.stack(laws, 1))
        p_RV = p_VV[torch.stack(path, 1).flatten()]
        verdict = verify(p_RV.log(), rows, sampled=True, coupled=False, rejection=True, block=block)
        live_B = base_B < TOKENS
        offset_BL = (column_L - base_B[:, None] - 1).clamp(0, DRAFTS)
        new_BL = (column_L > base_B[:, None]) & (column_L <= (base_B + verdict.n_emitted_B)[:, None]) & live_B[:, None]
        history_BL = torch.where(new_BL, verdict.tokens_BW.gather(1, offset_BL), history_BL)
        base_B = torch.where(live_B, (base_B + verdict.n_emitted_B), base_B).clamp(max=TOKENS)
    cells = torch.zeros(VOCAB**TOKENS, dtype=torch.float64)
    place_L = VOCAB ** torch.arange(TOKENS - 1, -1, -1)
    cells.index_add_(0, (history_BL[:, 1 : TOKENS + 1] * place_L).sum(1), torch.ones(SAMPLES, dtype=torch.float64))
    law = torch.tensor(
        [
            math.prod(float(p_VV[a, b]) for a, b in zip((0, *x[:-1]), x, strict=True))
            for x in product(range(VOCAB), repeat=TOKENS)
        ]
    )
    expected = law * SAMPLES
    rare = expected < 5
    o = torch.cat([cells[~rare], cells[rare].sum()[None]])
    e = torch.cat([expected[~rare], expected[rare].sum()[None]])
    return float(chi2.sf(float(((o - e) ** 2 / e).sum()), len(e) - 1))


@pytest.mark.parametrize("block", [True, False])
def test_many_rounds_keep_the_law(block: bool) -> None:
    assert p_value_of_rounds(block) > 1e-5


def test_control_coins_keyed_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests of a block are made, so a refused round has seen coins of positions that the next one judges again."""

    def by_position(rows: VerifyRows) -> Tensor:
        node_K = torch.arange(rows.row_of_BW.shape[1] - 1)
        return coin(rows.key_B[:, None], rows.child_B[:, None], rows.base_B[:, None] + node_K, 0, PURPOSE_ACCEPT)

    monkeypatch.setattr(rejection, "coins", by_position)
    assert p_value_of_rounds(True) < 1e-9


def test_control_stop_at_the_first_failed_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.verify.block.last_passed", lambda ok_BK: ok_BK.long().cumprod(1).sum(1))
    assert p_value_of_rounds(True) < 1e-9
