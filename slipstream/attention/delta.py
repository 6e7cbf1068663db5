"""Contexts for models with recurrent layers: attention beside states of slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from slipstream.attention.protocol import AttentionContext
from slipstream.kernels import delta, delta_ops
from slipstream.kernels.delta import DeltaWeights, Span, delta_tiles
from slipstream.memory.states import StatePool


class _BesideAttention:
    """A DeltaContext once it knows what attends."""

    _attention: AttentionContext | None = None

    def beside(self, attention: AttentionContext) -> Self:
        self._attention = attention
        return self

    def attend(self, layer: int, q_RND: Tensor, k_RKD: Tensor, v_RKD: Tensor) -> Tensor:
        assert self._attention is not None, "nothing attends here"
        return self._attention.attend(layer, q_RND, k_RKD, v_RKD)


class DeltaFrame(_BesideAttention):
    """A DeltaContext of a decode frame: rows behind each slot's committed tokens.

    committed_S: before the frame's commit. The other fields are those of `kernels.frame.packed_rows`. Call `commit`
    when all layers have run.
    """

    def __init__(
        self,
        pool: StatePool,
        *,
        committed_S: Tensor,
        slot_B: Tensor,
        rows_B: Tensor,
        owner_R: Tensor,
        row_of_BW: Tensor,
        kernels: bool = False,
        pdl: bool = False,
    ) -> None:
        """kernels: by the ops, one launch each on a GPU; pdl: as programmatic dependent launches."""
        self.pool, self.committed_S, self.slot_B, self.rows_B = pool, committed_S, slot_B, rows_B
        self.owner_R, self.row_of_BW, self.kernels, self.pdl = owner_R, row_of_BW, kernels, pdl

    def delta(self, layer: int, x_RX: Tensor, weights: DeltaWeights) -> Tensor:
        memory = self.pool.layers[layer]
        rows = (self.committed_S, self.slot_B, self.rows_B, self.owner_R, self.row_of_BW)
        if not self.kernels:
            return delta.delta_rows(x_RX, memory, weights, *rows)
        out_RNV: Tensor = delta_ops.delta_rows(x_RX, *memory, *weights, *rows, self.pdl)
        return out_RNV

    def commit(self) -> None:
        """What every state includes now: all but the drafts, which count once slot state says that they do."""
        absorb = delta_ops.delta_absorb if self.kernels else delta.absorbed_rows
        absorb(self.pool.absorbed_S, self.committed_S, self.slot_B, self.rows_B)


class DeltaSpans(_BesideAttention):
    """A DeltaContext of a chunk of prompt rows whose spans the host knows."""

    def __init__(self, pool: StatePool, *, slot_R: Tensor, pos_R: Tensor, spans: Sequence[Span]) -> None:
        self.pool, self.slot_R, self.pos_R, self.spans = pool, slot_R, pos_R, spans

    def delta(self, layer: int, x_RX: Tensor, weights: DeltaWeights) -> Tensor:
        return delta.delta_spans(x_RX, self.pool.layers[layer], weights, self.spans)

    def commit(self) -> None:
        self.pool.absorbed_S.scatter_reduce_(0, self.slot_R, self.pos_R + 1, "amax")


class DeltaChunk(DeltaSpans):
    """As DeltaSpans, by the op: the spans follow from slots and positions, padding stands behind them."""

    def __init__(self, pool: StatePool, *, slot_R: Tensor, pos_R: Tensor) -> None:
        super().__init__(pool, slot_R=slot_R, pos_R=pos_R, spans=())
        slots = pool.absorbed_S.shape[0]
        self.tile_3T = delta_tiles(slot_R, pos_R, delta_ops.PROMPT_TILE, slots, pool.early)

    def delta(self, layer: int, x_RX: Tensor, weights: DeltaWeights) -> Tensor:
        m = self.pool.layers[layer]
        out_RNV: Tensor = delta_ops.delta_prompt(
            x_RX, m.state_SNKV, m.recent_SMX, m.saved_ZNKV, m.saved_ZHX, m.saved_SC, m.interval, m.early, *weights,
            self.slot_R, self.pos_R, self.tile_3T,
        )  # fmt: skip
        return out_RNV
