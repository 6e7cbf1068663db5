"""A decoder's pass over flat rows as a chain of fused kernels (fused_layers.py), on the plain pass's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.attention.protocol import DeltaContext, TreeSight
from slipstream.kernels.norm import rms_norm
from slipstream.kernels.prefill import prefill_tiles, rows_per_tile
from slipstream.kernels.tuning import MAX_FUSED_ROWS, PassConfig
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from slipstream.models.decoder import Decoder
from slipstream.models.fused_layers import FusedLayers, Rows, Stream
from slipstream.models.layers import Embedding
from slipstream.types import NO_TOKEN


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
        self.decoder, self.kv, self.pdl = decoder, kv, pdl
        c = decoder.config
        self.layers = FusedLayers(
            c, workspace, decoder.device, positions=c.max_position_embeddings, pdl=pdl, cut=config
        )
        self.heads_per_kv = c.num_heads // c.num_kv_heads
        blocks: list[Any] = list(decoder.blocks)
        # The gain that follows each block's second residual: the next block's input norm, at last the final norm.
        self.gains = [b.input_norm.weight for b in blocks[1:]] + [decoder.norm.weight]

    @staticmethod
    def fits(model: object) -> bool:
        """A bf16 or float32 `Decoder` of dense layers on a GPU, without biases where the kernels take none."""
        if not isinstance(model, Decoder) or model.device.type != "cuda" or not model.fusable:
            return False
        if model.config.layer_types or model.config.norm_offset or model.config.rope.partial != 1.0:
            return False
        if model.dtype not in (torch.bfloat16, torch.float32) or not isinstance(model.embed, Embedding):
            return False
        return FusedLayers.fit(model.config, list(model.blocks), [model.head])

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
        states: DeltaContext | None = None,
    ) -> FusedOutput:
        """One pass. Rows of slot 0 are padding: they write to the sink and their result means nothing.

        logits=False: only the argmax is wanted. taps, hidden: as `Model.forward` gives them. width: rows per slot.
        cell_R, sight: of rows of trees, which are kept elsewhere than at pos_R. states: of recurrent layers.
        """
        rows = Rows(slot_R, pos_R, table_SP, width, cell_R=cell_R, sight=sight, states=states)
        stream, tapped = self._layers(self.decoder.embedded(token_R), rows, taps)
        d = self.decoder
        hidden_RH = rms_norm(stream.h_RH, d.norm.weight, d.config.rms_norm_eps, self.pdl) if hidden else None
        logits_RV, target_R = self.layers.head(
            stream, d.head, d.norm, logits=logits, normed_RH=hidden_RH, none=NO_TOKEN
        )
        assert target_R is not None
        return FusedOutput(logits_RV=logits_RV, target_R=target_R, taps=tapped, hidden_RH=hidden_RH)

    def forward(
        self, token_R: Tensor, slot_R: Tensor, pos_R: Tensor, table_SP: Tensor, *, taps: tuple[int, ...] = (),
        states: DeltaContext | None = None, rope_3R: Tensor | None = None, given: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """The pass without the head, for prompt chunks: what `Model.forward` gives, hidden states [R, H] and taps.

        The rows of a slot are neighbours, in order of position. rope_3R: rotary positions on three axes, where they
        are others than pos_R. given: as for `Model.forward`.
        """
        cache = self.kv.data
        per_tile = rows_per_tile(token_R.shape[0], self.heads_per_kv, cache.shape[-1], cache.element_size())
        tile_T = prefill_tiles(slot_R, per_tile, table_SP.shape[0])
        angles = None if rope_3R is None else self.layers.angles(rope_3R)
        rows = Rows(slot_R, pos_R, table_SP, tile_T=tile_T, states=states, angles=angles)
        stream, tapped = self._layers(self.decoder.embedded(token_R, given), rows, taps)
        d = self.decoder
        return rms_norm(stream.h_RH, d.norm.weight, d.config.rms_norm_eps, self.pdl), tapped

    def _layers(self, x_RH: Tensor, rows: Rows, taps: tuple[int, ...]) -> tuple[Stream, list[Tensor]]:
        blocks: list[Any] = list(self.decoder.blocks)
        stream = self.layers.start(x_RH, blocks[0].input_norm.weight)
        tapped: dict[int, Tensor] = {}
        for i, (block, gain_H, (k_PSKD, v_PSKD)) in enumerate(zip(blocks, self.gains, self.kv.paged, strict=True)):
            if i in taps:
                tapped[i] = stream.h_RH
            stream = self.layers.layer(block, stream, gain_H, k_PSKD, v_PSKD, rows)
        return stream, [tapped[i] for i in taps]
