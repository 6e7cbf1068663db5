"""Tiny EAGLE-3 heads: a random one for a target directory, and a target that is nothing but sizes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from slipstream.models.layers import Embedding
from slipstream.models.linear import Dense


def stand_in_target(*, hidden: int, vocab: int, layers: int, dtype: torch.dtype = torch.float32) -> Any:
    """What a head looks at when it is loaded. Its embedding and head are NaN: whoever uses them by mistake shows."""
    nan = torch.full((vocab, hidden), float("nan"), dtype=dtype)
    return SimpleNamespace(
        config=SimpleNamespace(hidden_size=hidden, vocab_size=vocab, num_layers=layers), dtype=dtype,
        device=torch.device("cpu"), embed=Embedding(nan), head=Dense(nan),
    )  # fmt: skip


def write_eagle3(
    folder: Path, target: Path, *, seed: int = 0, draft_vocab: int | None = None, spread: float = 2.0, **changes: Any
) -> Path:
    """A random head in the official format whose embedding is the target's. Features: the inputs of layers 0 and 1.

    draft_vocab: that many random ids. changes: other values of config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = json.loads((target / "config.json").read_text())
    vocab, h = base["vocab_size"], base["hidden_size"]
    small = vocab if draft_vocab is None else draft_vocab
    values = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": h, "vocab_size": vocab,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
        "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "draft_vocab_size": small,
        "eagle_aux_hidden_state_layer_ids": [0, 1], **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g) * (spread / shape[-1] ** 0.5)

    norm = lambda: 1 + 0.1 * torch.randn(h, generator=g)
    taps = len(values["eagle_aux_hidden_state_layer_ids"])
    p = "midlayer."
    tensors = {
        "fc.weight": rand(h, taps * h), p + "hidden_norm.weight": norm(), p + "input_layernorm.weight": norm(),
        p + "post_attention_layernorm.weight": norm(), "norm.weight": norm(), "lm_head.weight": rand(small, h),
        p + "self_attn.q_proj.weight": rand(64, 2 * h), p + "self_attn.k_proj.weight": rand(32, 2 * h),
        p + "self_attn.v_proj.weight": rand(32, 2 * h), p + "self_attn.o_proj.weight": rand(h, 64),
        p + "mlp.gate_proj.weight": rand(64, h), p + "mlp.up_proj.weight": rand(64, h),
        p + "mlp.down_proj.weight": rand(h, 64),
    }  # fmt: skip
    if small < vocab:
        ids = torch.randperm(vocab, generator=g)[:small].sort().values
        tensors["d2t"] = ids - torch.arange(small)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(tensors, folder / "model.safetensors")
    return folder
