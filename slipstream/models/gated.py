"""Gated full attention and the gated feed-forward part, as Qwen3-Next and Qwen3.5 have them."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.attention.protocol import AttentionContext
from slipstream.models.config import ModelConfig
from slipstream.models.layers import swiglu
from slipstream.models.rope import RotaryTable
from slipstream.models.weights import WeightBuilder


class GatedAttention:
    """Attention whose output is multiplied by sigmoid(gate) per element (arXiv 2505.06708, after SDPA), with RMSNorm on
    each head of q and k before rotation.

    q_proj holds [query | gate] for each head where the config says so (output_gate).
    """

    def __init__(self, config: ModelConfig, weights: WeightBuilder, prefix: str, kv_layer: int) -> None:
        """prefix: of the tensors, as in "model.layers.3.self_attn."; kv_layer: where the cache keeps this layer."""
        c = config
        self.kv_layer, self.heads, self.kv_heads, self.head_dim = kv_layer, c.num_heads, c.num_kv_heads, c.head_dim
        self.gated = c.output_gate
        self.q_size = c.q_size * (2 if self.gated else 1)
        self.qkv = weights.linear(
            [prefix + f"{x}_proj" for x in "qkv"],
            [self.q_size, c.kv_size, c.kv_size],
            c.hidden_size,
            bias=c.qkv_bias,
        )
        self.q_norm = weights.norm(prefix + "q_norm.weight", c.head_dim, c.rms_norm_eps, c.norm_offset)
        self.k_norm = weights.norm(prefix + "k_norm.weight", c.head_dim, c.rms_norm_eps, c.norm_offset)
        self.o = weights.linear(prefix + "o_proj", c.hidden_size, c.q_size, bias=c.o_bias)

    def forward(self, x_RH: Tensor, rotary: RotaryTable, cos: Tensor, sin: Tensor, attn: AttentionContext) -> Tensor:
        """x_RH [R, H]: normed. The projected output [R, H], without the residual."""
        rows = x_RH.shape[0]
        qkv = self.qkv(x_RH)
        q = qkv[:, : self.q_size].view(rows, self.heads, -1)
        k, v = qkv[:, self.q_size :].view(rows, 2, self.kv_heads, self.head_dim).unbind(1)
        q_RND = rotary.rotate(self.q_norm(q[..., : self.head_dim]), cos, sin)
        k_RKD = rotary.rotate(self.k_norm(k), cos, sin)
        o_RND = attn.attend(self.kv_layer, q_RND, k_RKD, v)
        if self.gated:
            o_RND = o_RND * torch.sigmoid(q[..., self.head_dim :])
        return self.o(o_RND.reshape(rows, -1))

    def bytes(self) -> int:
        return self.qkv.bytes() + self.o.bytes()


class GatedMLP:
    """down(silu(gate) * up)."""

    def __init__(
        self, config: ModelConfig, weights: WeightBuilder, prefix: str, intermediate_size: int | None = None
    ) -> None:
        """prefix: of the tensors, as in "model.layers.3.mlp."; intermediate_size: another than the config's."""
        size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_up = weights.linear([prefix + "gate_proj", prefix + "up_proj"], [size] * 2, config.hidden_size)
        self.down = weights.linear(prefix + "down_proj", config.hidden_size, size)

    def forward(self, x_RH: Tensor) -> Tensor:
        """x_RH [R, H]: normed. [R, H], without the residual."""
        return self.down(swiglu(self.gate_up(x_RH)))

    def bytes(self) -> int:
        return self.gate_up.bytes() + self.down.bytes()
