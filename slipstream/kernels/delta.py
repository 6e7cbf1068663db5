"""The gated delta rule (arXiv 2412.06464) in torch: chunked for prompts, step by step for decoding.

A head's state S [dk, dv] maps keys to values. A token scales it by exp(g), then moves what it answers to the token's
key k towards its value v: S <- exp(g) S + k (beta (v - k^T exp(g) S))^T. Its output is q^T S. q, k and v come from a
short causal convolution over the layer's inputs, so a position's state needs the last `taps - 1` inputs beside S.

Inputs are rows x [X]: the convolution's channels (all queries, all keys, all values), then a and b of each value head,
the logits of decay and of beta.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens that the chunked scan treats at once."""


class DeltaWeights(NamedTuple):
    """A layer's small weights, float32 or wider: taps of each channel, oldest first; decay_N: -exp(A_log); dt_N."""

    conv_CT: Tensor
    decay_N: Tensor
    dt_N: Tensor
    key_heads: int
    key_dim: int

    @property
    def history(self) -> int:
        """Inputs before a token that its convolution reads."""
        return self.conv_CT.shape[1] - 1


class DeltaInputs(NamedTuple):
    """q, k [..., N, dk], normed and for each value head; v [..., N, dv]; g, beta [..., N]; all float32 or wider."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def delta_inputs(x_BLX: Tensor, w: DeltaWeights) -> DeltaInputs:
    """Of rows [B, history + L, X], the first `history` of which only feed the convolution: [B, L, ...]."""
    channels, heads = w.conv_CT.shape[0], w.decay_N.shape[0]
    wide_BLX = x_BLX.to(w.conv_CT.dtype)
    mixed_BLC = F.silu((wide_BLX[..., :channels].unfold(1, w.history + 1, 1) * w.conv_CT).sum(-1))
    keys = w.key_heads * w.key_dim
    q, k, v = mixed_BLC.split((keys, keys, channels - 2 * keys), -1)
    a_BLN, b_BLN = wide_BLX[:, w.history :, channels:].chunk(2, -1)
    share = heads // w.key_heads
    return DeltaInputs(
        q=_unit(q.unflatten(-1, (w.key_heads, w.key_dim))).repeat_interleave(share, -2) * w.key_dim**-0.5,
        k=_unit(k.unflatten(-1, (w.key_heads, w.key_dim))).repeat_interleave(share, -2),
        v=v.unflatten(-1, (heads, -1)),
        g=w.decay_N * F.softplus(a_BLN + w.dt_N),
        beta=b_BLN.sigmoid(),
    )


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_step(state_BNKV: Tensor, at: DeltaInputs) -> tuple[Tensor, Tensor]:
    """One token: inputs without the L dimension. The new states, and outputs [B, N, dv]."""
    decayed = state_BNKV * at.g.exp()[..., None, None]
    told_BNV = (decayed * at.k[..., None]).sum(-2)
    change_BNV = at.beta[..., None] * (at.v - told_BNV)
    state = decayed + at.k[..., None] * change_BNV[..., None, :]
    return state, (state * at.q[..., None]).sum(-2)


def delta_scan(state_NKV: Tensor, inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """All tokens of one sequence [L, ...]: the state after them, and outputs [L, N, dv].

    Chunk by chunk, by the WY form (arXiv 2412.06464, section 3.3): within a chunk, what each token writes solves a
    unit lower triangular system in what the tokens before it wrote.
    """
    outputs = []
    for q, k, v, g, beta in zip(*(x.split(CHUNK) for x in inputs), strict=True):
        q_NLK, k_NLK, v_NLV = (x.transpose(0, 1) for x in (q, k, v))
        sum_NL, beta_NL1 = g.T.cumsum(-1), beta.T[..., None]
        # exp of what lies between two tokens; never of a positive number, which could overflow.
        between_NLL = (sum_NL[:, :, None] - sum_NL[:, None, :]).tril().exp().tril()
        from_start_NL1 = sum_NL.exp()[..., None]
        system_NLL = (beta_NL1 * k_NLK @ k_NLK.mT) * between_NLL
        told_NLV = (k_NLK * from_start_NL1) @ state_NKV
        written_NLV = torch.linalg.solve_triangular(
            system_NLL, beta_NL1 * (v_NLV - told_NLV), upper=False, unitriangular=True
        )
        out_NLV = (q_NLK * from_start_NL1) @ state_NKV + (q_NLK @ k_NLK.mT * between_NLL) @ written_NLV
        outputs.append(out_NLV.transpose(0, 1))
        to_end_NL1 = between_NLL[:, -1, :, None]
        state_NKV = state_NKV * from_start_NL1[:, -1:] + (k_NLK * to_end_NL1).mT @ written_NLV
    return state_NKV, torch.cat(outputs)
