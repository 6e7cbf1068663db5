"""Rotary frequencies against transformers' own, and rotation against its definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from slipstream.errors import ModelLoadError, UnsupportedError
from slipstream.models.config import parse_hf_config
from slipstream.models.rope import RopeConfig, RotaryTable, inverse_frequencies, parse_rope
from tests.support.tiny import tiny_values

CPU = torch.device("cpu")
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
        "beta_slow": 2.0, "attention_factor": 1.5,
    },
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
def test_frequencies_match_transformers(scaling: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = tiny_values("llama", head_dim=64, rope_theta=5e5, rope_scaling=scaling)
    ours, attention = inverse_frequencies(parse_hf_config(values).rope, 64)
    reference = LlamaRotaryEmbedding(LlamaConfig(**values))
    torch.testing.assert_close(ours, reference.inv_freq, rtol=1e-6, atol=0)
    assert attention == pytest.approx(reference.attention_scaling, rel=1e-6)


def test_frequencies_by_hand() -> None:
    inv, _ = inverse_frequencies(RopeConfig(theta=100.0), 4)
    assert inv.tolist() == pytest.approx([1.0, 0.1])
    inv, _ = inverse_frequencies(RopeConfig(theta=100.0, divisors=(1.0, 8.0)), 4)
    assert inv.tolist() == pytest.approx([1.0, 0.0125])
    with pytest.raises(ModelLoadError, match="rope_freqs has 2"):
        inverse_frequencies(RopeConfig(divisors=(1.0, 8.0)), 8)


def test_yarn_options_that_change_the_factor_are_refused() -> None:
    params = {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}
    with pytest.raises(UnsupportedError, match="mscale"):
        parse_rope({"rope_scaling": params}, 8, 64)


def test_rotation_turns_each_pair_by_its_angle() -> None:
    table = RotaryTable(RopeConfig(theta=100.0), 4, 16, device=CPU, dtype=torch.float64)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    y = table.rotate(x, *table.at(torch.tensor([5])))[0, 0].tolist()
    for i, freq in enumerate((1.0, 0.1)):
        a, b, angle = x[0, 0, i].item(), x[0, 0, i + 2].item(), 5 * freq
        # The frequencies are float32 numbers.
        assert y[i] == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-6)
        assert y[i + 2] == pytest.approx(b * math.cos(angle) + a * math.sin(angle), abs=1e-6)


def test_scores_depend_on_distance_only() -> None:
    table = RotaryTable(RopeConfig(), 16, 64, device=CPU, dtype=torch.float64)
    q, k = torch.randn((2, 1, 1, 16), dtype=torch.float64)
    rows = torch.arange(64)
    cos, sin = table.at(rows)
    qs, ks = table.rotate(q.expand(64, 1, 16), cos, sin)[:, 0], table.rotate(k.expand(64, 1, 16), cos, sin)[:, 0]
    for gap in (0, 1, 7):
        scores = (qs[gap:] * ks[: 64 - gap]).sum(-1)
        torch.testing.assert_close(scores, scores[:1].expand_as(scores))


def test_positions_clamp_at_the_end_of_the_table() -> None:
    table = RotaryTable(RopeConfig(), 8, 10, device=CPU, dtype=torch.float32)
    cos, sin = table.at(torch.tensor([9, 10, 10_000, -3]))
    assert torch.equal(cos[1], cos[0])
    assert torch.equal(sin[2], sin[0])
    assert torch.equal(cos[3], torch.ones_like(cos[3]))


def test_a_part_of_a_head_turns() -> None:
    whole = RotaryTable(RopeConfig(theta=100.0), 4, 16, device=CPU, dtype=torch.float64)
    part = RotaryTable(RopeConfig(theta=100.0, partial=0.5), 8, 16, device=CPU, dtype=torch.float64)
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    rows = torch.tensor([0, 5, 11])
    y = part.rotate(x, *part.at(rows))
    assert torch.equal(y[..., :4], whole.rotate(x[..., :4], *whole.at(rows)))
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert RopeConfig(partial=0.25).turned(32) == 8
    for partial in (0.1, 1.5):
        with pytest.raises(ModelLoadError, match=f"partial_rotary_factor={partial}"):
            RopeConfig(partial=partial).turned(12)
