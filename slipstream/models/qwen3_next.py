"""Qwen3-Next: as Qwen3.5, with joined projections of the delta nets and mixtures of experts."""

from __future__ import annotations

from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.delta_net import joined_projections
from slipstream.models.experts import SparseMLP
from slipstream.models.gated import GatedMLP
from slipstream.models.hybrid_block import HybridBlock


class Qwen3NextBlock(HybridBlock):
    projections = staticmethod(joined_projections)

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int) -> type[GatedMLP] | type[SparseMLP]:
        return SparseMLP if config.experts is not None and layer in config.experts.layers else GatedMLP


class Qwen3Next(Decoder):
    block = Qwen3NextBlock
    unused = ("mtp.",)
    fusable = False
