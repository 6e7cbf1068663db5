"""The same checks as the golden folder's, on a subset that lives in the repository (tests/support/make_golden.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams
from slipstream.attention.dense import DenseCausal
from slipstream.models import load_model
from tests.support.reference import planted_oracle

CASES = ("golden_llama", "golden_qwen2", "golden_qwen3")
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def expected_of(data_dir: Path, case: str) -> tuple[Path, dict[str, torch.Tensor]]:
    return data_dir / case, load_file(data_dir / case / "expected.safetensors")


def dense_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    pos = torch.arange(len(tokens))
    with torch.inference_mode():
        return model.logits(model.forward(tokens, pos, DenseCausal(pos))[0])


def test_the_subset_is_small(data_dir: Path) -> None:
    assert sum(f.stat().st_size for f in data_dir.rglob("*") if f.is_file()) < 2_000_000


@pytest.mark.parametrize("case", CASES)
def test_the_recorded_gaps_are_clear(data_dir: Path, case: str) -> None:
    """The continuation is the argmax of the recorded logits, by a gap far above float32 noise."""
    folder, expected = expected_of(data_dir, case)
    facts = json.loads((folder / "expected.json").read_text())
    first = len(expected["prompt_ids"]) - 1
    top = expected["logits"][first:-1].topk(2)
    assert torch.equal(top.indices[:, 0], expected["greedy_ids"])
    gap = float((top.values[:, 0] - top.values[:, 1]).min())
    assert gap == pytest.approx(facts["min_top2_gap"], abs=1e-4) and gap > 100 * facts["float32_off_float64"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits(data_dir: Path, case: str, dtype: str) -> None:
    folder, expected = expected_of(data_dir, case)
    tokens = torch.cat((expected["prompt_ids"], expected["greedy_ids"]))
    model = load_model(folder, dtype=dtype).model
    got = dense_logits(model, tokens)
    torch.testing.assert_close(got, expected["logits"].to(got.dtype), **CLOSE)
    with torch.inference_mode():  # negative control: 1 % on the last norm is seen
        model.norm.weight.mul_(1.01)  # type: ignore[attr-defined]
    assert not torch.allclose(dense_logits(model, tokens), expected["logits"].to(got.dtype), **CLOSE)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "oracle", "itself"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 5), (16, 7), (32, 256)])
def test_greedy_through_the_engine(
    data_dir: Path, case: str, dtype: str, drafter: str, page_size: int, chunk: int
) -> None:
    folder, expected = expected_of(data_dir, case)
    prompt, greedy = expected["prompt_ids"].tolist(), expected["greedy_ids"].tolist()
    drafts: dict[str, Any] = {
        "none": {},
        "ngram": {"draft": "ngram", "draft_options": {"min_n": 1, "gate": False}},
        "oracle": {"draft": planted_oracle(lambda r: greedy, vocab=128, seed=2)},
        "itself": {"draft": str(folder)},
    }[drafter]
    options: dict[str, Any] = {"dtype": dtype, "page_size": page_size, "prefill_chunk": chunk, "max_model_len": 64}
    with LLM(model=str(folder), **options, **drafts) as llm:
        params = SamplingParams(temperature=0, max_tokens=len(greedy), ignore_eos=True)
        outs = llm.generate([prompt, prompt[:-3], prompt], params)
        assert [outs[0].outputs[0].token_ids, outs[2].outputs[0].token_ids] == [greedy] * 2
        assert drafter == "none" or outs[0].spec.drafted > 0
        llm.check_idle()
