"""A gated delta net layer (arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it, and its output norm."""

from __future__ import annotations

from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.attention.protocol import AttentionContext, DeltaContext
from slipstream.kernels.delta import DeltaWeights
from slipstream.memory.states import StateShape
from slipstream.models.config import DeltaConfig, ModelConfig
from slipstream.models.linear import Dense, Linear
from slipstream.models.weights import WeightBuilder, wide_dtype


def state_shape(config: ModelConfig) -> StateShape | None:
    """Sizes of the states that a model's recurrent layers keep, None without any."""
    d = config.delta
    if d is None or not config.delta_layers:
        return None
    return StateShape(
        layers=len(config.delta_layers), heads=d.value_heads, key_dim=d.key_dim, value_dim=d.value_dim,
        inputs=d.channels + 2 * d.value_heads, history=d.conv - 1,
    )  # fmt: skip


class GatedNorm:
    """RMSNorm(x) * weight, rounded to x's dtype before weight and gate as in the releases, times silu(gate)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = wide_dtype(x.dtype)
        normed = F.rms_norm(x.to(wide), (x.shape[-1],), None, self.eps).to(x.dtype) * self.weight
        return (normed * F.silu(gate.to(wide))).to(x.dtype)


class Projections(Protocol):
    """The layer's input projections as one: [convolution channels | a | b | z], see kernels/delta.py."""

    def __call__(self, config: DeltaConfig, weights: WeightBuilder, prefix: str, hidden_size: int) -> Linear: ...


def split_projections(config: DeltaConfig, weights: WeightBuilder, prefix: str, hidden_size: int) -> Linear:
    """Qwen3.5: `in_proj_qkv`, `in_proj_a`, `in_proj_b`, `in_proj_z`."""
    return weights.linear(
        [prefix + f"in_proj_{x}" for x in ("qkv", "a", "b", "z")],
        [config.channels, config.value_heads, config.value_heads, config.values],
        hidden_size,
    )


def joined_projections(config: DeltaConfig, weights: WeightBuilder, prefix: str, hidden_size: int) -> Linear:
    """Qwen3-Next: `in_proj_qkvz` and `in_proj_ba`, whose rows go key head by key head; put in order here."""
    c, share = config, config.value_heads // config.key_heads
    joined = weights.linear(
        [prefix + "in_proj_qkvz", prefix + "in_proj_ba"], [c.channels + c.values, 2 * c.value_heads], hidden_size
    )
    assert isinstance(joined, Dense), "nothing packs these"
    per_head = (c.key_dim, c.key_dim, share * c.value_dim, share * c.value_dim)
    head_rows = torch.arange(c.channels + c.values).view(c.key_heads, -1).split(per_head, 1)
    q, k, v, z = (rows.flatten() for rows in head_rows)
    b, a = (x.flatten() for x in torch.arange(2 * c.value_heads).view(c.key_heads, 2, share).unbind(1))
    gates = c.channels + c.values
    order = torch.cat((q, k, v, gates + a, gates + b, z)).to(joined.weight_NK.device)
    return Dense(joined.weight_NK[order], None)


class DeltaNet:
    """The recurrent half of a hybrid model's layer."""

    def __init__(
        self, config: ModelConfig, weights: WeightBuilder, prefix: str, state_layer: int, projections: Projections
    ) -> None:
        """prefix: of the tensors, as in "model.layers.0.linear_attn."; state_layer: where the pool keeps its state."""
        c = config.delta
        assert c is not None, "a delta layer needs the sizes of one"
        self.state_layer, self.inputs = state_layer, c.channels + 2 * c.value_heads
        self.project = projections(c, weights, prefix, config.hidden_size)
        self.small = DeltaWeights(
            # Tap by tap in memory: kernels read one tap of neighbouring channels at once.
            conv_CT=weights.wide(prefix + "conv1d.weight", (c.channels, 1, c.conv)).squeeze(1).T.contiguous().T,
            decay_N=-weights.wide(prefix + "A_log", (c.value_heads,)).exp(),
            dt_N=weights.wide(prefix + "dt_bias", (c.value_heads,)),
            key_heads=c.key_heads,
            key_dim=c.key_dim,
        )
        self.norm = GatedNorm(weights.vector(prefix + "norm.weight", c.value_dim), config.rms_norm_eps)
        self.out = weights.linear(prefix + "out_proj", config.hidden_size, c.values)

    def forward(self, x_RH: Tensor, context: AttentionContext) -> Tensor:
        """x_RH [R, H]: normed. [R, H], without the residual. context: a DeltaContext."""
        x_RX, z_RC = self.project(x_RH).tensor_split((self.inputs,), -1)
        o_RNV = cast(DeltaContext, context).delta(self.state_layer, x_RX, self.small)
        return self.out(self.norm(o_RNV, z_RC.view(o_RNV.shape)).flatten(1))

    def bytes(self) -> int:
        return self.project.bytes() + self.out.bytes()
