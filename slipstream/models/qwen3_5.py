"""Qwen3.5, text: layers of gated delta nets with a gated full-attention layer after every few, (1 + w) norms and
rotary positions on a part of each head. The encoders of a checkpoint are left aside."""

from __future__ import annotations

from torch import Tensor

from slipstream.attention.protocol import AttentionContext
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.delta_net import DeltaNet, split_projections
from slipstream.models.gated import GatedAttention, GatedMLP
from slipstream.models.rope import RotaryTable
from slipstream.models.weights import WeightBuilder


class Qwen3_5Block:
    """x + mixer(norm(x)), then x + mlp(norm(x)); the mixer is attention or a delta net, as layer_types says."""

    def __init__(self, config: ModelConfig, weights: WeightBuilder, layer: int) -> None:
        c, p = config, f"{config.prefix}layers.{layer}."
        self.input_norm = weights.norm(p + "input_layernorm.weight", c.hidden_size, c.rms_norm_eps, c.norm_offset)
        self.attention: GatedAttention | None = None
        self.delta: DeltaNet | None = None
        if layer in c.kv_layers:
            self.attention = GatedAttention(c, weights, p + "self_attn.", c.kv_layers.index(layer))
        else:
            at = c.delta_layers.index(layer)
            self.delta = DeltaNet(c, weights, p + "linear_attn.", at, split_projections)
        self.post_norm = weights.norm(
            p + "post_attention_layernorm.weight", c.hidden_size, c.rms_norm_eps, c.norm_offset
        )
        self.mlp = GatedMLP(c, weights, p + "mlp.")

    def forward(self, x_RH: Tensor, rotary: RotaryTable, cos: Tensor, sin: Tensor, attn: AttentionContext) -> Tensor:
        normed_RH = self.input_norm(x_RH)
        if self.attention is not None:
            x_RH = self.attention.forward(normed_RH, rotary, cos, sin, attn).add_(x_RH)
        else:
            assert self.delta is not None
            x_RH = self.delta.forward(normed_RH, attn).add_(x_RH)
        return self.mlp.forward(self.post_norm(x_RH)).add_(x_RH)

    def bytes(self) -> int:
        mixer = self.attention or self.delta
        assert mixer is not None
        return mixer.bytes() + self.mlp.bytes()


class Qwen3_5(Decoder):
    block = Qwen3_5Block
    fusable = False
    unused = ("model.visual.", "mtp.")
