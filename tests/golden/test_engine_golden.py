"""The greedy continuations of the golden target cases, through the whole engine: pages, chunks, drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams
from tests.support.reference import planted_oracle

CASES = ("target_llama", "target_qwen3")
DRAFTERS = ("none", "ngram", "oracle", "itself")
# (page size, prefill chunk): every page size with a chunk below a page's or the prompt's length, and one above.
LAYOUTS = ((1, 3), (1, 256), (16, 7), (16, 256), (32, 3), (32, 256))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, golden_dir: Path) -> tuple[Path, list[int], list[int]]:
    folder = golden_dir / request.param
    expected = load_file(folder / "expected.safetensors")
    return folder, expected["prompt_ids"].tolist(), expected["greedy_ids"].tolist()


def draft_of(name: str, folder: Path, greedy: list[int]) -> dict[str, Any]:
    if name == "none":
        return {}
    if name == "ngram":
        return {"draft": "ngram", "num_drafts": 3, "draft_options": {"min_n": 1, "gate": False}}
    if name == "itself":
        return {"draft": str(folder), "num_drafts": 3}
    return {"draft": planted_oracle(lambda r: greedy, vocab=256, seed=1), "num_drafts": 3}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("page_size", "chunk"), LAYOUTS)
def test_greedy_ids(
    case: tuple[Path, list[int], list[int]], drafter: str, dtype: str, page_size: int, chunk: int
) -> None:
    folder, prompt, greedy = case
    params = SamplingParams(temperature=0, max_tokens=len(greedy), ignore_eos=True)
    options: dict[str, Any] = {"dtype": dtype, "page_size": page_size, "prefill_chunk": chunk, "max_model_len": 64}
    with LLM(model=str(folder), **options, **draft_of(drafter, folder, greedy)) as llm:
        # The second time the prompt comes from the prefix cache, and the third request reads it while others decode.
        first = llm.generate(prompt, params)
        again = llm.generate([prompt, prompt[:-1], prompt], params)
        assert [o.outputs[0].token_ids for o in (first[0], again[0], again[2])] == [greedy] * 3
        spec = first[0].spec
        assert spec.emitted == len(greedy) - 1
        assert first[0].outputs[0].finish_reason == "length"
        if drafter == "itself":
            assert spec.accepted == spec.drafted > 0
        elif drafter != "none":
            assert 0 < spec.accepted < spec.drafted
        llm.check_idle()


# Each layout, drafter and type once or more; the windows of the model's layers are 8 tokens long.
WINDOWED = [
    (drafter, dtype, *LAYOUTS[(i + 4 * j) % len(LAYOUTS)])
    for j, dtype in enumerate(("float32", "float64"))
    for i, drafter in enumerate(DRAFTERS)
]


@pytest.mark.parametrize(("drafter", "dtype", "page_size", "chunk"), WINDOWED)
def test_greedy_ids_of_a_model_with_windows(
    golden_dir: Path, drafter: str, dtype: str, page_size: int, chunk: int
) -> None:
    folder = golden_dir / "target_gemma3"
    expected = load_file(folder / "expected.safetensors")
    of = (folder, expected["prompt_ids"].tolist(), expected["greedy_ids"].tolist())
    test_greedy_ids(of, drafter, dtype, page_size, chunk)


def test_a_wrong_weight_is_noticed(case: tuple[Path, list[int], list[int]]) -> None:
    """Negative control: 30 % on one matrix of one layer changes the continuation."""
    folder, prompt, greedy = case
    with LLM(model=str(folder), dtype="float32", max_model_len=64) as llm:
        with torch.inference_mode():
            llm._built.model.blocks[1].qkv.weight_NK.mul_(1.3)
        out = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=len(greedy), ignore_eos=True))
        assert out[0].outputs[0].token_ids != greedy
