"""The target's keys and values, and its attention over the rows of a frame or of a prompt chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from slipstream.attention.paged import PagedAttention, RowGrid, cache_slots, span_attention
from slipstream.attention.protocol import AttentionContext, TreeSight
from slipstream.attention.windows import Maker, WindowLayers, by_layer
from slipstream.device.state import SlotState
from slipstream.device.tree import compact
from slipstream.memory.kv import KVPages
from slipstream.types import FramePlan
from slipstream.verify import TreeVerdict

if TYPE_CHECKING:
    from slipstream.kernels.workspace import Workspace


class TargetCache:
    """Layers that see everything have their pages in `kv` by state.table_SP; those with a sliding window have them in
    windows.kv by state.window_table_SP, where the model has such layers."""

    def __init__(
        self,
        kv: KVPages,
        state: SlotState,
        *,
        heads_per_kv: int,
        windows: WindowLayers | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        """workspace: on a GPU, the kernels' scratch."""
        self.kv, self.state, self.heads_per_kv = kv, state, heads_per_kv
        self.windows, self.workspace = windows, workspace

    def rows(
        self,
        plan: FramePlan,
        slot_B: Tensor,
        *,
        slot_R: Tensor,
        pos_R: Tensor,
        cell_R: Tensor,
        sight: TreeSight | None,
        grid: RowGrid | None,
    ) -> AttentionContext:
        """Of a decode frame: rows kept at cell_R. grid: the same as a grid, which the CPU needs."""

        def make(kv: KVPages, table_SP: Tensor, window: int) -> AttentionContext:
            cache_slot_R = cache_slots(table_SP, slot_R, cell_R, kv.page_size)
            if self.workspace is not None:
                from slipstream.attention.kernel import KernelAttention

                return KernelAttention(
                    kv, table_SP=table_SP, slot_R=slot_R, pos_R=pos_R, cache_slot_R=cache_slot_R,
                    workspace=self.workspace, sight=sight, window=window,
                )  # fmt: skip
            assert grid is not None
            return PagedAttention(
                kv, grid=grid, cache_slot_R=cache_slot_R, table_BP=table_SP[slot_B], len_ub=plan.len_ub,
                heads_per_kv=self.heads_per_kv, mask_dtype=kv.data.dtype, first_page=plan.first_page,
                reach=plan.reach, window=window,
            )  # fmt: skip

        return self._by_layer(make)

    def chunk(self, plan: FramePlan, slot_R: Tensor, pos_R: Tensor) -> AttentionContext:
        """Of prompt rows."""

        def make(kv: KVPages, table_SP: Tensor, window: int) -> AttentionContext:
            cache_slot_R = cache_slots(table_SP, slot_R, pos_R, kv.page_size)
            if self.workspace is not None:
                from slipstream.attention.kernel import ChunkAttention

                return ChunkAttention(
                    kv, table_SP=table_SP, slot_R=slot_R, pos_R=pos_R, cache_slot_R=cache_slot_R,
                    heads_per_kv=self.heads_per_kv, window=window,
                )  # fmt: skip
            return span_attention(
                kv, spans(plan), pos_R=pos_R, cache_slot_R=cache_slot_R, table_SP=table_SP,
                heads_per_kv=self.heads_per_kv, window=window,
            )  # fmt: skip

        return self._by_layer(make)

    def compact(self, slot_B: Tensor, verdict: TreeVerdict) -> None:
        """The accepted nodes' keys and values to their own positions; before the commit."""
        state, kernels = self.state, self.workspace is not None
        if len(self.kv.data):
            compact(self.kv, state.table_SP, state, slot_B, verdict, kernels=kernels)
        if self.windows is not None and self.windows.kv is not None:
            assert state.window_table_SP is not None
            compact(self.windows.kv, state.window_table_SP, state, slot_B, verdict, kernels=kernels)

    def _by_layer(self, make: Maker) -> AttentionContext:
        return by_layer(make, self.kv, self.state.table_SP, self.windows, self.state.window_table_SP)


def spans(plan: FramePlan) -> list[tuple[int, int, int, int]]:
    """(slot, start, length, first_page) of the chunk's spans."""
    return [(s.slot, s.start, s.length, f) for s, f in zip(plan.prefill, plan.prefill_first_page, strict=True)]
