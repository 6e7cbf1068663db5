"""The multi-token prediction head that comes with a model (DeepSeek-V3, arXiv 2412.19437, section 2.2; Qwen3-Next).

x = fc([norm_e(embedding of token i + 1), norm_h(h_i)]), then one full-attention layer of the target's architecture,
then the head's norm. h_i is the target's hidden state after its final norm; what the head gives, after its own norm,
takes its place when the head feeds on itself. Embedding and output head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from slipstream.attention.protocol import AttentionContext
from slipstream.draft.checkpoint import PartOf, TensorTable, read_tensors, tensor_names
from slipstream.errors import ConfigError, ModelLoadError, UnsupportedError
from slipstream.kernels.eagle import join_norms
from slipstream.models.config import FULL, ModelConfig
from slipstream.models.dummy import DummyTensors, decoder_shapes
from slipstream.models.layers import Embedding
from slipstream.models.loader import fp8_block
from slipstream.models.rope import RotaryTable, parse_rope
from slipstream.models.safetensors_io import SafetensorsWeights
from slipstream.models.weights import WeightBuilder, WeightSource

if TYPE_CHECKING:
    from slipstream.draft.feature import FusedPass
    from slipstream.kernels.workspace import Workspace
    from slipstream.memory.kv import KVPages

_TABLES = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
"""Copies of the target's tables that a folder of its own may hold: the head uses the target's."""
_ROPE = ("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor")
_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


class Layout(NamedTuple):
    """Names of a checkpoint's tensors; prefix: before `layers.0.`"""

    prefix: str
    fc: str
    embed_norm: str
    hidden_norm: str
    norm: str
    embed: str


QWEN = Layout(
    prefix="mtp.", fc="mtp.fc", embed_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight", norm="mtp.norm.weight", embed="mtp.embed_tokens.weight",
)  # fmt: skip
SPECULATORS = Layout(
    prefix="mtp_", fc="mtp_layers.0.input_proj", embed_norm="mtp_layers.0.token_layernorm.weight",
    hidden_norm="mtp_layers.0.hidden_layernorm.weight", norm="mtp_layers.0.final_layernorm.weight",
    embed="mtp_embed_tokens.weight",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """layer: the sizes of the head's one decoder layer, with experts where the target has some. own_embedding: it has a
    table of its own."""

    layer: ModelConfig
    own_embedding: bool = False


def parse_mtp(values: Mapping[str, Any], target: ModelConfig) -> MTPConfig:
    """From a `config.json`: the target's own, or one of a head alone, where what is not said is as in the target.

    Raises ConfigError that names a key which does not fit the target, UnsupportedError for several layers.
    """
    inner = values.get("transformer_layer_config", values.get("text_config"))
    values = {**values, **inner} if isinstance(inner, Mapping) else values
    for key, ours in (("vocab_size", target.vocab_size), ("hidden_size", target.hidden_size)):
        theirs = values.get(key, ours)
        if theirs != ours:
            raise ConfigError(f"the MTP head was made for {key}={theirs}; the model has {ours}")
    for key in _COUNTS:
        count = values.get(key, 1)
        if type(count) is not int or count < 0:
            raise ModelLoadError(f"{key}={count!r} must be a whole number")
        if count == 0:
            raise ConfigError(f"{key}=0: this model comes without an MTP head; leave draft='mtp' out")
        if count > 1:
            raise UnsupportedError(f"{key}={count}: MTP heads of one layer are supported, not of several")
    own = values.get("mtp_use_dedicated_embeddings", False)
    if type(own) is not bool:
        raise ModelLoadError(f"mtp_use_dedicated_embeddings={own!r} must be true or false")
    sizes = {
        name: values[key]
        for key, name in (
            ("num_attention_heads", "num_heads"), ("num_key_value_heads", "num_kv_heads"), ("head_dim", "head_dim"),
            ("intermediate_size", "intermediate_size"),
        )
        if values.get(key) is not None
    }  # fmt: skip
    eps = values.get("rms_norm_eps", target.rms_norm_eps)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise ModelLoadError(f"rms_norm_eps={eps!r} must be a number")
    kinds = (FULL,) if target.layer_types else ()
    experts = None if target.experts is None else replace(target.experts, layers=(0,))
    layer = replace(
        target, num_layers=1, layer_types=kinds, delta=None, experts=experts, rms_norm_eps=float(eps), **sizes
    )
    if any(values.get(key) is not None for key in _ROPE):
        layer = replace(layer, rope=parse_rope(values, layer.head_dim, target.max_position_embeddings))
    return MTPConfig(layer=layer, own_embedding=own)


class MTPModel:
    """Weights and formulas of the head. A `feature.FeatureHead`."""

    taps: tuple[int, ...] = ()
    reads_hidden = True
    id_D: Tensor | None = None

    def __init__(self, config: MTPConfig, source: WeightSource, target: Any, layout: Layout = QWEN) -> None:
        """target: the model it predicts for; its class makes the layer, its embedding and output head are used."""
        make, self.fusable = getattr(type(target), "block", None), getattr(type(target), "fusable", False)
        if make is None:
            raise UnsupportedError(f"an MTP head needs layers that {type(target).__name__} does not offer")
        self.device, self.dtype = target.device, target.dtype
        c = replace(config.layer, prefix=layout.prefix)
        self.config, self.vocab_size = c, c.vocab_size
        h, norms = c.hidden_size, (c.hidden_size, c.rms_norm_eps, c.norm_offset)
        weights = WeightBuilder(source, device=self.device, dtype=self.dtype)
        self.embed_norm = weights.norm(layout.embed_norm, *norms)
        self.hidden_norm = weights.norm(layout.hidden_norm, *norms)
        self.fc = weights.linear(layout.fc, h, 2 * h)
        self.block = make(c, weights, 0)
        self.norm = weights.norm(layout.norm, *norms)
        own = config.own_embedding
        self.embed = weights.embedding(layout.embed, c.vocab_size, h, tied=False) if own else target.embed
        self.head = target.head
        weights.finish()

    def rotary(self, positions: int) -> RotaryTable:
        return RotaryTable(self.config.rope, self.config.head_dim, positions, device=self.device, dtype=self.dtype)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """The target's hidden states [R, H] as they are: `forward` reads them and the head's own alike."""
        (hidden_RH,) = taps
        return hidden_RH

    def forward(
        self,
        token_R: Tensor,
        x_RH: Tensor,
        pos_R: Tensor,
        rotary: RotaryTable,
        attn: AttentionContext,
        wanted_B: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [R, H] after the head's norm, for the next step and for `logits`. x_RH: those of the last."""
        cos, sin = rotary.at(pos_R)
        x_RH = self.block.forward(self.fc(self._joined(token_R, x_RH)), rotary, cos, sin, attn)
        normed_RH = self.norm(x_RH if wanted_B is None else x_RH[wanted_B])
        return normed_RH, normed_RH

    def _joined(self, token_R: Tensor, x_RH: Tensor) -> Tensor:
        """What `fc` reads [R, 2 H]: on a GPU in one launch."""
        if x_RH.is_cuda and isinstance(self.embed, Embedding):
            gains = (self.embed_norm.weight, self.hidden_norm.weight)
            joined_RF: Tensor
            joined_RF, _ = join_norms(token_R, self.embed.table_VH, x_RH, *gains, self.config.rms_norm_eps)
            return joined_RF
        return torch.cat([self.embed_norm(self.embed(token_R)), self.hidden_norm(x_RH)], -1)

    def logits(self, normed_RH: Tensor) -> Tensor:
        """[R, V], float64 for a float64 model, else float32."""
        logits_RV: Tensor = self.head(normed_RH)
        return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()

    def fused(self, kv: KVPages, workspace: Workspace, *, positions: int, first_cell: int) -> FusedPass | None:
        from slipstream.draft.mtp_fused import FusedMTP

        if not FusedMTP.fits(self):
            return None
        return FusedMTP(self, kv, workspace, positions=positions, first_cell=first_cell, pdl=True)

    def pass_bytes(self) -> int:
        return int(self.fc.bytes() + self.block.bytes() + self.head.bytes())

    def fuse_bytes(self) -> int:
        return 0


def load_mtp(folder: Path, values: Mapping[str, Any], target: Any, *, seed: int | None = None) -> MTPModel:
    """The head in `folder`: the target's own checkpoint, or one that holds nothing else. values: its config.json.

    seed: random weights with it instead. Raises ModelLoadError that names a missing, extra or misshapen tensor, one
    that is not finite, or the folder where it has no head; UnsupportedError for layouts that are known but not built.
    """
    config = parse_mtp(values, target.config)
    with torch.inference_mode():
        if seed is not None:
            offset, shapes = config.layer.norm_offset, mtp_shapes(config)
            return MTPModel(config, DummyTensors(shapes, seed=seed, device=target.device, offset=offset), target)
        source = _source(folder, values)
        layout = _layout(source.names(), folder)
        if layout.prefix + "layers.0.mlp.gate.weight" not in source.names():
            config = replace(config, layer=replace(config.layer, experts=None))
        elif config.layer.experts is None:
            raise UnsupportedError("the MTP layer is a mixture of experts, and the model's layers are not")
        return MTPModel(config, PartOf(source, lambda name: _belongs(name, source.names(), layout)), target, layout)


def mtp_shapes(config: MTPConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a head in the Qwen layout."""
    c = replace(config.layer, prefix=QWEN.prefix)
    h, shapes = c.hidden_size, decoder_shapes(c)
    layer = {name: shape for name, shape in shapes.items() if name.startswith(QWEN.prefix + "layers.")}
    own = {QWEN.embed: (c.vocab_size, h)} if config.own_embedding else {}
    norms = dict.fromkeys((QWEN.embed_norm, QWEN.hidden_norm, QWEN.norm), (h,))
    return {QWEN.fc + ".weight": (h, 2 * h), **norms, **layer, **own}


def _source(folder: Path, values: Mapping[str, Any]) -> WeightSource:
    if tensor_names(folder):
        return SafetensorsWeights(folder, fp8_block=fp8_block(values.get("quantization_config")))
    return TensorTable(read_tensors(folder))


def _layout(names: set[str], folder: Path) -> Layout:
    if any(name.startswith("mtp_layers.") for name in names):
        return SPECULATORS
    if any(name.startswith("mtp.0.") for name in names):
        raise UnsupportedError("MTP heads in the layout of DeepSeek-V4 (mtp.0.*) are not supported, Qwen's are")
    if any(name.startswith(QWEN.prefix) for name in names):
        return QWEN
    deepseek = next((name for name in sorted(names) if name.endswith("eh_proj.weight")), None)
    if deepseek is not None:
        raise UnsupportedError(f"MTP heads in the layout of DeepSeek-V3 ({deepseek}) are not supported, Qwen's are")
    raise ModelLoadError(f"{folder} holds no MTP head: it has no tensors mtp.*")


def _belongs(name: str, names: set[str], layout: Layout) -> bool:
    """A model's checkpoint holds the model besides; one of the head alone may repeat the target's tables."""
    if any(n.startswith(("model.layers.", "model.language_model.")) for n in names):
        return name.startswith(layout.prefix)
    return name not in _TABLES
