"""Rows that give no token, NaN or everything banned: an error of that request that says why, and of no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.device import frame as frame_room
from slipstream.device import tree as tree_room
from slipstream.verify import VerifyRows
from tests.support.equality_cells import TREE, model_dirs

POISON = 90
"""A token whose embedding row is not finite."""
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 3},
    "sampled": {"temperature": 0.9, "top_p": 0.9},
}


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return model_dirs(tmp_path_factory.mktemp("no_token"))


def build(dirs: dict[str, Path], draft: str | None, **options: Any) -> LLM:
    tree = TREE if draft == "eagle3-tree" else None
    name = None if draft is None else draft.removesuffix("-tree")
    return LLM(
        str(dirs["target"]), dtype="float64", draft=None if name is None else str(dirs.get(name, name)),
        num_drafts=None if name is None or tree else 3, draft_tree=tree, max_slots=4, max_model_len=128, **options,
    )  # fmt: skip


PROMPTS = [[5, 6, 7, 8], [9, POISON, 4, 4, 3], [1, 2, 3, 1, 2], [30, 31, 32]]


def asked(kind: str) -> SamplingParams:
    return SamplingParams(max_tokens=30, ignore_eos=True, logit_bias={POISON: -100.0}, **SAMPLING[kind])


@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_weights_that_are_not_finite(dirs: dict[str, Path], draft: str | None, kind: str) -> None:
    """A token's embedding is NaN: the request that has it fails at its first token, the others are as before."""
    with build(dirs, draft) as llm:
        good = llm.generate([p for p in PROMPTS if POISON not in p], asked(kind))
        with torch.inference_mode():
            llm._built.model.embed.table_VH[POISON] = float("nan")
        outs = llm.generate(PROMPTS, asked(kind))
        bad = outs[1].outputs[0]
        assert bad.finish_reason == "error" and bad.token_ids == []
        assert "not finite" in str(bad.error) and "banned" in str(bad.error)
        _as_before([o for i, o in enumerate(outs) if i != 1], good, kind)
        # Nothing of it is in the prefix cache, and its slot and pages serve others.
        _as_before(llm.generate([p for p in PROMPTS if POISON not in p], asked(kind)), good, kind)
        llm.check_idle()


def _as_before(outs: list[Any], good: list[Any], kind: str) -> None:
    assert all(len(o.outputs[0].token_ids) == 30 and o.outputs[0].finish_reason == "length" for o in outs)
    if kind != "sampled":
        assert [o.outputs[0].token_ids for o in outs] == [o.outputs[0].token_ids for o in good]


@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ("draft-good", {"run_ahead": 2}), ("dspark", {"verifier": "block"}), ("eagle3-tree", {}),
        ("eagle3", {"slot_buckets": (4,), "row_tiers": (1, 4)}),
    ],
    ids=str,
)  # fmt: skip
def test_other_slots_of_the_frame_go_on(
    dirs: dict[str, Path], draft: str, options: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one slot lose their logits: from position 45 on, which only the second prompt reaches."""
    prompts = [PROMPTS[0], [9] * 40, PROMPTS[2], PROMPTS[3]]
    with build(dirs, draft, **options) as llm:
        good = llm.generate(prompts, asked(kind))
        for room, name in ((frame_room, "verify"), (tree_room, "verify_tree")):
            real = getattr(room, name)

            def broken(logits_RV: torch.Tensor, rows: Any, real: Any = real, **how: Any) -> Any:
                chain = isinstance(rows, VerifyRows)
                row_of, count_B = (rows.row_of_BW, rows.rows_B) if chain else (rows.row_of_BN, rows.nodes_B)
                victims = row_of[(rows.base_B >= 45) & (count_B > 0)].flatten()  # an ended slot's name another's
                return real(logits_RV.index_fill(0, victims, float("nan")), rows, **how)

            monkeypatch.setattr(room, name, broken)
        outs = llm.generate(prompts, asked(kind))
        bad = outs[1].outputs[0]
        assert bad.finish_reason == "error" and 6 <= len(bad.token_ids) < 12
        if kind != "sampled":
            assert bad.token_ids == good[1].outputs[0].token_ids[: len(bad.token_ids)]
        _as_before([outs[i] for i in (0, 2, 3)], [good[i] for i in (0, 2, 3)], kind)
        llm.check_idle()


@pytest.mark.parametrize("draft", [None, "dspark"])
@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_in_the_middle_of_an_answer(
    dirs: dict[str, Path], draft: str | None, kind: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was emitted before it stays with the request."""
    with build(dirs, draft, run_ahead=2) as llm:
        whole = llm.generate([PROMPTS[0]], asked(kind))[0].outputs[0].token_ids
        model = llm._built.model
        logits, calls = model.logits, iter(range(1 << 30))

        def broken(hidden_RH: torch.Tensor) -> torch.Tensor:
            logits_RV: torch.Tensor = logits(hidden_RH)
            return logits_RV.fill_(value) if next(calls) == 6 else logits_RV

        monkeypatch.setattr(model, "logits", broken)
        out = llm.generate([PROMPTS[0]], asked(kind))[0].outputs[0]
        assert out.finish_reason == "error" and "not finite" in str(out.error)
        assert 6 <= len(out.token_ids) < 30
        if kind != "sampled":
            assert out.token_ids == whole[: len(out.token_ids)]
        assert llm.stats()["counters"]["finished_error"] == 1
        llm.check_idle()


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ("draft-good", {}), ("eagle3", {}), ("eagle3", {"verifier": "block"}), ("eagle3-tree", {}), ("dspark", {}),
        ("dflash", {"verifier": "block"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_draft_that_is_not_finite_changes_no_token(
    dirs: dict[str, Path], draft: str, options: dict[str, Any]
) -> None:
    """Not only greedy and seeded: what is drawn is judged by the draft's law, and NaN is none."""
    kinds = [SAMPLING["greedy"], SAMPLING["seeded"], {"temperature": 0.9, "top_k": 1}, {"temperature": 0.9}]
    params = [SamplingParams(max_tokens=30, ignore_eos=True, **kind) for kind in kinds]
    with build(dirs, draft, **options) as llm:
        drafter = llm._built.device.frame.drafter
        model = drafter.model  # type: ignore[union-attr]
        with torch.inference_mode():
            getattr(model, "blocks", model.__dict__.get("layers"))[0].down.weight_NK.fill_(float("nan"))
        outs = [o.outputs[0].token_ids for o in llm.generate([PROMPTS[0]] * 4, params)]
        llm.check_idle()
    with build(dirs, None) as llm:
        want = [o.outputs[0].token_ids for o in llm.generate([PROMPTS[0]] * 3, params[:3])]
    assert outs[:3] == want and want[2] == want[0] and len(set(outs[3])) > 10
