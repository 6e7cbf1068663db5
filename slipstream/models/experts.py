"""Mixtures of experts with a shared expert, as Qwen3-Next has them: static shapes, nothing read back.

Rows are sorted by expert and multiplied group by group; how many rows an expert has stays on the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models.config import ModelConfig
from slipstream.models.gated import GatedMLP
from slipstream.models.layers import swiglu
from slipstream.models.linear import Dense, Linear
from slipstream.models.weights import WeightBuilder, wide_dtype

GATHERED = 1 << 26
"""Numbers of weights that are copied at once where rows are not sorted by expert."""


class SparseMLP:
    """Each row goes through its `chosen` likeliest experts, weighted by the router's softmax, and the shared one,
    times the sigmoid of a gate."""

    def __init__(self, config: ModelConfig, weights: WeightBuilder, prefix: str) -> None:
        """prefix: of the tensors, as in "model.layers.3.mlp."."""
        e, hidden = config.experts, config.hidden_size
        assert e is not None, "a layer of experts needs their numbers"
        self.number, self.chosen, self.renormed = e.number, e.chosen, e.renormed
        self.router = weights.linear(prefix + "gate", e.number, hidden)
        names = [f"{prefix}experts.{i}.{x}_proj" for i in range(e.number) for x in ("gate", "up")]
        self.gate_up_EKN = _stacked(weights.linear(names, [e.size] * len(names), hidden), e.number)
        downs = [f"{prefix}experts.{i}.down_proj" for i in range(e.number)]
        self.down_EKN = _stacked(weights.linear(downs, [hidden] * e.number, e.size), e.number)
        self.shared = GatedMLP(config, weights, prefix + "shared_expert.", e.shared_size)
        self.shared_gate = weights.linear(prefix + "shared_expert_gate", 1, hidden)

    def forward(self, x_RH: Tensor) -> Tensor:
        """x_RH [R, H]: normed. [R, H], without the residual."""
        law_RE = self.router(x_RH).softmax(-1, dtype=wide_dtype(x_RH.dtype))
        weight_RC, expert_RC = law_RE.topk(self.chosen, -1)
        if self.renormed:
            weight_RC = weight_RC / weight_RC.sum(-1, keepdim=True)
        experts_RH = (self._experts(x_RH, expert_RC) * weight_RC.to(x_RH.dtype)[..., None]).sum(1)
        return experts_RH.addcmul_(self.shared_gate(x_RH).sigmoid(), self.shared.forward(x_RH))

    def _experts(self, x_RH: Tensor, expert_RC: Tensor) -> Tensor:
        """What each of a row's experts makes of it [R, C, H]."""
        if x_RH.dtype == torch.float64 or (x_RH.dtype == torch.float32 and x_RH.device.type == "cuda"):
            return self._gathered(x_RH, expert_RC)  # the grouped product takes neither
        rows, chosen = expert_RC.shape
        order_G = expert_RC.flatten().argsort(stable=True)
        ones_G = torch.ones_like(order_G, dtype=torch.int32)
        count_E = ones_G.new_zeros(self.number).scatter_add_(0, expert_RC.flatten(), ones_G)
        ends_E = count_E.cumsum(0, dtype=torch.int32)
        sorted_GH = x_RH[torch.div(order_G, chosen, rounding_mode="floor")]
        inner_GF = swiglu(F.grouped_mm(sorted_GH, self.gate_up_EKN, offs=ends_E))
        out_GH: Tensor = F.grouped_mm(inner_GF, self.down_EKN, offs=ends_E)
        place_G = torch.empty_like(order_G).scatter_(0, order_G, torch.arange(len(order_G), device=x_RH.device))
        return out_GH[place_G].view(rows, chosen, -1)

    def _gathered(self, x_RH: Tensor, expert_RC: Tensor) -> Tensor:
        """The same, with a copy of the weights for every row, some rows at a time."""
        per_row = expert_RC.shape[1] * self.gate_up_EKN[0].numel()
        out = []
        for x, expert in zip(*(t.split(max(1, GATHERED // per_row)) for t in (x_RH, expert_RC)), strict=True):
            inner_RCF = swiglu(torch.einsum("rh,rchn->rcn", x, self.gate_up_EKN[expert]))
            out.append(torch.einsum("rcf,rcfh->rch", inner_RCF, self.down_EKN[expert]))
        return torch.cat(out)

    def bytes(self) -> int:
        """All experts': how many of them a pass reads depends on its rows."""
        stacked = sum(w.numel() * w.element_size() for w in (self.gate_up_EKN, self.down_EKN))
        return stacked + self.router.bytes() + self.shared.bytes() + self.shared_gate.bytes()


def _stacked(layer: Linear, number: int) -> Tensor:
    """Experts' weights [E, K, N] of one product, as rows of a layer; the storage stays [E, N, K]."""
    assert isinstance(layer, Dense), "nothing packs experts"
    weight_EKN: Tensor = layer.weight_NK.unflatten(0, (number, -1)).mT
    return weight_EKN
