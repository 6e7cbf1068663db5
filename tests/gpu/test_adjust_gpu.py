"""Penalties, biases, tallies, log-probabilities on a GPU: compiled kernels against the torch code, and end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.kernels import adjust as ops
from slipstream.kernels.logprobs import token_logprobs
from slipstream.logprobs import TOKEN_COLUMNS, read_tokens
from tests.support.adjust_cases import random_adjusting
from tests.support.kit import tiny_model_dir

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("penalties", "biases"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("vocab", [128_256, 5003])
def test_adjust_rows(vocab: int, tree: bool, penalties: bool, biases: bool) -> None:
    case = random_adjusting(slots=9, vocab=vocab, drafts=4, tree=tree, seed=vocab)
    want = ops.adjust_rows(case.logits, *case.rows, penalties, biases)
    mine = case.to("cuda")
    got = ops.adjust_rows(mine.logits, *mine.rows, penalties, biases)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-4)
    plain = case.slot % 3 == 0
    assert torch.equal(got.cpu()[plain], case.logits[plain])
    alone = ops.adjust_rows(mine.logits[7:8], mine.slot[7:8], mine.cell[7:8], *mine.rows[2:], penalties, biases)
    assert torch.equal(alone, got[7:8]), "a row depends on no other"


def test_tallies() -> None:
    case = random_adjusting(slots=40, vocab=50_257, drafts=3)
    mine = case.to("cuda")
    slot = torch.cat([torch.randperm(40)[:25] + 1, torch.zeros(5, dtype=torch.int64)])
    record = torch.randint(0, 50_257, (30, 10))
    record[:, 1] = torch.randint(0, 5, (30,))
    record[:, 7] = record[:, 6]
    for c, at, r in ((case, slot, record), (mine, slot.cuda(), record.cuda())):
        ops.recount_slots(c.tally, at, *c.penalties, *c.history)
        ops.count_tokens(c.tally, at, *c.penalties, r, 6)
    assert torch.equal(mine.tally.cpu()[1:], case.tally[1:])


@pytest.mark.parametrize("vocab", [151_936, 4097, 11])
def test_token_logprobs(vocab: int) -> None:
    x = torch.randn(33, vocab) * 6
    row, token = torch.randint(0, 33, (40,)), torch.randint(0, vocab, (40,))
    wanted = torch.randint(0, 22, (40,))
    got, want = (torch.zeros(45, TOKEN_COLUMNS, dtype=torch.int64) for _ in range(2))
    device = got.cuda()
    token_logprobs(device, 5, *(t.cuda() for t in (x, row, token, wanted)))
    token_logprobs(want, 5, x, row, token, wanted)
    got = device.cpu()
    for m, top in enumerate(wanted.tolist()):
        if top:
            [a], [b] = (read_tokens(t[5 + m : 6 + m].numpy(), top - 1) for t in (got, want))
            assert a.rank == b.rank and np.isclose(a.logprob, b.logprob, atol=1e-4)
            assert [i for i, _ in a.top] == [i for i, _ in b.top]
            assert np.allclose([v for _, v in a.top], [v for _, v in b.top], atol=1e-4)


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_captured_frames_equal_the_cpu(tmp_path: Path, draft: Any) -> None:
    """float32, graphs: greedy and seeded requests with every field, mixed with one that asks for nothing."""
    model = str(tiny_model_dir(tmp_path / "t", seed=1))
    every = {
        "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "logit_bias": {5: 3.0, 9: -50.0},
        "logprobs": 3, "min_tokens": 6, "stop_token_ids": [2, 3, 4], "ignore_eos": True, "max_tokens": 24,
    }  # fmt: skip
    params = [
        SamplingParams(temperature=0, prompt_logprobs=2, **every), SamplingParams(temperature=0.8, seed=3, **every),
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    ]  # fmt: skip
    prompts = [[7, 8, 9] * 9, [7, 8, 9, 1], [4, 4, 5]]
    outs = {}
    for device in ("cpu", "cuda"):
        with LLM(model=model, dtype="float32", device=device, draft=draft, max_model_len=128, max_slots=4) as llm:
            outs[device] = llm.generate(prompts, params)
            llm.check_idle()
    for got, want in zip(outs["cuda"], outs["cpu"], strict=True):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        pairs = [(got.outputs[0].logprobs, want.outputs[0].logprobs), (got.prompt_logprobs, want.prompt_logprobs)]
        for a, b in pairs:
            assert (a is None) == (b is None)
            for x, y in zip(a or (), b or (), strict=True):
                if x is not None and y is not None:
                    shared = x.keys() & y.keys()  # ties may swap the last of the likeliest
                    assert len(shared) >= len(y) - 1
                    assert all(abs(x[t].logprob - y[t].logprob) < 1e-4 for t in shared)
