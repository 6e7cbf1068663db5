"""Founding case 4, clause by clause: what penalties count, and that each clause broken is seen.

That nothing is copied for them is for the proof without a GPU: tests/unit/test_frame_proof.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.device.logits import LogitStages
from slipstream.kernels import adjust as ops
from slipstream.sampling import penalties
from slipstream.types import RECORD_COLUMNS
from tests.support.equality_cells import TREE
from tests.support.kit import VOCAB
from tests.support.reference import DenseReference, planted_oracle
from tests.support.tree_oracle import oracle_tree

Patch = pytest.MonkeyPatch
PROMPTS = [(5, 9, 31, 7), (8, 8, 8, 60, 2, 8), tuple(range(40, 64)), (77,)]
OUTPUT = {"presence_penalty": 1.5, "frequency_penalty": 0.8}
AGAIN = {"presence_penalty": -2.0, "repetition_penalty": 0.4}
REPETITION = {"repetition_penalty": 1.9}


def run(
    dirs: dict[str, Path], reference: DenseReference, fields: dict[str, Any], drafter: str | None, *, pages: int = 200
) -> LLM:
    """Four greedy requests with the fields equal plain decoding by recomputation."""
    oracle = planted_oracle(
        lambda r: reference.continuation(r.prompt_token_ids, r.params, r.child), vocab=VOCAB, wrong=0.2
    )
    draft: Any = {"oracle": oracle, "tree": oracle_tree(oracle)}.get(str(drafter))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **fields)
    want = [reference.continuation(p, params) for p in PROMPTS]
    llm = LLM(
        model=str(dirs["target"]), dtype="float64", draft=draft, num_drafts=3 if drafter == "oracle" else None,
        draft_tree=TREE if drafter == "tree" else None, page_size=4, num_pages=pages, max_slots=4, max_model_len=64,
    )  # fmt: skip
    got = llm.generate([list(p) for p in PROMPTS], params)
    assert [o.outputs[0].token_ids for o in got] == want
    assert drafter is None or sum(o.spec.accepted for o in got) > 20
    llm.check_idle()
    return llm


def only_the_last_token_of_a_round_counts(patch: Patch) -> None:
    def wrong(tally: Any, slot_B: Any, counts: Any, token_BW: Any, emitted_B: Any) -> None:
        last_B1 = token_BW.gather(1, (emitted_B - 1).clamp(min=0)[:, None])
        penalties.count(tally, slot_B, counts, last_B1, emitted_B.clamp(max=1))

    patch.setattr(ops, "count", wrong)


def rejected_drafts_count_too(patch: Patch) -> None:
    def wrong(tally: Any, slot_B: Any, counts: Any, token_BW: Any, emitted_B: Any) -> None:
        penalties.count(tally, slot_B, counts, token_BW, emitted_B + (emitted_B > 0))

    patch.setattr(ops, "count", wrong)


def drafts_do_not_see_those_before_them(patch: Patch) -> None:
    patch.setattr(ops, "row_tallies", lambda tally_SV, slot_R, *rest: tally_SV[slot_R])


def drafts_see_their_elders_in_other_branches(patch: Patch) -> None:
    def wrong(tally: Any, slot_R: Any, node_R: Any, pending: Any, seen: Any) -> Any:
        return penalties.row_tallies(tally, slot_R, node_R, pending, None)

    patch.setattr(ops, "row_tallies", wrong)


def the_prompt_counts_as_output(patch: Patch) -> None:
    def wrong(tally: Any, slot_B: Any, counts: Any, history: Any, prompt_len: Any, committed: Any) -> None:
        penalties.recount(tally, slot_B, counts, history, torch.zeros_like(prompt_len), committed)

    patch.setattr(ops, "recount", wrong)


def the_prompt_does_not_count(patch: Patch) -> None:
    def wrong(tally: Any, slot_B: Any, counts: Any, history: Any, prompt_len: Any, committed: Any) -> None:
        penalties.recount(tally, slot_B, counts, history, prompt_len, torch.full_like(committed, -1))

    patch.setattr(ops, "recount", wrong)


def output_before_a_preemption_counts_as_prompt(patch: Patch) -> None:
    def wrong(tally: Any, slot_B: Any, counts: Any, history: Any, prompt_len: Any, committed: Any) -> None:
        penalties.recount(tally, slot_B, counts, history, committed + 1, committed)

    patch.setattr(ops, "recount", wrong)


def the_first_token_does_not_count(patch: Patch) -> None:
    real = LogitStages.committed

    def wrong(self: LogitStages, plan: Any, slot_B: Any, record: Any, raw: Any, row_BW: Any, at: int) -> None:
        real(self, plan._replace(penalties=plan.penalties and at != self.ends_at), slot_B, record, raw, row_BW, at)

    patch.setattr(LogitStages, "committed", wrong)


def the_last_owner_counts_too(patch: Patch) -> None:
    def wrong(tally: Any, slot_B: Any, *rest: Any) -> None:
        before = tally[slot_B].clone()
        penalties.recount(tally, slot_B, *rest)
        tally[slot_B] += before

    patch.setattr(ops, "recount", wrong)


CLAUSES: list[tuple[dict[str, Any], str | None, Callable[[Patch], None]]] = [
    (OUTPUT, "oracle", only_the_last_token_of_a_round_counts),
    (OUTPUT, "tree", only_the_last_token_of_a_round_counts),
    (OUTPUT, "oracle", rejected_drafts_count_too),
    (OUTPUT, "oracle", drafts_do_not_see_those_before_them),
    (REPETITION, "tree", drafts_do_not_see_those_before_them),
    (AGAIN, "tree", drafts_see_their_elders_in_other_branches),
    (OUTPUT, None, the_prompt_counts_as_output),
    (REPETITION, None, the_prompt_does_not_count),
    (OUTPUT, None, the_first_token_does_not_count),
    (OUTPUT, "oracle", the_first_token_does_not_count),
]  # fmt: skip


@pytest.mark.parametrize("fields", [AGAIN, REPETITION, {**OUTPUT, **REPETITION}], ids=["again", "repetition", "all"])
@pytest.mark.parametrize("drafter", [None, "oracle", "tree"])
def test_what_is_counted(dirs: dict[str, Path], reference: DenseReference, fields: Any, drafter: str | None) -> None:
    run(dirs, reference, fields, drafter)


@pytest.mark.parametrize(
    ("fields", "drafter", "fault"), CLAUSES, ids=lambda x: x.__name__ if callable(x) else str(x) if x else "plain"
)
def test_a_broken_clause_is_seen(
    dirs: dict[str, Path], reference: DenseReference, monkeypatch: Patch, fields: Any, drafter: str | None, fault: Any
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        run(dirs, reference, fields, drafter)


@pytest.mark.parametrize("fault", [None, output_before_a_preemption_counts_as_prompt, the_last_owner_counts_too])
def test_a_preempted_request_counts_its_output_as_output(
    dirs: dict[str, Path], reference: DenseReference, monkeypatch: Patch, fault: Any
) -> None:
    if fault is None:
        llm = run(dirs, reference, OUTPUT, "oracle", pages=24)
        assert llm.stats()["counters"]["preemptions"] > 0
        return
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        run(dirs, reference, OUTPUT, "oracle", pages=24)


def test_presence_and_frequency_leave_the_first_token_alone(dirs: dict[str, Path], reference: DenseReference) -> None:
    """There is no output before it, though the prompt says all that could be said."""
    prompt = [t for t in range(VOCAB - 1) for _ in range(2)]
    with LLM(model=str(dirs["target"]), dtype="float64", max_model_len=256) as llm:
        plain, asked = llm.generate(
            [prompt] * 2,
            [SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, **more) for more in ({}, OUTPUT)],
        )
        assert plain.outputs[0].token_ids == asked.outputs[0].token_ids


def test_one_path_for_plain_and_speculative_frames_and_for_prompts(
    dirs: dict[str, Path], reference: DenseReference, monkeypatch: Patch
) -> None:
    """Rows of every kind of frame go through one function, and so do tokens of every kind of round."""
    rows, tokens = set(), set()
    adjust, count = ops.adjust_rows, ops.count_tokens

    def adjusted(logits: Any, *rest: Any) -> Any:
        rows.add(logits.shape[0])
        return adjust(logits, *rest)

    def counted(tally: Any, slot: Any, *rest: Any) -> Any:
        tokens.add((slot.shape[0], rest[3].shape[1] - RECORD_COLUMNS))
        return count(tally, slot, *rest)

    monkeypatch.setattr(ops, "adjust_rows", adjusted)
    monkeypatch.setattr(ops, "count_tokens", counted)
    run(dirs, reference, OUTPUT, None)
    assert rows == {4} == {slots * width for slots, width in tokens}  # the prompts' ends, and plain frames
    run(dirs, reference, OUTPUT, "oracle")
    assert max(rows) == 16 and (4, 4) in tokens
    run(dirs, reference, OUTPUT, "tree")
    assert max(rows) > 16
