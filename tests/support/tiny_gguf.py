"""Tiny GGUF models, laid out as llama.cpp's converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.support.tiny import tiny_config, tiny_weights

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
_SANDWICH = {
    **_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str, *, sandwich: bool = False) -> str:
    """GGUF's name for a Hugging Face tensor. sandwich: of a model that norms the results of its blocks' halves too."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{(_SANDWICH if sandwich else _NAMES)[parts[-2]]}.{parts[-1]}"
    return f"{_TOP[parts[-2]]}.{parts[-1]}"


def interleave_heads(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from halves side by side to interleaved pairs, as the converter does for llama's q and k."""
    return w.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def write_tiny_gguf(
    path: Path,
    arch: str = "llama",
    *,
    kinds: dict[str, str] | None = None,
    seed: int = 0,
    spread: float = 2.0,
    rope_divisors: list[float] | None = None,
    metadata: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """Write a tiny model. kinds: GGUF type by the last-but-one part of a Hugging Face name ("q_proj"), or "*" for
    all other matrices; F32 where nothing is said. Returns the float32 tensors that the file really holds, by
    Hugging Face name."""
    config = tiny_config("gemma3_text" if arch == "gemma3" else arch, **changes)
    kinds = kinds or {}
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    if config.window:
        writer.add_sliding_window(config.window)
        writer.add_sliding_window_pattern(2)
        writer.add_float32(f"{arch}.rope.freq_base_swa", 100.0)
    for key, value in (metadata or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    held: dict[str, torch.Tensor] = {}
    for name, w in tiny_weights(config, seed=seed, spread=spread).items():
        kind = kinds.get(name.split(".")[-2], kinds.get("*", "F32")) if w.dim() == 2 else "F32"
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        moved = arch == "llama" and heads is not None
        stored = interleave_heads(w, heads) if moved and heads else w
        if name.endswith("norm.weight"):
            stored = stored + config.norm_offset  # the file holds the gain itself
        data = gguf.quants.quantize(stored.numpy(), gguf.GGMLQuantizationType[kind])
        writer.add_tensor(
            gguf_name(name, sandwich=config.sandwich_norms), data, raw_dtype=gguf.GGMLQuantizationType[kind]
        )
        back = torch.from_numpy(np.array(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])))
        if moved and heads:
            back = back.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        if name.endswith("norm.weight"):
            back = back - config.norm_offset
        held[name] = back.reshape(w.shape).contiguous()
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
