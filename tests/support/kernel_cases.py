"""Inputs for kernel tests: fresh random numbers, NaN where nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖ in float64; NaN never passes a comparison with it."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


@dataclass(frozen=True, kw_only=True)
class Paged:
    """A cache whose written cells are random and whose other cells, the sink page included, are NaN."""

    k: Tensor
    v: Tensor
    table: Tensor
    slot: Tensor
    pos: Tensor
    tree: Tensor | None
    low: Tensor | None = None


def paged_case(
    lengths: list[int],
    rows: list[int],
    *,
    page: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    tree: bool = False,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
) -> Paged:
    """Slot s (from 1) has lengths[s - 1] committed tokens and rows[s - 1] rows in flight behind them.

    A sink row stands in front and between the slots. window: a row sees that many positions, its own included, and
    what no row of a slot sees is NaN too.
    """
    slots, wide = len(lengths), max(n + r for n, r in zip(lengths, rows, strict=True))
    pages = -(-wide // page) + 1
    table = torch.zeros(slots + 1, pages, dtype=torch.int32)
    table[1:] = (torch.randperm(slots * pages) + 1).view(slots, pages)
    k = torch.full((slots * pages + 1, page, kv_heads, dim), float("nan"), dtype=dtype)
    v = k.clone()
    slot, pos, masks, low = [0], [0], [0], [0]
    for s in range(1, slots + 1):
        first = max(0, lengths[s - 1] - window + 1) if window else 0
        for t in range(first, lengths[s - 1] + rows[s - 1]):
            k[table[s, t // page], t % page] = torch.randn(kv_heads, dim).to(dtype)
            v[table[s, t // page], t % page] = torch.randn(kv_heads, dim).to(dtype)
        for j in range(rows[s - 1]):
            slot.append(s)
            pos.append(lengths[s - 1] - 1 if tree else lengths[s - 1] + j)
            # Root, then alternating branches: row j sees itself and every second row before it.
            masks.append(sum(1 << i for i in range(j, -1, -2)) | 1)
            low.append(lengths[s - 1] + (-(-j // 2) if tree else j) - window + 1)
        slot.append(0)
        pos.append(0)
        masks.append(0)
        low.append(0)
    return Paged(
        k=k,
        v=v,
        table=table,
        slot=torch.tensor(slot, dtype=torch.int32),
        pos=torch.tensor(pos, dtype=torch.int32),
        tree=torch.tensor(masks, dtype=torch.int64) if tree else None,
        low=torch.tensor(low) if window else None,
    )


def attention_by_loops(q: Tensor, case: Paged, scale: float) -> Tensor:
    """The definition, one row and head at a time, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    page, group = case.k.shape[1], q.shape[1] // case.k.shape[2]
    for r in range(q.shape[0]):
        s, p = int(case.slot[r]), int(case.pos[r])
        if s == 0:
            continue
        seen = list(range(0 if case.low is None else max(0, int(case.low[r])), p + 1))
        if case.tree is not None:
            seen += [p + 1 + j for j in range(64) if int(case.tree[r]) >> j & 1]
        k = torch.stack([case.k[case.table[s, t // page], t % page] for t in seen]).double()
        v = torch.stack([case.v[case.table[s, t // page], t % page] for t in seen]).double()
        for h in range(q.shape[1]):
            weights = torch.softmax(k[:, h // group] @ q[r, h].double() * scale, 0)
            out[r, h] = weights @ v[:, h // group]
    return out


def rope_tables(positions: int, dim: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(positions, dim // 2) * 6.0
    return angle.cos().contiguous(), angle.sin().contiguous()
