"""Every architecture and option against `transformers` on tiny random checkpoints; GGUF against its own values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream.attention.dense import DenseCausal
from slipstream.models import LoadedModel, load_model
from tests.support.tiny import tiny_config as config_of
from tests.support.tiny import tiny_values, tiny_weights, write_tiny_checkpoint
from tests.support.tiny_gguf import write_tiny_gguf

TOKENS = torch.randint(0, 96, (200,), generator=torch.Generator().manual_seed(3))
CLOSE = {"atol": 2e-4, "rtol": 1e-4}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 16}),
    ("llama", {"rope_scaling": LLAMA3, "rope_theta": 5e5}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("mistral", {"sliding_window": None, "head_dim": 16}),
    ("mistral", {"sliding_window": 24}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "sliding_window": 8, "use_sliding_window": False}),
    ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}),
    ("qwen2", {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3", {}),
    (
        "qwen3",
        {"sliding_window": 9, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    ("gemma3_text", {}),
    ("gemma3_text", {"query_pre_attn_scalar": 24, "sliding_window": 1}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3_5_text", {}),
    ("qwen3_next", {}),
    ("qwen3_next", {"norm_topk_prob": False, "decoder_sparse_step": 2, "linear_num_key_heads": 1}),
    ("qwen3_5_text", {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True}),
]


def run(loaded: LoadedModel, tokens_R: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    positions_R = torch.arange(len(tokens_R))
    taps = tuple(range(loaded.config.num_layers))
    with torch.inference_mode():
        hidden, tapped = loaded.model.forward(
            tokens_R, positions_R, DenseCausal(positions_R, loaded.config.windows), taps
        )
        return loaded.model.logits(hidden), [*tapped, hidden]


def reference(folder: Path, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        out = model(TOKENS[None], output_hidden_states=True)
    return out.logits[0], [h[0] for h in out.hidden_states]


@pytest.mark.parametrize(("arch", "changes"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "plain")
def test_logits_and_hidden_states(tmp_path: Path, arch: str, changes: dict[str, Any]) -> None:
    write_tiny_checkpoint(tmp_path, arch, **changes)
    want_logits, want_hidden = reference(tmp_path, torch.float32)
    assert want_logits.std() > 0.5  # a model that says something
    logits, hidden = run(load_model(tmp_path), TOKENS)
    torch.testing.assert_close(logits, want_logits, **CLOSE)
    torch.testing.assert_close(hidden, want_hidden, **CLOSE)
    wide, _ = run(load_model(tmp_path, dtype="float64"), TOKENS)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide, want_logits.double(), **CLOSE)
    narrow, _ = run(load_model(tmp_path, dtype="bfloat16"), TOKENS)
    assert narrow.dtype == torch.float32
    theirs, _ = reference(tmp_path, torch.bfloat16)
    ours_off, theirs_off = (narrow - want_logits).abs().mean(), (theirs.float() - want_logits).abs().mean()
    assert ours_off < 1.25 * theirs_off  # as close to float32 as the reference's own bfloat16


def test_taps_come_in_the_order_asked_for(tmp_path: Path) -> None:
    model = load_model(write_tiny_checkpoint(tmp_path, "llama")).model
    positions = torch.arange(5)
    with torch.inference_mode():
        plain, none = model.forward(TOKENS[:5], positions, DenseCausal(positions))
        tapped, (second, first) = model.forward(TOKENS[:5], positions, DenseCausal(positions), (1, 0))
        again, (repeat, _) = model.forward(TOKENS[:5], positions, DenseCausal(positions), (0, 0))
    assert none == []
    assert torch.equal(plain, tapped)
    assert torch.equal(plain, again)
    assert torch.equal(first, repeat)
    assert not torch.equal(first, second)


def hf_copy(folder: Path, arch: str, held: dict[str, torch.Tensor], **changes: Any) -> Path:
    """The same tensors as a Hugging Face directory."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_values(arch, **changes)))
    save_file(held, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_gguf_equals_its_dequantised_copy(tmp_path: Path, arch: str, kind: str) -> None:
    """In float32, where both hold the same numbers, the two loaders must give the same model."""
    held = write_tiny_gguf(tmp_path / "m.gguf", arch, kinds={"*": kind, "o_proj": "F32"})
    plain = load_model(hf_copy(tmp_path / "hf", "gemma3_text" if arch == "gemma3" else arch, held))
    loaded = load_model(tmp_path / "m.gguf", dtype="float32")
    assert loaded.config.architecture == plain.config.architecture
    assert loaded.config.eos_ids == (2,)
    logits, hidden = run(loaded, TOKENS)
    want_logits, want_hidden = run(plain, TOKENS)
    # float16 and float32 rounding of the block arithmetic may differ by one unit in the last place.
    torch.testing.assert_close(logits, want_logits, **CLOSE)
    torch.testing.assert_close(hidden, want_hidden, **CLOSE)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_packed_gguf_is_as_close_as_bfloat16(tmp_path: Path, arch: str) -> None:
    shape = {"hidden_size": 64, "vocab_size": 128, "head_dim": 16, "num_key_value_heads": 2}
    kinds = {"*": "Q4_1", "v_proj": "Q8_0", "embed_tokens": "Q8_0", "lm_head": "Q8_0"}
    held = write_tiny_gguf(tmp_path / "m.gguf", arch, kinds=kinds, spread=1.0, **shape)
    want, _ = run(load_model(hf_copy(tmp_path / "hf", arch, held, **shape)), TOKENS)
    packed = load_model(tmp_path / "m.gguf")
    assert packed.model.dtype == torch.bfloat16
    assert any("packed" in note for note in packed.notes)
    dense = load_model(tmp_path / "m.gguf", dtype="bfloat16")
    assert packed.model.weight_bytes() < 0.6 * dense.model.weight_bytes()
    off = (run(packed, TOKENS)[0] - want).abs().mean()
    dense_off = (run(dense, TOKENS)[0] - want).abs().mean()
    assert off < 2 * dense_off
    assert off < 0.05 * want.abs().mean()


def test_tied_gguf_head_is_held_once(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "vocab_size": 128, "tie_word_embeddings": True}
    held = write_tiny_gguf(tmp_path / "m.gguf", kinds={"*": "Q4_0", "embed_tokens": "Q8_0"}, **shape)
    assert "lm_head.weight" not in held
    loaded = load_model(tmp_path / "m.gguf")
    assert loaded.config.tie_word_embeddings
    want, _ = run(load_model(hf_copy(tmp_path / "hf", "llama", held, **shape)), TOKENS)
    assert (run(loaded, TOKENS)[0] - want).abs().mean() < 0.05 * want.abs().mean()


def test_gguf_llama3_divisors(tmp_path: Path) -> None:
    """`rope_freqs` is how GGUF carries Llama 3.1's scaling: the same model as with `rope_scaling`."""
    from slipstream.models.rope import RopeConfig, inverse_frequencies

    scaled, _ = inverse_frequencies(config_of("llama", rope_scaling=LLAMA3).rope, 8)
    plain, _ = inverse_frequencies(RopeConfig(), 8)
    held = write_tiny_gguf(tmp_path / "m.gguf", rope_divisors=(plain / scaled).tolist())
    got, _ = run(load_model(tmp_path / "m.gguf"), TOKENS)
    want, _ = run(load_model(hf_copy(tmp_path / "hf", "llama", held, rope_scaling=LLAMA3)), TOKENS)
    torch.testing.assert_close(got, want, **CLOSE)
    without, _ = run(load_model(hf_copy(tmp_path / "no", "llama", held)), TOKENS)
    assert not torch.allclose(got, without, **CLOSE)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_packed_rows_do_not_depend_on_their_neighbours(tmp_path: Path, arch: str) -> None:
    """A whole packed pass, with an attention that looks at its own row only: bit-equal for any number of rows."""

    class OwnRow:
        def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return q + v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    shape = {"hidden_size": 64, "vocab_size": 128, "head_dim": 16}
    kinds = {"*": "Q4_1", "embed_tokens": "Q8_0", "lm_head": "Q8_0"}
    write_tiny_gguf(tmp_path / "m.gguf", arch, kinds=kinds, **shape)
    model = load_model(tmp_path / "m.gguf").model
    with torch.inference_mode():

        def logits(rows: slice) -> torch.Tensor:
            return model.logits(model.forward(TOKENS[rows], positions[rows], OwnRow())[0])

        positions = torch.arange(200) % 37
        one = torch.cat([logits(slice(i, i + 1)) for i in range(64)])
        for rows in (2, 3, 4, 5, 6, 7, 8, 16, 33, 64, 200):
            assert torch.equal(logits(slice(0, rows))[:64], one[:rows]), rows


def test_dummy_is_the_same_model_in_every_form(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_values("qwen3")))
    by_folder = load_model(tmp_path, load_format="dummy", seed=5)
    by_file = load_model(tmp_path / "config.json", load_format="dummy", seed=5, dtype="float64")
    other = load_model(tmp_path, load_format="dummy", seed=6)
    a, b, c = (run(m, TOKENS)[0] for m in (by_folder, by_file, other))
    torch.testing.assert_close(a.double(), b, **CLOSE)
    assert (a - c).abs().mean() > 0.1
    assert by_folder.notes == ["weights are random (load_format=dummy, seed 5)"]
    again = tiny_weights(config_of("qwen3"), seed=5)["model.embed_tokens.weight"]
    assert again.std().item() == pytest.approx(2.0 / 32**0.5, rel=0.05)
    assert again.mean().abs() < 0.02
