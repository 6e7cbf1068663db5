"""Cache-free causal attention over one packed sequence: the reference for models and tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.delta import DeltaInputs, DeltaWeights, delta_inputs, delta_scan


class DenseCausal:
    """Every row attends to the rows of this pass with position <= its own. No cache, one sequence.

    Source: Vaswani et al. 2017, eq. 1, with grouped query heads (Ainslie et al. 2023).
    """

    def __init__(self, positions_R: Tensor, windows: Sequence[int] = ()) -> None:
        """windows: of each layer, how many positions a row sees, its own included; 0 or no entry: all."""
        self.hidden_RR = positions_R[None, :] > positions_R[:, None]
        back_RR = positions_R[:, None] - positions_R[None, :]
        self.windowed = {i: self.hidden_RR | (back_RR >= w) for i, w in enumerate(windows) if w}

    def attend(self, layer: int, q_RND: Tensor, k_RKD: Tensor, v_RKD: Tensor) -> Tensor:
        hidden_RR = self.windowed.get(layer, self.hidden_RR)
        rows, heads, dim = q_RND.shape
        kv_heads = k_RKD.shape[1]
        wide = torch.float64 if q_RND.dtype == torch.float64 else torch.float32
        q = q_RND.to(wide).view(rows, kv_heads, heads // kv_heads, dim)
        scores = torch.einsum("rkgd,skd->kgrs", q, k_RKD.to(wide)) * dim**-0.5
        probs = scores.masked_fill(hidden_RR, float("-inf")).softmax(-1)
        out = torch.einsum("kgrs,skd->rkgd", probs, v_RKD.to(wide))
        return out.reshape(rows, heads, dim).to(q_RND.dtype)

    def delta(self, layer: int, x_RX: Tensor, weights: DeltaWeights) -> Tensor:
        """A recurrent layer over rows in order of position, from an empty state."""
        del layer
        inputs = DeltaInputs(*(x[0] for x in delta_inputs(F.pad(x_RX, (0, 0, weights.history, 0))[None], weights)))
        start_NKV = x_RX.new_zeros(*inputs.v.shape[1:2], weights.key_dim, inputs.v.shape[2], dtype=inputs.v.dtype)
        _, o_RNV = delta_scan(start_NKV, inputs)
        return o_RNV.to(x_RX.dtype)
