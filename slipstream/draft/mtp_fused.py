"""A pass of an MTP head as a chain of fused kernels: the join, its product, one layer as the target's, the choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.attention.protocol import TreeSight
from slipstream.draft.feature import HeadOutput
from slipstream.kernels.eagle import join_norms
from slipstream.kernels.norm import rms_norm
from slipstream.kernels.tuning import MAX_FUSED_ROWS
from slipstream.models.fused_layers import FusedLayers, Rows, Stream
from slipstream.models.layers import Embedding
from slipstream.models.linear import Dense
from slipstream.models.qwen3_5 import Qwen3_5Block

if TYPE_CHECKING:
    from slipstream.draft.mtp_model import MTPModel
    from slipstream.kernels.workspace import Workspace
    from slipstream.memory.kv import KVPages


class FusedMTP:
    """Runs an `MTPModel` against its paged KV. Build it only where `fits` says so."""

    max_rows = MAX_FUSED_ROWS

    def __init__(
        self, model: MTPModel, kv: KVPages, workspace: Workspace, *, positions: int, first_cell: int, pdl: bool
    ) -> None:
        """positions: cells that angles are made for. first_cell: the first one that holds a row; it has angle 0."""
        self.model, self.kv = model, kv
        self.layers = FusedLayers(
            model.config, workspace, model.device, positions=positions, first_cell=first_cell, pdl=pdl
        )

    @staticmethod
    def fits(model: MTPModel) -> bool:
        """bf16 or float32, all dense, without biases where the kernels take none; a layer of the forms they know."""
        block: Any = model.block
        wanted = [model.fc, model.head]
        if model.dtype not in (torch.bfloat16, torch.float32) or not isinstance(model.embed, Embedding):
            return False
        if not all(isinstance(x, Dense) and x.bias_N is None for x in wanted):
            return False
        if isinstance(block, Qwen3_5Block):
            return FusedLayers.fit_gated(block)
        return bool(model.fusable) and FusedLayers.fit(model.config, [block], [])

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """As `MTPModel.fuse`."""
        (hidden_RH,) = taps
        return hidden_RH

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
        """As `feature.FusedPass` says."""
        model, layers, block = self.model, self.layers, self.model.block
        eps, embed, fc = model.config.rms_norm_eps, model.embed, model.fc
        assert isinstance(embed, Embedding), "as `fits` says"
        rows = Rows(slot_R, cell_R if rope_R is None else rope_R, table_SP, per_slot, cell_R=cell_R, sight=sight)
        gains = (model.embed_norm.weight, model.hidden_norm.weight)
        joined_RF, _ = join_norms(token_R, embed.table_VH, x_RH, *gains, eps, layers.pdl)
        h_RH = layers.linear(joined_RF, layers.weight(fc), dependent=True)
        stream = layers.start(h_RH, block.input_norm.weight)
        ((k_PSKD, v_PSKD),) = self.kv.paged
        layer = layers.gated_layer if isinstance(block, Qwen3_5Block) else layers.layer
        stream = layer(block, stream, model.norm.weight, k_PSKD, v_PSKD, rows)
        assert stream.sq_TR is not None
        if last_B is not None:
            stream = Stream(stream.h_RH[last_B], stream.x_RH[last_B], stream.sq_TR[:, last_B].contiguous())
        # The gathers stand between a chain of dependent launches and the head.
        logits_BD, token_B = layers.head(stream, model.head, model.norm, logits=logits, dependent=last_B is None)
        state_BH: Tensor = rms_norm(stream.h_RH, model.norm.weight, eps)
        return HeadOutput(state_BH=state_BH, logits_BD=logits_BD, token_B=token_B)
