"""Block verification (Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444).

P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)). With S_i = sum max(P_i p_{i+1} - q_{i+1}, 0) the prefix of i drafts
passes its test with probability h_i = S_i / (S_i + 1 - P_i), the whole block with h = P. Every test is made, and the
LAST one that passes decides: stopping at the first failure is biased. The closing token comes from
max(P_a p - q, 0), or from p after all drafts. It accepts at least as many drafts as the chain rule; where q is a point
mass the two have the same law, so such slots keep the cheaper chain rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.verify.rejection import chain_residual
from slipstream.verify.rows import DenseQ, VerifyRows


@dataclass(frozen=True, kw_only=True)
class BlockTests:
    """pass_BK: h_i of the prefix of i + 1 drafts, 0 past a slot's drafts. weight_BW: P_0 .. P_K. Both float64."""

    pass_BK: Tensor
    weight_BW: Tensor


def block_tests(p_RV: Tensor, rows: VerifyRows) -> BlockTests:
    """The probabilities of all tests of a round. p_RV: target probabilities; rows.q must be dense."""
    assert isinstance(rows.q, DenseQ)
    drafts = rows.row_of_BW.shape[1] - 1
    q_BKV = rows.q.q_BKV[:, :drafts]
    x_BK1 = rows.draft_BK[:, :drafts].clamp(0, p_RV.shape[1] - 1).unsqueeze(2)
    p_x = p_RV[rows.row_of_BW[:, :drafts], x_BK1.squeeze(2)].double()
    q_x = q_BKV.gather(2, x_BK1).squeeze(2).double()
    ratio_BK = torch.where(p_x > 0, p_x / q_x, 0.0).clamp(max=1e300)  # finite, so that 0 times it is 0
    weight = torch.ones_like(ratio_BK[:, 0])
    weights = [weight]
    for i in range(drafts):
        weight = (weight * ratio_BK[:, i]).clamp(max=1.0)
        weights.append(weight)
    weight_BW = torch.stack(weights, 1)
    # S of the prefix of i drafts looks at row i and at draft i's law; the last prefix has neither and needs none.
    passes = []
    last_B = rows.rows_B - 1
    for i in range(1, drafts + 1):
        weight = weight_BW[:, i]
        if i == drafts:
            passes.append(weight)
            continue
        p_BV = p_RV.index_select(0, rows.row_of_BW[:, i])
        rest = (p_BV * weight.to(p_BV.dtype).unsqueeze(1) - q_BKV[:, i]).clamp_(min=0.0).sum(1).double()
        total = rest + 1.0 - weight
        inner = torch.where(total > 0, rest / total, 1.0)
        passes.append(torch.where(last_B == i, weight, inner))
    pass_BK = torch.stack(passes, 1)
    depth_K = torch.arange(1, drafts + 1, device=pass_BK.device)
    return BlockTests(pass_BK=torch.where(depth_K <= last_B.unsqueeze(1), pass_BK, 0.0), weight_BW=weight_BW)


def last_passed(ok_BK: Tensor) -> Tensor:
    """1 + the index of the last True, int64 [B]; 0 without one."""
    depth_K = torch.arange(1, ok_BK.shape[1] + 1, device=ok_BK.device)
    return (ok_BK * depth_K).amax(1)


def block_accepted(tests: BlockTests, u_BK: Tensor) -> Tensor:
    """Accepted drafts, int64 [B]. u_BK: one coin per draft, keyed by round and node: a round that accepts little
    leaves positions whose coins were examined, so coins keyed by position alone would be used twice."""
    return last_passed(u_BK < tests.pass_BK)


def closing_weights(p_RV: Tensor, rows: VerifyRows, tests: BlockTests, accepted_B: Tensor) -> Tensor:
    """Weights [B, V] of the token that ends the round after `accepted_B` drafts."""
    assert isinstance(rows.q, DenseQ)
    stop_B1 = accepted_B.unsqueeze(1)
    p_BV = p_RV.index_select(0, rows.row_of_BW.gather(1, stop_B1).squeeze(1))
    drafts = rows.row_of_BW.shape[1] - 1
    refused_B1 = stop_B1 < rows.rows_B.unsqueeze(1) - 1
    slot_B = torch.arange(p_BV.shape[0], device=p_BV.device)
    q_BV = rows.q.q_BKV[slot_B, accepted_B.clamp(max=drafts - 1)].to(p_BV.dtype)
    weight_B1 = torch.where(refused_B1, tests.weight_BW.gather(1, stop_B1), 1.0).to(p_BV.dtype)
    return chain_residual(p_BV * weight_B1, torch.where(refused_B1, q_BV, 0.0))
