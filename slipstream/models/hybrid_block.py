"""A layer of the recurrent models: attention or a delta net as the config says, then an MLP."""

from __future__ import annotations

from torch import Tensor

from slipstream.attention.protocol import AttentionContext
from slipstream.models.config import ModelConfig
from slipstream.models.delta_net import DeltaNet, Projections
from slipstream.models.experts import SparseMLP
from slipstream.models.gated import GatedAttention, GatedMLP
from slipstream.models.rope import RotaryTable
from slipstream.models.weights import WeightBuilder


class HybridBlock:
    """x + mixer(norm(x)), then x + mlp(norm(x)). projections: how a delta net's input projections are stored."""

    projections: Projections

    def __init__(self, config: ModelConfig, weights: WeightBuilder, layer: int) -> None:
        c, p = config, f"{config.prefix}layers.{layer}."
        self.input_norm = weights.norm(p + "input_layernorm.weight", c.hidden_size, c.rms_norm_eps, c.norm_offset)
        self.attention: GatedAttention | None = None
        self.delta: DeltaNet | None = None
        if layer in c.kv_layers:
            self.attention = GatedAttention(c, weights, p + "self_attn.", c.kv_layers.index(layer))
        else:
            at = c.delta_layers.index(layer)
            self.delta = DeltaNet(c, weights, p + "linear_attn.", at, self.projections)
        post = p + "post_attention_layernorm.weight"
        self.post_norm = weights.norm(post, c.hidden_size, c.rms_norm_eps, c.norm_offset)
        self.mlp = self.feed_forward(c, layer)(c, weights, p + "mlp.")

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int) -> type[GatedMLP] | type[SparseMLP]:
        """What the layer's MLP is."""
        del config, layer
        return GatedMLP

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
