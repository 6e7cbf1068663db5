"""Chain rejection against acceptance tables and exact laws that were computed independently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.verify.rejection import accepts, chain_accept_prob, closing_weights
from tests.support.verify_kit import (
    continued,
    grid_rows,
    inverse_cdf,
    round_law,
    sequence_law,
    total_variation,
    verify_rejection,
)

EXACT = {"atol": 1e-12, "rtol": 1e-12}


@pytest.fixture(scope="module")
def tables(golden_dir: Path) -> dict[str, Tensor]:
    return load_file(golden_dir / "verify_tables" / "expected.safetensors")


def test_chain_rule(tables: dict[str, Tensor]) -> None:
    p_NWV, q_NKV, x_NK = tables["chain_p"], tables["chain_q"], tables["chain_x"]
    torch.testing.assert_close(chain_accept_prob(p_NWV[:, :3], q_NKV, x_NK), tables["chain_accept_prob"], **EXACT)
    rows = grid_rows(len(p_NWV), 4, x_NK, q_BKV=q_NKV)
    ok_NK = accepts(p_NWV.flatten(0, 1), rows, tables["chain_u"])
    accepted_N = ok_NK.to(torch.int64).cumprod(1).sum(1)
    assert torch.equal(accepted_N, tables["chain_accepted"])
    weights_NV = closing_weights(p_NWV.flatten(0, 1), rows, accepted_N)
    torch.testing.assert_close(weights_NV / weights_NV.sum(1, keepdim=True), tables["chain_final_dist"], **EXACT)


def test_verify_with_given_uniforms(tables: dict[str, Tensor]) -> None:
    p_NWV, x_NK = tables["chain_p"], tables["chain_x"]
    rows = grid_rows(len(p_NWV), 4, x_NK, q_BKV=tables["chain_q"])
    verdict = verify_rejection(
        p_NWV, rows, tables["chain_u"], lambda weights_BV, _: inverse_cdf(weights_BV, tables["chain_v"])
    )
    accepted_N = tables["chain_accepted"]
    assert torch.equal(verdict.accepted_B, accepted_N)
    assert torch.equal(verdict.n_emitted_B, accepted_N + 1)
    assert set(accepted_N.tolist()) == {0, 1, 2, 3}
    for n, a in enumerate(accepted_N.tolist()):
        want = [*x_NK[n, :a].tolist(), int(tables["chain_emitted"][n])]
        assert verdict.tokens_BW[n].tolist() == want + [0] * (3 - a)


def law_tables(tables: dict[str, Tensor], name: str) -> list[Tensor]:
    return [tables[f"law_{name}_{level}"] for level in range(3) if f"law_{name}_{level}" in tables]


def test_exact_law_of_a_round(tables: dict[str, Tensor], golden_dir: Path) -> None:
    target, draft = law_tables(tables, "target"), law_tables(tables, "draft")

    def path_law(path: tuple[int, ...]) -> float:
        return float(draft[0][path[0]] * draft[1][path])

    law = round_law(target, path_law, lambda prefix: draft[len(prefix)][prefix], 2)
    for got, want in zip(law, law_tables(tables, "chain"), strict=True):
        torch.testing.assert_close(got, want, **EXACT)
    assert total_variation(continued(law, target), tables["law_sequence_target"]) < 1e-12
    torch.testing.assert_close(sequence_law(target), tables["law_sequence_target"], **EXACT)
    expected = json.loads((golden_dir / "verify_tables" / "expected.json").read_text())
    mean = sum(a * float(part.sum()) for a, part in enumerate(law))
    assert mean == pytest.approx(expected["mean_accepted"]["chain"], abs=1e-12)


def test_argmax_draft_with_soft_q_is_the_known_wrong_law(tables: dict[str, Tensor], golden_dir: Path) -> None:
    """Negative control: the same machinery reproduces the recorded wrong law, and sees that it is wrong."""
    target, draft = law_tables(tables, "target"), law_tables(tables, "draft")

    def path_law(path: tuple[int, ...]) -> float:
        return float(path[0] == int(draft[0].argmax()) and path[1] == int(draft[1][path[0]].argmax()))

    law = round_law(target, path_law, lambda prefix: draft[len(prefix)][prefix], 2)
    for got, want in zip(law, law_tables(tables, "wrong_argmax_draft_soft_q"), strict=True):
        torch.testing.assert_close(got, want, **EXACT)
    recorded = json.loads((golden_dir / "verify_tables" / "expected.json").read_text())["tv_to_target"]
    tv = total_variation(continued(law, target), tables["law_sequence_target"])
    assert tv == pytest.approx(recorded["wrong_argmax_draft_soft_q"], abs=1e-12)
    assert tv > 0.05
