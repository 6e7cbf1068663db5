"""Block verification and target-only trees against tables and exact laws that were computed independently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.verify.block import block_accepted, block_tests, closing_weights
from tests.support.verify_kit import (
    continued,
    grid_rows,
    inverse_cdf,
    round_law,
    total_variation,
    tree_law,
    tree_rows,
    verify_rejection,
    verify_tree_rejection,
)

EXACT = {"atol": 1e-12, "rtol": 1e-12}


@pytest.fixture(scope="module")
def tables(golden_dir: Path) -> dict[str, Tensor]:
    return load_file(golden_dir / "verify_tables" / "expected.safetensors")


@pytest.fixture(scope="module")
def expected(golden_dir: Path) -> dict[str, dict[str, float]]:
    return json.loads((golden_dir / "verify_tables" / "expected.json").read_text())


def test_block_rule(tables: dict[str, Tensor]) -> None:
    p_NWV, x_NK = tables["chain_p"], tables["chain_x"]
    rows = grid_rows(len(p_NWV), 4, x_NK, q_BKV=tables["chain_q"])
    p_RV = p_NWV.flatten(0, 1)
    tests = block_tests(p_RV, rows)
    torch.testing.assert_close(tests.weight_BW, tables["block_P"], **EXACT)
    torch.testing.assert_close(tests.pass_BK, tables["block_h"], **EXACT)
    accepted_N = block_accepted(tests, tables["chain_u"])
    assert torch.equal(accepted_N, tables["block_accepted"])
    assert set(accepted_N.tolist()) == {0, 1, 2, 3}
    weights_NV = closing_weights(p_RV, rows, tests, accepted_N)
    torch.testing.assert_close(weights_NV / weights_NV.sum(1, keepdim=True), tables["block_final_dist"], **EXACT)
    verdict = verify_rejection(
        p_NWV, rows, tables["chain_u"], lambda weights_BV, _: inverse_cdf(weights_BV, tables["chain_v"]), block=True
    )
    assert torch.equal(verdict.accepted_B, tables["block_accepted"])
    for n, a in enumerate(accepted_N.tolist()):
        want = [*x_NK[n, :a].tolist(), int(tables["block_emitted"][n])]
        assert verdict.tokens_BW[n].tolist() == want + [0] * (3 - a)


def law_of(tables: dict[str, Tensor], name: str) -> list[Tensor]:
    return [tables[f"law_{name}_{level}"] for level in range(3) if f"law_{name}_{level}" in tables]


def block_law(tables: dict[str, Tensor]) -> list[Tensor]:
    draft = law_of(tables, "draft")
    return round_law(
        law_of(tables, "target"),
        lambda x: float(draft[0][x[0]] * draft[1][x]),
        lambda prefix: draft[len(prefix)][prefix],
        2,
        block=True,
    )


def test_exact_law_of_a_block_round(tables: dict[str, Tensor], expected: dict[str, dict[str, float]]) -> None:
    law = block_law(tables)
    for got, want in zip(law, law_of(tables, "block"), strict=True):
        torch.testing.assert_close(got, want, **EXACT)
    assert total_variation(continued(law, law_of(tables, "target")), tables["law_sequence_target"]) < 1e-12
    mean = sum(a * float(part.sum()) for a, part in enumerate(law))
    assert mean == pytest.approx(expected["mean_accepted"]["block"], abs=1e-12)
    assert mean > expected["mean_accepted"]["chain"]


def test_control_stopping_at_the_first_failure(
    tables: dict[str, Tensor], expected: dict[str, dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the recorded wrong law comes out, and is seen to be wrong."""
    monkeypatch.setattr("slipstream.verify.block.last_passed", lambda ok_BK: ok_BK.long().cumprod(1).sum(1))
    law = block_law(tables)
    for got, want in zip(law, law_of(tables, "wrong_block_stop_at_first_fail"), strict=True):
        torch.testing.assert_close(got, want, **EXACT)
    tv = total_variation(continued(law, law_of(tables, "target")), tables["law_sequence_target"])
    assert tv == pytest.approx(expected["tv_to_target"]["wrong_block_stop_at_first_fail"], abs=1e-12)
    assert tv > 0.05


@pytest.mark.parametrize("tree", ["a", "b"])
def test_tree_law(tables: dict[str, Tensor], tree: str) -> None:
    parents, tokens = tables[f"tree_{tree}_parents"], tables[f"tree_{tree}_tokens"]
    law = tree_law(tables[f"tree_{tree}_p"], parents, tokens)
    torch.testing.assert_close(law, tables[f"tree_{tree}_law"], **EXACT)


@pytest.mark.parametrize("tree", ["a", "b"])
def test_tree_with_one_coin_per_tested_child(tables: dict[str, Tensor], tree: str) -> None:
    parents, tokens, p_NV = (tables[f"tree_{tree}_{name}"] for name in ("parents", "tokens", "p"))
    seen = set()
    for uniforms, (stop, emitted) in zip(
        tables[f"tree_{tree}_uniforms"], tables[f"tree_{tree}_scheme_a"].tolist(), strict=True
    ):
        # The recorded walk spends its coins in the order of its tests; ours belong to nodes.
        u_BN = torch.ones(1, len(parents), dtype=torch.float64)
        at, spent, child = 0, 0, 1
        while child < len(parents):
            if parents[child] == at:
                u_BN[0, child] = uniforms[spent]
                spent += 1
                accepted, node = walk_to(p_NV, parents, tokens, u_BN)
                if accepted and node == child:
                    at = child
            child += 1
        verdict_token, node = last_token(p_NV, parents, tokens, u_BN, uniforms[-1])
        assert (node, verdict_token) == (stop, emitted)
        seen.add(stop)
    assert len(seen) > 3


@pytest.mark.parametrize("tree", ["a", "b"])
def test_tree_with_one_coin_per_level(tables: dict[str, Tensor], tree: str) -> None:
    """One uniform against the running mass of the children is one coin per child, each scaled to what is left."""
    parents, tokens, p_NV = (tables[f"tree_{tree}_{name}"] for name in ("parents", "tokens", "p"))
    for uniforms, (stop, emitted) in zip(
        tables[f"tree_{tree}_uniforms"], tables[f"tree_{tree}_scheme_b"].tolist(), strict=True
    ):
        u_BN = torch.ones(1, len(parents), dtype=torch.float64)
        at, level = 0, 0
        while True:
            children = [n for n in range(len(parents)) if int(parents[n]) == at]
            if not children:
                break
            before = torch.zeros((), dtype=torch.float64)
            for child in children:
                u_BN[0, child] = ((uniforms[level] - before) / (1 - before)).clamp(max=1)
                before = before + p_NV[at, tokens[child]]
            _, node = walk_to(p_NV, parents, tokens, u_BN)
            level += 1
            if node == at:
                break
            at = node
        token, node = last_token(p_NV, parents, tokens, u_BN, uniforms[-1])
        assert (node, token) == (stop, emitted)


def walk_to(p_NV: Tensor, parents: Tensor, tokens: Tensor, u_BN: Tensor) -> tuple[int, int]:
    verdict = verify_tree_rejection(p_NV, tree_rows(parents, tokens), u_BN, lambda w, at: at)
    accepted = int(verdict.accepted_B)
    return accepted, int(verdict.path_BK[0, accepted - 1]) if accepted else 0


def last_token(p_NV: Tensor, parents: Tensor, tokens: Tensor, u_BN: Tensor, v: Tensor) -> tuple[int, int]:
    verdict = verify_tree_rejection(
        p_NV, tree_rows(parents, tokens), u_BN, lambda weights_BV, _: inverse_cdf(weights_BV, v.view(1))
    )
    accepted = int(verdict.accepted_B)
    assert int(verdict.n_emitted_B) == accepted + 1
    node = int(verdict.path_BK[0, accepted - 1]) if accepted else 0
    assert verdict.tokens_BW[0, :accepted].tolist() == tokens[verdict.path_BK[0, :accepted]].tolist()
    return int(verdict.tokens_BW[0, accepted]), node
