"""Qwen3-Next: as Qwen3.5, with joined projections of the delta nets and mixtures of experts."""

from __future__ import annotations

from torch import Tensor

from slipstream.attention.protocol import AttentionContext
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.delta_net import DeltaNet, joined_projections
from slipstream.models.experts import SparseMLP
from slipstream.models.gated import GatedAttention, GatedMLP
from slipstream.models.rope import RotaryTable
from slipstream.models.weights import WeightBuilder


class Qwen3NextBlock:
    """x + mixer(norm(x)), then x + mlp(norm(x)); which mixer and which mlp the config says for each layer."""

    def __init__(self, config: ModelConfig, weights: WeightBuilder, layer: int) -> None:
        c, p = config, f"{config.prefix}layers.{layer}."
        self.input_norm = weights.norm(p + "input_layernorm.weight", c.hidden_size, c.rms_norm_eps, c.norm_offset)
        self.attention: GatedAttention | None = None
        self.delta: DeltaNet | None = None
        if layer in c.kv_layers:
            self.attention = GatedAttention(c, weights, p + "self_attn.", c.kv_layers.index(layer))
        else:
            at = c.delta_layers.index(layer)
            self.delta = DeltaNet(c, weights, p + "linear_attn.", at, joined_projections)
        post = p + "post_attention_layernorm.weight"
        self.post_norm = weights.norm(post, c.hidden_size, c.rms_norm_eps, c.norm_offset)
        sparse = c.experts is not None and layer in c.experts.layers
        self.mlp: SparseMLP | GatedMLP = (SparseMLP if sparse else GatedMLP)(c, weights, p + "mlp.")

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


class Qwen3Next(Decoder):
    block = Qwen3NextBlock
    unused = ("mtp.",)
    fusable = False
