"""A block draft that does not fit its target, or lacks something, is refused at start-up by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams
from slipstream.draft.block_config import default_layer_ids, parse_block_config
from slipstream.draft.block_model import block_shapes
from slipstream.draft.detect import kind_of
from slipstream.errors import ConfigError, ModelLoadError, UnsupportedError
from slipstream.models.config import read_hf_config
from tests.support.block_draft import write_block_draft
from tests.support.kit import tiny_model_dir
from tests.support.tiny import tiny_config


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("block") / "target", seed=1)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"vocab_size": 95}, ConfigError, "vocab_size=95"),
        ({"hidden_size": 40}, ConfigError, "hidden_size=40"),
        ({"num_target_layers": 3}, ConfigError, "num_target_layers=3"),
        ({"target_layer_ids": [1]}, ConfigError, "target_layer_ids has 1"),  # the last layer's output is normalised
        ({"target_layer_ids": [0, -1]}, ConfigError, "target_layer_ids"),
        ({"target_layer_ids": []}, ModelLoadError, "target_layer_ids"),
        ({"target_layer_ids": [-1, 0]}, ModelLoadError, "fc.weight"),
        ({"mask_token_id": 96}, ConfigError, "mask_token_id=96"),
        ({"mask_token_id": None}, ModelLoadError, "mask_token_id"),
        ({"block_size": 0}, ModelLoadError, "block_size=0"),
        ({"markov_rank": 4}, ModelLoadError, "markov_head.markov_w1.weight"),
        ({"markov_head_type": "gru"}, UnsupportedError, "markov_head_type='gru'"),
        ({"markov_head_type": "gated"}, ModelLoadError, "markov_head.gate_proj"),
        ({"markov_rank": 0}, ConfigError, "confidence_head_with_markov"),
        ({"enable_confidence_head": False}, ModelLoadError, "confidence_head.proj"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, UnsupportedError, "layer_types"),
        ({"draft_vocab_size": 40}, UnsupportedError, "draft_vocab_size=40"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit(
    tmp_path: Path, target: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    folder = write_block_draft(tmp_path / "d", target, "dspark", **changes)
    with pytest.raises(error, match=words.replace("[", r"\[")):
        LLM(model=str(target), draft=str(folder), max_model_len=64)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_missing_extra_and_misshapen_tensors(tmp_path: Path, target: Path, kind: str) -> None:
    folder = write_block_draft(tmp_path / "d", target, kind)
    tensors = load_file(folder / "model.safetensors")
    name = "layers.1.self_attn.k_proj.weight"
    for case in ({n: t for n, t in tensors.items() if n != name}, {**tensors, name: tensors[name][1:].clone()}):
        save_file(case, folder / "model.safetensors")
        with pytest.raises(ModelLoadError, match=name):
            LLM(model=str(target), draft=str(folder), max_model_len=64)
    save_file(
        {**tensors, name: tensors[name].clone().index_fill_(0, torch.tensor(3), torch.inf)},
        folder / "model.safetensors",
    )
    with pytest.raises(ModelLoadError, match=f"{name}.*not finite"):
        LLM(model=str(target), draft=str(folder), max_model_len=64)
    save_file({**tensors, "layers.2.mlp.up_proj.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"layers.2.mlp.up_proj.weight"):
        LLM(model=str(target), draft=str(folder), max_model_len=64)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_drafts": 6}, "num_drafts=6 must be from 1 to 5"),
        ({"draft_options": {"confidence_threshold": 1.5}}, "confidence_threshold=1.5"),
        ({"draft_options": {"temperatures": [1.0, 1.0]}}, "temperatures has 2 values"),
        ({"draft_options": {"temperatures": [1.0, 1.0, 0.0, 1.0, 1.0]}}, "temperatures"),
        ({"draft_options": {"treshold": 0.5}}, "treshold"),
    ],
    ids=str,
)
def test_options_out_of_range(tmp_path: Path, target: Path, options: dict[str, Any], words: str) -> None:
    folder = write_block_draft(tmp_path / "d", target, "dspark")
    with pytest.raises(ConfigError, match=words):
        LLM(model=str(target), draft=str(folder), max_model_len=64, **options)
    if "confidence_threshold" in str(options):
        flash = write_block_draft(tmp_path / "f", target, "dflash")
        with pytest.raises(ConfigError, match="confidence head"):
            LLM(model=str(target), draft=str(flash), draft_options={"confidence_threshold": 0.5}, max_model_len=64)


def test_every_writer_says_it_in_its_own_way(tmp_path: Path) -> None:
    """One drafter written by z-lab, SpecForge (nested DSpark), DeepSpec and speculators."""
    target = tiny_config("qwen3", num_hidden_layers=8)
    shape = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}  # fmt: skip
    zlab = {**shape, "architectures": ["DFlashDraftModel"], "block_size": 8,
            "dflash_config": {"mask_token_id": 90, "target_layer_ids": [1, 3]}}  # fmt: skip
    newer = {**shape, "architectures": ["DFlashDraftModel"],
             "dflash_config": {"mask_token_id": 90, "target_layer_ids": [1, 3], "block_size": 8}}  # fmt: skip
    nested = {**shape, "architectures": ["DFlashDraftModel"],
              "dflash_config": {"mask_token_id": 90, "target_layer_ids": [1, 3], "block_size": 8, "markov_rank": 4,
                                "projector_type": "dspark", "enable_confidence_head": True}}  # fmt: skip
    flat = {**shape, "architectures": ["Qwen3DSparkModel"], "block_size": 8, "mask_token_id": 90, "markov_rank": 0,
            "target_layer_ids": [1, 3]}  # fmt: skip
    spec = {"speculators_model_type": "dflash", "transformer_layer_config": shape, "block_size": 8,
            "mask_token_id": 90, "aux_hidden_state_layer_ids": [2, 4]}  # fmt: skip
    anchored = {**spec, "sample_from_anchor": True}
    found = {}
    for name, values in {"zlab": zlab, "newer": newer, "nested": nested, "flat": flat, "spec": spec,
                         "anchored": anchored}.items():  # fmt: skip
        assert kind_of(values, tmp_path) in ("dflash", "dspark")
        config = parse_block_config(json.loads(json.dumps(values)), target)
        assert (config.taps, config.mask_token_id) == ((2, 4), 90)
        found[name] = config.max_drafts, config.rows_for(3), config.markov_rank, config.confidence
    assert found == {
        "zlab": (7, 4, 0, "none"),
        "newer": (7, 4, 0, "none"),
        "nested": (8, 3, 4, "markov"),
        "flat": (8, 3, 0, "none"),
        "spec": (7, 4, 0, "none"),
        "anchored": (8, 3, 0, "none"),
    }


def test_default_layers() -> None:
    assert default_layer_ids(5, 36) == [1, 9, 17, 25, 33]
    assert default_layer_ids(1, 36) == [18]


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_random_weights_for_benchmarks(tmp_path: Path, target: Path, head: str) -> None:
    """load_format=dummy needs the config alone, and knows every tensor that a checkpoint of that config has."""
    folder = write_block_draft(tmp_path / "d", target, "dspark", head=head)
    values = json.loads((folder / "config.json").read_text())
    shapes = block_shapes(parse_block_config(values, read_hf_config(target)), values["hidden_size"])
    stored = {n: tuple(t.shape) for n, t in load_file(folder / "model.safetensors").items()}
    assert shapes == {n: s for n, s in stored.items() if n not in ("embed_tokens.weight", "lm_head.weight")}
    (folder / "model.safetensors").unlink()
    with LLM(model=str(target), draft=str(folder), load_format="dummy", max_model_len=64) as llm:
        out = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]
        assert len(out.outputs[0].token_ids) == 12
        assert out.spec.drafted > 0
