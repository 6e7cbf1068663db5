"""One decoder layer over flat rows as a chain of fused kernels, for targets and for drafters' heads.

Few rows: five launches, all weight-streaming products (qkv with norm, RoPE and KV write inside; attention; o with the
residual; gate-up with norm and SwiGLU; down with the residual). Many rows: the library multiplies and our kernels stand
between, nine launches. `PassConfig` says per product where one becomes the other; both leave the residual stream in the
same form, so they mix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.attention.protocol import DeltaContext, TreeSight
from slipstream.kernels.attention import paged_attention
from slipstream.kernels.gated import gate_mul, gated_rope_write
from slipstream.kernels.gemm import stream_head, stream_linear, stream_residual, stream_rope, stream_swiglu
from slipstream.kernels.norm import norm_prepare, residual_prepare, rms_norm, silu_mul
from slipstream.kernels.prefill import prefill_attention
from slipstream.kernels.rope import rope_kv_write
from slipstream.kernels.sample import argmax_finish, argmax_rows
from slipstream.kernels.tuning import Epilogue, PassConfig
from slipstream.kernels.workspace import Workspace
from slipstream.models.config import ModelConfig
from slipstream.models.linear import Dense
from slipstream.models.rope import axis_of_pairs, by_axis, inverse_frequencies


class Stream(NamedTuple):
    """The residual stream h [R, H], h * gain of the norm that follows, and shares [T, R] of h's sums of squares.

    sq_TR None: x_RH is what the next product reads as it is.
    """

    h_RH: Tensor
    x_RH: Tensor
    sq_TR: Tensor | None


class Angles(NamedTuple):
    """Cosines and sines [R, T] of each row's pairs, and the rows' numbers [R]."""

    cos_RT: Tensor
    sin_RT: Tensor
    row_R: Tensor


class Rows(NamedTuple):
    """Where the rows stand: slot and position of each, the page table.

    per_slot: rows of a slot in a frame. tile_T: `prefill_tiles` of a prompt chunk. cell_R: where each row is kept, if
    that is not its position. last_R: the last cell that each row sees, if that is not its own. sight: what rows of
    trees see. states: of recurrent layers. angles: of rows with three rotary positions each; others turn by pos_R.
    """

    slot_R: Tensor
    pos_R: Tensor
    table_SP: Tensor
    per_slot: int = 1
    tile_T: Tensor | None = None
    cell_R: Tensor | None = None
    last_R: Tensor | None = None
    sight: TreeSight | None = None
    states: DeltaContext | None = None
    angles: Angles | None = None


class FusedLayers:
    """The products of layers of one shape and what stands between them, against paged KV.

    pdl: programmatic dependent launches. cut: up to how many rows each product streams.
    """

    def __init__(
        self,
        config: ModelConfig,
        workspace: Workspace,
        device: torch.device,
        *,
        positions: int,
        first_cell: int = 0,
        pdl: bool = False,
        cut: PassConfig | None = None,
    ) -> None:
        """positions: how many have angles. first_cell: the first one that holds a row; it has angle 0."""
        self.config, self.workspace, self.first_cell, self.pdl = config, workspace, first_cell, pdl
        self.cut = PassConfig() if cut is None else cut
        # Launches right behind a library product.
        self.pdl_after = pdl and self.cut.library_pdl
        inv_D, factor = inverse_frequencies(config.rope, config.head_dim)
        at_L = (torch.arange(positions, dtype=torch.float32) - first_cell).clamp(min=0)
        angle_LD = torch.outer(at_L, inv_D.float())
        self.cos_LD = (angle_LD.cos() * factor).to(device)
        self.sin_LD = (angle_LD.sin() * factor).to(device)
        self.axis_T = axis_of_pairs(config.rope, device) if config.rope.sections else None

    @staticmethod
    def fit(config: ModelConfig, blocks: list[Any], others: list[Any]) -> bool:
        """Dense weights, without biases where the kernels take none. others: products besides those of the blocks."""
        if config.qk_norm and 64 % (config.head_dim // 2):
            return False  # a head's half must not straddle the product's tiles
        plain = [x for b in blocks for x in (b.o, b.gate_up, b.down)] + others
        return all(isinstance(x, Dense) for x in [*plain, *(b.qkv for b in blocks)]) and all(
            x.bias_N is None for x in plain
        )

    @staticmethod
    def fit_gated(block: Any) -> bool:
        """The same of a block with gated attention."""
        linears = (block.attention.qkv, block.attention.o, block.mlp.gate_up, block.mlp.down)
        return all(isinstance(x, Dense) and x.bias_N is None for x in linears)

    def angles(self, pos_3R: Tensor) -> Angles:
        """Of rows at positions in time, height and width: once per pass. The kernels take them by the row's number."""
        assert self.axis_T is not None, "positions on three axes for a model that has one"
        at_3R = pos_3R.clamp(0, self.cos_LD.shape[0] - 1)
        cos_RT, sin_RT = (by_axis(table_LT[at_3R], self.axis_T) for table_LT in (self.cos_LD, self.sin_LD))
        return Angles(cos_RT, sin_RT, torch.arange(pos_3R.shape[1], device=pos_3R.device))

    def start(self, h_RH: Tensor, gain_H: Tensor) -> Stream:
        return Stream(h_RH, *norm_prepare(h_RH, gain_H, self.pdl))

    def layer(self, block: Any, stream: Stream, gain_H: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, rows: Rows) -> Stream:
        """gain_H: of the norm that follows the layer."""
        q_RND = self._qkv(block, stream, k_PSKD, v_PSKD, rows)
        o_RND = self.attend(q_RND, k_PSKD, v_PSKD, rows)
        stream = self.residual(o_RND.flatten(1), block.o, stream.h_RH, block.post_norm.weight)
        return self.residual(self.swiglu(block, stream), block.down, stream.h_RH, gain_H)

    def gated_layer(
        self, block: Any, stream: Stream, gain_H: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, rows: Rows
    ) -> Stream:
        """As `layer`, of a block with gated attention (models/gated.py)."""
        mixed_RM = self.gated(block, stream, k_PSKD, v_PSKD, rows)
        stream = self.residual(mixed_RM, block.attention.o, stream.h_RH, block.post_norm.weight)
        return self.residual(self.swiglu(block.mlp, stream), block.mlp.down, stream.h_RH, gain_H)

    def gated(self, block: Any, stream: Stream, k_PSKD: Tensor, v_PSKD: Tensor, rows: Rows) -> Tensor:
        """Gated attention [R, M] before its output product."""
        c, at = self.config, block.attention
        qkv_RM = self.project(at.qkv, stream, block.input_norm.weight)
        cos, sin, turn_R = self._turns(rows)
        q_RND = gated_rope_write(
            qkv_RM, k_PSKD, v_PSKD, cos, sin, at.q_norm.weight, at.k_norm.weight, rows.table_SP, rows.slot_R, turn_R,
            rows.pos_R if rows.cell_R is None else rows.cell_R, c.num_heads, c.rms_norm_eps, at.gated,
            self.pdl and stream.h_RH.shape[0] <= self.cut.linear,
        )  # fmt: skip
        o_RND = self.attend(q_RND, k_PSKD, v_PSKD, rows)
        out_RM: Tensor = gate_mul(o_RND, qkv_RM, self.pdl) if at.gated else o_RND.flatten(1)
        return out_RM

    def project(self, layer: Any, stream: Stream, gain_H: Tensor) -> Tensor:
        """The normed stream times a layer's weights; gain_H: the norm's, as `stream` was made with it."""
        eps, weight_NH = self.config.rms_norm_eps, self.weight(layer)
        if stream.h_RH.shape[0] > self.cut.linear:
            return F.linear(rms_norm(stream.h_RH, gain_H, eps, self.pdl), weight_NH)
        ws = self.workspace
        y_RN: Tensor = stream_linear(stream.x_RH, weight_NH, None, stream.sq_TR, eps, ws.partial, ws.counters, self.pdl)
        return y_RN

    def linear(
        self, x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, dependent: bool = False
    ) -> Tensor:
        """x @ w^T + bias [R, N]. dependent: inside a chain of dependent launches."""
        ws = self.workspace
        if x_RK.shape[0] > self.cut.linear:
            return F.linear(x_RK, weight_NK, bias_N)
        y_RN: Tensor = stream_linear(
            x_RK, weight_NK, bias_N, None, 0.0, ws.partial, ws.counters, self.pdl and dependent
        )
        return y_RN

    def head(
        self, stream: Stream, layer: Any, norm: Any, *, logits: bool, normed_RH: Tensor | None = None,
        dependent: bool = True, best: bool = True, none: int = 0,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Logits [R, V] float32 (memory unwritten where they are not asked for), and their argmax [R].

        normed_RH: `stream` after the norm, if that is there already. dependent: nothing else was launched since.
        best=False: no argmax. none: in its place where no logit is finite.
        """
        ws, weight_VH, rows = self.workspace, self.weight(layer), stream.h_RH.shape[0]
        pdl = self.pdl and dependent
        if rows <= self.cut.most(Epilogue.HEAD, *weight_VH.shape):
            logits_RV, best_TR, where_TR = stream_head(
                stream.x_RH, weight_VH, stream.sq_TR, self.config.rms_norm_eps, ws.partial, ws.counters, logits, pdl
            )
            return logits_RV, argmax_finish(best_TR, where_TR, weight_VH.shape[0], pdl, none) if best else None
        if normed_RH is None:
            normed_RH = rms_norm(stream.h_RH, norm.weight, self.config.rms_norm_eps, pdl)
        logits_RV = wide_product(normed_RH, weight_VH)
        return logits_RV, argmax_rows(logits_RV, self.pdl_after, none) if best else None

    def _qkv(self, block: Any, stream: Stream, k_PSKD: Tensor, v_PSKD: Tensor, rows: Rows) -> Tensor:
        """Rotated q [R, N, D]; k and v go to the cache."""
        c, ws, eps = self.config, self.workspace, self.config.rms_norm_eps
        gains = (block.q_norm.weight, block.k_norm.weight) if c.qk_norm else (None, None)
        weight_MH, bias_M = self.weight(block.qkv), block.qkv.bias_N
        cell_R = rows.pos_R if rows.cell_R is None else rows.cell_R
        cos, sin, turn_R = self._turns(rows)
        at = (rows.table_SP, rows.slot_R, turn_R, cell_R, c.num_heads)
        q_RND: Tensor
        if stream.h_RH.shape[0] <= self.cut.rope:
            q_RND = stream_rope(
                stream.x_RH, weight_MH, bias_M, stream.sq_TR, eps, k_PSKD, v_PSKD, cos, sin, *gains, eps,
                *at, ws.partial, ws.counters, self.pdl,
            )  # fmt: skip
        else:
            q_RND = rope_kv_write(
                F.linear(stream.x_RH, weight_MH), k_PSKD, v_PSKD, cos, sin, *gains, *at, eps, bias_M, stream.sq_TR,
                stream.x_RH.shape[1], eps, self.pdl_after,
            )  # fmt: skip
        return q_RND

    def _turns(self, rows: Rows) -> Angles:
        """Tables of angles, and where each row stands in them."""
        return rows.angles or Angles(self.cos_LD, self.sin_LD, rows.pos_R)

    def attend(self, q_RND: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, rows: Rows) -> Tensor:
        ws, scale = self.workspace, self.config.head_dim**-0.5
        own_R = rows.pos_R if rows.cell_R is None else rows.cell_R
        last_R, seen_R = rows.sight or (own_R if rows.last_R is None else rows.last_R, None)
        where = (rows.table_SP, rows.slot_R, last_R)
        o_RND: Tensor
        if rows.tile_T is None:
            o_RND = paged_attention(
                q_RND, k_PSKD, v_PSKD, *where, seen_R, scale, ws.partial, ws.counters, self.pdl, rows.per_slot,
                self.first_cell,
            )  # fmt: skip
        else:
            o_RND = prefill_attention(q_RND, k_PSKD, v_PSKD, *where, rows.tile_T, scale)
        return o_RND

    def swiglu(self, block: Any, stream: Stream) -> Tensor:
        """silu(gate) * up [R, I]."""
        c, ws, weight_NH = self.config, self.workspace, self.weight(block.gate_up)
        a_RI: Tensor
        if stream.h_RH.shape[0] <= self.cut.most(Epilogue.SILU, weight_NH.shape[0] // 2, weight_NH.shape[1]):
            a_RI = stream_swiglu(
                stream.x_RH, weight_NH, stream.sq_TR, c.rms_norm_eps, ws.partial, ws.counters, self.pdl
            )
        else:
            product_RN = F.linear(stream.x_RH, weight_NH)
            a_RI = silu_mul(product_RN, stream.sq_TR, c.hidden_size, c.rms_norm_eps, self.pdl_after)
        return a_RI

    def residual(self, x_RK: Tensor, layer: Any, h_RH: Tensor, gain_H: Tensor) -> Stream:
        """h + x @ w^T, and the first half of the norm that follows."""
        ws, weight_HK = self.workspace, self.weight(layer)
        if x_RK.shape[0] <= self.cut.residual:
            return Stream(*stream_residual(x_RK, weight_HK, h_RH, gain_H, ws.partial, ws.counters, self.pdl))
        return Stream(*residual_prepare(F.linear(x_RK, weight_HK), h_RH, gain_H, self.pdl_after))

    @staticmethod
    def weight(layer: Any) -> Tensor:
        weight_NK: Tensor = layer.weight_NK
        return weight_NK


def wide_product(x_RK: Tensor, w_NK: Tensor) -> Tensor:
    """x @ w^T in float32: logits that are not rounded to bf16, as the streaming head gives them."""
    if x_RK.dtype == torch.float32:
        return F.linear(x_RK, w_NK)
    if x_RK.device.type == "cuda":
        return torch.mm(x_RK, w_NK.T, out_dtype=torch.float32)
    return F.linear(x_RK.float(), w_NK.float())
