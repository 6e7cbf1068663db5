"""Chain rejection sampling (Leviathan et al. 2023; Chen et al. 2023): lossless for drafts sampled from q.

Draft x of row i is accepted with probability min(1, p_i(x) / q_i(x)); at the first refusal the round ends
with a token from max(p - q, 0), and after full acceptance with one from the last row's p.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.sampling.rng import PURPOSE_ACCEPT, PURPOSE_EMIT, coin, race, race_noise
from slipstream.verify.rows import OneHot, VerifyRows

Pick = Callable[[Tensor, Tensor], Tensor]
"""(weights [B, V], accepted [B]) -> token [B], drawn in proportion to the weights."""


def chain_accepts(u: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
    """Whether a coin u in [0, 1) accepts a draft of target mass p_x and draft mass q_x.

    Strict, so that a coin of exactly 0 still refuses a token of zero target mass.
    """
    return u * q_x < p_x


def chain_accept_prob(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """Probability of `chain_accepts`: min(1, p(x) / q(x)), 0 where p(x) = 0. p, q [..., V]; x [...]."""
    p_x = p.gather(-1, x.unsqueeze(-1)).squeeze(-1)
    q_x = q.gather(-1, x.unsqueeze(-1)).squeeze(-1)
    return torch.where(p_x > 0, (p_x / q_x).clamp(max=1.0), 0.0)


def chain_residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0) [..., V], or p where nothing is left of it. Not normalised: a race does that by itself.

    An empty residual means q = p up to rounding, where a refusal has no weight.
    """
    rest = (p - q).clamp_(min=0.0)
    empty = rest.amax(dim=-1, keepdim=True) <= 0
    return torch.where(empty, p, rest)


def one_hot_residual(p: Tensor, x: Tensor, refused: Tensor) -> Tensor:
    """chain_residual for q a point mass on x [..., 1]: p without x, or p where nothing else has mass.

    Where `refused` [..., 1] is False it is p.
    """
    rest = p.scatter(-1, x, 0.0)
    empty = rest.amax(dim=-1, keepdim=True) <= 0
    # Only one entry of p changes: write that one instead of choosing between whole rows.
    return p.scatter(-1, x, torch.where(refused & ~empty, 0.0, p.gather(-1, x)))


def accepted_prefix(ok_BK: Tensor) -> Tensor:
    """Length of the leading run of True, int64 [B]."""
    return ok_BK.to(torch.int64).cumprod(dim=1).sum(dim=1)


def accepts(p_RV: Tensor, rows: VerifyRows, u_BK: Tensor) -> Tensor:
    """Which drafts their coin accepts, bool [B, W - 1]. u_BK [B, W - 1], float64."""
    drafts = rows.row_of_BW.shape[1] - 1
    x_BK = rows.draft_BK[:, :drafts].clamp(0, p_RV.shape[1] - 1)  # entries past rows_B may hold anything
    p_BK = p_RV[rows.row_of_BW[:, :drafts], x_BK].to(u_BK.dtype)
    if isinstance(rows.q, OneHot):
        return chain_accepts(u_BK, p_BK, torch.ones_like(p_BK))
    q_BK = rows.q.q_BKV[:, :drafts].gather(2, x_BK.unsqueeze(2)).squeeze(2).to(u_BK.dtype)
    return chain_accepts(u_BK, p_BK, q_BK)


def closing_weights(p_RV: Tensor, rows: VerifyRows, accepted_B: Tensor) -> Tensor:
    """Weights [B, V] of the token that ends the round after `accepted_B` drafts."""
    stop_B1 = accepted_B.unsqueeze(1)
    p_BV = p_RV.index_select(0, rows.row_of_BW.gather(1, stop_B1).squeeze(1))
    drafts = rows.row_of_BW.shape[1] - 1
    if drafts == 0:
        return p_BV
    refused_B1 = stop_B1 < rows.rows_B.unsqueeze(1) - 1
    judged_B1 = stop_B1.clamp(max=drafts - 1)  # after full acceptance any draft will do: it has no weight
    if isinstance(rows.q, OneHot):
        x_B1 = rows.draft_BK.gather(1, judged_B1).clamp(0, p_BV.shape[1] - 1)
        return one_hot_residual(p_BV, x_B1, refused_B1)
    slot_B = torch.arange(p_BV.shape[0], device=p_BV.device)
    q_BV = rows.q.q_BKV[slot_B, judged_B1.squeeze(1)].to(p_BV.dtype)
    return chain_residual(p_BV, torch.where(refused_B1, q_BV, 0.0))


def coins(rows: VerifyRows) -> Tensor:
    """The acceptance coins of the round, float64 [B, W - 1]."""
    node_K = torch.arange(rows.row_of_BW.shape[1] - 1, device=rows.key_B.device)
    return coin(rows.key_B.unsqueeze(1), rows.child_B.unsqueeze(1), rows.base_B.unsqueeze(1), node_K, PURPOSE_ACCEPT)


def race_pick(rows: VerifyRows) -> Pick:
    """The engine's `Pick`: an exponential race keyed by the round and the depth at which it ends."""

    def pick(weights_BV: Tensor, accepted_B: Tensor) -> Tensor:
        vocab, dtype = weights_BV.shape[1], weights_BV.dtype
        return race(
            weights_BV,
            race_noise(rows.key_B, rows.child_B, rows.base_B, PURPOSE_EMIT, vocab, dtype, accepted_B),
        )

    return pick
