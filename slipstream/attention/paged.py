"""Paged attention in torch: the reference, and the CPU backend.

Rows of one slot are packed with the query heads that share a kv head into one matrix per (slot, kv head).
Two facts about torch's CPU kernels make results independent, bit for bit, of how rows are grouped in bf16 (see
docs/log.md; wider types agree to rounding): a product with fewer than 8 rows takes another path, so the grid is
padded to at least 8; and the number of columns is a multiple of 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.memory.kv import KVPages

MIN_QUERY_ROWS = 8
COLUMNS = 32


@dataclass(frozen=True, kw_only=True)
class RowGrid:
    """Where flat rows [R] stand in the grid [B, W] of slots and depths.

    row_of_BW: row at each cell (clamped where the slot has fewer rows); None: rows are the grid, in order.
    cell_of_R: b * W + depth of each row; None likewise. pos_BW: position of each cell's token.
    """

    pos_BW: Tensor
    row_of_BW: Tensor | None = None
    cell_of_R: Tensor | None = None


def cache_slots(table_SP: Tensor, slot_R: Tensor, pos_R: Tensor, page_size: int) -> Tensor:
    """Flat cache index [R] of (slot, position); positions past the table go to the sink page."""
    page_R = torch.div(pos_R, page_size, rounding_mode="floor")
    width = table_SP.shape[1]
    page_id_R = table_SP[slot_R, page_R.clamp(max=width - 1)]
    page_id_R = torch.where(page_R < width, page_id_R, 0)
    return page_id_R * page_size + pos_R % page_size


class PagedAttention:
    """AttentionContext over `KVPages` for one pass (decode frame, draft step, or one prefill span)."""

    def __init__(
        self,
        kv: KVPages,
        *,
        grid: RowGrid,
        cache_slot_R: Tensor,
        table_BP: Tensor,
        len_ub: int,
        heads_per_kv: int,
        mask_dtype: torch.dtype,
        first_page: Sequence[int] = (),
    ) -> None:
        """table_BP: page table rows of the B slots. len_ub: host bound on position + 1 over the grid.

        first_page: per slot, where its pages are one ascending run (a host fact), else -1; a lone slot's
        run is read in place instead of being gathered.
        """
        slots, width = grid.pos_BW.shape
        self.kv = kv
        self.cache_slot_R = cache_slot_R
        self.width = width
        self.pad = max(width, -(-MIN_QUERY_ROWS // heads_per_kv))
        self.group = heads_per_kv
        self.grid = grid
        page = kv.page_size
        columns = -(-len_ub // COLUMNS) * COLUMNS
        num_pages = -(-columns // page)
        lone = slots == 1 and len(first_page) == 1 and first_page[0] > 0 and page % COLUMNS == 0
        self.run_start = first_page[0] * page if lone else -1
        columns = num_pages * page
        self.columns = columns
        if not lone:
            have = min(num_pages, table_BP.shape[1])
            wanted_BP = table_BP[:, :have]
            if have < num_pages:
                wanted_BP = F.pad(wanted_BP, (0, num_pages - have))
            # Columns past the slot's own pages are masked; they read its first page, never the sink's.
            self.pages = torch.where(wanted_BP > 0, wanted_BP, table_BP[:, :1]).reshape(-1)
        pos_BW = grid.pos_BW
        if self.pad > width:
            pos_BW = torch.cat([pos_BW, pos_BW[:, -1:].expand(slots, self.pad - width)], 1)
        column_L = torch.arange(columns, device=pos_BW.device)
        hidden = column_L > pos_BW[:, :, None]
        mask_BWL = torch.zeros(hidden.shape, dtype=mask_dtype, device=pos_BW.device).masked_fill_(hidden, float("-inf"))
        mask = mask_BWL[:, None, :, None, :].expand(slots, 1, self.pad, heads_per_kv, columns)
        self.mask = mask.reshape(slots, 1, self.pad * heads_per_kv, columns)

    def attend(self, layer: int, q_RND: Tensor, k_RKD: Tensor, v_RKD: Tensor) -> Tensor:
        flat_k, flat_v = self.kv.flat[layer]
        flat_k.index_copy_(0, self.cache_slot_R, k_RKD)
        flat_v.index_copy_(0, self.cache_slot_R, v_RKD)
        rows, heads, dim = q_RND.shape
        slots, pad, group = self.mask.shape[0], self.pad, self.group
        kv_heads = heads // group
        if self.run_start >= 0:
            k = flat_k.narrow(0, self.run_start, self.columns).view(1, self.columns, kv_heads, dim)
            v = flat_v.narrow(0, self.run_start, self.columns).view(1, self.columns, kv_heads, dim)
        else:
            paged_k, paged_v = self.kv.paged[layer]
            k = paged_k.index_select(0, self.pages).view(slots, self.columns, kv_heads, dim)
            v = paged_v.index_select(0, self.pages).view(slots, self.columns, kv_heads, dim)
        grid = self.grid
        if grid.row_of_BW is None:
            q = q_RND.view(slots, self.width, heads, dim)
        else:
            q = q_RND.index_select(0, grid.row_of_BW.view(-1)).view(slots, self.width, heads, dim)
        if pad > self.width:
            q = torch.cat([q, q[:, -1:].expand(slots, pad - self.width, heads, dim)], 1)
        q = q.view(slots, pad, kv_heads, group, dim).transpose(1, 2).reshape(slots, kv_heads, pad * group, dim)
        o = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=self.mask)
        o = o.view(slots, kv_heads, pad, group, dim).transpose(1, 2).reshape(slots, pad, heads, dim)
        if grid.cell_of_R is None:
            return o[:, : self.width].reshape(rows, heads, dim)
        # cell_of_R counts cells of width W; the padded grid is wider.
        cell_R = grid.cell_of_R
        if pad > self.width:
            cell_R = torch.div(cell_R, self.width, rounding_mode="floor") * pad + cell_R % self.width
        return o.reshape(slots * pad, heads, dim).index_select(0, cell_R)


class PrefillAttention:
    """Several spans of prompt rows in one pass: one `PagedAttention` each."""

    def __init__(self, spans: Sequence[tuple[int, PagedAttention]]) -> None:
        """spans: (rows, attention of those rows), in row order."""
        self.spans = spans

    def attend(self, layer: int, q_RND: Tensor, k_RKD: Tensor, v_RKD: Tensor) -> Tensor:
        if len(self.spans) == 1:
            return self.spans[0][1].attend(layer, q_RND, k_RKD, v_RKD)
        out, at = [], 0
        for rows, attention in self.spans:
            out.append(attention.attend(layer, *(x.narrow(0, at, rows) for x in (q_RND, k_RKD, v_RKD))))
            at += rows
        return torch.cat(out)
