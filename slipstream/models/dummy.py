"""Seeded random weights for a config, to measure or test without a checkpoint."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.models.config import ModelConfig
from slipstream.models.weights import DenseSource


class DummyTensors(DenseSource):
    """`WeightSource` of random tensors: uniform with standard deviation 1/sqrt(K), norm weights 0.9 to 1.1 less offset.

    A value depends on (seed, tensor name, index) only, through integer arithmetic, so it is the same on
    every device and, up to rounding, in every dtype.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], *, seed: int, device: torch.device, offset: float = 0.0
    ) -> None:
        self._seed, self._device, self._shapes, self._offset = seed, device, dict(shapes), offset

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        shape = (stop - start, *self._shapes[name][1:])
        row = math.prod(shape[1:])
        key = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        noise = uniform_noise(start * row, stop * row, int.from_bytes(key[:4], "little"), self._device)
        if "norm" in name.split(".")[-2:][0]:
            whole = name.endswith("linear_attn.norm.weight")  # the one gain that is stored without an offset
            return noise.mul_(0.1).add_(1.0).sub_(0.0 if whole else self._offset)
        fan_in = shape[-1] if len(shape) > 1 else 100
        return noise.view(shape).mul_(math.sqrt(3.0 / fan_in))


class DummyWeights(DummyTensors):
    """The tensors that a model of this config has.

    Gains are around 1 with the config's norm_offset; decay rates of delta layers, exp(A_log), from 0.03 to 0.6.
    """

    def __init__(self, config: ModelConfig, *, seed: int, device: torch.device) -> None:
        super().__init__(decoder_shapes(config), seed=seed, device=device, offset=config.norm_offset)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        value = super().read(name, start, stop)
        return value.mul_(1.5 / math.sqrt(3.0 / 100)).sub_(2.0) if name.endswith("A_log") else value


def uniform_noise(start: int, stop: int, key: int, device: torch.device) -> Tensor:
    """float32 [stop - start], uniform in [-1, 1): an integer hash (multiply, xorshift; twice) of the index."""
    h = torch.arange(start, stop, dtype=torch.int64, device=device)
    h = (h + key * 0x9E3779B1) & 0xFFFFFFFF
    for multiplier, shift in ((0x21F0AAAD, 16), (0x735A2D97, 15)):
        h = ((h ^ (h >> shift)) * multiplier) & 0xFFFFFFFF
    h ^= h >> 15
    return (h >> 8).float() * 2.0**-23 - 1.0  # the top 24 bits fit float32 exactly


def decoder_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the supported architectures, from the config's flags."""
    h, f = c.hidden_size, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        c.prefix + "embed_tokens.weight": (c.vocab_size, h),
        c.prefix + "norm.weight": (h,),
    }
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, h)
    mlp = (
        ("mlp.gate_proj", f, h, c.mlp_bias),
        ("mlp.up_proj", f, h, c.mlp_bias),
        ("mlp.down_proj", h, f, c.mlp_bias),
    )
    attention = (
        ("self_attn.q_proj", c.q_size * (2 if c.output_gate else 1), h, c.qkv_bias),
        ("self_attn.k_proj", c.kv_size, h, c.qkv_bias),
        ("self_attn.v_proj", c.kv_size, h, c.qkv_bias),
        ("self_attn.o_proj", h, c.q_size, c.o_bias),
    )
    for i in range(c.num_layers):
        p = f"{c.prefix}layers.{i}."
        shapes[p + "input_layernorm.weight"] = shapes[p + "post_attention_layernorm.weight"] = (h,)
        if c.sandwich_norms:
            shapes[p + "pre_feedforward_layernorm.weight"] = shapes[p + "post_feedforward_layernorm.weight"] = (h,)
        full = i in c.kv_layers
        sparse = c.experts is not None and i in c.experts.layers
        for name, rows, columns, bias in (
            *(_expert_linears(c) if sparse else mlp),
            *(attention if full else _delta_linears(c)),
        ):
            shapes[f"{p}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{p}{name}.bias"] = (rows,)
        if full and c.qk_norm:
            shapes[p + "self_attn.q_norm.weight"] = shapes[p + "self_attn.k_norm.weight"] = (c.head_dim,)
        if not full and c.delta is not None:
            p += "linear_attn."
            shapes[p + "conv1d.weight"] = (c.delta.channels, 1, c.delta.conv)
            shapes[p + "A_log"] = shapes[p + "dt_bias"] = (c.delta.value_heads,)
            shapes[p + "norm.weight"] = (c.delta.value_dim,)
    return shapes


def _delta_linears(c: ModelConfig) -> tuple[tuple[str, int, int, bool], ...]:
    assert c.delta is not None
    d, h, p = c.delta, c.hidden_size, "linear_attn."
    rows = {"qkv": d.channels, "a": d.value_heads, "b": d.value_heads, "z": d.values}
    if c.architecture == "Qwen3NextForCausalLM":
        rows = {"qkvz": d.channels + d.values, "ba": 2 * d.value_heads}
    return (*((f"{p}in_proj_{x}", n, h, False) for x, n in rows.items()), (p + "out_proj", h, d.values, False))


def _expert_linears(c: ModelConfig) -> tuple[tuple[str, int, int, bool], ...]:
    assert c.experts is not None
    e, h = c.experts, c.hidden_size
    sizes = {**{f"mlp.experts.{i}.": e.size for i in range(e.number)}, "mlp.shared_expert.": e.shared_size}
    linears = [("mlp.gate", e.number, h, False), ("mlp.shared_expert_gate", 1, h, False)]
    for p, f in sizes.items():
        linears += [(p + "gate_proj", f, h, False), (p + "up_proj", f, h, False), (p + "down_proj", h, f, False)]
    return tuple(linears)
