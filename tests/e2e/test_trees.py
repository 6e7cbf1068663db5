"""Draft trees end to end: faults that equality must see, a poisoned sink, options that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.device import frame as frame_room
from slipstream.device import tree as tree_room
from slipstream.device.target_cache import TargetCache
from slipstream.errors import ConfigError
from tests.support.equality_cells import TREE, as_on_a_gpu, run_cell
from tests.support.reference import DenseReference

CELL = {
    "drafter": "oracle-tree", "sampling": "greedy", "batch": 4, "page_size": 16, "prefix": "miss", "chunk": 256,
    "event": "none", "run_ahead": 1, "shapes": "exact",
}  # fmt: skip


def nothing_moves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TargetCache, "compact", lambda *args, **kw: None)


def one_move_after_the_other(patch: pytest.MonkeyPatch) -> None:
    """Each node moves before the next is read, from the path's end: sources are overwritten."""
    real = tree_room.ops.moved_path

    def slow(data: Any, table: Any, slot_B: Any, committed: Any, path_BK: Any, accepted_B: Any) -> None:
        for i in reversed(range(path_BK.shape[1])):
            only = torch.arange(1, path_BK.shape[1] + 1).expand_as(path_BK).clone()
            only[:, i] = path_BK[:, i]
            real(data, table, slot_B, committed, only, accepted_B.clamp(max=i + 1))

    patch.setattr(tree_room.ops, "moved_path", slow)


def nodes_see_their_elders(patch: pytest.MonkeyPatch) -> None:
    def wrong(parent_BN: Any, levels: int) -> Any:
        return ((2 << torch.arange(parent_BN.shape[1])) - 1).expand_as(parent_BN)

    patch.setattr(tree_room, "seen_bits", wrong)


def nodes_stand_in_a_row(patch: pytest.MonkeyPatch) -> None:
    real = frame_room.place_rows

    def wrong(state: Any, slot_R: Any, cell_R: Any, **kw: Any) -> Any:
        return cell_R, real(state, slot_R, cell_R, **kw)[1]

    patch.setattr(frame_room, "place_rows", wrong)


@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
@pytest.mark.parametrize(
    "fault", [None, nothing_moves, one_move_after_the_other, nodes_see_their_elders, nodes_stand_in_a_row],
    ids=lambda f: f.__name__ if f else "none",
)  # fmt: skip
def test_faults_are_seen(
    dirs: dict[str, Path],
    reference: DenseReference,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None] | None,
    sampling: str,
) -> None:
    cell = {**CELL, "sampling": sampling}
    if fault is None:
        run_cell(cell, dirs, reference, dtype="float64")
        return
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        run_cell(cell, dirs, reference, dtype="float64")


@pytest.mark.parametrize("drafter", ["oracle-tree", "eagle3-tree"])
@pytest.mark.parametrize("shapes", ["exact", "padded"])
def test_nothing_is_read_from_the_sink(
    dirs: dict[str, Path], reference: DenseReference, drafter: str, shapes: str
) -> None:
    """Before every frame the sink page is NaN, the target's and the head's."""

    def poison(llm: LLM) -> None:
        frame = llm._built.device.frame
        decode = frame.decode

        def poisoned(*args: Any) -> Any:
            for kv in (frame.kv, getattr(frame.drafter, "kv", frame.kv)):
                kv.data[:, :, 0] = float("nan")
            return decode(*args)

        frame.decode = poisoned  # type: ignore[method-assign]

    cell = {**CELL, "drafter": drafter, "shapes": shapes, "sampling": "mixed", "run_ahead": 2, "prefix": "hit"}
    run_cell(cell, dirs, reference, dtype="float64", prepare=poison)


@pytest.mark.parametrize("drafter", ["oracle-tree", "eagle3-tree", "mtp-tree"])
@pytest.mark.parametrize("sampling", ["greedy", "mixed"])
def test_the_frame_as_it_runs_on_a_gpu(
    dirs: dict[str, Path], reference: DenseReference, drafter: str, sampling: str
) -> None:
    """The same frames out of the kernels' ops, each by its definition."""

    cell = {**CELL, "drafter": drafter, "sampling": sampling, "shapes": "padded", "run_ahead": 2, "page_size": 1}
    run_cell(cell, dirs, reference, dtype="float64", prepare=as_on_a_gpu)


def test_a_mean_of_accepted_drafts_can_be_asked_for(dirs: dict[str, Path]) -> None:
    with LLM(
        model=str(dirs["target"]), draft=str(dirs["eagle3"]), draft_tree=TREE, synthetic_acceptance=2.5,
        max_model_len=400, device="cpu",
    ) as llm:  # fmt: skip
        out = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))[0]
    assert out.spec.acceptance_length == pytest.approx(2.5, abs=0.2)
    assert set(out.spec.counts) <= {(7, 1, 2), (7, 2, 3), *(c for c in out.spec.counts if c[0] < 7)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_tree": {"topk": 2, "levels": 2, "total": 8}}, "keeps 7 drafts, but topk=2 and levels=2 give only 6"),
        ({"draft_tree": {"topk": 9, "levels": 9, "total": 65}}, "total=65 must be a whole number from 2 to 64"),
        ({"draft_tree": {"topk": 9, "levels": 9, "total": 64}}, "expand 72 nodes, .* the limit is 64"),
        ({"draft_tree": {"topk": 2, "levels": 2}}, "lacks 'total'"),
        ({"draft_tree": {"topk": 2, "levels": 2, "total": 4, "width": 1}}, "has no 'width'"),
        ({"draft_tree": "2,2,4"}, "must be a mapping"),
        ({"draft_tree": {"topk": 30, "levels": 2, "total": 16}}, "topk=30 is above the draft's vocabulary of 24"),
        ({"draft_tree": TREE, "num_drafts": 3}, "num_drafts=3 and draft_tree"),
        ({"draft_tree": TREE, "verifier": "block"}, "judges chains only"),
        ({"draft_tree": TREE, "draft": None}, "needs a draft"),
        ({"draft_tree": TREE, "draft": "ngram"}, "needs an EAGLE-3 or MTP head; draft='ngram'"),
        ({"draft_tree": TREE, "synthetic_acceptance": 4.5}, "must be from 1 to 4"),
    ],
    ids=str,
)
def test_options_that_cannot_be(dirs: dict[str, Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{"model": str(dirs["target"]), "draft": str(dirs["eagle3"]), "device": "cpu", **options})


@pytest.mark.parametrize("draft", ["draft-good", "dflash"])
def test_drafters_without_trees(dirs: dict[str, Path], draft: str) -> None:
    with pytest.raises(ConfigError, match="needs an EAGLE-3 or MTP head"):
        LLM(model=str(dirs["target"]), draft=str(dirs[draft]), draft_tree=TREE, device="cpu")
