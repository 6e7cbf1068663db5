"""The engine on a GPU: graphs change nothing, float32 equals the CPU, bf16 is plain decoding's argmax, nobody leaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams
from slipstream.errors import ConfigError
from tests.support.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

BIG = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
}  # fmt: skip
PROMPTS = [[5, 6, 7] * 10, [9] * 20, [1, 2], list(range(30, 70))]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 3},
    "filtered": {"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": str(write_tiny_checkpoint(root / "llama", "llama", seed=1, **BIG)),
        "qwen3": str(write_tiny_checkpoint(root / "qwen3", "qwen3", seed=2, **{**BIG, "head_dim": 32})),
    }


def generate(model: str, device: str, sampling: str, **options: Any) -> tuple[list[list[int]], float]:
    params = SamplingParams(max_tokens=40, ignore_eos=True, **SAMPLING[sampling])
    with LLM(
        model=model, device=device, dtype="float32", max_slots=4, max_model_len=128, page_size=16, **options
    ) as llm:
        outs = llm.generate(PROMPTS, params)
        llm.check_idle()
        rounds = sum(o.spec.rounds for o in outs)
        return [o.outputs[0].token_ids for o in outs], sum(o.spec.emitted for o in outs) / rounds


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("sampling", list(SAMPLING))
def test_gpu_equals_cpu_with_and_without_graphs(models: dict[str, str], name: str, sampling: str) -> None:
    model = models[name]
    want, _ = generate(model, "cpu", sampling)
    for draft in (None, "ngram", model):
        for graphs in (False, True):
            for run_ahead in (1, 2, 8) if graphs else (2,):
                options = {"draft": draft, "cuda_graphs": graphs, "run_ahead": run_ahead}
                got, length = generate(model, "cuda", sampling, **options)
                assert got == want, options
                assert draft != model or length > 3.5


@pytest.mark.parametrize("case", ["target_llama", "target_qwen3"])
def test_golden_tokens(golden_dir: Path, case: str) -> None:
    expected = load_file(golden_dir / case / "expected.safetensors")
    prompt, want = expected["prompt_ids"].tolist(), expected["greedy_ids"].tolist()
    for draft in (None, "ngram"):
        with LLM(model=str(golden_dir / case), device="cuda", dtype="float32", max_slots=2, draft=draft) as llm:
            out = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=len(want), ignore_eos=True))[0]
        assert out.outputs[0].token_ids == want


def test_bf16_speculative_tokens_are_plain_decodings_argmax(models: dict[str, str]) -> None:
    """Teacher-forced: each token is the plain pass's argmax, or within twice the largest difference of the paths."""
    from slipstream.attention.dense import DenseCausal

    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(
        model=models["llama"], device="cuda", dtype="bfloat16", draft=models["llama"], max_slots=4, max_model_len=128
    ) as llm:
        outs = llm.generate(PROMPTS, params)
        model = llm._built.model
    exact = total = 0
    for prompt, out in zip(PROMPTS, outs, strict=True):
        tokens = prompt + out.outputs[0].token_ids
        pos = torch.arange(len(tokens), device="cuda")
        with torch.inference_mode():
            hidden, _ = model.forward(torch.tensor(tokens, device="cuda"), pos, DenseCausal(pos))
            logits = model.logits(hidden)[len(prompt) - 1 : -1]
        chosen = torch.tensor(out.outputs[0].token_ids, device="cuda")
        gap = logits.amax(1) - logits.gather(1, chosen[:, None])[:, 0]
        assert float(gap.max()) < 2 * 0.25, "bf16 paths of this model differ by less than 0.25"
        exact += int((gap == 0).sum())
        total += len(chosen)
    assert exact / total > 0.9


def test_poison_in_sink_scratch_and_free_pages_reaches_nobody(models: dict[str, str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {"model": models["llama"], "device": "cuda", "dtype": "float32", "draft": "ngram"}
    with LLM(max_slots=4, max_model_len=128, page_size=16, prefix_cache=False, **options) as llm:
        want = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
        frame = llm._built.device.frame
        frame.kv.data.fill_(float("nan"))
        frame.workspace.partial.fill_(float("nan"))
        victim = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
        next(victim)
        victim.close()
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)] == want
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:1], params)] == want[:1]


def test_start_up_errors_name_the_numbers(models: dict[str, str]) -> None:
    base: dict[str, Any] = {"model": models["llama"], "device": "cuda"}
    with pytest.raises(ConfigError, match="run_ahead=0"):
        LLM(run_ahead=0, **base)
    with pytest.raises(ConfigError, match=r"slot_buckets=\[1, 2\].*max_slots=8"):
        LLM(max_slots=8, slot_buckets=(1, 2), **base)
    with pytest.raises(ConfigError, match="num_pages=1 "):
        LLM(num_pages=1, max_model_len=256, **base)
