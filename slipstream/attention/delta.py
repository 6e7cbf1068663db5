"""Contexts for models with recurrent layers: attention beside states of slots."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slipstream.attention.protocol import AttentionContext
from slipstream.kernels import delta as ops
from slipstream.kernels.delta import DeltaWeights, Span
from slipstream.memory.states import StatePool


class DeltaFrame:
    """A DeltaContext of a decode frame: rows behind each slot's committed tokens.

    committed_S: before the frame's commit. The other fields are those of `kernels.frame.packed_rows`. Call `commit`
    when all layers have run.
    """

    def __init__(
        self,
        attention: AttentionContext,
        pool: StatePool,
        *,
        committed_S: Tensor,
        slot_B: Tensor,
        rows_B: Tensor,
        owner_R: Tensor,
        row_of_BW: Tensor,
    ) -> None:
        self.attend = attention.attend
        self.pool, self.committed_S, self.slot_B, self.rows_B = pool, committed_S, slot_B, rows_B
        self.owner_R, self.row_of_BW = owner_R, row_of_BW

    def delta(self, layer: int, x_RX: Tensor, weights: DeltaWeights) -> Tensor:
        return ops.delta_rows(
            x_RX, self.pool.layers[layer], weights, self.committed_S, self.slot_B, self.rows_B, self.owner_R,
            self.row_of_BW,
        )  # fmt: skip

    def commit(self) -> None:
        """What every state includes now: all but the drafts, which count once slot state says that they do."""
        ops.absorbed_rows(self.pool.absorbed_S, self.committed_S, self.slot_B, self.rows_B)


class DeltaSpans:
    """A DeltaContext of a chunk of prompt rows whose spans the host knows."""

    def __init__(
        self, attention: AttentionContext, pool: StatePool, *, slot_R: Tensor, pos_R: Tensor, spans: Sequence[Span]
    ) -> None:
        self.attend = attention.attend
        self.pool, self.slot_R, self.pos_R, self.spans = pool, slot_R, pos_R, spans

    def delta(self, layer: int, x_RX: Tensor, weights: DeltaWeights) -> Tensor:
        return ops.delta_spans(x_RX, self.pool.layers[layer], weights, self.spans)

    def commit(self) -> None:
        self.pool.absorbed_S.scatter_reduce_(0, self.slot_R, self.pos_R + 1, "amax")
