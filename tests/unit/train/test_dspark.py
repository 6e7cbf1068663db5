"""A DSpark draft from the first step to the engine: head counts of its own, conventions, what it can learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.errors import ConfigError
from slipstream.train.corpus import Corpus
from slipstream.train.dspark import DSparkHead, draft_config
from slipstream.train.loop import TrainOptions, evaluate, export, train
from slipstream.train.teacher import Teacher
from tests.support.tiny import tiny_config


def test_head_counts_of_a_draft() -> None:
    target = tiny_config(num_attention_heads=6, num_key_value_heads=2)
    for given, want in (((None, None), (6, 2)), ((None, 6), (6, 6)), ((8, 4), (8, 4)), ((1, None), (1, 1))):
        found = draft_config(target, *given)
        assert (found.num_heads, found.num_kv_heads) == want
    for heads, kv_heads, message in ((None, 4, "--kv-heads 4 must divide the draft's heads, 6"),
                                     (0, None, "--heads 0 must be at least 1"), (4, 0, "--kv-heads 0")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            draft_config(target, heads, kv_heads)


def test_a_draft_with_more_heads_than_its_target(golden_dir: Path, tmp_path: Path) -> None:
    """Trained on a trained target, it loads, the output is plain decoding's, and rounds are as long as the trainer's
    agreement promises."""
    folder = golden_dir / "e2e_target"
    known = json.loads((folder / "expected.json").read_text())["prompts"]
    prompts = [p["prompt_ids"] for p in known]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with LLM(str(folder), dtype="float64", max_model_len=160) as plain:
        starts = [ids[at : at + 12] for ids in (p["prompt_ids"] + p["greedy_ids"] for p in known)
                  for at in range(0, len(ids) - 12, 6)]  # fmt: skip
        answers = [o.outputs[0].token_ids for o in plain.generate([*prompts, *starts], params)]
    corpus = Corpus.pack(zip([*prompts, *starts], answers, strict=True), 96)
    teacher = Teacher.load(str(folder), taps=(2, 4, 5), device="cpu", dtype="float32")
    torch.manual_seed(0)
    head = DSparkHead(teacher, mask_token_id=0, block=4, layers=1, rank=16, heads=4, kv_heads=4, anchors=16)
    assert teacher.config.num_kv_heads < 4
    train(head, teacher, corpus, TrainOptions(steps=60, batch=16, lr=4e-3))
    agreed = evaluate(head, teacher, corpus.take(torch.arange(len(prompts))))
    draft = export(head, tmp_path / "draft")
    assert json.loads((draft / "config.json").read_text())["num_key_value_heads"] == 4
    with LLM(str(folder), dtype="float64", draft=str(draft), num_drafts=4, max_model_len=160) as llm:
        outs = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outs] == answers[: len(prompts)]
    reached = sum(o.spec.emitted for o in outs) / sum(o.spec.rounds for o in outs)
    promised = 1 + float(torch.tensor(agreed).cumprod(0).sum())
    assert promised > 1.5 and abs(reached - promised) < 0.25 * promised, (reached, promised, agreed)
