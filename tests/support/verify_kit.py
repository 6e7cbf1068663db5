"""For verification tests: rounds on a dense grid, inverse-CDF picks, exact laws of one round."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from slipstream.types import VerifyMode
from slipstream.verify import DenseQ, OneHot, Verdict, VerifyRows, verify


def grid_rows(
    batch: int,
    width: int,
    draft_BK: Tensor | None = None,
    *,
    mode: VerifyMode = VerifyMode.REJECTION,
    key_B: Tensor | None = None,
    child_B: Tensor | None = None,
    base_B: Tensor | None = None,
    rows_B: Tensor | None = None,
    q_BKV: Tensor | None = None,
) -> VerifyRows:
    """Slot b owns the flat rows b * width ... + width - 1."""
    zeros_B = torch.zeros(batch, dtype=torch.int64)
    return VerifyRows(
        mode_B=torch.full((batch,), int(mode)),
        key_B=torch.arange(batch) * 7919 if key_B is None else key_B,
        child_B=zeros_B if child_B is None else child_B,
        base_B=zeros_B if base_B is None else base_B,
        row_of_BW=torch.arange(batch * width).view(batch, width),
        rows_B=torch.full((batch,), width) if rows_B is None else rows_B,
        draft_BK=zeros_B.view(batch, 1).expand(batch, max(1, width - 1)) if draft_BK is None else draft_BK,
        q=OneHot() if q_BKV is None else DenseQ(q_BKV),
    )


def verify_rejection(
    p_BWV: Tensor, rows: VerifyRows, u_BK: Tensor | None = None, pick: Callable[[Tensor, Tensor], Tensor] | None = None
) -> Verdict:
    return verify(p_BWV.flatten(0, 1).log(), rows, sampled=True, coupled=False, rejection=True, u_BK=u_BK, pick=pick)


def inverse_cdf(weights_BV: Tensor, v_B: Tensor) -> Tensor:
    """First index with positive mass whose normalised running sum exceeds v."""
    cdf_BV = weights_BV.cumsum(1) / weights_BV.sum(1, keepdim=True)
    return ((cdf_BV > v_B.unsqueeze(1)) & (weights_BV > 0)).to(torch.int64).argmax(1)


def random_tables(vocab: int, depth: int, seed: int, zeros: bool = False) -> list[Tensor]:
    """tables[l] [V] * (l + 1): the law of the next token after each prefix of l tokens."""
    g = torch.Generator().manual_seed(seed)
    tables = []
    for level in range(depth + 1):
        raw = torch.rand([vocab] * (level + 1), generator=g, dtype=torch.float64) ** 3
        if zeros:
            raw = raw * (torch.rand(raw.shape, generator=g) > 0.3) + 1e-300
            raw = torch.where(raw > 1e-200, raw, 0.0)
            raw[..., 0] += (raw.sum(-1) == 0).to(raw.dtype)
        tables.append(raw / raw.sum(-1, keepdim=True))
    return tables


def round_law(
    target: list[Tensor],
    path_law: Callable[[tuple[int, ...]], float],
    q_of: Callable[[tuple[int, ...]], Tensor] | None,
    depth: int,
    *,
    normalise: bool = True,
) -> list[Tensor]:
    """Exact law of one round of the real `verify`: law[a][x1 .. xa, e] = P(a accepted drafts x, then e).

    path_law: probability that the drafter proposes a path. q_of: q row after a prefix, None for one-hot.
    Each draft's coin is put once inside its accepting interval and once outside it, weighted by the lengths;
    the closing draw is replaced by its whole law. `normalise` False leaves the residual's mass as it is.
    """
    vocab = target[0].shape[-1]
    paths = list(product(range(vocab), repeat=depth))
    p_NWV = torch.stack([torch.stack([target[d][x[:d]] for d in range(depth + 1)]) for x in paths])
    x_NK = torch.tensor(paths)
    if q_of is None:
        q_NKV = torch.nn.functional.one_hot(x_NK, vocab).to(torch.float64)
    else:
        q_NKV = torch.stack([torch.stack([q_of(x[:d]) for d in range(depth)]) for x in paths])
    p_x, q_x = (t.gather(2, x_NK.unsqueeze(2)).squeeze(2) for t in (p_NWV[:, :depth], q_NKV))
    ratio_NK = torch.where(p_x > 0, (p_x / q_x).clamp(max=1.0), 0.0)

    law = [torch.zeros([vocab] * (a + 1), dtype=torch.float64) for a in range(depth + 1)]
    for inside in product((True, False), repeat=depth):
        inside_K = torch.tensor(inside)
        weight_N = torch.where(inside_K, ratio_NK, 1 - ratio_NK).prod(1)
        u_NK = torch.where(inside_K, ratio_NK / 2, (1 + ratio_NK) / 2)
        seen: list[Tensor] = []

        def pick(weights_BV: Tensor, accepted_B: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(weights_BV.clone())
            return torch.zeros_like(accepted_B)

        rows = grid_rows(len(paths), depth + 1, x_NK, q_BKV=None if q_of is None else q_NKV)
        accepted = verify_rejection(p_NWV, rows, u_NK, pick).accepted_B.tolist()
        closing_NV = seen[0] / seen[0].sum(1, keepdim=True) if normalise else seen[0]
        for n, path in enumerate(paths):
            a = accepted[n]
            law[a][path[:a]] += path_law(path) * weight_N[n] * closing_NV[n]
    return law


def sequence_law(target: list[Tensor]) -> Tensor:
    law = target[0]
    for table in target[1:]:
        law = law.unsqueeze(-1) * table
    return law


def continued(law: list[Tensor], target: list[Tensor]) -> Tensor:
    """Law of the first depth + 1 tokens when plain sampling goes on after the round."""
    total = torch.zeros_like(target[-1])
    for part in law:
        for table in target[part.dim() :]:
            part = part.unsqueeze(-1) * table
        total += part
    return total


def total_variation(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().sum() / 2)
