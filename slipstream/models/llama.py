"""Llama 2 and 3, Mistral, SmolLM2 (arXiv 2307.09288, 2407.21783, 2310.06825): pre-norm blocks with
grouped-query attention, rotary positions and SwiGLU."""

from __future__ import annotations

from torch import Tensor

from slipstream.attention.protocol import AttentionContext
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.layers import swiglu
from slipstream.models.rope import RotaryTable
from slipstream.models.weights import WeightBuilder


class LlamaBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)). Biases where the config has them."""

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
        self.o = weights.linear(p + "self_attn.o_proj", c.hidden_size, c.q_size, bias=c.o_bias)
        self.post_norm = weights.norm(p + "post_attention_layernorm.weight", c.hidden_size, c.rms_norm_eps)
        self.gate_up = weights.linear(
            [p + "mlp.gate_proj", p + "mlp.up_proj"],
            [c.intermediate_size] * 2,
            c.hidden_size,
            bias=c.mlp_bias,
        )
        self.down = weights.linear(p + "mlp.down_proj", c.hidden_size, c.intermediate_size, bias=c.mlp_bias)

    def forward(self, x_RH: Tensor, rotary: RotaryTable, cos: Tensor, sin: Tensor, attn: AttentionContext) -> Tensor:
        rows, rotated = x_RH.shape[0], self.heads + self.kv_heads
        qkv = self.qkv(self.input_norm(x_RH)).view(rows, rotated + self.kv_heads, self.head_dim)
        # q and k turn by the same angles: one pass over both.
        qk = rotary.rotate(qkv[:, :rotated], cos, sin)
        o_RND = attn.attend(self.layer, qk[:, : self.heads], qk[:, self.heads :], qkv[:, rotated:])
        x_RH = self.o(o_RND.reshape(rows, -1)).add_(x_RH)
        return self.down(swiglu(self.gate_up(self.post_norm(x_RH)))).add_(x_RH)

    def bytes(self) -> int:
        return self.qkv.bytes() + self.o.bytes() + self.gate_up.bytes() + self.down.bytes()


class Llama(Decoder):
    block = LlamaBlock
