"""`ModelConfig`: what a checkpoint says about itself, from a Hugging Face `config.json` or GGUF metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import ModelLoadError, UnsupportedError
from slipstream.models.rope import RopeConfig, parse_rope, rope_values

GEMMA3 = "Gemma3ForCausalLM"

# Names for configs that carry only `model_type`.
_BY_MODEL_TYPE = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
_HYBRID = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3NextForCausalLM")
FULL, WINDOW, DELTA = "full_attention", "sliding_attention", "linear_attention"
_DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Gated delta net layers (arXiv 2412.06464): heads and sizes of keys and values, taps of the convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "conv"):
            if getattr(self, name) < 1:
                raise ModelLoadError(f"model config: {name}={getattr(self, name)} of the delta layers must be above 0")
        if self.value_heads % self.key_heads:
            raise ModelLoadError(
                f"model config: linear_num_value_heads={self.value_heads} is not a multiple of "
                f"linear_num_key_heads={self.key_heads}"
            )

    @property
    def keys(self) -> int:
        """Channels of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """What the convolution runs over: queries, keys, values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Layers of experts: how many there are, how many a row takes, their inner size and that of the shared one.

    renormed: the chosen ones' weights sum to 1. layers: those that have experts.
    """

    number: int
    chosen: int
    size: int
    shared_size: int
    renormed: bool
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("number", "chosen", "size", "shared_size"):
            if getattr(self, name) < 1:
                raise ModelLoadError(f"model config: {name}={getattr(self, name)} of the experts must be above 0")
        if self.chosen > self.number:
            raise ModelLoadError(f"model config: num_experts_per_tok={self.chosen} is above num_experts={self.number}")


@dataclass(frozen=True, kw_only=True)
class VisionTokens:
    """Ids that stand for a piece of an image and of a video, and how many patches wide and high a piece is."""

    image: int
    video: int
    merge: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and options of one decoder-only model.

    Names are Hugging Face's. torch_dtype: the stored element type by name, None when the config is silent.
    qkv_bias, o_bias, mlp_bias: those projections add a bias. qk_norm: RMSNorm per head on q and k before
    RoPE. eos_ids: the ids that end a sequence, those of `generation_config` where it names any.
    quantization: the checkpoint's `quantization_config`, or None. prefix: of the decoder's tensors. norm_offset: added
    to the stored gains of norms. output_gate: q_proj holds a gate beside each query. layer_types: FULL, WINDOW or DELTA
    of each layer, empty where all are FULL. delta: the sizes of those. experts: of layers that have them. mtp_layers:
    prediction layers behind the last.
    window: in WINDOW layers a token sees itself and the window - 1 tokens before it. rope_local: rotary positions of
    those layers, where they have their own. embedding_scale: embeddings are multiplied by it. query_scalar: attention
    scores are divided by its root; 0: by that of the head size. sandwich_norms: the results of attention and of the
    MLP are normed too.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    prefix: str = "model."
    norm_offset: float = 0.0
    output_gate: bool = False
    layer_types: tuple[str, ...] = ()
    delta: DeltaConfig | None = None
    experts: ExpertsConfig | None = None
    mtp_layers: int = 0
    bos_token_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    torch_dtype: str | None = None
    quantization: Mapping[str, Any] | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    window: int = 0
    rope_local: RopeConfig | None = None
    embedding_scale: float = 1.0
    query_scalar: float = 0.0
    sandwich_norms: bool = False
    vision: VisionTokens | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "intermediate_size", "max_position_embeddings",
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise ModelLoadError(f"model config: {name}={value!r} must be a whole number above 0")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"model config: num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"model config: head_dim={self.head_dim} must be even for rotary positions")
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps > 0):
            raise ModelLoadError(f"model config: rms_norm_eps={self.rms_norm_eps} must be above 0")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that keep keys and values, in order; a layer's place among them is its place in the cache."""
        kinds = self.layer_types or (FULL,) * self.num_layers
        return tuple(i for i, kind in enumerate(kinds) if kind != DELTA)

    @property
    def windows(self) -> tuple[int, ...]:
        """Of each of `kv_layers`: its window, 0 where it sees everything before it."""
        windowed = [bool(self.layer_types) and self.layer_types[i] == WINDOW for i in self.kv_layers]
        return tuple(self.window if w else 0 for w in windowed)

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """The layers with a recurrent state, in order."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == DELTA)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelLoadError when missing, empty, not JSON or not an object."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ModelLoadError(f"{path} cannot be read: {_first_line(e)}") from None
    if not text.strip():
        raise ModelLoadError(f"{path} is empty")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ModelLoadError(f"{path} is not valid JSON: {_first_line(e)}") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


def read_hf_config(folder: Path) -> ModelConfig:
    """ModelConfig of an HF directory: `config.json`, and `generation_config.json` where there is one."""
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return parse_hf_config(read_json(folder / "config.json"), generation)


def parse_hf_config(values: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """ModelConfig from the values of a `config.json`.

    Raises ModelLoadError for a missing or senseless key, UnsupportedError for an option that is known by
    name but not built (sliding windows, other activations, other rotary scalings).
    """
    if not values:
        raise ModelLoadError("the model config is empty; it needs at least architectures and the layer sizes")
    generation = dict(generation or {})
    arch = architecture_of(values)
    vision = _vision(values)
    values = text_part(values)
    hidden = _int(values, "hidden_size")
    heads = _int(values, "num_attention_heads")
    max_positions = _int(values, "max_position_embeddings", 2048)
    _check_activation(values, arch)
    layers = _int(values, "num_hidden_layers")
    head_dim = values.get("head_dim")
    if head_dim is None:
        if heads < 1 or hidden % heads:
            raise ModelLoadError(f"model config: hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
        head_dim = hidden // heads
    attention_bias = bool(values.get("attention_bias", False))
    hybrid = arch in _HYBRID
    window, kinds = (0, ()) if hybrid else _windows(values, arch, layers, max_positions)
    rope = parse_rope(rope_values(values, FULL), head_dim, max_positions)
    rope.turned(head_dim)
    if rope.partial != 1.0 and not hybrid:
        raise UnsupportedError(f"partial_rotary_factor={rope.partial} is not supported for {arch}; only 1.0 is")
    eos = generation.get("eos_token_id", values.get("eos_token_id"))
    bos = values.get("bos_token_id", generation.get("bos_token_id"))
    return ModelConfig(
        architecture=arch,
        vocab_size=_int(values, "vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_int(values, "num_key_value_heads", heads),
        head_dim=_whole("head_dim", head_dim),
        intermediate_size=_int(values, "intermediate_size"),
        rms_norm_eps=_float(values, "rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=max_positions,
        tie_word_embeddings=bool(values.get("tie_word_embeddings", arch == GEMMA3)),
        qkv_bias=True if arch == "Qwen2ForCausalLM" else attention_bias,
        o_bias=False if arch == "Qwen2ForCausalLM" else attention_bias,
        mlp_bias=arch == "LlamaForCausalLM" and bool(values.get("mlp_bias", False)),
        qk_norm=hybrid or arch in ("Qwen3ForCausalLM", GEMMA3),
        prefix="model.language_model." if arch.endswith("ForConditionalGeneration") else "model.",
        norm_offset=1.0 if hybrid or arch == GEMMA3 else 0.0,
        output_gate=hybrid and bool(values.get("attn_output_gate", True)),
        layer_types=_layer_types(values) if hybrid else kinds,
        window=window if WINDOW in kinds else 0,
        delta=_delta(values) if hybrid else None,
        experts=_experts(values) if hybrid else None,
        mtp_layers=_int(values, "mtp_num_hidden_layers", 0),
        vision=vision,
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_ids=_ids(eos),
        torch_dtype=_dtype_name(values),
        quantization=values.get("quantization_config"),
        generation=generation,
        **(_gemma3(values, hidden, head_dim, max_positions) if arch == GEMMA3 else {}),
    )


def _gemma3(values: Mapping[str, Any], hidden: int, head_dim: int, max_positions: int) -> dict[str, Any]:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if values.get(name) is not None:
            raise UnsupportedError(f"{name}={values[name]!r} is not supported; only null is")
    if values.get("use_bidirectional_attention"):
        raise UnsupportedError("use_bidirectional_attention=true is not supported: a decoder sees what is before it")
    scalar = _float(values, "query_pre_attn_scalar", 256.0)
    if not 0 < scalar < math.inf:
        raise ModelLoadError(f"model config: query_pre_attn_scalar={scalar} must be above 0")
    return {
        "rope_local": parse_rope(rope_values(values, WINDOW), head_dim, max_positions),
        "embedding_scale": hidden**0.5,
        "query_scalar": scalar,
        "sandwich_norms": True,
    }


def architecture_of(values: Mapping[str, Any]) -> str:
    """The architecture name in a `config.json`; whether it can be run is the registry's to say."""
    names = values.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    kind = values.get("model_type")
    if isinstance(kind, str) and kind:
        return _BY_MODEL_TYPE.get(kind, kind)
    raise ModelLoadError("the model config names no architecture: it has neither architectures nor model_type")


def _vision(values: Mapping[str, Any]) -> VisionTokens | None:
    part = values.get("vision_config")
    if not isinstance(part, Mapping) or values.get("image_token_id") is None:
        return None
    merge = _int(part, "spatial_merge_size", 1)
    if merge < 1:
        raise ModelLoadError(f"model config: spatial_merge_size={merge} must be above 0")
    return VisionTokens(image=_int(values, "image_token_id"), video=_int(values, "video_token_id", -1), merge=merge)


def text_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of the language model in a `config.json` that describes an encoder beside it."""
    part = values.get("text_config")
    if part is None:
        return values
    if not isinstance(part, Mapping):
        raise ModelLoadError(f"model config: text_config={part!r} must be an object")
    shared = ("tie_word_embeddings", "quantization_config", "eos_token_id", "bos_token_id", "dtype", "torch_dtype")
    return {**{name: values[name] for name in shared if name in values}, **part}


def _layer_types(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The kind of each layer; without a list every `full_attention_interval`-th is full attention."""
    layers = _int(values, "num_hidden_layers")
    if values.get("layer_types") is None:
        every = _int(values, "full_attention_interval", 4)
        if every < 1:
            raise ModelLoadError(f"model config: full_attention_interval={every} must be above 0")
        return tuple(DELTA if (i + 1) % every else FULL for i in range(layers))
    return _kinds(values, layers, (FULL, DELTA))


def _experts(values: Mapping[str, Any]) -> ExpertsConfig | None:
    number, dense = _int(values, "num_experts", 0), values.get("mlp_only_layers") or []
    step = _int(values, "decoder_sparse_step", 1)
    if not isinstance(dense, list) or step < 1:
        raise ModelLoadError(
            f"model config: mlp_only_layers={dense!r} must be a list, decoder_sparse_step={step} above 0"
        )
    layers = tuple(i for i in range(_int(values, "num_hidden_layers")) if i not in dense and (i + 1) % step == 0)
    if not number or not layers:
        return None
    return ExpertsConfig(
        number=number,
        chosen=_int(values, "num_experts_per_tok"),
        size=_int(values, "moe_intermediate_size"),
        shared_size=_int(values, "shared_expert_intermediate_size"),
        renormed=bool(values.get("norm_topk_prob", True)),
        layers=layers,
    )


def _delta(values: Mapping[str, Any]) -> DeltaConfig:
    return DeltaConfig(
        key_heads=_int(values, "linear_num_key_heads"),
        value_heads=_int(values, "linear_num_value_heads"),
        key_dim=_int(values, "linear_key_head_dim"),
        value_dim=_int(values, "linear_value_head_dim"),
        conv=_int(values, "linear_conv_kernel_dim", 4),
    )


def _check_activation(values: Mapping[str, Any], arch: str) -> None:
    name, known = ("hidden_activation", ("gelu_pytorch_tanh",)) if arch == GEMMA3 else ("hidden_act", ("silu", "swish"))
    act = values.get(name, known[0])
    if act not in known:
        raise UnsupportedError(f"{name}={act!r} is not supported; the known one is {known[0]!r}")


def _windows(values: Mapping[str, Any], arch: str, layers: int, max_positions: int) -> tuple[int, tuple[str, ...]]:
    """The window, and FULL or WINDOW of each layer: those that `layer_types` names, or the architecture's pattern.

    (0, ()) where no layer has one. A window that no sequence outgrows only counts where such layers differ otherwise.
    Raises ModelLoadError for one below 1, or for layer types that do not fit the layers.
    """
    window = values.get("sliding_window", 4096 if arch == GEMMA3 else None)
    default_use = not arch.startswith("Qwen")  # Qwen writes a window beside use_sliding_window=false
    if window is None or not values.get("use_sliding_window", default_use):
        return 0, ()
    if _whole("sliding_window", window) < 1:
        raise ModelLoadError(
            f"model config: sliding_window={window} must be at least 1 (a token sees itself), or null for no window"
        )
    if window >= max_positions and arch != GEMMA3:
        return 0, ()
    if values.get("layer_types") is not None:
        return window, _kinds(values, layers, (FULL, WINDOW))
    if arch == GEMMA3:
        every = _int(values, "sliding_window_pattern", 6)
        if every < 1:
            raise ModelLoadError(f"model config: sliding_window_pattern={every} must be at least 1")
        return window, tuple(WINDOW if (i + 1) % every else FULL for i in range(layers))
    first = _int(values, "max_window_layers", 28) if arch.startswith("Qwen") else 0
    return window, tuple(FULL if i < first else WINDOW for i in range(layers))


def _kinds(values: Mapping[str, Any], layers: int, known: tuple[str, ...]) -> tuple[str, ...]:
    kinds = values.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(k, str) for k in kinds):
        raise ModelLoadError(f"model config: layer_types must name a kind for each of the {layers} layers")
    for kind in kinds:
        if kind not in known:
            raise UnsupportedError(f"layer_types has {kind!r}; the known kinds are {', '.join(map(repr, known))}")
    return tuple(kinds)


def _dtype_name(values: Mapping[str, Any]) -> str | None:
    name = values.get("dtype", values.get("torch_dtype"))
    if name is None:
        return None
    short = str(name).removeprefix("torch.")
    if short not in _DTYPES:
        raise UnsupportedError(f"torch_dtype={name!r} is not supported; the known ones are {', '.join(_DTYPES)}")
    return short


def _ids(value: Any) -> tuple[int, ...]:
    items = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(i for i in items if isinstance(i, int) and not isinstance(i, bool)))


def _int(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name)
    if value is None:
        if default is None:
            raise ModelLoadError(f"the model config lacks {name!r}")
        return default
    return _whole(name, value)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelLoadError(f"model config: {name}={value!r} must be a whole number")
    return value


def _float(values: Mapping[str, Any], name: str, default: float) -> float:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelLoadError(f"model config: {name}={value!r} must be a number")
    return float(value)


def _first_line(e: BaseException) -> str:
    return (str(e) or type(e).__name__).splitlines()[0]
