"""Layers with gradients: weights as parameters, the arithmetic of the models room."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.config import ModelConfig
from slipstream.train.teacher import Features


class DraftHead(nn.Module, ABC):
    """A draft under training. kind: the format's name. overlap: late in training, see the head's `loss`."""

    kind: str

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.overlap = False
        self.generator = torch.Generator().manual_seed(seed)

    @abstractmethod
    def loss(self, token_BT: Tensor, answer_BT: Tensor, features: Features) -> tuple[Tensor, dict[str, Any]]:
        """token_BT int64, answer_BT bool [B, T]. The metrics hold "acceptance", [K] shares by draft position."""

    @abstractmethod
    def inputs(self, token_BT: Tensor, answer_BT: Tensor) -> list[Tensor]:
        """What `loss_of` reads, on the host: the tokens, then tensors whose shapes have few values."""

    @abstractmethod
    def loss_of(self, inputs: Sequence[Tensor], features: Features) -> tuple[Tensor, dict[str, Any]]:
        """The loss from `inputs` on the device: no shape depends on what they hold, so that it can be captured."""

    @abstractmethod
    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and the values of config.json, in the released format."""


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467), float32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Projections(nn.Module):
    """q, k, v and o of one attention layer; `width`: size of what q, k and v read. qk_norm as in Qwen3."""

    def __init__(self, config: ModelConfig, width: int, *, qk_norm: bool) -> None:
        super().__init__()
        c = config
        self.heads, self.kv_heads, self.dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.q_proj = nn.Linear(width, c.q_size, bias=False)
        self.k_proj = nn.Linear(width, c.kv_size, bias=False)
        self.v_proj = nn.Linear(width, c.kv_size, bias=False)
        self.o_proj = nn.Linear(c.q_size, c.hidden_size, bias=False)
        self.q_norm = Norm(c.head_dim, c.rms_norm_eps) if qk_norm else None
        self.k_norm = Norm(c.head_dim, c.rms_norm_eps) if qk_norm else None

    def queries(self, x: Tensor, rope: Tensor) -> Tensor:
        """[..., T, N, D], rotated. rope [T, 2, 1, D] or [..., T, 2, 1, D]: rows of the target's rotary table."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.dim))
        return rotate(q if self.q_norm is None else self.q_norm(q), rope)

    def keys(self, x: Tensor, rope: Tensor) -> Tensor:
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        return rotate(k if self.k_norm is None else self.k_norm(k), rope)

    def values(self, x: Tensor) -> Tensor:
        v: Tensor = self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        return v


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864) from rows (cos, cos), (-sin, sin) of `RotaryTable.table`."""
    rope = rope.to(x.dtype)
    return x * rope[..., 0, :, :] + x.roll(x.shape[-1] // 2, -1) * rope[..., 1, :, :]


def later(x_BT: Tensor, by: int) -> Tensor:
    """x shifted so that index i holds x[i + by]; zeros (False) past the end. [B, T, ...]."""
    if by == 0:
        return x_BT
    out = torch.zeros_like(x_BT)
    out[:, :-by] = x_BT[:, by:]
    return out
