"""Tiny random checkpoints in Hugging Face form, for every room's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slipstream.models.config import ModelConfig, parse_hf_config
from slipstream.models.dummy import DummyWeights

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 3,
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "norm_topk_prob": True,
}

GEMMA: dict[str, Any] = {
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "rope_local_base_freq": 100.0,
    "query_pre_attn_scalar": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def tiny_values(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    """Values of a `config.json`: 2 layers, hidden size 32, vocabulary 96, 512 positions, then `changes`.

    Hybrids: a delta layer, full attention, a delta layer. Gemma: a layer with a window of 8, then one without.
    """
    values: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12 if arch == "qwen3" else 8,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    own = {"qwen3_5_text": HYBRID, "qwen3_next": HYBRID | EXPERTS, "gemma3_text": GEMMA}
    values |= own.get(arch, {}) | changes
    return values


def tiny_config(arch: str = "llama", **changes: Any) -> ModelConfig:
    return parse_hf_config(tiny_values(arch, **changes))


def tiny_weights(config: ModelConfig, *, seed: int = 0, spread: float = 2.0) -> dict[str, torch.Tensor]:
    """float32 tensors by Hugging Face name. `spread` scales all but the norms, so that the logits of a random
    model are far enough apart for greedy comparisons."""
    source = DummyWeights(config, seed=seed, device=torch.device("cpu"))
    tensors = {name: source.read(name, 0, source.shape(name)[0]) for name in sorted(source.names())}
    return {n: t if n.endswith(("norm.weight", "A_log")) else t * spread for n, t in tensors.items()}


def write_tiny_checkpoint(
    folder: Path,
    arch: str = "llama",
    *,
    seed: int = 0,
    shards: int = 1,
    spread: float = 2.0,
    generation: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write config.json and safetensors (an index too when `shards` > 1) to `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_values(arch, **changes)))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    tensors = tiny_weights(tiny_config(arch, **changes), seed=seed, spread=spread)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    table = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: tensors[n] for n in names[i::shards]}
        save_file(part, folder / file)
        table.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return folder
