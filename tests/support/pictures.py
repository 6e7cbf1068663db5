"""Prompts with pictures beside text, and tiny models that take them."""

from __future__ import annotations

from typing import Any

import torch

IMAGE = 90
GRIDS = ((4, 6), (2, 16), (8, 8), (4, 4))
SEEING: dict[str, Any] = {
    "image_token_id": IMAGE, "video_token_id": IMAGE + 1, "vision_config": {"spatial_merge_size": 2},
}  # fmt: skip


def axes(*sections: int, **more: Any) -> dict[str, Any]:
    """Values of a config whose rotary embedding has three axes."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*sections], "mrope_interleaved": True}
    return {**SEEING, "rope_parameters": {**rope, **more}}


def picture(rows: int, seed: int, hidden: int = 32) -> torch.Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed))


def pictures_and_text(hidden: int = 32) -> list[Any]:
    """In turn, grids of four shapes."""
    prompts: list[Any] = []
    for i, (h, w) in enumerate(GRIDS):
        count = h * w // 4
        ids = [3 + i, 4, 7, *[IMAGE] * count, 5, *range(20, 21 + i)]
        prompts.append(
            {"prompt_token_ids": ids, "prompt_embeds": picture(count, i, hidden), "image_grid_thw": [[1, h, w]]}
        )
        prompts.append([3 + i, 4, 7, 5, *range(20, 33 + i)])
    return prompts
