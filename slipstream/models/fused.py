"""A decoder's pass over flat rows as a chain of fused kernels.

Few rows: five launches a layer, all weight-streaming products (qkv with norm, RoPE and KV write inside; attention;
o with the residual; gate-up with norm and SwiGLU; down with the residual). Many rows: the library multiplies and our
kernels stand between, nine launches a layer. `PassConfig` says per product where one becomes the other; both leave
the residual stream in the same form, so they mix. The same weights as the plain pass; no copy is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.attention.protocol import TreeSight
from slipstream.kernels.attention import paged_attention
from slipstream.kernels.gemm import stream_head, stream_residual, stream_rope, stream_swiglu
from slipstream.kernels.norm import norm_prepare, residual_prepare, rms_norm, silu_mul
from slipstream.kernels.prefill import prefill_attention, prefill_tiles, rows_per_tile
from slipstream.kernels.rope import rope_kv_write
from slipstream.kernels.sample import argmax_finish, argmax_rows
from slipstream.kernels.tuning import MAX_FUSED_ROWS, PassConfig
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


class Stream(NamedTuple):
    """The residual stream h [R, H], h * gain of the norm that follows, and shares [T, R] of h's sums of squares."""

    h_RH: Tensor
    x_RH: Tensor
    sq_TR: Tensor


class Rows(NamedTuple):
    """Where the rows stand: slot and position of each, the page table.

    per_slot: rows of a slot in a frame. tile_T: `prefill_tiles` of a prompt chunk. cell_R: where each row is kept, if
    that is not its position; sight: what it sees then.
    """

    slot_R: Tensor
    pos_R: Tensor
    table_SP: Tensor
    per_slot: int = 1
    tile_T: Tensor | None = None
    cell_R: Tensor | None = None
    sight: TreeSight | None = None


class FusedDecoder:
    """Runs `decoder` over flat rows against paged KV. Build it only where `fits` says so."""

    max_rows = MAX_FUSED_ROWS

    def __init__(
        self,
        decoder: Decoder,
        kv: KVPages,
        workspace: Workspace,
        *,
        pdl: bool = False,
        config: PassConfig | None = None,
    ) -> None:
        """pdl: programmatic dependent launches. config: another cut than the measured one."""
        self.decoder, self.kv, self.workspace, self.pdl = decoder, kv, workspace, pdl
        self.config = PassConfig() if config is None else config
        # Launches right behind a library product.
        self.pdl_after = pdl and self.config.library_pdl
        c = decoder.config
        self.heads_per_kv = c.num_heads // c.num_kv_heads
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
        if not isinstance(model, Decoder) or model.device.type != "cuda" or not model.fusable or model.config.window:
            return False
        if model.config.layer_types or model.config.norm_offset or model.config.rope.partial != 1.0:
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
        width: int = 1,
        cell_R: Tensor | None = None,
        sight: TreeSight | None = None,
    ) -> FusedOutput:
        """One pass. Rows of slot 0 are padding: they write to the sink and their result means nothing.

        logits=False: only the argmax is wanted. taps, hidden: as `Model.forward` gives them. width: rows per slot.
        cell_R, sight: of rows of trees, which are kept elsewhere than at pos_R.
        """
        rows = Rows(slot_R, pos_R, table_SP, width, cell_R=cell_R, sight=sight)
        stream, tapped = self._layers(token_R, rows, taps)
        d, pdl = self.decoder, self.pdl
        eps, head = d.config.rms_norm_eps, self._weight(d.head)
        streamed = token_R.shape[0] <= self.config.head
        hidden_RH = rms_norm(stream.h_RH, d.norm.weight, eps, pdl) if hidden or not streamed else None
        if streamed:
            ws = self.workspace
            logits_RV, best_TR, where_TR = stream_head(
                stream.x_RH, head, stream.sq_TR, eps, ws.partial, ws.counters, logits, pdl
            )
            target_R = argmax_finish(best_TR, where_TR, d.config.vocab_size, pdl)
        else:
            assert hidden_RH is not None
            logits_RV = wide_product(hidden_RH, head)
            target_R = argmax_rows(logits_RV, self.pdl_after)
        return FusedOutput(logits_RV=logits_RV, target_R=target_R, taps=tapped, hidden_RH=hidden_RH if hidden else None)

    def forward(
        self, token_R: Tensor, slot_R: Tensor, pos_R: Tensor, table_SP: Tensor, *, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """The pass without the head, for prompt chunks: what `Model.forward` gives, hidden states [R, H] and taps.

        The rows of a slot are neighbours, in order of position.
        """
        cache = self.kv.data
        per_tile = rows_per_tile(token_R.shape[0], self.heads_per_kv, cache.shape[-1], cache.element_size())
        tile_T = prefill_tiles(slot_R, per_tile, table_SP.shape[0])
        stream, tapped = self._layers(token_R, Rows(slot_R, pos_R, table_SP, tile_T=tile_T), taps)
        d = self.decoder
        return rms_norm(stream.h_RH, d.norm.weight, d.config.rms_norm_eps, self.pdl), tapped

    def _layers(self, token_R: Tensor, rows: Rows, taps: tuple[int, ...]) -> tuple[Stream, list[Tensor]]:
        blocks: list[Any] = list(self.decoder.blocks)
        h_RH = self.decoder.embed(token_R)
        stream = Stream(h_RH, *norm_prepare(h_RH, blocks[0].input_norm.weight, self.pdl))
        tapped: dict[int, Tensor] = {}
        for i, (block, gain_H, (k_PSKD, v_PSKD)) in enumerate(zip(blocks, self.gains, self.kv.paged, strict=True)):
            if i in taps:
                tapped[i] = stream.h_RH
            q_RND = self._qkv(block, stream, k_PSKD, v_PSKD, rows)
            o_RND = self._attend(q_RND, k_PSKD, v_PSKD, rows)
            stream = self._residual(o_RND.flatten(1), block.o, stream.h_RH, block.post_norm.weight)
            stream = self._residual(self._swiglu(block, stream), block.down, stream.h_RH, gain_H)
        return stream, [tapped[i] for i in taps]

    def _qkv(self, block: Any, stream: Stream, k_PSKD: Tensor, v_PSKD: Tensor, rows: Rows) -> Tensor:
        """Rotated q [R, N, D]; k and v go to the cache."""
        c, ws, eps = self.decoder.config, self.workspace, self.decoder.config.rms_norm_eps
        gains = (block.q_norm.weight, block.k_norm.weight) if c.qk_norm else (None, None)
        weight_MH, bias_M = self._weight(block.qkv), block.qkv.bias_N
        cell_R = rows.pos_R if rows.cell_R is None else rows.cell_R
        at = (rows.table_SP, rows.slot_R, rows.pos_R, cell_R, c.num_heads)
        q_RND: Tensor
        if stream.h_RH.shape[0] <= self.config.rope:
            q_RND = stream_rope(
                stream.x_RH, weight_MH, bias_M, stream.sq_TR, eps, k_PSKD, v_PSKD, self.cos_LD, self.sin_LD, *gains,
                eps, *at, ws.partial, ws.counters, self.pdl,
            )  # fmt: skip
        else:
            q_RND = rope_kv_write(
                F.linear(stream.x_RH, weight_MH), k_PSKD, v_PSKD, self.cos_LD, self.sin_LD, *gains, *at, eps, bias_M,
                stream.sq_TR, c.hidden_size, eps, self.pdl_after,
            )  # fmt: skip
        return q_RND

    def _attend(self, q_RND: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, rows: Rows) -> Tensor:
        ws, scale = self.workspace, self.decoder.config.head_dim**-0.5
        last_R, seen_R = (rows.pos_R, None) if rows.sight is None else rows.sight
        where = (rows.table_SP, rows.slot_R, last_R)
        o_RND: Tensor
        if rows.tile_T is None:
            o_RND = paged_attention(
                q_RND, k_PSKD, v_PSKD, *where, seen_R, scale, ws.partial, ws.counters, self.pdl, rows.per_slot
            )
        else:
            o_RND = prefill_attention(q_RND, k_PSKD, v_PSKD, *where, rows.tile_T, scale)
        return o_RND

    def _swiglu(self, block: Any, stream: Stream) -> Tensor:
        """silu(gate) * up [R, I]."""
        c, ws, weight_NH = self.decoder.config, self.workspace, self._weight(block.gate_up)
        a_RI: Tensor
        if stream.h_RH.shape[0] <= self.config.silu:
            a_RI = stream_swiglu(
                stream.x_RH, weight_NH, stream.sq_TR, c.rms_norm_eps, ws.partial, ws.counters, self.pdl
            )
        else:
            product_RN = F.linear(stream.x_RH, weight_NH)
            a_RI = silu_mul(product_RN, stream.sq_TR, c.hidden_size, c.rms_norm_eps, self.pdl_after)
        return a_RI

    def _residual(self, x_RK: Tensor, layer: Any, h_RH: Tensor, gain_H: Tensor) -> Stream:
        """h + x @ w^T, and the first half of the norm that follows."""
        ws, weight_HK = self.workspace, self._weight(layer)
        if x_RK.shape[0] <= self.config.residual:
            return Stream(*stream_residual(x_RK, weight_HK, h_RH, gain_H, ws.partial, ws.counters, self.pdl))
        return Stream(*residual_prepare(F.linear(x_RK, weight_HK), h_RH, gain_H, self.pdl_after))

    @staticmethod
    def _weight(layer: Any) -> Tensor:
        weight_NK: Tensor = layer.weight_NK
        return weight_NK


def wide_product(x_RK: Tensor, w_NK: Tensor) -> Tensor:
    """x @ w^T in float32: logits that are not rounded to bf16, as the streaming head gives them."""
    if x_RK.dtype == torch.float32:
        return F.linear(x_RK, w_NK)
    if x_RK.device.type == "cuda":
        return torch.mm(x_RK, w_NK.T, out_dtype=torch.float32)
    return F.linear(x_RK.float(), w_NK.float())
