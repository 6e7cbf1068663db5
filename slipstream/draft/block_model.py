"""DFlash and DSpark networks: the block backbone, Markov heads, the confidence head. No engine in here.

Backbone (DFlash, arXiv 2602.06036): ctx = hidden_norm(fc(target features)). Each layer's k and v projections read both
ctx and the block; queries come from the block alone, which sees all of itself. DSpark adds a bias to the logits that
depends on the previous draft (a low-rank Markov head) and a confidence for each draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.attention.protocol import AttentionContext
from slipstream.draft.block_config import BlockConfig
from slipstream.draft.checkpoint import PartOf
from slipstream.errors import ModelLoadError
from slipstream.models.dummy import DummyTensors
from slipstream.models.layers import swiglu
from slipstream.models.linear import Dense, Linear
from slipstream.models.rope import RotaryTable
from slipstream.models.safetensors_io import SafetensorsWeights
from slipstream.models.weights import WeightBuilder, WeightSource


class BlockLayer:
    """One layer; its keys and values of context rows are `BlockModel.context`'s."""

    def __init__(self, config: BlockConfig, weights: WeightBuilder, layer: int, kv: Dense) -> None:
        c, p = config.shape, f"layers.{layer}."
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, c.num_heads, c.num_kv_heads, c.head_dim
        self.input_norm = weights.norm(p + "input_layernorm.weight", c.hidden_size, c.rms_norm_eps)
        self.q = weights.linear(p + "self_attn.q_proj", c.q_size, c.hidden_size, bias=c.qkv_bias)
        self.kv = kv
        self.q_norm = weights.norm(p + "self_attn.q_norm.weight", c.head_dim, c.rms_norm_eps)
        self.k_norm = weights.norm(p + "self_attn.k_norm.weight", c.head_dim, c.rms_norm_eps)
        self.o = weights.linear(p + "self_attn.o_proj", c.hidden_size, c.q_size, bias=c.o_bias)
        self.post_norm = weights.norm(p + "post_attention_layernorm.weight", c.hidden_size, c.rms_norm_eps)
        self.gate_up = weights.linear(
            [p + "mlp.gate_proj", p + "mlp.up_proj"], [c.intermediate_size] * 2, c.hidden_size
        )
        self.down = weights.linear(p + "mlp.down_proj", c.hidden_size, c.intermediate_size)

    def keys_values(self, kv_RF: Tensor, rotary: RotaryTable, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [R, K, D] from projected rows."""
        k, v = kv_RF.view(kv_RF.shape[0], 2 * self.kv_heads, self.head_dim).split(self.kv_heads, 1)
        return rotary.rotate(self.k_norm(k), cos, sin), v

    def forward(self, x_RH: Tensor, rotary: RotaryTable, cos: Tensor, sin: Tensor, attn: AttentionContext) -> Tensor:
        rows, normed_RH = x_RH.shape[0], self.input_norm(x_RH)
        q = rotary.rotate(self.q_norm(self.q(normed_RH).view(rows, self.heads, self.head_dim)), cos, sin)
        k, v = self.keys_values(self.kv(normed_RH), rotary, cos, sin)
        o_RND = attn.attend(self.layer, q, k, v)
        x_RH = self.o(o_RND.reshape(rows, -1)).add_(x_RH)
        return self.down(swiglu(self.gate_up(self.post_norm(x_RH)))).add_(x_RH)

    def bytes(self) -> int:
        return self.q.bytes() + self.kv.bytes() + self.o.bytes() + self.gate_up.bytes() + self.down.bytes()


class MarkovHead:
    """Bias on the logits of a draft, from the token before it and the hidden state; rank r.

    vanilla: W2 W1[x]. gated: W2 (sigmoid(G [h; e]) * e), e = W1[x]. rnn: a gated state s, zero at the anchor:
    (g, c, o) = J [s; e; h], s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c), bias = W2 tanh(o).
    """

    def __init__(self, config: BlockConfig, weights: WeightBuilder, prefix: str) -> None:
        c, r = config.shape, config.markov_rank
        self.kind, self.rank = config.markov_head, r
        self.w1 = weights.embedding(prefix + "markov_w1.weight", c.vocab_size, r, tied=False)
        self.w2 = weights.linear(prefix + "markov_w2", c.vocab_size, r)
        self.mix: Linear | None = None
        if self.kind == "gated":
            self.mix = weights.linear(prefix + "gate_proj", r, c.hidden_size + r, bias=True)
        elif self.kind == "rnn":
            self.mix = weights.linear(prefix + "joint_proj", 3 * r, 2 * r + c.hidden_size, bias=True)

    def start(self, hidden_BH: Tensor) -> Tensor:
        """The state [B, r] at the anchor."""
        return hidden_BH.new_zeros(hidden_BH.shape[0], self.rank)

    def step(self, prev_B: Tensor, hidden_BH: Tensor, state_BR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Bias [B, V], the embedding [B, r] of the previous token, the next state."""
        e_BR: Tensor = self.w1(prev_B)
        x_BR, state_BR = self.mixed(e_BR, hidden_BH, state_BR)
        return self.w2(x_BR), e_BR, state_BR

    def mixed(self, e_BR: Tensor, hidden_BH: Tensor, state_BR: Tensor) -> tuple[Tensor, Tensor]:
        """What W2 reads [B, r], and the next state. e_BR: W1 of the previous token. vanilla: both as they are."""
        if self.mix is None:
            return e_BR, state_BR
        if self.kind == "gated":
            gate_BR = torch.sigmoid(self.mix(torch.cat([hidden_BH, e_BR], 1)))
            return gate_BR * e_BR, state_BR
        g, c, o = self.mix(torch.cat([state_BR, e_BR, hidden_BH], 1)).chunk(3, 1)
        keep = torch.sigmoid(g)
        return torch.tanh(o), keep * state_BR + (1 - keep) * torch.tanh(c)

    def bytes(self) -> int:
        return self.w2.bytes() + (self.mix.bytes() if self.mix is not None else 0)


class BlockModel:
    """Backbone and heads. block: the format; config: the backbone's sizes.

    embed and head are the checkpoint's where it has them, else the target's.
    """

    def __init__(self, config: BlockConfig, weights: WeightBuilder, target: Any) -> None:
        c = config.shape
        self.block, self.config = config, c
        self.dtype, self.device = weights.dtype, weights.device
        names = weights.source.names()
        self.fc = weights.linear("fc", c.hidden_size, len(config.taps) * target.config.hidden_size)
        self.hidden_norm = weights.norm("hidden_norm.weight", c.hidden_size, c.rms_norm_eps)
        # One tensor for all layers' k and v, so that context rows take one product.
        projections = [f"layers.{i}.self_attn.{x}_proj" for i in range(c.num_layers) for x in "kv"]
        kv = weights.linear(projections, [c.kv_size] * len(projections), c.hidden_size, bias=c.qkv_bias)
        assert isinstance(kv, Dense)
        self.kv = kv
        self.layers = [BlockLayer(config, weights, i, _part(kv, i, 2 * c.kv_size)) for i in range(c.num_layers)]
        self.norm = weights.norm("norm.weight", c.hidden_size, c.rms_norm_eps)
        own_embed, own_head = "embed_tokens.weight" in names, "lm_head.weight" in names
        self.embed = (
            weights.embedding("embed_tokens.weight", c.vocab_size, c.hidden_size, tied=False)
            if own_embed
            else target.embed
        )
        self.head: Linear = weights.head("lm_head", c.vocab_size, c.hidden_size) if own_head else target.head
        prefix = "logit_head." if any(n.startswith("logit_head.") for n in names) else "markov_head."
        self.markov = MarkovHead(config, weights, prefix) if config.markov_rank else None
        self.confidence: Linear | None = None
        if config.confidence != "none":
            width = c.hidden_size + (config.markov_rank if config.confidence == "markov" else 0)
            bias = "confidence_head.proj.bias" in names
            self.confidence = weights.linear("confidence_head.proj", 1, width, bias=bias)
        self.rotary = RotaryTable(
            c.rope, c.head_dim, max(c.max_position_embeddings, target.config.max_position_embeddings),
            device=self.device, dtype=self.dtype,
        )  # fmt: skip

    @property
    def max_drafts(self) -> int:
        """Drafts of a full block."""
        return self.block.max_drafts

    def context(self, taps: Sequence[Tensor], pos_R: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [R, K, D] of each layer for rows whose features the target has computed.

        taps: [R, Ht] each, in the order of config.taps; pos_R: the rows' positions.
        """
        features_RF = torch.cat([tap.to(self.dtype) for tap in taps], 1)
        all_RF = self.kv(self.hidden_norm(self.fc(features_RF)))
        cos, sin = self.rotary.at(pos_R)
        parts = all_RF.chunk(len(self.layers), 1)
        return [
            layer.keys_values(part.contiguous(), self.rotary, cos, sin)
            for layer, part in zip(self.layers, parts, strict=True)
        ]

    def forward(self, token_BT: Tensor, pos_BT: Tensor, attn: AttentionContext) -> Tensor:
        """Hidden states [B, T, H] of blocks, after the final norm. `attn` decides that a block sees all of itself."""
        x_RH = self.embed(token_BT.flatten()).to(self.dtype)
        cos, sin = self.rotary.at(pos_BT.flatten())
        for layer in self.layers:
            x_RH = layer.forward(x_RH, self.rotary, cos, sin, attn)
        hidden_RH: Tensor = self.norm(x_RH)
        return hidden_RH.view(*token_BT.shape, -1)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Base logits [R, V], float32 (float64 for a float64 model)."""
        logits_RV = self.head(hidden_RH)
        return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()

    def confidence_logit(self, hidden_BH: Tensor, prev_BR: Tensor | None) -> Tensor:
        """Logit [B] of "this draft is accepted if those before it are". It looks at tokens before the draft only."""
        assert self.confidence is not None
        x = hidden_BH if self.block.confidence == "plain" else torch.cat([hidden_BH, _some(prev_BR)], 1)
        return self.confidence(x).squeeze(1).float()

    def weight_bytes(self) -> int:
        """Bytes that one round streams with all drafts."""
        heads = self.head.bytes() + (self.markov.bytes() * self.block.max_drafts if self.markov else 0)
        return self.fc.bytes() + self.kv.bytes() + sum(layer.bytes() for layer in self.layers) + heads


def _some(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _part(kv: Dense, layer: int, rows: int) -> Dense:
    """One layer's rows of the shared weight, in place."""
    at = slice(layer * rows, (layer + 1) * rows)
    return Dense(kv.weight_NK[at], None if kv.bias_N is None else kv.bias_N[at])


def block_shapes(config: BlockConfig, target_hidden: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint that takes embedding and head from its target."""
    c, r = config.shape, config.markov_rank
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (c.hidden_size, len(config.taps) * target_hidden),
        "hidden_norm.weight": (c.hidden_size,),
        "norm.weight": (c.hidden_size,),
    }
    for i in range(c.num_layers):
        p = f"layers.{i}."
        for name, shape in {
            "self_attn.q_proj": (c.q_size, c.hidden_size),
            "self_attn.k_proj": (c.kv_size, c.hidden_size),
            "self_attn.v_proj": (c.kv_size, c.hidden_size),
            "self_attn.o_proj": (c.hidden_size, c.q_size),
            "self_attn.q_norm": (c.head_dim,),
            "self_attn.k_norm": (c.head_dim,),
            "mlp.gate_proj": (c.intermediate_size, c.hidden_size),
            "mlp.up_proj": (c.intermediate_size, c.hidden_size),
            "mlp.down_proj": (c.hidden_size, c.intermediate_size),
            "input_layernorm": (c.hidden_size,),
            "post_attention_layernorm": (c.hidden_size,),
        }.items():
            shapes[f"{p}{name}.weight"] = shape
    if r:
        shapes["markov_head.markov_w1.weight"] = shapes["markov_head.markov_w2.weight"] = (c.vocab_size, r)
        if config.markov_head == "gated":
            shapes["markov_head.gate_proj.weight"] = (r, c.hidden_size + r)
            shapes["markov_head.gate_proj.bias"] = (r,)
        elif config.markov_head == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * r, 2 * r + c.hidden_size)
            shapes["markov_head.joint_proj.bias"] = (3 * r,)
    if config.confidence != "none":
        shapes["confidence_head.proj.weight"] = (1, c.hidden_size + (r if config.confidence == "markov" else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def load_block_model(folder: Path, config: BlockConfig, target: Any, *, dummy_seed: int | None = None) -> BlockModel:
    """The checkpoint in `folder`, in the target's dtype and on its device.

    dummy_seed: random weights of the config's shapes instead, for benchmarks. Raises ModelLoadError that names a tensor
    which is missing, extra, of another shape or not finite.
    """
    source: WeightSource
    if dummy_seed is None:
        source = PartOf(SafetensorsWeights(folder))
    else:
        shapes = block_shapes(config, target.config.hidden_size)
        source = DummyTensors(shapes, seed=dummy_seed, device=target.device)
    weights = WeightBuilder(source, device=target.device, dtype=target.dtype)
    with torch.inference_mode():
        model = BlockModel(config, weights, target)
        try:
            weights.finish(("rotary_emb.inv_freq",))
        except ModelLoadError as error:
            raise ModelLoadError(f"draft {folder.name}: {error}") from None
    return model
