"""Qwen3 dense (arXiv 2505.09388): no biases by default, RMSNorm on each head of q and k before
rotation, and a head size of its own."""

from __future__ import annotations

from torch import Tensor

from slipstream.attention.protocol import AttentionContext
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.layers import swiglu
from slipstream.models.rope import RotaryTable
from slipstream.models.weights import WeightBuilder


class Qwen3Block:
    """x + attention(norm(x)) with normalised q and k, then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, weights: WeightBuilder, layer: int) -> None:
        c, p = config, f"{config.prefix}layers.{layer}."
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, c.num_heads, c.num_kv_heads, c.head_dim
        self.input_norm = weights.norm(p + "input_layernorm.weight", c.hidden_size, c.rms_norm_eps)
        self.qkv = weights.linear(
            [p + f"self_attn.{x}_proj" for x in "qkv"],
            [c.q_size, c.kv_size, c.kv_size],
            c.hidden_size,
            bias=c.qkv_bias,
        )
        self.q_norm = weights.norm(p + "self_attn.q_norm.weight", c.head_dim, c.rms_norm_eps)
        self.k_norm = weights.norm(p + "self_attn.k_norm.weight", c.head_dim, c.rms_norm_eps)
        self.o = weights.linear(p + "self_attn.o_proj", c.hidden_size, c.q_size, bias=c.o_bias)
        self.post_norm = weights.norm(p + "post_attention_layernorm.weight", c.hidden_size, c.rms_norm_eps)
        self.gate_up = weights.linear(
            [p + "mlp.gate_proj", p + "mlp.up_proj"], [c.intermediate_size] * 2, c.hidden_size
        )
        self.down = weights.linear(p + "mlp.down_proj", c.hidden_size, c.intermediate_size)

    def forward(self, x_RH: Tensor, rotary: RotaryTable, cos: Tensor, sin: Tensor, attn: AttentionContext) -> Tensor:
        rows = x_RH.shape[0]
        qkv = self.qkv(self.input_norm(x_RH)).view(rows, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        q = rotary.rotate(self.q_norm(q), cos, sin)
        k = rotary.rotate(self.k_norm(k), cos, sin)
        o_RND = attn.attend(self.layer, q, k, v)
        x_RH = self.o(o_RND.reshape(rows, -1)).add_(x_RH)
        return self.down(swiglu(self.gate_up(self.post_norm(x_RH)))).add_(x_RH)

    def bytes(self) -> int:
        return self.qkv.bytes() + self.o.bytes() + self.gate_up.bytes() + self.down.bytes()


class Qwen3(Decoder):
    block = Qwen3Block
