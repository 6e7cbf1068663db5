"""Qwen3.5, text: layers of gated delta nets with a gated full-attention layer after every few, (1 + w) norms and
rotary positions on a part of each head. The encoders of a checkpoint are left aside."""

from __future__ import annotations

from slipstream.models.decoder import Decoder
from slipstream.models.delta_net import split_projections
from slipstream.models.hybrid_block import HybridBlock


class Qwen3_5Block(HybridBlock):
    projections = staticmethod(split_projections)


class Qwen3_5(Decoder):
    block = Qwen3_5Block
    fusable = False
    unused = ("model.visual.", "mtp.")
