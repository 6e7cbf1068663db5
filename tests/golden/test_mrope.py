"""Positions of images and videos: golden layouts, rotations, and a prompt with pictures through model and engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams
from slipstream.attention.dense import DenseCausal
from slipstream.device.media import GivenRows
from slipstream.models import load_model
from slipstream.models.config import VisionTokens
from slipstream.models.mrope import layout_positions
from slipstream.models.rope import RopeConfig, RotaryTable, parse_rope
from tests.support.reference import planted_oracle

VISION = VisionTokens(image=250, video=251, merge=2)


@pytest.fixture(scope="module")
def golden(golden_dir: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    folder = golden_dir / "mrope_positions"
    return json.loads((folder / "expected.json").read_text()), load_file(folder / "expected.safetensors")


def test_layouts(golden: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> None:
    for layout in golden[0]["layouts"]:
        got = layout_positions(layout["input_ids"], layout["image_grid_thw"], layout["video_grid_thw"], VISION)
        assert got.tolist() == layout["position_ids"], layout["name"]
        assert int(got.max()) + 1 - got.shape[1] == layout["mrope_position_delta"], layout["name"]


@pytest.mark.parametrize("model", ["qwen3_vl", "qwen3_5"])
def test_rotations(golden: tuple[dict[str, Any], dict[str, torch.Tensor]], model: str) -> None:
    values, tensors = golden
    rope = values[f"{model}_rope"]
    head_dim = rope.get("head_dim", 32)
    config = parse_rope({"rope_parameters": {"rope_type": "default", **rope}}, head_dim, 512)
    table = RotaryTable(config, head_dim, 512, device=torch.device("cpu"), dtype=torch.float32)
    layout = next(x for x in values["layouts"] if x["name"] == values["lm_layout"])
    cos, signed = table.at(torch.tensor(layout["position_ids"]))
    sin = torch.cat((-signed[..., : signed.shape[-1] // 2], signed[..., signed.shape[-1] // 2 :]), -1)
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(cos[:, 0], tensors[f"{model}_cos"], **close)
    torch.testing.assert_close(sin[:, 0], tensors[f"{model}_sin"], **close)
    flat = torch.arange(20)
    for one, three in zip(table.at(flat), table.at(flat.expand(3, 20)), strict=True):
        assert torch.equal(one, three), "text turns as if there were one axis"


def test_sections_as_runs() -> None:
    """Qwen2-VL's order, from its definition."""
    config = RopeConfig(sections=(1, 2, 1), interleaved=False)
    table = RotaryTable(config, 8, 64, device=torch.device("cpu"), dtype=torch.float64)
    cos, _ = table.at(torch.tensor([[3], [5], [7]]))
    want = [3 * 10000 ** (-0 / 4), 5 * 10000 ** (-1 / 4), 5 * 10000 ** (-2 / 4), 7 * 10000 ** (-3 / 4)]
    assert torch.allclose(cos[0, 0], torch.tensor(want * 2, dtype=torch.float64).cos(), atol=1e-6)


def test_logits(golden_dir: Path, golden: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> None:
    """Prompt and continuation in one pass, the pictures' embeddings in their places."""
    _, tensors = golden
    model = load_model(golden_dir / "target_qwen3_5", dtype="float32").model
    ids = torch.cat((tensors["lm_input_ids"], tensors["lm_greedy_ids"]))
    given_R = (ids == 250) | (ids == 251)
    embeds = torch.zeros(len(ids), model.config.hidden_size)
    embeds[given_R] = tensors["lm_image_features"]
    with torch.inference_mode():
        hidden, _ = model.forward(
            ids, tensors["lm_position_ids"], DenseCausal(torch.arange(len(ids))), given=(embeds, given_R)
        )
        logits = model.logits(hidden)
    torch.testing.assert_close(logits, tensors["lm_logits"], atol=1e-3, rtol=1e-3)


def prompt_of(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    layout = next(x for x in values["layouts"] if x["name"] == values["lm_layout"])
    assert layout["input_ids"] == tensors["lm_input_ids"].tolist()
    return {
        "prompt_token_ids": layout["input_ids"], "prompt_embeds": tensors["lm_image_features"],
        "image_grid_thw": layout["image_grid_thw"],
    }  # fmt: skip


@pytest.mark.parametrize(("dtype", "page_size", "chunk"), [("float32", 1, 7), ("float64", 16, 256), ("float64", 4, 3)])
@pytest.mark.parametrize("drafter", ["none", "ngram", "oracle", "mtp"])
def test_a_mixed_batch_through_the_engine(
    golden_dir: Path, golden: tuple[dict[str, Any], dict[str, torch.Tensor]], dtype: str, page_size: int, chunk: int,
    drafter: str,
) -> None:  # fmt: skip
    """A prompt with pictures beside text, whose output is what it is alone; the pictures' is the golden one."""
    prompt, greedy = prompt_of(*golden), golden[1]["lm_greedy_ids"].tolist()
    params = SamplingParams(temperature=0, max_tokens=len(greedy), ignore_eos=True)
    text = [7, 19, 3, 88, 150, 4, 9]
    draft: dict[str, Any] = {
        "none": {},
        "mtp": {"draft": "mtp"},
        "ngram": {"draft": "ngram", "draft_options": {"min_n": 1, "gate": False}},
        "oracle": {"draft": planted_oracle(lambda r: greedy if len(r.prompt_token_ids) > 9 else [0] * 8, vocab=256)},
    }[drafter]
    options = {"dtype": dtype, "page_size": page_size, "prefill_chunk": chunk, "max_model_len": 64, "run_ahead": 2}
    with LLM(model=str(golden_dir / "target_qwen3_5"), **options, **draft) as llm:
        alone = llm.generate(text, params)[0].outputs[0].token_ids
        outs = [o.outputs[0].token_ids for o in llm.generate([text, prompt, text, prompt], params)]
        assert outs == [alone, greedy, alone, greedy]
        again = [o.outputs[0].token_ids for o in llm.generate([prompt, text], params)]
        assert again == [greedy, alone]
        assert llm.generate(prompt["prompt_token_ids"], params)[0].outputs[0].token_ids != greedy, "no pictures"
        llm.check_idle()


def test_without_the_embeddings_other_tokens_come_out(
    golden_dir: Path, golden: tuple[dict[str, Any], dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control. That positions matter is shown on a model that turns more (tests/e2e/test_prompt_embeds.py)."""
    monkeypatch.setattr(GivenRows, "of", lambda self, plan, rows: None)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(model=str(golden_dir / "target_qwen3_5"), dtype="float32", max_model_len=64) as llm:
        out = llm.generate(prompt_of(*golden), params)[0].outputs[0].token_ids
    assert out != golden[1]["lm_greedy_ids"].tolist()
