"""The EAGLE-3 head (Li et al. 2025, arXiv 2503.01840, section 3.1): one decoder layer over tokens and features.

g = fc(features of a position), then a Llama-like layer whose attention reads [norm(embedding), norm(g)] side by side
and whose residual stream is g. Its output, before the final norm, takes g's place when the head feeds on itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.attention.protocol import AttentionContext
from slipstream.draft.checkpoint import TensorTable, read_tensors
from slipstream.draft.eagle3_config import Eagle3Config, parse_eagle3
from slipstream.errors import ConfigError, ModelLoadError
from slipstream.models.config import ModelConfig
from slipstream.models.dummy import DummyTensors
from slipstream.models.layers import Embedding, RMSNorm, swiglu
from slipstream.models.linear import Dense, Int8Rows, Linear, PackedInt8
from slipstream.models.rope import RotaryTable
from slipstream.models.weights import WeightBuilder, WeightSource

if TYPE_CHECKING:
    from slipstream.draft.feature import FusedPass
    from slipstream.kernels.workspace import Workspace
    from slipstream.memory.kv import KVPages

_DERIVED = ("rotary_emb.inv_freq",)


class EagleLayer:
    """x + attention, x + mlp. wide: attention reads the token's embedding beside the stream, each with its norm."""

    def __init__(self, config: ModelConfig, weights: WeightBuilder, layer: int, *, wide: bool, normed: bool) -> None:
        c, p = config, f"layers.{layer}."
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, c.num_heads, c.num_kv_heads, c.head_dim
        self.wide, self.normed = wide, normed
        self.input_norm = weights.norm(p + "input_layernorm.weight", c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = weights.norm(p + "hidden_norm.weight", c.hidden_size, c.rms_norm_eps) if wide else None
        self.qkv = weights.linear(
            [p + f"self_attn.{x}_proj" for x in "qkv"], [c.q_size, c.kv_size, c.kv_size],
            c.hidden_size * (2 if wide else 1), bias=c.qkv_bias,
        )  # fmt: skip
        self.q_norm = self.k_norm = None
        if c.qk_norm:
            self.q_norm = weights.norm(p + "self_attn.q_norm.weight", c.head_dim, c.rms_norm_eps)
            self.k_norm = weights.norm(p + "self_attn.k_norm.weight", c.head_dim, c.rms_norm_eps)
        self.o = weights.linear(p + "self_attn.o_proj", c.hidden_size, c.q_size, bias=c.o_bias)
        self.post_norm = weights.norm(p + "post_attention_layernorm.weight", c.hidden_size, c.rms_norm_eps)
        self.gate_up = weights.linear(
            [p + "mlp.gate_proj", p + "mlp.up_proj"], [c.intermediate_size] * 2, c.hidden_size, bias=c.mlp_bias
        )
        self.down = weights.linear(p + "mlp.down_proj", c.hidden_size, c.intermediate_size, bias=c.mlp_bias)

    def forward(
        self,
        e_RH: Tensor,
        x_RH: Tensor,
        rotary: RotaryTable,
        cos: Tensor,
        sin: Tensor,
        attn: AttentionContext,
        wanted_B: Tensor | None = None,
    ) -> Tensor:
        """wanted_B: the rows whose result is wanted [B]; of the others only keys and values are made."""
        joined, residual_RH = self.joined(e_RH, x_RH)
        rows, rotated = x_RH.shape[0], self.heads + self.kv_heads
        qkv = self.qkv(joined).view(rows, rotated + self.kv_heads, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotary.rotate(q, cos, sin), rotary.rotate(k, cos, sin)
        o_RF = attn.attend(self.layer, q, k, v).reshape(rows, -1)
        if wanted_B is not None:
            if not wanted_B.shape[0]:
                return residual_RH[:0]
            o_RF, residual_RH = o_RF[wanted_B], residual_RH[wanted_B]
        x_RH = self.o(o_RF).add_(residual_RH)
        return self.down(swiglu(self.gate_up(self.post_norm(x_RH)))).add_(x_RH)

    def joined(self, e_RH: Tensor, x_RH: Tensor) -> tuple[Tensor, Tensor]:
        """What attention's projections read, and the residual stream."""
        if self.hidden_norm is None:
            return self.input_norm(x_RH), x_RH
        hidden_RH = self.hidden_norm(x_RH)
        return torch.cat([self.input_norm(e_RH), hidden_RH], -1), hidden_RH if self.normed else x_RH

    def bytes(self) -> int:
        return self.qkv.bytes() + self.o.bytes() + self.gate_up.bytes() + self.down.bytes()


class Eagle3Model:
    """Weights and formulas of the head; rows, caches and sampling are the drafter's.

    taps: indices of the target's hidden_states that `fuse` takes. id_D: target ids of the draft vocabulary, int64,
    ascending; None where it is the whole vocabulary. config: sizes of its decoder layers. A `feature.FeatureHead`.
    """

    reads_hidden = False

    def __init__(
        self, config: Eagle3Config, source: WeightSource, target: Any, id_D: Tensor | None, *, rounded: bool = False
    ) -> None:
        """target: the target model; embedding and head that the checkpoint leaves out, or repeats, are its own.

        rounded: matrices get 8 bits, beside a target whose own are packed.
        """
        self.device, self.dtype, self.taps, self.id_D = target.device, target.dtype, config.taps, id_D
        names, eps = source.names(), config.layers.rms_norm_eps
        c = replace(config.layers, qk_norm="layers.0.self_attn.q_norm.weight" in names)
        self.config, self.feeds_norm = c, config.feeds_norm
        self.vocab_size = c.vocab_size
        self.rounded = rounded
        weights = WeightBuilder(source, device=self.device, dtype=self.dtype, rounded=rounded)
        wide = config.target_hidden_size * len(config.taps)
        self.tap_norms, self.input_norm = _feature_norms(weights, names, config, eps)
        self.fc = weights.linear("fc", c.hidden_size, wide, bias="fc.bias" in names)
        self.layers = [
            EagleLayer(
                c, weights, i, wide=i == 0 or f"layers.{i}.hidden_norm.weight" in names,
                normed=config.norm_before_residual,
            )
            for i in range(c.num_layers)
        ]  # fmt: skip
        self.norm = weights.norm("norm.weight", c.hidden_size, eps)
        self.embed = _embedding(weights, names, config, target)
        self.head = _head(weights, names, config, target, self.id_D, rounded)
        weights.finish(_DERIVED)

    def rotary(self, positions: int) -> RotaryTable:
        """Angles for `positions` positions: the head runs as far as the target, whatever length it was trained on."""
        return RotaryTable(self.config.rope, self.config.head_dim, positions, device=self.device, dtype=self.dtype)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """g [R, H] from the target's features [R, Ht], in the order of `taps`."""
        if self.tap_norms:
            taps = [norm(tap_RH) for norm, tap_RH in zip(self.tap_norms, taps, strict=True)]
        joined = torch.cat(list(taps), -1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def forward(
        self,
        token_R: Tensor,
        x_RH: Tensor,
        pos_R: Tensor,
        rotary: RotaryTable,
        attn: AttentionContext,
        wanted_B: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What the next step reads [R, H], and what the head reads [R, H]. x_RH: g, or the last step's state."""
        e_RH = self.embed(token_R)
        cos, sin = rotary.at(pos_R)
        for layer in self.layers:
            x_RH = layer.forward(e_RH, x_RH, rotary, cos, sin, attn, wanted_B if layer is self.layers[-1] else None)
        normed_RH = self.norm(x_RH)
        return normed_RH if self.feeds_norm else x_RH, normed_RH

    def logits(self, normed_RH: Tensor) -> Tensor:
        """Logits [R, D] over the draft vocabulary: float64 for a float64 model, else float32."""
        logits_RD = self.head(normed_RH)
        return logits_RD if logits_RD.dtype == torch.float64 else logits_RD.float()

    def fused(self, kv: KVPages, workspace: Workspace, *, positions: int, first_cell: int) -> FusedPass | None:
        from slipstream.draft.eagle3_fused import FusedHead

        if not FusedHead.fits(self):
            return None
        return FusedHead(self, kv, workspace, positions=positions, first_cell=first_cell, pdl=True)

    def pass_bytes(self) -> int:
        """Bytes of weights that one draft pass streams."""
        return sum(layer.bytes() for layer in self.layers) + self.head.bytes()

    def fuse_bytes(self) -> int:
        """Bytes of weights that fusing features streams."""
        return self.fc.bytes()


def load_eagle3(
    folder: Path, values: Mapping[str, Any], target: Any, *, seed: int | None = None, rounded: bool = False
) -> Eagle3Model:
    """The head in `folder`, whose config.json holds `values`, in the target's type and on its device.

    seed: random weights with it instead of the folder's, in the official layout. rounded: to 8 bits.
    Raises ModelLoadError that names a missing, extra or misshapen tensor, ConfigError for a key that does not fit.
    """
    config = parse_eagle3(values, target.config)
    if seed is not None:
        return dummy_eagle3(config, target, seed=seed, rounded=rounded)
    with torch.inference_mode():
        table = TensorTable(read_tensors(folder), _canonical)
        return Eagle3Model(config, table, target, draft_ids(table, config, target.device), rounded=rounded)


def dummy_eagle3(config: Eagle3Config, target: Any, *, seed: int, rounded: bool = False) -> Eagle3Model:
    """A head of random weights in the official layout; its draft vocabulary is the lowest ids."""
    small, device = config.draft_vocab_size, target.device
    with torch.inference_mode():
        id_D = None if small == config.layers.vocab_size else torch.arange(small, device=device)
        tensors = DummyTensors(_official_shapes(config), seed=seed, device=device)
        return Eagle3Model(config, tensors, target, id_D, rounded=rounded)


def _official_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """The weights of an official head of one layer that leaves the embedding to the target."""
    c = config.layers
    h, p = c.hidden_size, "layers.0."
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, config.target_hidden_size * len(config.taps))}
    shapes |= dict.fromkeys(
        [p + f"{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")], (h,)
    )
    shapes |= {p + f"self_attn.{x}_proj.weight": (c.q_size if x == "q" else c.kv_size, 2 * h) for x in "qkv"}
    shapes |= {p + "self_attn.o_proj.weight": (h, c.q_size), p + "mlp.down_proj.weight": (h, c.intermediate_size)}
    shapes |= {p + f"mlp.{x}_proj.weight": (c.intermediate_size, h) for x in ("gate", "up")}
    shapes |= {"norm.weight": (h,), "lm_head.weight": (config.draft_vocab_size, h)}
    if h != config.target_hidden_size:
        shapes["embed_tokens.weight"] = (c.vocab_size, h)
    return shapes


def _canonical(name: str) -> str:
    """One name for each tensor: no `model.` before it, and `layers.0.` for EAGLE's `midlayer.`."""
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def draft_ids(table: TensorTable, config: Eagle3Config, device: torch.device) -> Tensor | None:
    """Target ids of the draft vocabulary [D] from d2t (id = d + d2t[d]) or t2d (a mask over the vocabulary)."""
    draft_vocab, vocab = config.draft_vocab_size, config.layers.vocab_size
    offset_D, mask_V = table.take("d2t"), table.take("t2d")
    mask_V = None if mask_V is None else mask_V.to(torch.bool)
    if offset_D is None and mask_V is None:
        if draft_vocab != vocab:
            raise ModelLoadError(f"draft_vocab_size={draft_vocab} of {vocab} needs the tensor 'd2t', which is missing")
        return None
    if mask_V is not None and tuple(mask_V.shape) != (vocab,):
        raise ModelLoadError(f"tensor 't2d' has shape {list(mask_V.shape)}; the vocabulary needs [{vocab}]")
    if offset_D is None:
        assert mask_V is not None
        id_D = mask_V.nonzero()[:, 0]
    else:
        id_D = offset_D.to(torch.int64)
        if tuple(id_D.shape) == (draft_vocab,):
            id_D = id_D + torch.arange(draft_vocab)
    if tuple(id_D.shape) != (draft_vocab,):
        name = "t2d" if offset_D is None else "d2t"
        raise ModelLoadError(f"tensor {name!r} names {list(id_D.shape)} ids; draft_vocab_size is {draft_vocab}")
    if int(id_D.min()) < 0 or int(id_D.max()) >= vocab:
        raise ModelLoadError(f"tensor 'd2t' leads to ids {int(id_D.min())} to {int(id_D.max())}; there are {vocab}")
    if id_D.unique().numel() != draft_vocab:
        raise ModelLoadError("tensor 'd2t' leads to the same id twice")
    if mask_V is not None and not bool(mask_V[id_D].all() & (mask_V.sum() == draft_vocab)):
        raise ModelLoadError("tensors 'd2t' and 't2d' name different ids")
    return None if draft_vocab == vocab and bool((id_D == torch.arange(vocab)).all()) else id_D.to(device)


def _feature_norms(
    weights: WeightBuilder, names: set[str], config: Eagle3Config, eps: float
) -> tuple[list[RMSNorm], RMSNorm | None]:
    """Norms of each feature (EAGLE-3.1 `fc_norm.i`), and the one over all of them (`input_norm`), where they exist."""
    size, count = config.target_hidden_size, len(config.taps)
    each = [f"fc_norm.{i}.weight" for i in range(count)]
    tap_norms = [weights.norm(name, size, eps) for name in each] if each[0] in names else []
    for name in ("input_norm.weight", "fc_norm.weight"):
        if name in names:
            return tap_norms, weights.norm(name, size * count, eps)
    return tap_norms, None


def _embedding(weights: WeightBuilder, names: set[str], config: Eagle3Config, target: Any) -> Any:
    c = config.layers
    if "embed_tokens.weight" not in names and c.hidden_size == config.target_hidden_size:
        return target.embed
    own = weights.embedding("embed_tokens.weight", c.vocab_size, c.hidden_size, tied=False)
    theirs = target.embed
    if isinstance(own, Embedding) and isinstance(theirs, Embedding) and _same(own.table_VH, theirs.table_VH):
        return theirs
    return own


def _head(
    weights: WeightBuilder, names: set[str], config: Eagle3Config, target: Any, id_D: Tensor | None, rounded: bool
) -> Linear:
    c = config.layers
    if "lm_head.weight" not in names and c.hidden_size == config.target_hidden_size:
        return target.head if id_D is None else _rows_of(target.head, id_D, rounded)
    own = weights.linear("lm_head", config.draft_vocab_size, c.hidden_size, bias="lm_head.bias" in names)
    if isinstance(own, Dense) and own.bias_N is None and isinstance(target.head, Dense) and id_D is None:
        if target.head.bias_N is None and _same(own.weight_NK, target.head.weight_NK):
            return target.head
    return own


def _same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and torch.equal(ours, theirs)


def _rows_of(head: Linear, id_D: Tensor, rounded: bool) -> Linear:
    """The target's head for some of its tokens; rounded: with 8 bits."""
    if isinstance(head, Dense):
        return Dense(head.weight_NK[id_D], None if head.bias_N is None else head.bias_N[id_D])
    if isinstance(head, PackedInt8):
        rows_DH = head.rows(id_D)
        return Int8Rows.round(rows_DH) if rounded and Int8Rows.fits(rows_DH.shape[1]) else Dense(rows_DH)
    raise ConfigError("the draft has no lm_head.weight, and rows of the model's packed head cannot be taken")
