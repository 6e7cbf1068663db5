"""Paged attention through the kernel op: lengths only from tensors, so one call serves every frame of a shape."""

from __future__ import annotations

from torch import Tensor

from slipstream.attention.protocol import TreeSight
from slipstream.kernels.attention import paged_attention
from slipstream.kernels.prefill import prefill_attention, prefill_tiles, rows_per_tile
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages


class KernelAttention:
    """AttentionContext for decode rows: row r sees positions 0..pos_R[r] of slot_R[r]; slot 0 rows are padding."""

    def __init__(
        self,
        kv: KVPages,
        *,
        table_SP: Tensor,
        slot_R: Tensor,
        pos_R: Tensor,
        cache_slot_R: Tensor,
        workspace: Workspace,
        first_cell: int = 0,
        per_slot: int = 1,
        sight: TreeSight | None = None,
        window: int = 0,
    ) -> None:
        """first_cell: the first cache position that holds anything. per_slot: how many rows a slot has, a hint.

        sight: of rows of trees, in pos_R's place. window: positions that a row sees, its own at pos_R included; 0: all.
        """
        self.kv, self.table_SP, self.slot_R = kv, table_SP, slot_R
        self.pos_R = pos_R if sight is None else sight.past_R
        self.seen_R = None if sight is None else sight.seen_R
        self.cache_slot_R, self.workspace = cache_slot_R, workspace
        self.first_cell, self.per_slot = first_cell, per_slot
        self.low_R = pos_R - (window - 1) if window else None

    def attend(self, layer: int, q_RND: Tensor, k_RKD: Tensor, v_RKD: Tensor) -> Tensor:
        self.kv.write(layer, self.cache_slot_R, k_RKD, v_RKD)
        k_PSKD, v_PSKD = self.kv.paged[layer]
        out_RND: Tensor = paged_attention(
            q_RND.contiguous(), k_PSKD, v_PSKD, self.table_SP, self.slot_R, self.pos_R, self.seen_R,
            q_RND.shape[-1] ** -0.5, self.workspace.partial, self.workspace.counters,
            per_slot=self.per_slot, first_cell=self.first_cell, low_R=self.low_R,
        )  # fmt: skip
        return out_RND


class ChunkAttention:
    """AttentionContext for a chunk of prompt rows, padding at slot 0: as KernelAttention, for many rows.

    The rows of a slot are neighbours in order of position. Built once per pass: it lays the rows out in tiles.
    """

    def __init__(
        self,
        kv: KVPages,
        *,
        table_SP: Tensor,
        slot_R: Tensor,
        pos_R: Tensor,
        cache_slot_R: Tensor,
        heads_per_kv: int,
        first_cell: int = 0,
        window: int = 0,
    ) -> None:
        self.kv, self.table_SP, self.slot_R, self.pos_R = kv, table_SP, slot_R, pos_R
        self.cache_slot_R, self.first_cell, self.window = cache_slot_R, first_cell, window
        dim, itemsize = kv.data.shape[-1], kv.data.element_size()
        self.tile_T = prefill_tiles(
            slot_R, rows_per_tile(slot_R.shape[0], heads_per_kv, dim, itemsize), table_SP.shape[0]
        )

    def attend(self, layer: int, q_RND: Tensor, k_RKD: Tensor, v_RKD: Tensor) -> Tensor:
        self.kv.write(layer, self.cache_slot_R, k_RKD, v_RKD)
        k_PSKD, v_PSKD = self.kv.paged[layer]
        out_RND: Tensor = prefill_attention(
            q_RND.contiguous(), k_PSKD, v_PSKD, self.table_SP, self.slot_R, self.pos_R, self.tile_T,
            q_RND.shape[-1] ** -0.5, self.first_cell, self.window,
        )  # fmt: skip
        return out_RND
