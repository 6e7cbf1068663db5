"""A pass of the EAGLE-3 head as a chain of fused kernels; few rows: six launches a layer, two for the choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.attention.protocol import TreeSight
from slipstream.draft.eagle3_model import Eagle3Model
from slipstream.draft.feature import HeadOutput
from slipstream.kernels.eagle import join_norms
from slipstream.kernels.norm import rms_norm
from slipstream.kernels.tuning import MAX_FUSED_ROWS, PassConfig
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from slipstream.models.fused_layers import FusedLayers, Rows, Stream
from slipstream.models.layers import Embedding
from slipstream.models.linear import Dense


class FusedHead:
    """Runs an `Eagle3Model` against its paged KV. Build it only where `fits` says so."""

    max_rows = MAX_FUSED_ROWS

    def __init__(
        self,
        model: Eagle3Model,
        kv: KVPages,
        workspace: Workspace,
        *,
        positions: int,
        first_cell: int,
        pdl: bool,
        config: PassConfig | None = None,
    ) -> None:
        """positions: cells that angles are made for. first_cell: the first one that holds a row; it has angle 0.

        config: another cut between our products and the library's than the measured one.
        """
        self.model, self.kv = model, kv
        self.layers = FusedLayers(
            model.config, workspace, model.device, positions=positions, first_cell=first_cell, pdl=pdl, cut=config
        )

    @staticmethod
    def fits(model: Eagle3Model) -> bool:
        """bf16 or float32 weights, all dense, without biases where the kernels take none."""
        if model.dtype not in (torch.bfloat16, torch.float32) or not isinstance(model.embed, Embedding):
            return False
        blocks: list[Any] = list(model.layers)
        return blocks[0].wide and isinstance(model.fc, Dense) and FusedLayers.fit(model.config, blocks, [model.head])

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """g [R, H], as `Eagle3Model.fuse`."""
        model = self.model
        eps = model.config.rms_norm_eps
        if model.tap_norms:
            taps = [rms_norm(tap_RH, norm.weight, eps) for norm, tap_RH in zip(model.tap_norms, taps, strict=True)]
        joined = torch.cat(list(taps), -1)
        if model.input_norm is not None:
            joined = rms_norm(joined, model.input_norm.weight, eps)
        fc: Any = model.fc
        return self.layers.linear(joined, fc.weight_NK, fc.bias_N)

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
        model, layers = self.model, self.layers
        eps, embed = model.config.rms_norm_eps, model.embed
        assert isinstance(embed, Embedding), "as `fits` says"
        rope_R = cell_R if rope_R is None else rope_R
        rows = Rows(slot_R, rope_R, table_SP, per_slot, cell_R=cell_R, sight=sight)
        stream = Stream(x_RH, x_RH, None)
        for i, (layer, (k_PSKD, v_PSKD)) in enumerate(zip(model.layers, self.kv.paged, strict=True)):
            block: Any = layer
            if layer.wide:
                joined, normed_RH = join_norms(
                    token_R, embed.table_VH, stream.h_RH, block.input_norm.weight, block.hidden_norm.weight, eps,
                    layers.pdl,
                )  # fmt: skip
                stream = Stream(normed_RH if layer.normed else stream.h_RH, joined, None)
            # The gain of the norm that follows: the next plain layer's, or the final one.
            after = model.layers[i + 1].input_norm if i + 1 < len(model.layers) else model.norm
            stream = layers.layer(block, stream, after.weight, k_PSKD, v_PSKD, rows)
        assert stream.sq_TR is not None
        if last_B is not None:
            stream = Stream(stream.h_RH[last_B], stream.x_RH[last_B], stream.sq_TR[:, last_B].contiguous())
        # The gathers stand between a chain of dependent launches and the head.
        logits_BD, token_B = layers.head(stream, model.head, model.norm, logits=logits, dependent=last_B is None)
        if model.id_D is not None:
            assert token_B is not None
            token_B = model.id_D[token_B]
        state_BH = rms_norm(stream.h_RH, model.norm.weight, eps) if model.feeds_norm else stream.h_RH
        return HeadOutput(state_BH=state_BH, logits_BD=logits_BD, token_B=token_B)
