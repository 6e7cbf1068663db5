"""A decoder's pass for few rows as a chain of fused kernels: five launches a layer.

qkv product (norm, RoPE and KV write inside), attention, o product (residual), gate-up product (norm, SwiGLU), down
product (residual). The same weights as the plain pass; no copy is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention import paged_attention
from slipstream.kernels.gemm import stream_head, stream_residual, stream_rope, stream_swiglu
from slipstream.kernels.norm import norm_prepare, rms_norm
from slipstream.kernels.sample import argmax_finish
from slipstream.kernels.tuning import MAX_STREAM_ROWS
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from slipstream.models.decoder import Decoder
from slipstream.models.layers import Embedding
from slipstream.models.linear import Dense
from slipstream.models.rope import inverse_frequencies


@dataclass(frozen=True, kw_only=True)
class FusedOutput:
    """logits_RV float32 (memory unwritten when they were not asked for), and each row's argmax int64 [R].

    taps: the residual stream [R, H] before each tapped layer, in the order asked for. hidden_RH [R, H]: after the
    final norm, where asked for.
    """

    logits_RV: Tensor
    target_R: Tensor
    taps: list[Tensor]
    hidden_RH: Tensor | None


class FusedDecoder:
    """Runs `decoder` over flat rows against paged KV. Build it only where `fits` says so."""

    max_rows = MAX_STREAM_ROWS

    def __init__(self, decoder: Decoder, kv: KVPages, workspace: Workspace, *, pdl: bool = False) -> None:
        self.decoder, self.kv, self.workspace, self.pdl = decoder, kv, workspace, pdl
        c = decoder.config
        inv_D, factor = inverse_frequencies(c.rope, c.head_dim)
        angle_LD = torch.outer(torch.arange(c.max_position_embeddings, dtype=torch.float32), inv_D.float())
        self.cos_LD = (angle_LD.cos() * factor).to(decoder.device)
        self.sin_LD = (angle_LD.sin() * factor).to(decoder.device)
        blocks: list[Any] = list(decoder.blocks)
        # The gain that follows each block's second residual: the next block's input norm, at last the final norm.
        self.gains = [b.input_norm.weight for b in blocks[1:]] + [decoder.norm.weight]

    @staticmethod
    def fits(model: object) -> bool:
        """A bf16 or float32 `Decoder` of dense layers on a GPU, without biases where the kernels take none."""
        if not isinstance(model, Decoder) or model.device.type != "cuda":
            return False
        if model.dtype not in (torch.bfloat16, torch.float32) or not isinstance(model.embed, Embedding):
            return False
        if model.config.qk_norm and 64 % (model.config.head_dim // 2):
            return False  # a head's half must not straddle the product's tiles
        blocks: list[Any] = list(model.blocks)
        linears = [x for b in blocks for x in (b.qkv, b.o, b.gate_up, b.down)] + [model.head]
        plain = [x for b in blocks for x in (b.o, b.gate_up, b.down)] + [model.head]
        return all(isinstance(x, Dense) for x in linears) and all(x.bias_N is None for x in plain)

    def run(
        self,
        token_R: Tensor,
        slot_R: Tensor,
        pos_R: Tensor,
        table_SP: Tensor,
        *,
        logits: bool,
        taps: tuple[int, ...] = (),
        hidden: bool = False,
    ) -> FusedOutput:
        """One pass. Rows of slot 0 are padding: they write to the sink and their result means nothing.

        logits=False: only the argmax is wanted. taps, hidden: as `Model.forward` gives them.
        """
        d, ws, pdl = self.decoder, self.workspace, self.pdl
        c, partial, counters = d.config, ws.partial, ws.counters
        eps, scale = c.rms_norm_eps, c.head_dim**-0.5
        blocks: list[Any] = list(d.blocks)
        h_RH = d.embed(token_R)
        x_RH, sq_TR = norm_prepare(h_RH, blocks[0].input_norm.weight, pdl)
        tapped: dict[int, Tensor] = {}
        for i, (block, gain_H, (k_PSKD, v_PSKD)) in enumerate(zip(blocks, self.gains, self.kv.paged, strict=True)):
            if i in taps:
                tapped[i] = h_RH
            q_gain = block.q_norm.weight if c.qk_norm else None
            k_gain = block.k_norm.weight if c.qk_norm else None
            q_RND = stream_rope(
                x_RH, block.qkv.weight_NK, block.qkv.bias_N, sq_TR, eps, k_PSKD, v_PSKD, self.cos_LD, self.sin_LD,
                q_gain, k_gain, eps, table_SP, slot_R, pos_R, pos_R, c.num_heads, partial, counters, pdl,
            )  # fmt: skip
            o_RND = paged_attention(q_RND, k_PSKD, v_PSKD, table_SP, slot_R, pos_R, None, scale, partial, counters, pdl)
            h_RH, x_RH, sq_TR = stream_residual(
                o_RND.view(token_R.shape[0], -1),
                block.o.weight_NK,
                h_RH,
                block.post_norm.weight,
                partial,
                counters,
                pdl,
            )
            a_RI = stream_swiglu(x_RH, block.gate_up.weight_NK, sq_TR, eps, partial, counters, pdl)
            h_RH, x_RH, sq_TR = stream_residual(a_RI, block.down.weight_NK, h_RH, gain_H, partial, counters, pdl)
        hidden_RH = rms_norm(h_RH, d.norm.weight, eps, pdl) if hidden else None
        head: Any = d.head
        logits_RV, best_TR, where_TR = stream_head(x_RH, head.weight_NK, sq_TR, eps, partial, counters, logits, pdl)
        target_R = argmax_finish(best_TR, where_TR, c.vocab_size, pdl)
        return FusedOutput(logits_RV=logits_RV, target_R=target_R, taps=[tapped[i] for i in taps], hidden_RH=hidden_RH)
