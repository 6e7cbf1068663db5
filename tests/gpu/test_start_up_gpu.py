"""Start-up on a GPU: too little memory, the capture budget, GGUF."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream import LLM, SamplingParams
from slipstream.errors import ConfigError
from tests.support.raw_gguf import write_raw_gguf
from tests.support.tiny import tiny_values, write_tiny_checkpoint

pytestmark = pytest.mark.gpu

BIG = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
}  # fmt: skip
PROMPTS = [[5, 6, 7] * 10, [9] * 20, [1, 2]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"llama": str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama", seed=1, **BIG))}


def test_too_little_memory_for_weights_or_pages_is_refused_with_the_numbers(models: dict[str, str]) -> None:
    base: dict[str, Any] = {"model": models["llama"], "device": "cuda", "dtype": "float32"}
    with pytest.raises(ConfigError, match=r"the weights need 0\.\d MiB in float32, and 0\.0 MiB are left"):
        LLM(gpu_memory_mib=0.01, **base)
    gc.collect()
    used = torch.cuda.memory_allocated() / 2**20
    with pytest.raises(ConfigError, match=r"left for KV pages, 0\.\d MiB, holds \d pages of 16 tokens .* needs 33"):
        LLM(gpu_memory_mib=used + 0.4, page_size=16, max_model_len=512, **base)
    with pytest.raises(ConfigError, match=r"no memory for \d+ KV pages \(\d+ MiB\); lower num_pages"):
        LLM(num_pages=2**28, page_size=1024, **base)
    with LLM(max_model_len=64, **base) as llm:  # nothing stays behind
        assert llm.generate([1, 2, 3], SamplingParams(max_tokens=2))


def test_a_capture_budget_that_is_too_small_is_refused_with_the_numbers(models: dict[str, str]) -> None:
    base: dict[str, Any] = {"model": models["llama"], "device": "cuda", "max_slots": 4, "max_model_len": 64}
    with pytest.raises(ConfigError, match=r"capturing 1 of \d+ graphs took .* the budget is 0 s"):
        LLM(capture_seconds=1e-6, **base)
    with LLM(**base) as llm:
        report = llm.stats()["capture"]
        assert report == llm.resolved["capture"] and report["graphs"] > 0 and report["seconds"] > 0
        assert any("frame graphs" in note for note in llm.notes)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_gguf_is_dequantised_to_bf16_and_says_so(tmp_path: Path, kind: str) -> None:
    """The tokens are those of the same values kept as a bf16 checkpoint."""
    held = write_raw_gguf(tmp_path / "m.gguf", kind=kind, **BIG)
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_values("llama", torch_dtype="bfloat16", **BIG)))
    save_file({name: w.to(torch.bfloat16) for name, w in held.items()}, folder / "model.safetensors")
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    options: dict[str, Any] = {"device": "cuda", "max_slots": 2, "max_model_len": 64}
    with LLM(model=str(tmp_path / "m.gguf"), **options) as llm:
        assert llm.resolved["dtype"] == "bfloat16"
        assert llm.resolved["weights"] == f"GGUF {kind} dequantised to bfloat16"
        assert any("dequantised to bfloat16 on the GPU" in note for note in llm.notes)
        got = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    with LLM(model=str(folder), **options) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)] == got
