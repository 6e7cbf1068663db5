"""What every model offers to the rooms above."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from slipstream.attention.protocol import AttentionContext
from slipstream.models.config import ModelConfig
from slipstream.models.weights import WeightBuilder


class Model(Protocol):
    """A causal language model over flat rows.

    dtype is the type of activations. Nothing in `forward` or `logits` branches on a tensor's value or
    changes a shape: the result's shapes follow from R alone.
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype

    def __init__(self, config: ModelConfig, weights: WeightBuilder) -> None: ...

    def forward(
        self,
        tokens_R: Tensor,
        positions_R: Tensor,
        attn: AttentionContext,
        taps: tuple[int, ...] = (),
        given: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states [R, H] after the final norm, and the residual stream [R, H] before each tapped layer.

        tokens_R, positions_R: int64 [R]; positions [3, R] where the model's rotary embedding has sections. Tap i is
        Hugging Face's `hidden_states[i]`, 0 <= i < num_layers; taps come back in the order asked for. Positions beyond
        the rotary table take its last row. given: embeddings [R, H] and bool [R], where they stand in the place of the
        tokens' own.
        """

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Logits [R, V]: float64 for a float64 model, else float32."""

    def weight_bytes(self) -> int:
        """Bytes of weights that one pass with logits streams; an untied input embedding is not counted."""
