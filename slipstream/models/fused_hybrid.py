"""A hybrid decoder's pass as a chain of fused kernels: delta nets and gated attention between the products.

A recurrent layer of few rows is six launches: projections with the norm inside; the rows through the states; the gated
norm; the output with the residual; gate-up with norm and SwiGLU; down with the residual. One of attention is seven.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.attention.protocol import DeltaContext
from slipstream.kernels.gated import gated_norm
from slipstream.models.fused import FusedDecoder
from slipstream.models.fused_layers import Rows, Stream
from slipstream.models.layers import Embedding
from slipstream.models.linear import Dense
from slipstream.models.qwen3_5 import Qwen3_5


class FusedHybrid(FusedDecoder):
    """Runs a Qwen3.5 decoder. Rows come with the context of the recurrent layers (attention/delta.py)."""

    @staticmethod
    def fits(model: object) -> bool:
        """A bf16 or float32 model of dense layers without biases on a GPU."""
        if not isinstance(model, Qwen3_5) or model.device.type != "cuda":
            return False
        if model.dtype not in (torch.bfloat16, torch.float32) or not isinstance(model.embed, Embedding):
            return False
        blocks: list[Any] = list(model.blocks)
        linears = [x for b in blocks for x in (b.mlp.gate_up, b.mlp.down)] + [model.head]
        for b in blocks:
            linears += [b.delta.project, b.delta.out] if b.attention is None else [b.attention.qkv, b.attention.o]
        return all(isinstance(x, Dense) and x.bias_N is None for x in linears)

    def _layers(self, x_RH: Tensor, rows: Rows, taps: tuple[int, ...]) -> tuple[Stream, list[Tensor]]:
        blocks: list[Any] = list(self.decoder.blocks)
        layers = self.layers
        stream = layers.start(x_RH, blocks[0].input_norm.weight)
        tapped: dict[int, Tensor] = {}
        for i, (block, gain_H) in enumerate(zip(blocks, self.gains, strict=True)):
            if i in taps:
                tapped[i] = stream.h_RH
            if block.attention is not None:
                k_PSKD, v_PSKD = self.kv.paged[block.attention.kv_layer]
                stream = layers.gated_layer(block, stream, gain_H, k_PSKD, v_PSKD, rows)
                continue
            mixed_RM = self._delta(block, stream, rows)
            stream = layers.residual(mixed_RM, block.delta.out, stream.h_RH, block.post_norm.weight)
            stream = layers.residual(layers.swiglu(block.mlp, stream), block.mlp.down, stream.h_RH, gain_H)
        return stream, [tapped[i] for i in taps]

    def _delta(self, block: Any, stream: Stream, rows: Rows) -> Tensor:
        net, states = block.delta, rows.states
        assert isinstance(states, DeltaContext)
        p_RM = self.layers.project(net.project, stream, block.input_norm.weight)
        o_RNV = states.delta(net.state_layer, p_RM[:, : net.inputs], net.small)
        out_RM: Tensor = gated_norm(o_RNV, p_RM[:, net.inputs :], net.norm.weight, net.norm.eps, self.pdl)
        return out_RM
