"""A DSpark draft from the first step to the engine: head counts of its own, conventions, what it can learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.errors import ConfigError
from slipstream.train.calibrate import held_out_blocks
from slipstream.train.corpus import Corpus
from slipstream.train.dspark import DSparkHead, draft_config
from slipstream.train.loop import TrainOptions, evaluate, export, train
from slipstream.train.teacher import Features, Teacher
from tests.support.tiny import tiny_config, write_tiny_checkpoint


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


class Periodic(Teacher):
    """A target that is sure of the token that follows in the text; the taps are its own."""

    def features(self, token_BT: Tensor) -> Features:
        likely_BTH = self.head_VH[token_BT.roll(-1, 1)]
        return Features(tap_BTF=super().features(token_BT).tap_BTF, hidden_BTH=50 * likely_BTH)


def test_text_that_can_be_known_is_learned_at_every_slot(tmp_path: Path) -> None:
    """Cycles of the same six tokens in four orders: which order it is stands in the context alone. Slot k predicts
    anchor + k + 1 from what lies before the anchor; were it told another place, the later slots could not know."""
    folder = write_tiny_checkpoint(tmp_path / "t", num_hidden_layers=4, vocab_size=40, hidden_size=48, spread=3.0)
    teacher = Periodic.load(str(folder), taps=(1, 2, 3), device="cpu", dtype="float32")
    cycles = [torch.tensor(c) for c in ([3, 4, 5, 6, 7, 8], [3, 6, 4, 8, 5, 7], [8, 7, 6, 5, 4, 3], [7, 3, 5, 4, 8, 6])]
    texts = [cycles[i % 4].repeat(4).roll(i // 4)[:24].tolist() for i in range(96)]
    corpus = Corpus.pack([(text[:4], text[4:]) for text in texts], 24)
    torch.manual_seed(1)
    head = DSparkHead(teacher, mask_token_id=0, block=7, layers=2, rank=8, kv_heads=4, anchors=16)
    train(head, teacher, corpus, TrainOptions(steps=90, batch=24, lr=8e-3))
    assert min(evaluate(head, teacher, corpus)) > 0.97
    _, accepted = held_out_blocks(head, teacher, corpus.take(torch.arange(24)))
    assert accepted.double().mean() > 6.5, "on its own drafts as well"

    class Elsewhere(Periodic):
        def features(self, token_BT: Tensor) -> Features:
            true = super().features(token_BT)
            return Features(tap_BTF=true.tap_BTF.roll(1, 0), hidden_BTH=true.hidden_BTH)

    other = Elsewhere.load(str(folder), taps=(1, 2, 3), device="cpu", dtype="float32")
    assert max(evaluate(head, other, corpus)[1:]) < 0.8, "the control: another sequence's features"


@pytest.mark.parametrize(("heads", "kv_heads", "layers"), [(6, 6, 2), (6, 3, 2), (6, 2, 3), (8, 8, 1)])
def test_features_pass_through_a_new_draft(heads: int, kv_heads: int, layers: int, tmp_path: Path) -> None:
    """What all layers' values and outputs make of one context row together is the row itself, but for a little."""
    folder = write_tiny_checkpoint(tmp_path / "t", num_hidden_layers=2, hidden_size=48, vocab_size=40)
    teacher = Teacher.load(str(folder), taps=(0, 1), device="cpu", dtype="float32")
    torch.manual_seed(0)
    head = DSparkHead(teacher, mask_token_id=0, layers=layers, heads=heads, kv_heads=kv_heads)
    whole = torch.zeros(48, 48)
    for layer in head.layers:
        attn = layer.self_attn
        values = attn.values(torch.eye(48)).repeat_interleave(heads // kv_heads, 1)
        whole += attn.o_proj(values.flatten(1)).detach().T
    part = min(1.0, layers * kv_heads * 8 / 48)  # of the features
    assert whole.diagonal().mean() == pytest.approx(part, abs=0.05)
    assert (whole - whole.diagonal().diag()).norm() < 0.5 * whole.diagonal().norm()
