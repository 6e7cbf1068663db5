"""Attention of prompt rows over paged KV, for 128 to thousands of rows of one or several slots.

Sources: Dao et al. (2022, 2023), tiled softmax; Kwon et al. (2023), paged KV; Ainslie et al. (2023), grouped heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.attention import paged_attention
from slipstream.kernels.tuning import prefill_config

OP = "slipstream::"


def rows_per_tile(rows: int, heads_per_kv: int, dim: int, itemsize: int) -> int:
    """Rows of one slot that a program takes, a power of two: its query rows over the (padded) heads of a KV head."""
    group = 1 << (heads_per_kv - 1).bit_length()
    return max(1, prefill_config(rows, dim, itemsize).queries // group)


def prefill_tiles(slot_R: Tensor, rows_per_tile: int, slots: int) -> Tensor:
    """First row of every tile, int32 [ceil(R / rows_per_tile) + min(slots, R)], and R where there is no such tile.

    A tile opens where the slot changes and every rows_per_tile rows after that. slots: most slots that the rows can
    belong to, padding included; each stands in one run of rows. Once per pass; the layers share it.
    """
    rows, device = slot_R.shape[0], slot_R.device
    tiles = -(-rows // rows_per_tile) + min(slots, rows)
    row_R = torch.arange(rows, device=device)
    before_R = torch.cat([slot_R.new_full((1,), -1), slot_R[:-1]])
    run_R = torch.where(slot_R != before_R, row_R, 0).cummax(0).values
    opens_R = (row_R - run_R) % rows_per_tile == 0
    # The rows that open nothing all write to one more cell, which is cut off.
    index_R = torch.where(opens_R, opens_R.cumsum(0) - 1, tiles)
    tile_T = torch.full((tiles + 1,), rows, dtype=torch.int32, device=device)
    return tile_T.scatter_(0, index_R, row_R.to(torch.int32))[:tiles]


@torch.library.custom_op(OP + "prefill_attention", mutates_args=())
def prefill_attention(
    q_RND: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, table_SP: Tensor, slot_R: Tensor, pos_R: Tensor, tile_T: Tensor,
    scale: float, first_cell: int = 0, window: int = 0,
) -> Tensor:  # fmt: skip
    """softmax(q K^T * scale) V, [R, N, D]: row r sees cache positions 0..pos_R[r] of slot_R[r].

    As `paged_attention`, for many rows: the rows of a slot are neighbours, in order of position. Rows of slot 0 are
    padding and give zeros. tile_T: `prefill_tiles` of slot_R. Cells that no row may see can hold anything.
    first_cell: as in `paged_attention`. window: a row sees so many positions, its own included; 0: all.
    """
    none = q_RND.new_empty(0, dtype=torch.float32)
    out_RND: Tensor = paged_attention(
        q_RND, k_PSKD, v_PSKD, table_SP, slot_R, pos_R, None, scale, none, none.to(torch.int32), first_cell=first_cell,
        low_R=pos_R - (window - 1) if window else None,
    )  # fmt: skip
    return out_RND


@prefill_attention.register_fake
def _(
    q_RND: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, table_SP: Tensor, slot_R: Tensor, pos_R: Tensor, tile_T: Tensor,
    scale: float, first_cell: int = 0, window: int = 0,
) -> Tensor:  # fmt: skip
    return torch.empty_like(q_RND, memory_format=torch.contiguous_format)


@prefill_attention.register_kernel("cuda")
def _(
    q_RND: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, table_SP: Tensor, slot_R: Tensor, pos_R: Tensor, tile_T: Tensor,
    scale: float, first_cell: int = 0, window: int = 0,
) -> Tensor:  # fmt: skip
    from slipstream.kernels.jit import prefill

    rows, heads, dim = q_RND.shape
    out_RND = torch.empty_like(q_RND, memory_format=torch.contiguous_format)
    prefill.launch_prefill_attention(
        q_RND.contiguous(), k_PSKD, v_PSKD, out_RND, table_SP, slot_R.contiguous(), pos_R.contiguous(), tile_T,
        scale=scale,
        rows_per_tile=rows_per_tile(rows, heads // k_PSKD.shape[2], dim, q_RND.element_size()),
        config=prefill_config(rows, dim, q_RND.element_size()), first_cell=first_cell, window=window,
    )  # fmt: skip
    return out_RND
