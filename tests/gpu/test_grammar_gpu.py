"""Grammars on a GPU: the masking kernel, and captured frames with masks in their ring, against the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance")

from slipstream import LLM, SamplingParams
from slipstream.kernels.grammar import mask_rows, masked_rows
from tests.support.grammar_kit import character_models

pytestmark = pytest.mark.gpu

BIG = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
}  # fmt: skip
REGEX = "(the (quick|lazy) vixen|[a-f]{4}[0-9]{3}) jumps [0-9]{2} times!"
SPECS: list[dict[str, Any] | None] = [
    {"regex": REGEX}, {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}, None,
    {"choice": ["abacus", "ab10", "true love"]},
]  # fmt: skip


@pytest.mark.parametrize("vocab", [151_936, 4097, 70])
def test_mask_rows(vocab: int) -> None:
    torch.manual_seed(vocab)
    slots, width, rows = 9, 5, 33
    mask = torch.randint(-(2**31), 2**31, (slots, width, -(-vocab // 32)), dtype=torch.int64).to(torch.int32)
    masked, committed = torch.arange(slots) % 3, torch.randint(0, 99, (slots,))
    slot = torch.randint(0, slots, (rows,))
    cell = committed[slot] + torch.randint(0, width, (rows,))
    logits = torch.randn(rows, vocab)
    want, got = logits.clone(), logits.cuda()
    masked_rows(want, slot, cell, committed, masked, mask)
    mask_rows(got, slot.cuda(), cell.cuda(), committed.cuda(), masked.cuda(), mask.cuda())
    free = masked[slot] == 0
    assert torch.equal(got.cpu(), want) and want[~free].isinf().any(1).all() and torch.equal(want[free], logits[free])


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return character_models(tmp_path_factory.mktemp("characters"), **BIG)


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
@pytest.mark.parametrize("draft", [None, "ngram", "draft"])
def test_captured_frames_equal_the_cpu(dirs: dict[str, Path], draft: str | None, run_ahead: int) -> None:
    """float32: greedy and seeded requests with and without a grammar, forced text, lists of tokens, in one batch."""
    laws = ({"temperature": 0}, {"temperature": 0.8, "seed": 3, "top_k": 40})
    params = [
        SamplingParams(max_tokens=40, structured_outputs=spec, ignore_eos=spec is None, **law)
        for spec in SPECS for law in laws
    ]  # fmt: skip
    params += [
        SamplingParams(
            max_tokens=40, ignore_eos=True, allowed_token_ids=range(9, 60), bad_words=["a", "b1"], **laws[0]
        ),
        SamplingParams(max_tokens=40, structured_outputs={"regex": REGEX}, bad_words=["e", "1"], **laws[1]),
    ]
    prompts = [[9 + i, 40, 41 + i] for i in range(len(params))]
    outs = {}
    for device in ("cpu", "cuda"):
        with LLM(
            model=str(dirs["target"]), dtype="float32", device=device, max_model_len=128, max_slots=8,
            draft=str(dirs["draft"]) if draft == "draft" else draft, run_ahead=run_ahead,
        ) as llm:  # fmt: skip
            outs[device] = [o.outputs[0] for o in llm.generate(prompts, params)]
            llm.check_idle()
    assert [o.token_ids for o in outs["cuda"]] == [o.token_ids for o in outs["cpu"]]
    assert [o.finish_reason for o in outs["cuda"]] == [o.finish_reason for o in outs["cpu"]]
