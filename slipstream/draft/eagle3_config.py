"""What an EAGLE-3 checkpoint says about itself: official, SpecForge, speculators and DeepSpec configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ConfigError, ModelLoadError
from slipstream.models.config import ModelConfig, parse_hf_config

# Where layer ids stand in a config, and what is added to them to get Hugging Face's hidden_states[i].
_LAYER_KEYS: tuple[tuple[tuple[str, ...], int], ...] = (
    (("eagle_aux_hidden_state_layer_ids",), 0),
    (("aux_hidden_state_layer_ids",), 0),
    (("eagle_config", "eagle_aux_hidden_state_layer_ids"), 1),
    (("target_layer_ids",), 1),
)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """layers: sizes of the head's decoder layers. taps: target layers whose inputs it reads, in order.

    norm_before_residual: the first layer's residual is the normed feature. feeds_norm: the next step gets the state
    after the final norm instead of before it.
    """

    layers: ModelConfig
    taps: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool
    feeds_norm: bool


def parse_eagle3(values: Mapping[str, Any], target: ModelConfig) -> Eagle3Config:
    """Raises ModelLoadError for a senseless config, ConfigError that names the key where it does not fit the target."""
    inner = values.get("transformer_layer_config")
    speculators = isinstance(inner, Mapping)
    shape = dict(inner if isinstance(inner, Mapping) else values)
    shape["architectures"] = ["LlamaForCausalLM"]
    shape.setdefault("vocab_size", target.vocab_size)
    layers = parse_hf_config(shape)
    if layers.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the EAGLE-3 head was made for vocab_size={layers.vocab_size}; the model has {target.vocab_size}"
        )
    # null is as good as no key: writers leave it so.
    target_hidden = _either(values.get("target_hidden_size"), layers.hidden_size)
    if target_hidden != target.hidden_size:
        key = "target_hidden_size" if values.get("target_hidden_size") is not None else "hidden_size"
        raise ConfigError(f"the EAGLE-3 head was made for {key}={target_hidden}; the model has {target.hidden_size}")
    draft_vocab = _either(values.get("draft_vocab_size"), values.get("truncated_vocab_size"), layers.vocab_size)
    if type(draft_vocab) is not int or not 1 <= draft_vocab <= layers.vocab_size:
        raise ModelLoadError(f"draft_vocab_size={draft_vocab!r} must be from 1 to vocab_size={layers.vocab_size}")
    return Eagle3Config(
        layers=layers,
        taps=tap_layers(values, target.num_layers),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocab,
        norm_before_residual=_flag(values, "norm_before_residual"),
        # SpecForge writes the same key for the norm before the head, which every head has.
        feeds_norm=speculators and _flag(values, "norm_output"),
    )


def _either(*values: Any) -> Any:
    """The first that is not None."""
    return next(value for value in values if value is not None)


def _flag(values: Mapping[str, Any], key: str) -> bool:
    value = values.get(key)
    if value is not None and type(value) is not bool:
        raise ModelLoadError(f"{key}={value!r} must be true or false")
    return bool(value)


def tap_layers(values: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Indices of Hugging Face's hidden_states that a draft config asks for, in order; EAGLE-3's own without a key.

    The last entry of hidden_states is after the final norm and never a feature.
    """
    for path, offset in _LAYER_KEYS:
        ids: Any = values
        for key in path:
            ids = ids.get(key) if isinstance(ids, Mapping) else None
        if ids is None:
            continue
        name = ".".join(path)
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise ModelLoadError(f"{name}={ids!r} must be a list of whole numbers")
        taps = tuple(i + offset for i in ids)
        wrong = [i for i, tap in zip(ids, taps, strict=True) if not 0 <= tap < num_layers]
        if wrong or len(set(taps)) < len(taps):
            raise ConfigError(
                f"{name}={ids} does not fit the model: its {num_layers} layers allow {-offset} to "
                f"{num_layers - 1 - offset}, each once"
            )
        return taps
    taps = (2, num_layers // 2, num_layers - 3)
    if num_layers < 3 or len(set(taps)) < 3:
        raise ConfigError(
            f"the draft config names no layer ids, and EAGLE-3's own (2, L/2, L - 3) need a model of more than "
            f"{num_layers} layers; add eagle_aux_hidden_state_layer_ids"
        )
    return taps
