"""Reading configs: what is understood, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ModelLoadError, SlipstreamError, UnsupportedError
from slipstream.models.config import parse_hf_config, read_hf_config, read_json
from slipstream.models.registry import MODELS, model_class
from tests.support.tiny import tiny_values


def test_values_are_read() -> None:
    c = parse_hf_config(tiny_values("llama"))
    assert (c.vocab_size, c.hidden_size, c.num_layers, c.num_heads, c.num_kv_heads) == (96, 32, 2, 4, 2)
    assert (c.head_dim, c.q_size, c.kv_size, c.intermediate_size) == (8, 32, 16, 64)
    assert (c.bos_token_id, c.eos_ids, c.torch_dtype) == (1, (2,), "float32")
    assert not (c.qkv_bias or c.o_bias or c.mlp_bias or c.qk_norm or c.tie_word_embeddings)


def test_architecture_sets_biases_and_norms() -> None:
    qwen2, qwen3 = parse_hf_config(tiny_values("qwen2")), parse_hf_config(tiny_values("qwen3"))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (False, False, True)
    assert qwen3.head_dim == 12
    biased = parse_hf_config(tiny_values("llama", attention_bias=True, mlp_bias=True))
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)


def test_hybrid_layers_are_read() -> None:
    c = parse_hf_config(tiny_values("qwen3_5_text"))
    assert c.layer_types == ("linear_attention", "full_attention", "linear_attention")
    assert (c.kv_layers, c.delta_layers) == ((1,), (0, 2))
    assert c.delta is not None and (c.delta.channels, c.delta.keys, c.delta.values) == (56, 16, 24)
    assert (c.norm_offset, c.output_gate, c.qk_norm, c.rope.partial) == (1.0, True, True, 0.5)
    plain = parse_hf_config(tiny_values("llama"))
    assert (plain.kv_layers, plain.delta_layers, plain.prefix) == ((0, 1), (), "model.")


def test_the_text_part_of_a_config_with_encoders() -> None:
    text = tiny_values("qwen3_5_text")
    del text["tie_word_embeddings"], text["architectures"]
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": True, "text_config": text}
    c = parse_hf_config(outer)
    assert (c.prefix, c.tie_word_embeddings, c.hidden_size) == ("model.language_model.", True, 32)
    with pytest.raises(ModelLoadError, match="text_config="):
        parse_hf_config({**outer, "text_config": 3})


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "mamba", "full_attention"]}, "'mamba'"),
        ({"full_attention_interval": 0}, "full_attention_interval=0"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads=3"),
        ({"num_experts": 4, "num_experts_per_tok": 2}, "moe_intermediate_size"),
        (
            {
                "num_experts": 2,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 8,
                "shared_expert_intermediate_size": 8,
            },
            "num_experts_per_tok=3",
        ),
        ({"num_experts": 2, "decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim"),
        ({"linear_value_head_dim": 0}, "value_dim=0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, "partial_rotary_factor=0.2"),
    ],
)
def test_senseless_hybrids_are_named(changes: dict[str, Any], shown: str) -> None:
    with pytest.raises(SlipstreamError) as e:
        parse_hf_config(tiny_values("qwen3_5_text", **changes))
    assert shown in str(e.value)


def test_defaults_follow_from_other_values() -> None:
    values = tiny_values("llama")
    for name in ("head_dim", "num_key_value_heads", "architectures", "torch_dtype"):
        del values[name]
    c = parse_hf_config(values)
    assert (c.head_dim, c.num_kv_heads, c.architecture, c.torch_dtype) == (8, 4, "LlamaForCausalLM", None)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtype_under_both_names(name: str) -> None:
    values = tiny_values("llama")
    del values["torch_dtype"]
    assert parse_hf_config({**values, name: "torch.bfloat16"}).torch_dtype == "bfloat16"


def test_generation_config_names_the_stop_ids() -> None:
    c = parse_hf_config(tiny_values("llama"), {"eos_token_id": [5, 7, 5], "temperature": 0.6})
    assert c.eos_ids == (5, 7)
    assert c.generation["temperature"] == 0.6


@pytest.mark.parametrize(
    "params",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}, "rope_theta": 1.0},
    ],
)
def test_rope_under_old_and_new_names(params: dict[str, Any]) -> None:
    rope = parse_hf_config(tiny_values("llama", **params)).rope
    assert (rope.theta, rope.kind, rope.factor) == (5e5, "linear", 2.0)


def test_unused_windows_are_accepted() -> None:
    parse_hf_config(tiny_values("mistral", sliding_window=None))
    parse_hf_config(tiny_values("mistral", sliding_window=512))
    parse_hf_config(tiny_values("qwen2", sliding_window=64, use_sliding_window=False))
    parse_hf_config(tiny_values("qwen2", sliding_window=64))


def test_windows_of_layers() -> None:
    """layer_types rules; without it Gemma's pattern, Qwen's first layers, or every layer."""
    for arch, changes, want in (
        ("mistral", {"sliding_window": 64}, (64, 64)),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, (0, 64)),
        ("qwen3", {"sliding_window": 9, "use_sliding_window": True,
                   "layer_types": ["sliding_attention", "full_attention"]}, (9, 0)),
        ("gemma3_text", {}, (8, 0)),
        ("gemma3_text", {"sliding_window_pattern": 1}, (0, 0)),
        ("llama", {}, (0, 0)),
    ):  # fmt: skip
        assert parse_hf_config(tiny_values(arch, **changes)).windows == want
    new_names = tiny_values("gemma3_text", rope_parameters={
        "full_attention": {"rope_theta": 5e5, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 77.0, "rope_type": "default"},
    })  # fmt: skip
    config = parse_hf_config(new_names)
    assert (config.rope.theta, config.rope.factor) == (5e5, 8.0)
    assert config.rope_local is not None and (config.rope_local.theta, config.rope_local.factor) == (77.0, 1.0)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"hidden_activation": "relu"}, "hidden_activation='relu'"),
    ("mistral", {"sliding_window": 64, "layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("llama", {"torch_dtype": "int8"}, "torch_dtype='int8'"),
]


@pytest.mark.parametrize(("arch", "changes", "shown"), REFUSED)
def test_known_but_unsupported_options_are_named(arch: str, changes: dict[str, Any], shown: str) -> None:
    with pytest.raises(UnsupportedError) as e:
        parse_hf_config(tiny_values(arch, **changes))
    assert shown in str(e.value)
    assert "\n" not in str(e.value)


SENSELESS: list[tuple[dict[str, Any], str]] = [
    ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
    ({"sliding_window": -3}, "sliding_window=-3"),
    ({"sliding_window": 8, "layer_types": ["full_attention"]}, "each of the 2 layers"),
    ({"hidden_size": None}, "hidden_size"),
    ({"vocab_size": -4}, "vocab_size=-4"),
    ({"vocab_size": "many"}, "vocab_size='many'"),
    ({"num_hidden_layers": True}, "num_hidden_layers=True"),
    ({"num_hidden_layers": 0}, "num_layers=0"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ({"head_dim": 7}, "head_dim=7"),
    ({"head_dim": None, "hidden_size": 33}, "hidden_size=33"),
    ({"head_dim": None, "num_attention_heads": 0}, "num_attention_heads=0"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
    ({"rope_theta": -1.0}, "rope_theta=-1.0"),
    ({"rope_scaling": {"rope_type": "linear"}}, "'factor'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor=0"),
    ({"rope_scaling": "linear"}, "rope_scaling='linear'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "'low_freq_factor'"),
    ({"architectures": None, "model_type": None}, "architectures"),
]


@pytest.mark.parametrize(("changes", "shown"), SENSELESS)
def test_senseless_values_are_named(changes: dict[str, Any], shown: str) -> None:
    with pytest.raises(SlipstreamError) as e:
        parse_hf_config(tiny_values("llama", **changes))
    assert shown in str(e.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("", "is empty"), ("  \n", "is empty"), ("{", "not valid JSON"), ("[1]", "list"), ("{}", "empty")],
)
def test_broken_json(tmp_path: Path, text: str, shown: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=shown):
        read_hf_config(tmp_path)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_json(tmp_path / "config.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ModelLoadError, match="not valid JSON"):
        read_json(tmp_path / "deep.json")


def test_registry_lists_what_it_knows() -> None:
    assert model_class("MistralForCausalLM").__name__ == "Llama"
    for name in MODELS:
        assert model_class(name)
    with pytest.raises(ModelLoadError) as e:
        model_class("GPT2LMHeadModel")
    assert "'GPT2LMHeadModel'" in str(e.value)
    assert "Qwen3ForCausalLM" in str(e.value)


def test_third_party_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from slipstream.models import registry

    point = EntryPoint("ToyForCausalLM", "slipstream.models.llama:Llama", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.GROUP else [])
    assert registry.model_class("ToyForCausalLM").__name__ == "Llama"
    with pytest.raises(ModelLoadError, match="ToyForCausalLM"):
        registry.model_class("OtherForCausalLM")
