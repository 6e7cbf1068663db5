"""The target as teacher: taps and final hidden states of whole batches, without a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.errors import ConfigError, UnsupportedError
from slipstream.models.config import ModelConfig
from slipstream.models.layers import Embedding
from slipstream.models.linear import Dense
from slipstream.models.loader import LoadedModel, load_model
from slipstream.models.rope import RotaryTable


class _BatchCausal:
    """B sequences of T rows each, flattened; every row sees its own sequence up to itself."""

    def __init__(self, sequences: int, length: int) -> None:
        self.shape = (sequences, length)

    def attend(self, layer: int, q_RND: Tensor, k_RKD: Tensor, v_RKD: Tensor) -> Tensor:
        del layer
        q, k, v = (x.unflatten(0, self.shape).transpose(1, 2) for x in (q_RND, k_RKD, v_RKD))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class Features:
    """tap_BTF [B, T, taps * H]: the tapped residual streams side by side. hidden_BTH: after the final norm."""

    tap_BTF: Tensor
    hidden_BTH: Tensor


@dataclass(frozen=True, kw_only=True)
class LastBlock:
    """Weights of the last layer's MLP, where a draft may start from."""

    post_norm_H: Tensor
    gate_FH: Tensor
    up_FH: Tensor
    down_HF: Tensor


class Teacher:
    """A dense target. embed_VH and head_VH are its tables, usable in autograd as constants.

    last_block: None where the last layer is not a plain gated MLP.
    """

    def __init__(self, loaded: LoadedModel, taps: tuple[int, ...]) -> None:
        model = loaded.model
        if loaded.config.delta_layers:
            raise UnsupportedError(f"training a draft for {loaded.config.architecture}: recurrent layers are not built")
        embed, head = getattr(model, "embed", None), getattr(model, "head", None)
        if not isinstance(embed, Embedding) or not isinstance(head, Dense):
            raise ConfigError("training needs a target with dense weights; load it with dtype bfloat16 or float32")
        for tap in taps:
            if not 0 <= tap < loaded.config.num_layers:
                raise ConfigError(f"tap {tap} must be from 0 to {loaded.config.num_layers - 1}, the target's layers")
        self.model, self.config, self.taps = model, loaded.config, taps
        # The weights were made in inference mode; copies made outside it may be saved for backward.
        self.embed_VH = embed.table_VH.clone()
        self.head_VH = self.embed_VH if head.weight_NK is embed.table_VH else head.weight_NK.clone()
        parts: Any = model
        rotary: RotaryTable = parts.rotary
        self.rope_table = rotary.table.clone()
        self.final_norm_H = parts.norm.weight.clone()
        end = parts.blocks[-1]
        self.last_block: LastBlock | None = None
        gate_up, down = getattr(end, "gate_up", None), getattr(end, "down", None)
        if isinstance(gate_up, Dense) and isinstance(down, Dense):
            gate, up = gate_up.weight_NK.chunk(2)
            self.last_block = LastBlock(
                post_norm_H=end.post_norm.weight.clone(), gate_FH=gate.clone(), up_FH=up.clone(),
                down_HF=down.weight_NK.clone(),
            )  # fmt: skip

    @classmethod
    def load(cls, source: str | None, *, taps: tuple[int, ...], device: str, dtype: str) -> Teacher:
        return cls(load_model(source, dtype=dtype, device=device), taps)

    @property
    def model_config(self) -> ModelConfig:
        return self.config

    @torch.no_grad()
    def features(self, token_BT: Tensor) -> Features:
        batch, length = token_BT.shape
        pos_R = torch.arange(length, device=token_BT.device).repeat(batch)
        hidden_RH, taps = self.model.forward(token_BT.flatten(), pos_R, _BatchCausal(batch, length), self.taps)
        return Features(
            tap_BTF=torch.cat(taps, -1).unflatten(0, (batch, length)),
            hidden_BTH=hidden_RH.unflatten(0, (batch, length)),
        )
