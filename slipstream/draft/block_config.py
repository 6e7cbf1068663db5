"""What a DFlash or DSpark checkpoint says about itself, and whether it fits the target.

Sources: DFlash (arXiv 2602.06036) and its released configs; DSpark as DeepSpec and SpecForge write it. Read:
z-lab (`DFlashDraftModel`, keys in `dflash_config`), DeepSpec (`Qwen3DSparkModel`, flat keys; its `dflash_*_block7`
too, which is DSpark without a Markov head), SpecForge (nested, `projector_type`), speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ConfigError, ModelLoadError, UnsupportedError
from slipstream.models.config import ModelConfig, parse_hf_config

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """shape: the backbone's sizes. block_size: rows of a full block, the anchor first.

    anchor_predicts: the anchor's own row gives the first draft (DSpark: row k predicts anchor + k + 1, block_size
    drafts); else row 0 is unused (DFlash: row k predicts anchor + k, block_size - 1 drafts).
    taps: target layers whose input is read, in order. markov_rank 0: no Markov head. confidence: "none", "plain"
    (the hidden state alone) or "markov" (with the previous token's embedding).
    """

    shape: ModelConfig
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    anchor_predicts: bool
    markov_rank: int = 0
    markov_head: str = "vanilla"
    confidence: str = "none"

    @property
    def max_drafts(self) -> int:
        return self.block_size if self.anchor_predicts else self.block_size - 1

    def rows_for(self, drafts: int) -> int:
        """Rows of a block that yields so many drafts."""
        return drafts if self.anchor_predicts else drafts + 1


def parse_block_config(values: Mapping[str, Any], target: ModelConfig) -> BlockConfig:
    """BlockConfig of a `config.json` for a target. Raises ConfigError, ModelLoadError or UnsupportedError by key."""
    names = values.get("architectures")
    arch = str(names[0]) if isinstance(names, list) and names else ""
    nested = values.get("dflash_config") or values.get("dspark_config") or {}
    if not isinstance(nested, Mapping):
        raise ModelLoadError(f"draft config: dflash_config={nested!r} must be an object")
    speculators = values.get("speculators_model_type")
    inner = values.get("transformer_layer_config") if speculators else None
    shape_values = dict(inner) if isinstance(inner, Mapping) else dict(values)
    both = {**values, **nested}

    def number(key: str, low: int, default: Any = None) -> int:
        value = both.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ModelLoadError(f"draft config: {key}={value!r} must be a whole number of at least {low}")
        return value

    shape_values["architectures"] = ["Qwen3ForCausalLM"]
    layer_types = shape_values.pop("layer_types", None) or []
    if not isinstance(layer_types, list):
        raise ModelLoadError(f"draft config: layer_types={layer_types!r} must be a list")
    sliding = bool(both.get("use_swa")) or any(kind != "full_attention" for kind in layer_types)
    for key, on in (("layer_types / use_swa", sliding), ("causal", both.get("causal")),
                    ("attention_sink_bias", both.get("attention_sink_bias"))):  # fmt: skip
        if on:
            raise UnsupportedError(f"draft config: {key} asks for sliding, causal or sink attention; not supported yet")
    shape_values.pop("sliding_window", None)
    shape_values["use_sliding_window"] = False
    shape = parse_hf_config(shape_values)
    if shape.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft config: vocab_size={shape.vocab_size} is not the target's vocab_size={target.vocab_size}"
        )
    draft_vocab = values.get("draft_vocab_size")
    if draft_vocab not in (None, shape.vocab_size):
        raise UnsupportedError(
            f"draft config: draft_vocab_size={draft_vocab} (a reduced vocabulary) is not supported for block drafters"
        )
    if shape.hidden_size != target.hidden_size:
        raise ConfigError(
            f"draft config: hidden_size={shape.hidden_size} is not the target's hidden_size={target.hidden_size}"
        )
    layers = both.get("num_target_layers", target.num_layers)
    if layers != target.num_layers:
        raise ConfigError(f"draft config: num_target_layers={layers}, but the target has {target.num_layers} layers")
    if speculators:
        anchor_predicts = bool(both.get("sample_from_anchor", speculators == "dspark"))
    else:
        anchor_predicts = "DSpark" in arch or both.get("projector_type") == "dspark"
    block_size = number("block_size", 1 if anchor_predicts else 2)
    mask = number("mask_token_id", 0)
    if mask >= shape.vocab_size:
        raise ConfigError(f"draft config: mask_token_id={mask} is outside the vocabulary of {shape.vocab_size}")
    rank = number("markov_rank", 0, 0)
    head = both.get("markov_head_type", "vanilla")
    if rank and head not in MARKOV_HEADS:
        raise UnsupportedError(f"draft config: markov_head_type={head!r} is not one of {', '.join(MARKOV_HEADS)}")
    confidence = "none"
    if both.get("enable_confidence_head", False):
        with_markov = bool(both.get("confidence_head_with_markov", True))
        if with_markov and not rank:
            raise ConfigError("draft config: confidence_head_with_markov needs markov_rank above 0")
        confidence = "markov" if with_markov else "plain"
    return BlockConfig(
        shape=shape,
        block_size=block_size,
        mask_token_id=mask,
        taps=_taps(both, shape.num_layers, target.num_layers),
        anchor_predicts=anchor_predicts,
        markov_rank=rank,
        markov_head=str(head),
        confidence=confidence,
    )


def default_layer_ids(draft_layers: int, target_layers: int) -> list[int]:
    """DFlash's rule where a config names no layers: evenly from 1 to L - 3."""
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]


def _taps(values: Mapping[str, Any], draft_layers: int, target_layers: int) -> tuple[int, ...]:
    """Target layers whose input is tapped: `target_layer_ids` name outputs (-1: the embedding), speculators' key
    names hidden states."""
    key, shift = "target_layer_ids", 1
    ids = values.get(key)
    if ids is None and values.get("aux_hidden_state_layer_ids") is not None:
        key, shift = "aux_hidden_state_layer_ids", 0
        ids = values[key]
    if ids is None:
        ids = default_layer_ids(draft_layers, target_layers)
    if not isinstance(ids, list) or not ids or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelLoadError(f"draft config: {key}={ids!r} must be a list of layer numbers")
    taps = tuple(i + shift for i in ids)
    for i, tap in zip(ids, taps, strict=True):
        # The last hidden state is normalised already and no layer's input.
        if not 0 <= tap < target_layers:
            raise ConfigError(
                f"draft config: {key} has {i}; a target of {target_layers} layers allows {-shift} to "
                f"{target_layers - 1 - shift}"
            )
    if list(taps) != sorted(set(taps)):
        raise ConfigError(f"draft config: {key}={ids} must rise")
    return taps
