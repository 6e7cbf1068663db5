"""A trained MTP head is right because of what it reads: the target's final hidden states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.draft.feature import FeatureDrafter
from slipstream.train.corpus import Corpus
from slipstream.train.loop import TrainOptions, train
from slipstream.train.teacher import Teacher
from tests.support.mtp import write_mtp
from tests.support.mtp_train import HiddenTeacher, MTPHead

MARGIN = 0.15
PROMPT, ANSWER = 16, 12


def continued(teacher: Teacher, token_BT: torch.Tensor, count: int) -> list[list[int]]:
    for _ in range(count):
        hidden = teacher.features(token_BT).hidden_BTH[:, -1]
        token_BT = torch.cat((token_BT, (hidden @ teacher.head_VH.T).argmax(-1, keepdim=True)), 1)
    return token_BT.tolist()


def test_a_trained_head_needs_its_features(golden_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First drafts that hold in the engine, by a head that was trained for 20 steps on a trained target: at least
    MARGIN more than by its like that learnt and drafts with features of other sequences, and than by itself fed so."""
    folder = golden_dir / "e2e_target"
    base = Teacher.load(str(folder), taps=(1,), device="cpu", dtype="float32")
    known = [p["prompt_ids"] + p["greedy_ids"] for p in json.loads((folder / "expected.json").read_text())["prompts"]]
    starts = [ids[at : at + PROMPT] for ids in known for at in range(0, len(ids) - PROMPT, 2)]
    whole = continued(base, torch.tensor(starts), ANSWER)
    corpus = Corpus.pack([(t[:PROMPT], t[PROMPT:]) for t in whole], PROMPT + ANSWER)
    drafts = {}
    for shuffled in (False, True):
        torch.manual_seed(1)
        head = MTPHead(base)
        options = TrainOptions(steps=20, batch=32, lr=4e-3, log_every=19)
        train(head, HiddenTeacher(base, shuffled=shuffled), corpus, options)
        drafts[shuffled] = write_mtp(tmp_path / str(shuffled), folder, head.export()[0])

    real = FeatureDrafter._features

    def of_others(self: FeatureDrafter, rows: Any) -> Any:
        return tuple(x.roll(x.shape[0] // 2, 0) for x in real(self, rows))

    def held(trained_on_others: bool, fed_with_others: bool) -> list[float]:
        """Shares of rounds whose first, whose second draft held."""
        with monkeypatch.context() as patch:
            if fed_with_others:
                patch.setattr(FeatureDrafter, "_features", of_others)
            with LLM(
                str(folder), dtype="float32", draft=str(drafts[trained_on_others]), num_drafts=2, max_model_len=64
            ) as llm:
                outs = llm.generate(starts, SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True))
        assert [o.outputs[0].token_ids for o in outs] == [t[PROMPT:] for t in whole]
        rounds = sum(o.spec.rounds for o in outs)
        return [sum(sum(o.spec.accepted_per_position[k : k + 1]) for o in outs) / rounds for k in (0, 1)]

    good, control, misled = held(False, False), held(True, True), held(False, True)
    assert good[0] > control[0] + MARGIN and good[0] > misled[0] + MARGIN, (good, control, misled)
    assert good[1] > 0.6 * good[0], "its own states carry on"
