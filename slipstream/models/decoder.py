"""The shell around the blocks: embedding, taps, final norm, head. One copy, so that taps cannot drift."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from slipstream.attention.protocol import AttentionContext
from slipstream.models.config import WINDOW, ModelConfig
from slipstream.models.linear import Linear
from slipstream.models.rope import RopeConfig, RotaryTable
from slipstream.models.weights import WeightBuilder


class Block(Protocol):
    """One decoder layer: residual stream [R, H] in, residual stream out."""

    def __init__(self, config: ModelConfig, weights: WeightBuilder, layer: int) -> None: ...

    def forward(
        self, x_RH: Tensor, rotary: RotaryTable, cos: Tensor, sin: Tensor, attn: AttentionContext
    ) -> Tensor: ...

    def bytes(self) -> int: ...


class Decoder:
    """A `protocol.Model` whose layers are all of one block class, which each architecture's file supplies.

    unused: prefixes of tensors in a checkpoint that belong to other parts of the model than this one.
    """

    block: ClassVar[type[Block]]
    unused: ClassVar[tuple[str, ...]] = ("mtp.",)
    fusable: ClassVar[bool] = True
    """Whether `FusedDecoder` knows the block: pre-norm, SwiGLU, one rotary table."""

    def __init__(self, config: ModelConfig, weights: WeightBuilder) -> None:
        self.config: ModelConfig = config
        self.device: torch.device = weights.device
        self.dtype: torch.dtype = weights.dtype
        self.packed: bool = weights.packed
        table = config.prefix + "embed_tokens.weight"
        self.embed = weights.embedding(table, config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings)
        self.blocks = [self.block(config, weights, i) for i in range(config.num_layers)]
        norm = config.prefix + "norm.weight"
        self.norm = weights.norm(norm, config.hidden_size, config.rms_norm_eps, config.norm_offset)
        # Released models scale by the factor rounded to their own dtype.
        self.embed_scale = float(torch.tensor(config.embedding_scale, dtype=self.dtype))
        self.head: Linear
        if config.tie_word_embeddings:
            self.head = self.embed.as_head()
        else:
            self.head = weights.head("lm_head", config.vocab_size, config.hidden_size)
        self.windows = [kind == WINDOW for kind in config.layer_types] or [False] * config.num_layers
        self.rotary = self._rotary(config.rope)
        self.local = None if config.rope_local is None else self._rotary(config.rope_local)

    def _rotary(self, rope: RopeConfig) -> RotaryTable:
        c = self.config
        return RotaryTable(rope, c.head_dim, c.max_position_embeddings, device=self.device, dtype=self.dtype)

    def forward(
        self,
        tokens_R: Tensor,
        positions_R: Tensor,
        attn: AttentionContext,
        taps: tuple[int, ...] = (),
        given: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        for tap in taps:
            assert 0 <= tap < len(self.blocks), f"tap {tap} is outside 0..{len(self.blocks) - 1}"
        x_RH = self.embedded(tokens_R, given)
        full = (self.rotary, *self.rotary.at(positions_R))
        windows = self.windows
        windowed = full if self.local is None else (self.local, *self.local.at(positions_R))
        tapped: dict[int, Tensor] = {}
        for i, block in enumerate(self.blocks):
            if i in taps:
                tapped[i] = x_RH
            x_RH = block.forward(x_RH, *(windowed if windows[i] else full), attn)
        return self.norm(x_RH), [tapped[i] for i in taps]

    def embedded(self, tokens_R: Tensor, given: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """What the first layer reads, [R, H]. given: as in `forward`."""
        x_RH = self.embed(tokens_R)
        if self.embed_scale != 1.0:
            x_RH = x_RH * self.embed_scale
        if given is None:
            return x_RH
        embeds_RH, given_R = given
        return torch.where(given_R[:, None], embeds_RH, x_RH)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        logits_RV = self.head(hidden_RH)
        return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()

    def weight_bytes(self) -> int:
        return sum(block.bytes() for block in self.blocks) + self.head.bytes()
