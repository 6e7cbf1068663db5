"""Gemma 3, text (arXiv 2503.19786): norms before and after each half of a block, tanh GELU gates, scaled embeddings,
and layers with a sliding window of their own rotary base between layers that see everything."""

from __future__ import annotations

from torch import Tensor

from slipstream.attention.protocol import AttentionContext
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.layers import RMSNorm, geglu
from slipstream.models.rope import RotaryTable
from slipstream.models.weights import WeightBuilder


class Gemma3Block:
    """x + post(attention(norm(x))), then x + post(mlp(norm(x))). Gains are stored as w and mean 1 + w.

    Attention scores are scaled by query_pre_attn_scalar^-0.5; the attention rooms scale by the head size, so the gain
    of q's norm takes the quotient.
    """

    def __init__(self, config: ModelConfig, weights: WeightBuilder, layer: int) -> None:
        c, p = config, f"model.layers.{layer}."
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, c.num_heads, c.num_kv_heads, c.head_dim
        eps, h, plus = c.rms_norm_eps, c.hidden_size, c.norm_offset
        self.input_norm = weights.norm(p + "input_layernorm.weight", h, eps, plus)
        self.qkv = weights.linear(
            [p + f"self_attn.{x}_proj" for x in "qkv"], [c.q_size, c.kv_size, c.kv_size], h, bias=c.qkv_bias
        )
        self.q_norm = weights.norm(p + "self_attn.q_norm.weight", c.head_dim, eps, plus)
        if c.query_scalar not in (0, c.head_dim):
            self.q_norm = RMSNorm(self.q_norm.weight * (c.head_dim / c.query_scalar) ** 0.5, eps)
        self.k_norm = weights.norm(p + "self_attn.k_norm.weight", c.head_dim, eps, plus)
        self.o = weights.linear(p + "self_attn.o_proj", h, c.q_size, bias=c.o_bias)
        self.post_norm = weights.norm(p + "post_attention_layernorm.weight", h, eps, plus)
        self.mlp_norm = weights.norm(p + "pre_feedforward_layernorm.weight", h, eps, plus)
        self.gate_up = weights.linear([p + "mlp.gate_proj", p + "mlp.up_proj"], [c.intermediate_size] * 2, h)
        self.down = weights.linear(p + "mlp.down_proj", h, c.intermediate_size)
        self.mlp_post_norm = weights.norm(p + "post_feedforward_layernorm.weight", h, eps, plus)

    def forward(self, x_RH: Tensor, rotary: RotaryTable, cos: Tensor, sin: Tensor, attn: AttentionContext) -> Tensor:
        rows = x_RH.shape[0]
        qkv = self.qkv(self.input_norm(x_RH)).view(rows, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        q = rotary.rotate(self.q_norm(q), cos, sin)
        k = rotary.rotate(self.k_norm(k), cos, sin)
        o_RND = attn.attend(self.layer, q, k, v)
        x_RH = self.post_norm(self.o(o_RND.reshape(rows, -1))).add_(x_RH)
        return self.mlp_post_norm(self.down(geglu(self.gate_up(self.mlp_norm(x_RH))))).add_(x_RH)

    def bytes(self) -> int:
        return self.qkv.bytes() + self.o.bytes() + self.gate_up.bytes() + self.down.bytes()


class Gemma3(Decoder):
    block = Gemma3Block
    fusable = False
