"""A hybrid decoder's pass as a chain of fused kernels: delta nets and gated attention between the products.

A recurrent layer of few rows is six launches: projections with the norm inside; the rows through the states; the gated
norm; the output with the residual; gate-up with norm and SwiGLU; down with the residual. One of attention is seven.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.attention.protocol import DeltaContext
from slipstream.kernels.gated import gate_mul, gated_norm, gated_rope_write
from slipstream.kernels.gemm import stream_linear
from slipstream.kernels.norm import rms_norm
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

    def _layers(self, token_R: Tensor, rows: Rows, taps: tuple[int, ...]) -> tuple[Stream, list[Tensor]]:
        blocks: list[Any] = list(self.decoder.blocks)
        layers = self.layers
        stream = layers.start(self.decoder.embed(token_R), blocks[0].input_norm.weight)
        tapped: dict[int, Tensor] = {}
        for i, (block, gain_H) in enumerate(zip(blocks, self.gains, strict=True)):
            if i in taps:
                tapped[i] = stream.h_RH
            if block.attention is None:
                mixed_RM, out = self._delta(block, stream, rows), block.delta.out
            else:
                mixed_RM, out = self._attention(block, stream, rows), block.attention.o
            stream = layers.residual(mixed_RM, out, stream.h_RH, block.post_norm.weight)
            stream = layers.residual(layers.swiglu(block.mlp, stream), block.mlp.down, stream.h_RH, gain_H)
        return stream, [tapped[i] for i in taps]

    def _project(self, layer: Any, stream: Stream, gain_H: Tensor) -> Tensor:
        """The normed stream times a layer's weights."""
        layers, eps, weight_NH = self.layers, self.decoder.config.rms_norm_eps, self.layers.weight(layer)
        if stream.h_RH.shape[0] > layers.cut.linear:
            return F.linear(rms_norm(stream.h_RH, gain_H, eps, self.pdl), weight_NH)
        ws = layers.workspace
        y_RN: Tensor = stream_linear(stream.x_RH, weight_NH, None, stream.sq_TR, eps, ws.partial, ws.counters, self.pdl)
        return y_RN

    def _delta(self, block: Any, stream: Stream, rows: Rows) -> Tensor:
        net, states = block.delta, rows.states
        assert isinstance(states, DeltaContext)
        p_RM = self._project(net.project, stream, block.input_norm.weight)
        o_RNV = states.delta(net.state_layer, p_RM[:, : net.inputs], net.small)
        out_RM: Tensor = gated_norm(o_RNV, p_RM[:, net.inputs :], net.norm.weight, net.norm.eps, self.pdl)
        return out_RM

    def _attention(self, block: Any, stream: Stream, rows: Rows) -> Tensor:
        c, at, layers = self.decoder.config, block.attention, self.layers
        k_PSKD, v_PSKD = self.kv.paged[at.kv_layer]
        qkv_RM = self._project(at.qkv, stream, block.input_norm.weight)
        q_RND = gated_rope_write(
            qkv_RM, k_PSKD, v_PSKD, layers.cos_LD, layers.sin_LD, at.q_norm.weight, at.k_norm.weight, rows.table_SP,
            rows.slot_R, rows.pos_R, rows.pos_R if rows.cell_R is None else rows.cell_R, c.num_heads, c.rms_norm_eps,
            at.gated, self.pdl and stream.h_RH.shape[0] <= layers.cut.linear,
        )  # fmt: skip
        o_RND = layers.attend(q_RND, k_PSKD, v_PSKD, rows)
        out_RM: Tensor = gate_mul(o_RND, qkv_RM, self.pdl) if at.gated else o_RND.flatten(1)
        return out_RM
