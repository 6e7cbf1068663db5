"""The target models against outputs that the reference implementations gave on tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.attention.dense import DenseCausal
from slipstream.models import LoadedModel, load_model

CASES = ("target_llama", "target_qwen3")
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def run(loaded: LoadedModel, tokens_R: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of every position, and all of Hugging Face's hidden_states."""
    model = loaded.model
    positions_R = torch.arange(len(tokens_R))
    taps = tuple(range(model.config.num_layers))
    with torch.inference_mode():
        hidden_RH, tapped = model.forward(tokens_R, positions_R, DenseCausal(positions_R), taps)
        return model.logits(hidden_RH), [*tapped, hidden_RH]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits_and_hidden_states(golden_dir: Path, case: str, dtype: str) -> None:
    expected = load_file(golden_dir / case / "expected.safetensors")
    loaded = load_model(golden_dir / case, dtype=dtype)
    tokens_R = torch.cat((expected["prompt_ids"], expected["greedy_ids"]))
    logits, hidden = run(loaded, tokens_R)
    assert logits.dtype == getattr(torch, dtype)
    torch.testing.assert_close(logits, expected["logits"].to(logits.dtype), **CLOSE)
    torch.testing.assert_close(torch.stack(hidden), expected["hidden_states"].to(hidden[0].dtype), **CLOSE)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_greedy_continuation(golden_dir: Path, case: str, dtype: str) -> None:
    expected = load_file(golden_dir / case / "expected.safetensors")
    loaded = load_model(golden_dir / case, dtype=dtype)
    tokens = expected["prompt_ids"].tolist()
    for _ in range(32):
        logits, _ = run(loaded, torch.tensor(tokens))
        tokens.append(int(logits[-1].argmax()))
    assert tokens[-32:] == expected["greedy_ids"].tolist()


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_keeps_clear_decisions(golden_dir: Path, case: str) -> None:
    """bf16 rounds, so only positions whose recorded gap exceeds twice the error seen must keep their argmax."""
    expected = load_file(golden_dir / case / "expected.safetensors")
    loaded = load_model(golden_dir / case, dtype="bfloat16")
    logits, _ = run(loaded, torch.cat((expected["prompt_ids"], expected["greedy_ids"])))
    error = (logits - expected["logits"]).abs().max()
    assert error < 0.6  # logits reach 7: bf16 spacing 0.03 there, through four layers of random weights
    top = expected["logits"].topk(2).values
    clear = top[:, 0] - top[:, 1] > 2 * error
    assert clear.float().mean() > 0.2
    assert torch.equal(logits.argmax(-1)[clear], expected["logits"].argmax(-1)[clear])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_tolerance_sees_one_wrong_tensor(golden_dir: Path, case: str, name: str) -> None:
    """Negative control: the tolerance above is tight enough to notice 1 % on one tensor."""
    expected = load_file(golden_dir / case / "expected.safetensors")
    loaded = load_model(golden_dir / case, dtype="float32")
    model = loaded.model
    with torch.inference_mode():
        if name == "model.norm.weight":
            model.norm.weight.mul_(1.01)  # type: ignore[attr-defined]
        else:
            c = model.config
            model.blocks[1].qkv.weight_NK[c.q_size : c.q_size + c.kv_size].mul_(1.01)  # type: ignore[attr-defined]
            if c.qk_norm:  # the norm takes a scale of k away again
                model.blocks[1].k_norm.weight.mul_(1.01)  # type: ignore[attr-defined]
    logits, _ = run(loaded, torch.cat((expected["prompt_ids"], expected["greedy_ids"])))
    assert not torch.allclose(logits, expected["logits"], **CLOSE)
