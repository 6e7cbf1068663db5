"""Rows that give no token on a GPU: the kernels agree with the references, one request ends and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.kernels import sample
from slipstream.types import NO_TOKEN
from tests.support.frame_kernel_cases import same_state
from tests.support.sample_cases import op_frame, random_case
from tests.support.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.gpu

BIG = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
}  # fmt: skip
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0}, "seeded": {"temperature": 0.8, "seed": 3}, "sampled": {"temperature": 0.9},
}  # fmt: skip
POISON = 90
PROMPTS = [[5, 6, 7, 8], [9, POISON, 4, 4, 3], [1, 2, 3, 1, 2], [30, 31, 32]]


def test_argmax() -> None:
    x = torch.randn(9, 9000)
    x[0], x[1], x[2, 8999], x[3, ::2] = float("nan"), float("-inf"), float("inf"), float("-inf")
    want = sample.argmax_rows(x, False, NO_TOKEN)
    assert want[:3].tolist() == [NO_TOKEN] * 3 and int(want[3:].min()) >= 0
    assert torch.equal(sample.argmax_rows(x.cuda(), False, NO_TOKEN).cpu(), want)


@pytest.mark.parametrize("dense", [False, True])
def test_a_sampled_round(dense: bool) -> None:
    case = random_case(slots=40, vocab=9000, width=3, seed=2, filtered=True, dense=dense)
    case.logits[::7], case.logits[3::7] = float("nan"), float("-inf")
    there = case.to("cuda")
    _, got = op_frame(there, filtered=True)
    _, want = op_frame(case, filtered=True)
    assert torch.equal(got[:, :6].cpu(), want[:, :6]) and same_state(there.state, case.state)
    assert 3 in want[:, 4]


@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize("kind", SAMPLING)
def test_weights_that_are_not_finite(kind: str, draft: str | None, tmp_path: Path) -> None:
    target = write_tiny_checkpoint(tmp_path / "target", "llama", seed=1, **BIG)
    params = SamplingParams(max_tokens=30, ignore_eos=True, logit_bias={POISON: -100.0}, **SAMPLING[kind])
    more = {} if draft is None else {"num_drafts": 3}
    with LLM(str(target), device="cuda", dtype="float32", draft=draft, max_slots=4, max_model_len=128, **more) as llm:
        good = llm.generate([p for p in PROMPTS if POISON not in p], params)
        with torch.inference_mode():
            llm._built.model.embed.table_VH[POISON] = float("nan")
        outs = llm.generate(PROMPTS, params)
        bad = outs[1].outputs[0]
        assert bad.finish_reason == "error" and bad.token_ids == [] and "not finite" in str(bad.error)
        rest = [o.outputs[0].token_ids for i, o in enumerate(outs) if i != 1]
        assert [len(t) for t in rest] == [30] * 3
        if kind != "sampled":
            assert rest == [o.outputs[0].token_ids for o in good]
        llm.check_idle()
