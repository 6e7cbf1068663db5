"""Whole frames of a tiny model with uneven sizes, for `bench/memcheck.sh`; without it they are a quick smoke test.

Eager only: a graph cannot be captured while each tensor has an allocation of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from tests.support.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7] * 5, [9], list(range(30, 53))]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 3, "top_p": 0.9, "min_p": 0.02},
    "rejection": {"temperature": 0.8, "top_k": 7, "min_tokens": 3, "stop_token_ids": [11]},
}


@pytest.mark.parametrize("draft", ["none", "ngram", "itself"])
@pytest.mark.parametrize(("arch", "dtype", "page"), [("llama", "bfloat16", 16), ("qwen3", "float32", 1)])
def test_memcheck_frames(arch: str, dtype: str, page: int, draft: str, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(
        tmp_path / "m", arch, seed=1, vocab_size=97, hidden_size=96, num_attention_heads=6, num_key_value_heads=2,
        head_dim=16 if arch == "llama" else 32, intermediate_size=88,
    )  # fmt: skip
    chosen = {"none": None, "ngram": "ngram", "itself": str(folder)}[draft]
    for name, sampling in SAMPLING.items():
        params = SamplingParams(max_tokens=9, ignore_eos=True, **sampling)
        with LLM(
            model=str(folder), device="cuda", dtype=dtype, draft=chosen, cuda_graphs=False, max_slots=3,
            max_model_len=47, page_size=page, prefill_chunk=11,
        ) as llm:  # fmt: skip
            outs = llm.generate(PROMPTS, params, use_tqdm=False)
            llm.check_idle()
        assert all(0 < len(o.outputs[0].token_ids) <= 9 for o in outs), name
        assert all(0 <= t < 97 for o in outs for t in o.outputs[0].token_ids)
    torch.cuda.synchronize()


@pytest.mark.skipif(os.environ.get("SLIPSTREAM_MEMCHECK") != "1", reason="only under bench/memcheck.sh")
def test_memcheck_has_an_allocation_per_tensor() -> None:
    a, b = torch.empty(8, device="cuda"), torch.empty(8, device="cuda")
    assert torch.cuda.memory_reserved() == 0 or abs(a.data_ptr() - b.data_ptr()) >= 256
