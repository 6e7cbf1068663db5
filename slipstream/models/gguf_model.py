"""A GGUF file as a model: its metadata as `ModelConfig`, its tensors under Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from slipstream.errors import ModelLoadError, UnsupportedError
from slipstream.models.blocks import Int4Blocks, Int8Blocks
from slipstream.models.config import FULL, GEMMA3, WINDOW, ModelConfig
from slipstream.models.gguf import READABLE, GGUFFile
from slipstream.models.gguf_blocks import INT4, Bytes, dequantize, read_int4, read_int8
from slipstream.models.rope import RopeConfig

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma3": GEMMA3,
}  # fmt: skip
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# What stands behind attention, and around the MLP, has names of its own where results are normed too.
_SANDWICH = {
    **_LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA3_EVERY, _GEMMA3_LOCAL_BASE = 6, 10_000.0
"""llama.cpp's own for files that do not say: every sixth layer sees everything; the rotary base of the others."""
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight"}  # fmt: skip
_ROPE_DIVISORS = "rope_freqs.weight"


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """ModelConfig from a GGUF file's metadata; ModelLoadError names what is missing or unknown."""
    meta, where = file.metadata, file.path.name
    arch = meta.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise ModelLoadError(
            f"{where}: architecture {arch!r} is not supported in GGUF; the known ones are {', '.join(_ARCHITECTURES)}"
        )
    if "token_embd.weight" not in file.tensors:
        raise ModelLoadError(f"{where} lacks the tensor 'token_embd.weight'")

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{key}", default)
        if value is None:
            raise ModelLoadError(f"{where} lacks the metadata key '{arch}.{key}'")
        if isinstance(value, (list, str, bool)):
            raise UnsupportedError(f"{where}: '{arch}.{key}'={value!r:.60} must be one number")
        return value

    hidden, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden // max(heads, 1))
    if get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(f"{where}: attention.value_length must equal key_length={head_dim}")
    if get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedError(f"{where}: rope.dimension_count must equal the head size {head_dim}")
    window = meta.get(f"{arch}.attention.sliding_window")
    context = get("context_length")
    special = _gemma3(get, hidden, head_dim) if arch == "gemma3" else {}
    if window and window < context and not special:
        raise UnsupportedError(
            f"{where}: attention.sliding_window={window} below the context {context} is not supported"
        )
    if meta.get(f"{arch}.expert_count"):
        raise UnsupportedError(
            f"{where}: expert_count={meta[f'{arch}.expert_count']} (mixture of experts) is not supported"
        )
    return ModelConfig(
        architecture=_ARCHITECTURES[arch],
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=get("feed_forward_length"),
        rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope=_rope(file, arch),
        max_position_embeddings=context,
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_ids=_eos(meta),
        torch_dtype=None,
        **special,
    )


def _gemma3(get: Callable[..., Any], hidden: int, head_dim: int) -> dict[str, Any]:
    """What Gemma 3 has beyond the others. The gains in the file are 1 + w already."""
    window, layers = get("attention.sliding_window"), get("block_count")
    every = get("attention.sliding_window_pattern", _GEMMA3_EVERY)
    if not isinstance(window, int) or window < 1 or not isinstance(every, int) or every < 1:
        raise ModelLoadError(
            f"gemma3.attention.sliding_window={window} and sliding_window_pattern={every} must be at least 1"
        )
    kinds = tuple(WINDOW if (i + 1) % every else FULL for i in range(layers))
    # The 27B model alone divides by the root of its hidden size per head; a file does not say so.
    scalar = hidden / get("attention.head_count") if layers == 62 else head_dim
    return {
        "layer_types": kinds,
        "window": window if WINDOW in kinds else 0,
        "rope_local": RopeConfig(theta=float(get("rope.freq_base_swa", _GEMMA3_LOCAL_BASE))),
        "embedding_scale": hidden**0.5,
        "query_scalar": scalar,
        "sandwich_norms": True,
    }


def _eos(meta: dict[str, Any]) -> tuple[int, ...]:
    ids = [meta.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _rope(file: GGUFFile, arch: str) -> RopeConfig:
    meta, prefix = file.metadata, f"{arch}.rope."
    theta = float(meta.get(prefix + "freq_base", 10000.0))
    kind = meta.get(prefix + "scaling.type", "none")
    factor = float(meta.get(prefix + "scaling.factor", 1.0))
    divisors: tuple[float, ...] = ()
    if _ROPE_DIVISORS in file.tensors:  # Llama 3.1's scaling, worked out by the converter
        divisors = tuple(dequantize(file.raw(_ROPE_DIVISORS), file.tensors[_ROPE_DIVISORS].type).flatten().tolist())
    if kind == "none" or factor == 1.0:
        return RopeConfig(theta=theta, divisors=divisors)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor, divisors=divisors)
    if kind == "yarn":
        original = meta.get(prefix + "scaling.original_context_length")
        if not original:
            raise ModelLoadError(f"{file.path.name} lacks the metadata key '{prefix}scaling.original_context_length'")
        return RopeConfig(
            theta=theta, kind="yarn", factor=factor, original_max_position=int(original), divisors=divisors
        )
    raise UnsupportedError(f"{file.path.name}: rope scaling {kind!r} is not supported; none, linear and yarn are")


class GGUFWeights:
    """`WeightSource` over a GGUF file.

    GGUF keeps q and k of the llama architecture with each head's rotary pairs interleaved (0, D/2, 1, ...);
    reading puts the rows back into the order of Hugging Face, halves side by side.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._interleaved = config.architecture == "LlamaForCausalLM"
        self._heads = {"q": config.num_heads, "k": config.num_kv_heads}
        back = {gguf: hf for hf, gguf in (_SANDWICH if config.sandwich_norms else _LAYER).items()}
        self._stored: dict[str, str] = {}
        for name, tensor in file.tensors.items():
            if name == _ROPE_DIVISORS:
                continue
            parts = name.split(".")
            hf = _TOP.get(name, name)
            if parts[0] == "blk" and len(parts) == 4 and parts[2] in back:
                hf = f"model.layers.{parts[1]}.{back[parts[2]]}.{parts[3]}"
            if tensor.type not in READABLE:
                raise UnsupportedError(
                    f"{file.path.name}: tensor {name!r} has type {tensor.type}; "
                    f"the known ones are {', '.join(READABLE)}"
                )
            self._stored[hf] = name

    def names(self) -> set[str]:
        return set(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._stored[name]].shape

    def type(self, name: str) -> str:
        return self._file.tensors[self._stored[name]].type

    def read(self, name: str, start: int, stop: int) -> Tensor:
        values = dequantize(self._rows(name, start, stop), self.type(name))
        return values.reshape(stop - start, *self.shape(name)[1:])

    def packed_kind(self, name: str) -> Literal["int4", "int8"] | None:
        kind = self.type(name)
        return "int4" if kind in INT4 else "int8" if kind == "Q8_0" else None

    def read_packed(self, name: str) -> Int4Blocks | Int8Blocks:
        raw = self._rows(name, 0, self.shape(name)[0])
        return read_int8(raw) if self.type(name) == "Q8_0" else read_int4(raw, self.type(name))

    def _rows(self, name: str, start: int, stop: int) -> Bytes:
        which = name.rsplit(".", 2)[-2]
        if not self._interleaved or which not in ("q_proj", "k_proj"):
            return self._file.raw(self._stored[name], start, stop)
        raw = self._file.raw(self._stored[name])
        # A row is a whole number of blocks, so rows can be moved without decoding them.
        pairs = raw.reshape(self._heads[which[0]], -1, 2, raw.shape[1])
        return pairs.swapaxes(1, 2).reshape(raw.shape)[start:stop]
