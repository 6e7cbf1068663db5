"""A pass of the EAGLE-3 head for few rows as a chain of fused kernels: six launches a layer, two for the choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.attention.protocol import TreeSight
from slipstream.draft.eagle3_model import Eagle3Model
from slipstream.draft.feature import HeadOutput
from slipstream.kernels.attention import paged_attention
from slipstream.kernels.eagle import join_norms
from slipstream.kernels.gemm import stream_head, stream_linear, stream_residual, stream_rope, stream_swiglu
from slipstream.kernels.norm import norm_prepare, rms_norm
from slipstream.kernels.sample import argmax_finish
from slipstream.kernels.tuning import MAX_STREAM_ROWS
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from slipstream.models.layers import Embedding
from slipstream.models.linear import Dense
from slipstream.models.rope import inverse_frequencies


class FusedHead:
    """Runs an `Eagle3Model` against its paged KV. Build it only where `fits` says so."""

    max_rows = MAX_STREAM_ROWS

    def __init__(
        self, model: Eagle3Model, kv: KVPages, workspace: Workspace, *, positions: int, first_cell: int, pdl: bool
    ) -> None:
        """positions: cells that angles are made for. first_cell: the first one that holds a row; it has angle 0."""
        self.model, self.kv, self.workspace, self.first_cell, self.pdl = model, kv, workspace, first_cell, pdl
        c = model.config
        inv_D, factor = inverse_frequencies(c.rope, c.head_dim)
        at_L = (torch.arange(positions, dtype=torch.float32) - first_cell).clamp(min=0)
        angle_LD = torch.outer(at_L, inv_D.float())
        self.cos_LD = (angle_LD.cos() * factor).to(model.device)
        self.sin_LD = (angle_LD.sin() * factor).to(model.device)

    @staticmethod
    def fits(model: Eagle3Model) -> bool:
        """bf16 or float32 weights, all dense, without biases where the kernels take none."""
        c, layers = model.config, model.layers
        if model.dtype not in (torch.bfloat16, torch.float32) or not isinstance(model.embed, Embedding):
            return False
        if (c.qk_norm and 64 % (c.head_dim // 2)) or not layers[0].wide:
            return False
        plain: list[Any] = [x for b in layers for x in (b.o, b.gate_up, b.down)] + [model.head]
        linears: list[Any] = [*plain, *(b.qkv for b in layers), model.fc]
        return all(isinstance(x, Dense) for x in linears) and all(x.bias_N is None for x in plain)

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """g [R, H], as `Eagle3Model.fuse`."""
        model, ws = self.model, self.workspace
        eps = model.config.rms_norm_eps
        if model.tap_norms:
            taps = [rms_norm(tap_RH, norm.weight, eps) for norm, tap_RH in zip(model.tap_norms, taps, strict=True)]
        joined = torch.cat(list(taps), -1)
        if model.input_norm is not None:
            joined = rms_norm(joined, model.input_norm.weight, eps)
        fc: Any = model.fc
        g_RH: Tensor = stream_linear(joined, fc.weight_NK, fc.bias_N, None, eps, ws.partial, ws.counters)
        return g_RH

    def run(
        self,
        token_R: Tensor,
        x_RH: Tensor,
        slot_R: Tensor,
        cell_R: Tensor,
        table_SP: Tensor,
        *,
        last_B: Tensor | None = None,
        logits: bool,
        per_slot: int = 1,
        rope_R: Tensor | None = None,
        sight: TreeSight | None = None,
    ) -> HeadOutput:
        """One pass over rows [R]; its output is that of the rows last_B [B], all of them where it is None.

        Rows of slot 0 are padding. logits=False: only the choice is wanted. per_slot: rows of one slot.
        rope_R, sight: of rows of trees, the cell that each is rotated for, and what it sees.
        """
        rope_R = cell_R if rope_R is None else rope_R
        past_R, seen_R = (cell_R, None) if sight is None else sight
        model, ws, pdl = self.model, self.workspace, self.pdl
        c, partial, counters = model.config, ws.partial, ws.counters
        eps, h_RH = c.rms_norm_eps, x_RH
        embed: Any = model.embed
        scaled_RH = sq_TR = None
        for i, (layer, (k_PSKD, v_PSKD)) in enumerate(zip(model.layers, self.kv.paged, strict=True)):
            block: Any = layer
            if layer.wide:
                scaled_RH, normed_RH = join_norms(
                    token_R, embed.table_VH, h_RH, block.input_norm.weight, block.hidden_norm.weight, eps, pdl
                )
                sq_TR, h_RH = None, normed_RH if layer.normed else h_RH
            elif scaled_RH is None:
                scaled_RH, sq_TR = norm_prepare(h_RH, block.input_norm.weight, pdl)
            gains = (block.q_norm.weight, block.k_norm.weight) if c.qk_norm else (None, None)
            q_RND = stream_rope(
                scaled_RH, block.qkv.weight_NK, block.qkv.bias_N, sq_TR, eps, k_PSKD, v_PSKD, self.cos_LD, self.sin_LD,
                *gains, eps, table_SP, slot_R, rope_R, cell_R, c.num_heads, partial, counters, pdl,
            )  # fmt: skip
            o_RND = paged_attention(
                q_RND, k_PSKD, v_PSKD, table_SP, slot_R, past_R, seen_R, c.head_dim**-0.5, partial, counters, pdl,
                per_slot, self.first_cell,
            )  # fmt: skip
            h_RH, scaled_RH, sq_TR = stream_residual(
                o_RND.flatten(1), block.o.weight_NK, h_RH, block.post_norm.weight, partial, counters, pdl
            )
            a_RI = stream_swiglu(scaled_RH, block.gate_up.weight_NK, sq_TR, eps, partial, counters, pdl)
            # The gain of the norm that follows: the next plain layer's, or the final one.
            after = model.layers[i + 1].input_norm if i + 1 < len(model.layers) else model.norm
            h_RH, scaled_RH, sq_TR = stream_residual(
                a_RI, block.down.weight_NK, h_RH, after.weight, partial, counters, pdl
            )
        assert scaled_RH is not None and sq_TR is not None
        if last_B is not None:
            h_RH, scaled_RH, sq_TR = h_RH[last_B], scaled_RH[last_B], sq_TR[:, last_B]
            pdl = False  # the gathers stand between
        head: Any = model.head
        logits_BD, best_TB, where_TB = stream_head(
            scaled_RH, head.weight_NK, sq_TR.contiguous(), eps, partial, counters, logits, pdl
        )
        token_B = argmax_finish(best_TB, where_TB, head.weight_NK.shape[0], pdl)
        if model.id_D is not None:
            token_B = model.id_D[token_B]
        state_BH = rms_norm(h_RH, model.norm.weight, eps) if model.feeds_norm else h_RH
        return HeadOutput(state_BH=state_BH, logits_BD=logits_BD, token_B=token_B)
