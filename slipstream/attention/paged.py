"""Paged attention in torch: the reference, and the CPU backend.

Rows of one slot are packed with the query heads that share a kv head into one matrix per (slot, kv head).
torch's CPU kernel works in blocks of queries and of 512 columns; how a sum is split depends on the size of the last
block. `padded_columns` and `padded_rows` keep out of the sizes that differ, so that in bf16 a row's result is the
same, bit for bit, however rows are grouped (docs/log.md; wider types agree to rounding).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.memory.kv import KVPages

MIN_QUERY_ROWS = 8
COLUMNS = 32
KEY_BLOCK = 512
IN_PLACE_COLUMNS = 256
"""Columns per slot from which one call per slot in place beats one gathered call for all."""


def padded_columns(length: int) -> int:
    """Columns to attend over for `length` visible ones: a multiple of 32 whose last block is at most 192 of 512, or all
    of it."""
    columns = -(-length // COLUMNS) * COLUMNS
    tail = columns % KEY_BLOCK
    return columns + KEY_BLOCK - tail if tail > 192 else columns


def padded_rows(width: int, heads_per_kv: int, dim: int = 128) -> int:
    """Rows per slot so that the last block of packed queries is full or has at least 8; more for heads above 128."""
    least = max(MIN_QUERY_ROWS, dim // 16)
    width = max(width, -(-least // heads_per_kv))
    while True:
        queries = width * heads_per_kv
        tail = queries % (32 if queries < 192 else 64 if queries < 768 else 256)
        if tail == 0 or tail >= least:
            return width
        width += 1


@dataclass(frozen=True, kw_only=True)
class RowGrid:
    """Where flat rows [R] stand in the grid [B, W] of slots and depths.

    row_of_BW: row at each cell (clamped where the slot has fewer rows); None: rows are the grid, in order.
    cell_of_R: b * W + depth of each row; None likewise. pos_BW: position of each cell's token. seen_BW: of rows of
    trees, the bits of TreeSight; pos_BW is then its `past`, and at_BW the position. A slot's first row has the lowest.
    """

    pos_BW: Tensor
    row_of_BW: Tensor | None = None
    cell_of_R: Tensor | None = None
    seen_BW: Tensor | None = None
    at_BW: Tensor | None = None


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
        reach: Sequence[int] = (),
        clean: bool = False,
        first_cell: int = 0,
        window: int = 0,
    ) -> None:
        """table_BP: page table rows of the B slots. len_ub: host bound on position + 1 over the grid.

        reach: the bound for each slot. first_page: per slot, where its pages are one ascending run (a host fact),
        else -1; a lone slot's run, and long ones of several slots, are read in place instead of being gathered.
        clean: zero what is gathered beyond the last visible column, for caches whose pages are not zeroed when
        they change hands. first_cell: the first column that holds anything; a row before it sees itself. window: a row
        sees that many positions, its own included (0: all); only pages that some row may see are gathered then, and
        what no row of a slot sees is read as zero, as those pages may be anybody's.
        """
        slots, width = grid.pos_BW.shape
        self.slots = slots
        self.kv = kv
        self.cache_slot_R = cache_slot_R
        self.width = width
        self.pad = padded_rows(width, heads_per_kv, kv.data.shape[-1])
        self.group = heads_per_kv
        self.grid = grid
        page = kv.page_size
        self.dim = kv.data.shape[-1]
        self.columns = columns = padded_columns(len_ub)
        pos_BW = _padded(grid.pos_BW, self.pad)
        low_BW = (
            None if not window else _padded(grid.pos_BW if grid.at_BW is None else grid.at_BW, self.pad) - window + 1
        )
        from_page_B1 = None
        if low_BW is not None:
            # Whole blocks of torch's kernel are left out, so that the others hold the same columns whatever the rows.
            step = math.lcm(page, KEY_BLOCK) if mask_dtype == torch.bfloat16 else page
            within = padded_columns(window - 1 + width + step - 1)
            if within < columns:
                self.columns = columns = within
                from_page_B1 = (low_BW[:, :1].clamp(min=0) // step) * (step // page)
        num_pages = -(-columns // page)
        # In place, masked columns may belong to others: finite numbers, times a probability of zero.
        spans = self._runs(first_page, reach) if not window else []
        self.in_place = [kv.in_place(start, tokens) for start, tokens in spans]
        if not spans:
            have = min(num_pages, table_BP.shape[1])
            wanted_BP = table_BP[:, :have]
            if from_page_B1 is not None:
                index_BP = from_page_B1 + torch.arange(have, device=table_BP.device)
                wanted_BP = table_BP.gather(1, index_BP.clamp(max=table_BP.shape[1] - 1))
            if have < num_pages:
                wanted_BP = F.pad(wanted_BP, (0, num_pages - have))
            # Columns past the slot's own pages are masked; they read its first page, never the sink's.
            self.pages = torch.where(wanted_BP > 0, wanted_BP, table_BP[:, :1]).reshape(-1)
        column_B1L = torch.arange(columns, device=pos_BW.device).view(1, 1, -1)
        if from_page_B1 is not None:
            column_B1L = column_B1L + (from_page_B1 * page)[:, :, None]
        hidden = column_B1L > pos_BW[:, :, None]
        if grid.seen_BW is not None:
            bit_BWL = column_B1L - pos_BW[:, :, None] - 1
            shown = _padded(grid.seen_BW, self.pad)[:, :, None] >> bit_BWL.clamp(0, 63)
            hidden &= (bit_BWL < 0) | (bit_BWL > 63) | (shown & 1 == 0)
        if first_cell:
            hidden |= (column_B1L < first_cell) & (pos_BW >= first_cell)[:, :, None]
        if low_BW is not None:
            hidden |= column_B1L < low_BW[:, :, None]
        self.seen_BL11 = (~hidden.all(1))[:, :, None, None] if clean or window else None
        mask_BWL = torch.zeros(hidden.shape, dtype=mask_dtype, device=pos_BW.device).masked_fill_(hidden, float("-inf"))
        mask = mask_BWL[:, None, :, None, :].expand(slots, 1, self.pad, heads_per_kv, columns)
        self.mask = mask.reshape(slots, 1, self.pad * heads_per_kv, columns)
        self.slot_masks = [self.mask[b : b + 1, ..., :tokens] for b, (_, tokens) in enumerate(spans)]

    def _runs(self, first_page: Sequence[int], reach: Sequence[int]) -> list[tuple[int, int]]:
        """(first cache cell, columns) of every slot when all are to be read in place, else nothing."""
        page, cells = self.kv.page_size, self.kv.flat[0][0].shape[0]
        if len(first_page) != self.slots or min(first_page) <= 0:
            return []
        wanted = reach if len(reach) == self.slots else (self.columns,) * self.slots
        columns = [padded_columns(r) for r in wanted]
        spans = [(first * page, c) for first, c in zip(first_page, columns, strict=True)]
        worth = self.slots == 1 or sum(columns) >= IN_PLACE_COLUMNS * self.slots
        return spans if worth and all(start + c <= cells for start, c in spans) else []

    def attend(self, layer: int, q_RND: Tensor, k_RKD: Tensor, v_RKD: Tensor) -> Tensor:
        self.kv.write(layer, self.cache_slot_R, k_RKD, v_RKD)
        flat_k, _ = self.kv.flat[layer]
        rows, heads, dim = q_RND.shape
        slots, pad, group = self.slots, self.pad, self.group
        kv_heads = heads // group
        k = v = flat_k
        if not self.in_place:
            paged_k, paged_v = self.kv.paged[layer]
            k = paged_k.index_select(0, self.pages).view(slots, -1, kv_heads, dim)[:, : self.columns]
            v = paged_v.index_select(0, self.pages).view(slots, -1, kv_heads, dim)[:, : self.columns]
            if self.seen_BL11 is not None:
                k, v = torch.where(self.seen_BL11, k, 0), torch.where(self.seen_BL11, v, 0)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        grid = self.grid
        q = q_RND if grid.row_of_BW is None else q_RND.index_select(0, grid.row_of_BW.view(-1))
        q = q.view(slots, self.width, kv_heads, group, dim)
        if pad > self.width:
            if self.width == 1:
                q = q.expand(slots, pad, kv_heads, group, dim)
            else:
                q = torch.cat([q, q[:, -1:].expand(slots, pad - self.width, kv_heads, group, dim)], 1)
        q = q.transpose(1, 2).reshape(slots, kv_heads, pad * group, dim)
        if self.in_place:
            parts = [
                F.scaled_dot_product_attention(q[b : b + 1], kv[2 * layer], kv[2 * layer + 1], attn_mask=mask)
                for b, (kv, mask) in enumerate(zip(self.in_place, self.slot_masks, strict=True))
            ]
            o = parts[0] if slots == 1 else torch.cat(parts)
        else:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        o = o.view(slots, kv_heads, pad, group, dim).transpose(1, 2)
        if grid.cell_of_R is None:
            return o[:, : self.width].reshape(rows, heads, dim)
        # cell_of_R counts cells of width W; the padded grid is wider.
        cell_R = grid.cell_of_R
        if pad > self.width:
            cell_R = torch.div(cell_R, self.width, rounding_mode="floor") * pad + cell_R % self.width
        return o.reshape(slots * pad, heads, dim).index_select(0, cell_R)


def _padded(x_BW: Tensor, width: int) -> Tensor:
    """`width` rows per slot: the last one again and again."""
    slots, have = x_BW.shape
    return x_BW if width == have else torch.cat([x_BW, x_BW[:, -1:].expand(slots, width - have)], 1)


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


def span_attention(
    kv: KVPages,
    spans: Sequence[tuple[int, int, int, int]],
    *,
    pos_R: Tensor,
    cache_slot_R: Tensor,
    table_SP: Tensor,
    heads_per_kv: int,
    first_cell: int = 0,
    window: int = 0,
) -> PrefillAttention:
    """Attention of packed prompt rows [R] whose spans (slot, start, length, first_page) the host knows."""
    parts, at = [], 0
    for slot, start, length, first_page in spans:
        attention = PagedAttention(
            kv,
            grid=RowGrid(pos_BW=pos_R[at : at + length].view(1, -1)),
            cache_slot_R=cache_slot_R[at : at + length],
            table_BP=table_SP[slot : slot + 1],
            len_ub=start + length,
            heads_per_kv=heads_per_kv,
            mask_dtype=kv.data.dtype,
            first_page=(first_page,),
            first_cell=first_cell,
            window=window,
        )
        parts.append((length, attention))
        at += length
    return PrefillAttention(parts)
