"""Faults that random combinations of features showed; each stays a test."""

from __future__ import annotations

from pathlib import Path

import torch

from slipstream import LLM, SamplingParams
from tests.support.kit import tiny_model_dir

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PICTURES = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
    "image_token_id": 90, "video_token_id": 91, "vision_config": {"spatial_merge_size": 2},
}  # fmt: skip


def test_text_behind_a_picture_stands_where_it_should(tmp_path: Path) -> None:
    """A chunk shorter than the picture's left the other rows' offsets to the next longer one."""
    embeds = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    ids = [3, *[90] * 6, *range(4, 16)]
    picture = {"prompt_token_ids": ids, "prompt_embeds": embeds, "image_grid_thw": [[1, 4, 6]]}
    text = [(7 * i + i * i) % 80 for i in range(3, 25)]
    with LLM(model=str(tiny_model_dir(tmp_path / "m", seed=4, **PICTURES)), dtype="float64", max_model_len=64) as llm:
        want = llm.generate([text], GREEDY)[0].outputs[0].token_ids
    with LLM(model=str(tmp_path / "m"), dtype="float64", max_model_len=64) as llm:
        for prompt in (picture, [5]):
            llm.generate(prompt, GREEDY)
        assert llm.generate([text], GREEDY)[0].outputs[0].token_ids == want
        llm.check_idle()
