"""Verification of draft trees: greedy, coupled, target-only and multi-round rejection, in one walk.

Every node is tested in parallel under the assumption that its parent was reached and its earlier siblings were
refused; the walk then follows the first accepted child, level by level. Nothing here has a data-dependent shape.

Rules for unseeded sampling, both exact:

* target-only, for trees that do not depend on the verifier's randomness (top-k expansion): a child is accepted with
  its target probability on what its earlier siblings have left.
* multi-round, for siblings drawn from q: accept with p / q, then p <- norm max(p - q, 0); siblings drawn without
  replacement also need q <- q without the refused token, renormalised (SpecInfer, arXiv 2305.09781, algorithm 2;
  without replacement: Jeon et al., arXiv 2402.14160).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.sampling.rng import (
    PURPOSE_ACCEPT,
    PURPOSE_COUPLED,
    PURPOSE_EMIT,
    PURPOSE_SYNTHETIC,
    coin,
    noise_from_words,
    race,
    race_noise,
    stream_words,
)
from slipstream.types import VerifyMode
from slipstream.verify.greedy import target_tokens
from slipstream.verify.rejection import Pick


class Siblings(enum.Enum):
    """How the children of one node were drawn from their q."""

    IID = "iid"
    WITHOUT_REPLACEMENT = "without replacement"


@dataclass(frozen=True)
class TreeQ:
    """q_BNV [B, N, V]: at each node, the law that its children were drawn from. siblings: how."""

    q_BNV: Tensor
    siblings: Siblings


@dataclass(frozen=True, kw_only=True)
class TreeRows:
    """One round of B slots with a tree each; N nodes, the root included. All tensors int64.

    mode_B, key_B, child_B, base_B: as in VerifyRows. row_of_BN: flat row of each node, any valid row where
    n >= nodes_B. nodes_B: nodes in use, 0 for an inactive slot. parent_BN: -1 at the root (node 0), else smaller than
    the node (breadth first). token_BN: node tokens; the root's is the bonus token and is not judged.
    depth: levels below the root, at most. fan: children of one node, at most. q: None for the target-only rule.
    """

    mode_B: Tensor
    key_B: Tensor
    child_B: Tensor
    base_B: Tensor
    row_of_BN: Tensor
    nodes_B: Tensor
    parent_BN: Tensor
    token_BN: Tensor
    depth: int
    fan: int
    q: TreeQ | None = None


@dataclass(frozen=True, kw_only=True)
class TreeVerdict:
    """accepted_B: accepted nodes, the root not counted. path_BK [B, depth]: those nodes, then zeros.

    tokens_BW [B, depth + 1]: their tokens, then the target's own token, then zeros. n_emitted_B: accepted + 1, or 0
    for an inactive slot. All int64.
    """

    accepted_B: Tensor
    path_BK: Tensor
    tokens_BW: Tensor
    n_emitted_B: Tensor


def node_depths(parent_BN: Tensor, depth: int) -> Tensor:
    """Level of each node below the root, int64 [B, N]."""
    level_BN = torch.zeros_like(parent_BN)
    at_BN = parent_BN
    for _ in range(depth):
        level_BN = level_BN + (at_BN >= 0)
        at_BN = torch.where(at_BN >= 0, parent_BN.gather(1, at_BN.clamp(min=0)), -1)
    return level_BN


def sibling_pairs(rows: TreeRows) -> Tensor:
    """bool [B, N, N]: node j is an earlier sibling of node i, both in use."""
    node_N = torch.arange(rows.parent_BN.shape[1], device=rows.parent_BN.device)
    used_BN = (node_N < rows.nodes_B.unsqueeze(1)) & (rows.parent_BN >= 0)
    same = rows.parent_BN.unsqueeze(2) == rows.parent_BN.unsqueeze(1)
    return same & (node_N.unsqueeze(0) < node_N.unsqueeze(1)) & used_BN.unsqueeze(2) & used_BN.unsqueeze(1)


def verify_tree(
    logits_RV: Tensor,
    rows: TreeRows,
    *,
    sampled: bool,
    coupled: bool,
    rejection: bool,
    target_R: Tensor | None = None,
    synthetic: float | None = None,
    u_BN: Tensor | None = None,
    pick: Pick | None = None,
) -> TreeVerdict:
    """Judge a tree per slot. Arguments as in `verify`; u_BN float64 [B, N]: node n's coin, for tests.

    target_R: the rows' argmax, where it is known. synthetic: as in `verify`; the path to the last node is walked.
    pick: (weights [B, V], node where the walk ended [B]) -> token [B], replaces the closing draw.
    """
    vocab = logits_RV.shape[1]
    token_BN = rows.token_BN.clamp(0, vocab - 1)
    parent_BN = rows.parent_BN.clamp(min=0)
    target_BN = (target_tokens(logits_RV) if target_R is None else target_R)[rows.row_of_BN]
    p_RV = torch.softmax(logits_RV, -1) if sampled and (coupled or rejection) else logits_RV
    if sampled and coupled:
        coupled_BN = _coupled_tokens(p_RV, rows)
        is_coupled_B1 = (rows.mode_B == VerifyMode.COUPLED).unsqueeze(1)
        target_BN = torch.where(is_coupled_B1 & (target_BN >= 0), coupled_BN, target_BN)
    ok_BN = token_BN == target_BN.gather(1, parent_BN)
    is_rejection_B = rows.mode_B == VerifyMode.REJECTION
    closing: Callable[[Tensor], Tensor] | None = None
    if sampled and rejection:
        coins_BN = _coins(rows) if u_BN is None else u_BN
        judged_BN, closing = (_target_only if rows.q is None else _multi_round)(p_RV, rows, token_BN, coins_BN)
        ok_BN = torch.where(is_rejection_B.unsqueeze(1), judged_BN, ok_BN)
    if synthetic is not None:
        ok_BN = _by_lot(rows, synthetic)

    accepted_B, path_BK, at_B = walk(ok_BN, rows)
    last_B = target_BN.gather(1, at_B.unsqueeze(1)).squeeze(1)
    if closing is not None:
        drawn_B = (pick or _race_pick(rows))(closing(at_B), at_B)
        last_B = torch.where(is_rejection_B & (last_B >= 0), drawn_B, last_B)
    n_emitted_B = torch.where(rows.nodes_B > 0, accepted_B + 1, 0)
    width_W = torch.arange(rows.depth + 1, device=at_B.device)
    drafts_BW = torch.nn.functional.pad(rows.token_BN.gather(1, path_BK), (0, 1))
    tokens_BW = torch.where(width_W < accepted_B.unsqueeze(1), drafts_BW, last_B.unsqueeze(1))
    tokens_BW = torch.where(width_W < n_emitted_B.unsqueeze(1), tokens_BW, 0)
    return TreeVerdict(accepted_B=accepted_B, path_BK=path_BK, tokens_BW=tokens_BW, n_emitted_B=n_emitted_B)


def walk(ok_BN: Tensor, rows: TreeRows) -> tuple[Tensor, Tensor, Tensor]:
    """From the root to the first accepted child, until there is none: accepted [B], path [B, depth], last node [B]."""
    nodes = rows.parent_BN.shape[1]
    node_N = torch.arange(nodes, device=ok_BN.device)
    live_BN = ok_BN & (node_N < rows.nodes_B.unsqueeze(1)) & (rows.parent_BN >= 0)
    at_B = torch.zeros_like(rows.nodes_B)
    accepted_B = torch.zeros_like(at_B)
    path = []
    for _ in range(rows.depth):
        found_BN = live_BN & (rows.parent_BN == at_B.unsqueeze(1))
        next_B = torch.where(found_BN, node_N, nodes).amin(1)
        # A node without an accepted child is never left: its parent's test cannot be asked again.
        moved_B = next_B < nodes
        at_B = torch.where(moved_B, next_B, at_B)
        accepted_B = accepted_B + moved_B
        path.append(torch.where(moved_B, next_B, 0))
    return accepted_B, torch.stack(path, 1), at_B


Judged = tuple[Tensor, Callable[[Tensor], Tensor]]
"""Which nodes their coin accepts, bool [B, N]; and from the nodes [B] where walks end, the closing weights [B, V]."""


def _target_only(p_RV: Tensor, rows: TreeRows, token_BN: Tensor, u_BN: Tensor) -> Judged:
    parent_BN = rows.parent_BN.clamp(min=0)
    earlier_BNN = sibling_pairs(rows)
    mass_BN = p_RV[rows.row_of_BN.gather(1, parent_BN), token_BN].double()
    # A sibling with the same token has nothing left to win.
    twin_BN = (earlier_BNN & (token_BN.unsqueeze(2) == token_BN.unsqueeze(1))).any(2)
    mass_BN = torch.where(twin_BN, 0.0, mass_BN)
    total_BN = p_RV.sum(1, dtype=torch.float64)[rows.row_of_BN].gather(1, parent_BN)
    left_BN = total_BN - (earlier_BNN * mass_BN.unsqueeze(1)).sum(2)
    ok_BN = u_BN * left_BN < mass_BN
    node_N = torch.arange(rows.parent_BN.shape[1], device=p_RV.device)

    def closing(at_B: Tensor) -> Tensor:
        p_BV = p_RV[rows.row_of_BN.gather(1, at_B.unsqueeze(1)).squeeze(1)]
        refused_BN = (node_N < rows.nodes_B.unsqueeze(1)) & (rows.parent_BN == at_B.unsqueeze(1))
        # Refused children lose their mass; min() of zero, so that the order of writes is no matter.
        ceiling_BN = torch.where(refused_BN, 0.0, float("inf")).to(p_BV.dtype)
        rest_BV = p_BV.scatter_reduce(1, token_BN, ceiling_BN, reduce="amin")
        return torch.where(rest_BV.amax(1, keepdim=True) > 0, rest_BV, p_BV)

    return ok_BN, closing


def _multi_round(p_RV: Tensor, rows: TreeRows, token_BN: Tensor, u_BN: Tensor) -> Judged:
    assert rows.q is not None
    p_BNV = p_RV[rows.row_of_BN]
    q_BNV = rows.q.q_BNV.to(p_BNV.dtype)
    nodes = p_BNV.shape[1]
    node_N = torch.arange(nodes, device=p_BNV.device)
    used_BN = (node_N < rows.nodes_B.unsqueeze(1)) & (rows.parent_BN >= 0)
    rank_BN = sibling_pairs(rows).sum(2)
    ok_BN = torch.zeros_like(used_BN)
    for rank in range(rows.fan):
        # The child of this rank at every node, as a scatter from children to parents; spare column for the others.
        here_BN = used_BN & (rank_BN == rank)
        at_BN = torch.where(here_BN, rows.parent_BN, nodes)
        child_BN = torch.full((at_BN.shape[0], nodes + 1), -1, device=at_BN.device).scatter(
            1, at_BN, node_N.expand_as(at_BN)
        )[:, :nodes]
        has_BN, child_BN = child_BN >= 0, child_BN.clamp(min=0)
        x_BN1 = token_BN.gather(1, child_BN).unsqueeze(2)
        p_x, q_x = p_BNV.gather(2, x_BN1).squeeze(2).double(), q_BNV.gather(2, x_BN1).squeeze(2).double()
        accept_BN = has_BN & (u_BN.gather(1, child_BN) * q_x < p_x)
        parent_BN = rows.parent_BN.clamp(min=0)
        ok_BN = ok_BN | (here_BN & accept_BN.gather(1, parent_BN))
        rest_BNV = (p_BNV - q_BNV).clamp(min=0.0)
        mass_BN1 = rest_BNV.sum(2, keepdim=True)
        refused_BN1 = has_BN.unsqueeze(2)
        p_BNV = torch.where(refused_BN1 & (mass_BN1 > 0), rest_BNV / mass_BN1, p_BNV)
        if rows.q.siblings is Siblings.WITHOUT_REPLACEMENT:
            q_BNV = torch.where(refused_BN1, without(q_BNV, x_BN1), q_BNV)
    slot_B = torch.arange(p_BNV.shape[0], device=p_BNV.device)
    return ok_BN, lambda at_B: p_BNV[slot_B, at_B]


def _by_lot(rows: TreeRows, mean_length: float) -> Tensor:
    """Synthetic acceptance: the first levels of the path to the last node, as many as are drawn; bool [B, N]."""
    at_B1 = (rows.nodes_B - 1).clamp(min=0).unsqueeze(1)
    ok_BN = torch.zeros_like(rows.parent_BN, dtype=torch.bool)
    for _ in range(rows.depth):
        ok_BN = ok_BN.scatter(1, at_B1, True)
        at_B1 = rows.parent_BN.gather(1, at_B1).clamp(min=0)
    whole = math.floor(mean_length - 1.0)
    u_B = coin(rows.key_B, rows.child_B, rows.base_B, 0, PURPOSE_SYNTHETIC)
    drawn_B = whole + (u_B < mean_length - 1.0 - whole).to(torch.int64)
    return ok_BN & (node_depths(rows.parent_BN, rows.depth) <= drawn_B.unsqueeze(1))


def without(q_BNV: Tensor, x_BN1: Tensor) -> Tensor:
    """q after token x was drawn and is not put back: x at zero, the rest renormalised."""
    rest = q_BNV.scatter(2, x_BN1, 0.0)
    return rest / rest.sum(2, keepdim=True).clamp(min=torch.finfo(rest.dtype).tiny)


def _coins(rows: TreeRows) -> Tensor:
    node_N = torch.arange(rows.parent_BN.shape[1], device=rows.key_B.device)
    return coin(rows.key_B.unsqueeze(1), rows.child_B.unsqueeze(1), rows.base_B.unsqueeze(1), node_N, PURPOSE_ACCEPT)


def _coupled_tokens(p_RV: Tensor, rows: TreeRows) -> Tensor:
    """The seeded target's token at each node: all nodes of a level share that position's noise."""
    position_BN = rows.base_B.unsqueeze(1) + node_depths(rows.parent_BN, rows.depth) + 1
    words_BN = stream_words(rows.key_B.unsqueeze(1), rows.child_B.unsqueeze(1), position_BN, 0, PURPOSE_COUPLED)
    noise_RV = noise_from_words(words_BN.flatten(), p_RV.shape[1], p_RV.dtype)
    return race(p_RV[rows.row_of_BN.flatten()], noise_RV).view_as(position_BN)


def _race_pick(rows: TreeRows) -> Callable[[Tensor, Tensor], Tensor]:
    def pick(weights_BV: Tensor, at_B: Tensor) -> Tensor:
        vocab, dtype = weights_BV.shape[1], weights_BV.dtype
        noise_BV = race_noise(rows.key_B, rows.child_B, rows.base_B, PURPOSE_EMIT, vocab, dtype, at_B)
        return race(weights_BV, noise_BV)

    return pick
