"""Tiny random DFlash and DSpark checkpoints for a tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def write_block_draft(
    folder: Path,
    target: Path,
    kind: str = "dspark",
    *,
    block_size: int = 5,
    seed: int = 0,
    head: str = "vanilla",
    rank: int = 8,
    layers: int = 2,
    spread: float = 2.0,
    confidence: bool = True,
    **changes: Any,
) -> Path:
    """kind: "dflash" (embedding and head are the target's) or "dspark" (copies of them, Markov and confidence head)."""
    t = json.loads((target / "config.json").read_text())
    hidden, vocab = t["hidden_size"], t["vocab_size"]
    heads, kv_heads, dim, wide = 4, 2, 16, 2 * hidden
    ids = [0] if t["num_hidden_layers"] > 1 else [-1]
    values: dict[str, Any] = {
        "model_type": "qwen3", "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim, "intermediate_size": wide,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": t["max_position_embeddings"],
        "block_size": block_size, "num_target_layers": t["num_hidden_layers"],
    }  # fmt: skip
    if kind == "dflash":
        values |= {"architectures": ["DFlashDraftModel"]}
        values |= {"dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": ids}}
    else:
        values |= {"architectures": ["Qwen3DSparkModel"], "mask_token_id": vocab - 1, "target_layer_ids": ids}
        values |= {"markov_rank": rank, "markov_head_type": head, "enable_confidence_head": confidence,
                   "confidence_head_with_markov": confidence}  # fmt: skip
    values |= changes
    g = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=g) * spread / columns**0.5

    def gains(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=g)

    tensors = {"fc.weight": matrix(hidden, len(ids) * hidden), "hidden_norm.weight": gains(hidden),
               "norm.weight": gains(hidden)}  # fmt: skip
    for i in range(layers):
        p = f"layers.{i}."
        for name, rows, columns in (
            ("self_attn.q_proj", heads * dim, hidden), ("self_attn.k_proj", kv_heads * dim, hidden),
            ("self_attn.v_proj", kv_heads * dim, hidden), ("self_attn.o_proj", hidden, heads * dim),
            ("mlp.gate_proj", wide, hidden), ("mlp.up_proj", wide, hidden), ("mlp.down_proj", hidden, wide),
        ):  # fmt: skip
            tensors[f"{p}{name}.weight"] = matrix(rows, columns)
        for name, size in (("self_attn.q_norm", dim), ("self_attn.k_norm", dim), ("input_layernorm", hidden),
                           ("post_attention_layernorm", hidden)):  # fmt: skip
            tensors[f"{p}{name}.weight"] = gains(size)
    if kind == "dspark":
        own = load_file(target / "model.safetensors")
        tensors["embed_tokens.weight"] = own["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = own.get("lm_head.weight", own["model.embed_tokens.weight"]).clone()
        tensors["markov_head.markov_w1.weight"] = matrix(vocab, rank)
        tensors["markov_head.markov_w2.weight"] = matrix(vocab, rank)
        if head == "gated":
            tensors["markov_head.gate_proj.weight"] = matrix(rank, hidden + rank)
            tensors["markov_head.gate_proj.bias"] = torch.zeros(rank)
        if head == "rnn":
            tensors["markov_head.joint_proj.weight"] = matrix(3 * rank, 2 * rank + hidden)
            tensors["markov_head.joint_proj.bias"] = torch.zeros(3 * rank)
        if confidence:
            tensors["confidence_head.proj.weight"] = matrix(1, hidden + rank)
            tensors["confidence_head.proj.bias"] = torch.zeros(1)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder
