"""A tiny llama in a GGUF file, written byte by byte: for machines without the `gguf` package.

Layout: the GGUF specification, version 3, little-endian. Matrices are Q4_0 or Q8_0 blocks of 32 values along a row.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.tiny import tiny_config, tiny_weights

_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k",
    "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip
_TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_F32, _Q4_0, _Q8_0 = 0, 2, 8
_ALIGN = 32


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Type id and value: uint32, float32 or string."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<II", 4, value)


def _q8_0(w_NK: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Blocks of a float16 scale and 32 int8 codes, and the values they stand for."""
    blocks = w_NK.reshape(-1, 32).astype(np.float32)
    scale = (np.abs(blocks).max(1, keepdims=True) / 127.0).astype(np.float16)
    codes = np.rint(blocks / np.maximum(scale.astype(np.float32), 1e-12)).clip(-127, 127).astype(np.int8)
    data = b"".join(s.tobytes() + c.tobytes() for s, c in zip(scale, codes, strict=True))
    return data, (codes * scale.astype(np.float32)).reshape(w_NK.shape)


def _q4_0(w_NK: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Blocks of a float16 scale and 16 bytes: value i in the low half, i + 16 in the high one; (code - 8) * scale."""
    blocks = w_NK.reshape(-1, 32).astype(np.float32)
    scale = (np.abs(blocks).max(1, keepdims=True) / 7.0).astype(np.float16)
    codes = (np.rint(blocks / np.maximum(scale.astype(np.float32), 1e-12)).clip(-8, 7) + 8).astype(np.uint8)
    packed = codes[:, :16] | codes[:, 16:] << 4
    data = b"".join(s.tobytes() + p.tobytes() for s, p in zip(scale, packed, strict=True))
    return data, ((codes.astype(np.float32) - 8.0) * scale.astype(np.float32)).reshape(w_NK.shape)


def write_raw_gguf(path: Path, *, kind: str = "Q4_0", seed: int = 0, **changes: Any) -> dict[str, torch.Tensor]:
    """Write the model of `tiny_config("llama", **changes)`; returns the float32 tensors that the file really holds."""
    config = tiny_config("llama", **changes)
    metadata = {
        "general.architecture": "llama", "general.alignment": _ALIGN, "llama.block_count": config.num_layers,
        "llama.context_length": config.max_position_embeddings, "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size, "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads, "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim, "llama.rope.freq_base": float(config.rope.theta),
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps), "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    table, body, held = b"", b"", {}
    tensors = tiny_weights(config, seed=seed)
    for name, w in tensors.items():
        parts = name.split(".")
        layer = parts[:2] == ["model", "layers"]
        stored = f"blk.{parts[2]}.{_LAYER[parts[-2]]}.weight" if layer else f"{_TOP[parts[-2]]}.weight"
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(parts[-2])
        w_np = w.numpy()
        if heads:  # the converter interleaves the halves of each head
            w_np = w_np.reshape(heads, 2, -1, w_np.shape[1]).swapaxes(1, 2).reshape(w_np.shape)
        if w.dim() == 1:
            type_id, data, back = _F32, w_np.astype(np.float32).tobytes(), w_np
        else:
            type_id = {"Q4_0": _Q4_0, "Q8_0": _Q8_0}[kind]
            data, back = (_q4_0 if kind == "Q4_0" else _q8_0)(w_np)
        if heads:
            back = back.reshape(heads, -1, 2, back.shape[1]).swapaxes(1, 2).reshape(back.shape)
        held[name] = torch.from_numpy(np.ascontiguousarray(back, dtype=np.float32))
        shape = w_np.shape[::-1]
        table += _string(stored) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        table += struct.pack("<IQ", type_id, len(body))
        body += data + bytes(-len(data) % _ALIGN)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items()) + table
    path.write_bytes(head + bytes(-len(head) % _ALIGN) + body)
    return held
