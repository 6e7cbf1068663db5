"""For verification tests: rounds on a dense grid, inverse-CDF picks, exact laws of one round."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from slipstream.types import VerifyMode
from slipstream.verify import DenseQ, OneHot, TreeQ, TreeRows, TreeVerdict, Verdict, VerifyRows, verify, verify_tree
from slipstream.verify.block import block_tests


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
    p_BWV: Tensor,
    rows: VerifyRows,
    u_BK: Tensor | None = None,
    pick: Callable[[Tensor, Tensor], Tensor] | None = None,
    *,
    block: bool = False,
) -> Verdict:
    return verify(
        p_BWV.flatten(0, 1).log(), rows, sampled=True, coupled=False, rejection=True, u_BK=u_BK, pick=pick, block=block
    )


def tree_rows(
    parents_N: Tensor,
    tokens_BN: Tensor,
    *,
    mode: VerifyMode = VerifyMode.REJECTION,
    q: TreeQ | None = None,
    key_B: Tensor | None = None,
    base_B: Tensor | None = None,
) -> TreeRows:
    """Slots with trees of one shape; all slots share the flat rows 0 .. N - 1 unless tokens are [B, N]."""
    parents = parents_N.tolist()
    levels = [0] * len(parents)
    for n in range(1, len(parents)):
        levels[n] = levels[parents[n]] + 1
    fan = max(parents.count(n) for n in range(len(parents)))
    tokens_BN = tokens_BN.view(-1, len(parents))
    batch, nodes = tokens_BN.shape
    zeros_B = torch.zeros(batch, dtype=torch.int64)
    return TreeRows(
        mode_B=torch.full((batch,), int(mode)),
        key_B=zeros_B if key_B is None else key_B,
        child_B=zeros_B,
        base_B=zeros_B if base_B is None else base_B,
        row_of_BN=torch.arange(batch * nodes).view(batch, nodes),
        nodes_B=torch.full((batch,), nodes),
        parent_BN=parents_N.expand(batch, nodes),
        token_BN=tokens_BN,
        depth=max(levels),
        fan=fan,
        q=q,
    )


def verify_tree_rejection(
    p_RV: Tensor,
    rows: TreeRows,
    u_BN: Tensor | None = None,
    pick: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> TreeVerdict:
    return verify_tree(p_RV.log(), rows, sampled=True, coupled=False, rejection=True, u_BN=u_BN, pick=pick)


def tree_law(p_NV: Tensor, parents_N: Tensor, tokens_N: Tensor, q: TreeQ | None = None) -> Tensor:
    """Exact law [N, V] of one round on one tree: the walk ends at node n and emits e.

    Runs the real `verify_tree` once for every pattern of accepted and refused nodes. A node's acceptance edge is found
    by bisection on its own coin, so the law does not rest on the formula that is tested.
    """
    nodes, vocab = p_NV.shape
    edges = _edges(p_NV, parents_N, tokens_N, q)
    law = torch.zeros(nodes, vocab, dtype=torch.float64)
    patterns = list(product((True, False), repeat=nodes - 1))
    u_BN = torch.ones(len(patterns), nodes, dtype=torch.float64)
    weight_B = torch.ones(len(patterns), dtype=torch.float64)
    for b, pattern in enumerate(patterns):
        for n, (inside, edge) in enumerate(zip(pattern, edges, strict=True), start=1):
            u_BN[b, n] = edge / 2 if inside else (1 + edge) / 2
            weight_B[b] *= edge if inside else 1 - edge
    keep = weight_B > 0
    u_BN, weight_B = u_BN[keep], weight_B[keep]
    batch = len(u_BN)
    seen: list[tuple[Tensor, Tensor]] = []

    def pick(weights_BV: Tensor, at_B: Tensor) -> Tensor:
        seen.append((weights_BV / weights_BV.sum(1, keepdim=True), at_B))
        return torch.zeros_like(at_B)

    q_B = None if q is None else TreeQ(q.q_BNV.expand(batch, -1, -1), q.siblings)
    verify_tree_rejection(p_NV.repeat(batch, 1), tree_rows(parents_N, tokens_N.expand(batch, -1), q=q_B), u_BN, pick)
    closing_BV, at_B = seen[0]
    return law.index_add(0, at_B, closing_BV * weight_B.unsqueeze(1))


def _edges(p_NV: Tensor, parents_N: Tensor, tokens_N: Tensor, q: TreeQ | None) -> list[float]:
    """Per node but the root: the coin below which it is accepted once its parent is reached and its earlier siblings
    are refused. One row of a batch per node."""
    parents = parents_N.tolist()
    nodes = len(parents)
    u_BN = torch.full((nodes - 1, nodes), 1.0, dtype=torch.float64)
    for n in range(1, nodes):
        at = parents[n]
        while at > 0:
            u_BN[n - 1, at] = -1.0  # reached, whatever its mass
            at = parents[at]
    node_B1 = torch.arange(1, nodes).unsqueeze(1)
    q_B = None if q is None else TreeQ(q.q_BNV.expand(nodes - 1, -1, -1), q.siblings)
    rows = tree_rows(parents_N, tokens_N.expand(nodes - 1, -1), q=q_B)
    p_RV = p_NV.repeat(nodes - 1, 1)

    def accepts(u_B: Tensor) -> Tensor:
        coins_BN = u_BN.scatter(1, node_B1, u_B.unsqueeze(1))
        return (verify_tree_rejection(p_RV, rows, coins_BN, lambda w, at: at).path_BK == node_B1).any(1)

    zero_B = torch.zeros(nodes - 1, dtype=torch.float64)
    low_B, high_B = zero_B, zero_B + 1
    never_B, always_B = ~accepts(zero_B), accepts(zero_B + (1 - 2**-53))
    for _ in range(56):
        middle_B = (low_B + high_B) / 2
        inside_B = accepts(middle_B)
        low_B, high_B = torch.where(inside_B, middle_B, low_B), torch.where(inside_B, high_B, middle_B)
    return torch.where(never_B, 0.0, torch.where(always_B, 1.0, high_B)).tolist()


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
    block: bool = False,
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

    if block:
        rows = grid_rows(len(paths), depth + 1, x_NK, q_BKV=q_NKV)
        ratio_NK = block_tests(p_NWV.flatten(0, 1), rows).pass_BK

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
        accepted = verify_rejection(p_NWV, rows, u_NK, pick, block=block).accepted_B.tolist()
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
