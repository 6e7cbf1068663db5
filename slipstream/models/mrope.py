"""Positions of prompts with images and videos: three per token, for time, height and width (Qwen2-VL, arXiv 2409.12191,
section 2.1; Qwen3-VL and Qwen3.5 give each frame of a video a grid of its own, behind its timestamp).

Text counts on all three axes alike. The tokens of a picture of t x h x w patches, `merge` x `merge` of them to a token,
stand in a grid that begins where the text before it ends; the text behind it goes on after the grid's largest position.
So positions run behind the number of tokens; the difference is the same from the prompt's end on: its delta. Keys and
values are kept by token number all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import InvalidRequestError, UnsupportedError
from slipstream.models.config import ModelConfig, VisionTokens
from slipstream.types import IntArray

PROMPT_KEYS = ("prompt_token_ids", "prompt_embeds", "image_grid_thw", "video_grid_thw")
MAX_GRID = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Media:
    """What a prompt with pictures, or with embeddings of its own, has beside its token ids.

    positions: rotary positions [3, n] of its tokens (time, height, width), delta: their largest and 1, less n. embeds:
    a tensor [M, H] for the tokens at `places`, in order, or None. key: a digest of both; prompts of the same ids share
    cached prefixes only where it is the same.
    """

    positions: IntArray
    delta: int
    embeds: Any
    places: IntArray
    key: str


def media_prompt(prompt: Mapping[str, Any], config: ModelConfig, dtype: torch.dtype) -> tuple[Any, Media]:
    """Token ids and `Media` of a prompt that is a mapping.

    prompt_embeds [M, H] stand in the place of the embeddings of the M image and video tokens, in order; without such
    tokens, of all tokens. image_grid_thw, video_grid_thw: [t, h, w] in patches of each image and video. Raises
    InvalidRequestError with what does not fit.
    """
    for key in prompt:
        if key not in PROMPT_KEYS:
            raise InvalidRequestError(f"prompt key {key!r} is unknown; the known ones are {', '.join(PROMPT_KEYS)}")
    ids: Any = prompt.get("prompt_token_ids")
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(ids, (list, tuple)) or not ids or not all(type(i) is int for i in ids):
        raise InvalidRequestError("prompt_token_ids must be a list of at least one whole number")
    grids = [_grids(name, prompt.get(name)) for name in ("image_grid_thw", "video_grid_thw")]
    vision, embeds = config.vision, prompt.get("prompt_embeds")
    if vision is None or not config.rope.sections:
        if any(grids):
            raise InvalidRequestError(
                f"image_grid_thw and video_grid_thw: {config.architecture} has no image positions"
            )
        places = np.arange(len(ids))
        positions = np.tile(places, (3, 1))
    else:
        positions = layout_positions(ids, grids[0], grids[1], vision)
        places = np.flatnonzero(np.isin(np.asarray(ids), (vision.image, vision.video)))
        if places.size and embeds is None:
            raise InvalidRequestError(f"the prompt has {places.size} image and video tokens and no prompt_embeds")
        places = places if places.size else np.arange(len(ids))
    if embeds is None:
        places = places[:0]
    else:
        embeds = _embeds(embeds, len(places), config.hidden_size, dtype)
    delta = int(positions.max()) + 1 - len(ids)
    digest = hashlib.sha256(positions.tobytes())
    if embeds is not None:
        digest.update(embeds.view(torch.uint8).numpy().tobytes())
    return ids, Media(positions=positions, delta=delta, embeds=embeds, places=places, key=digest.hexdigest())


def layout_positions(
    ids: Sequence[int],
    images: Sequence[tuple[int, int, int]],
    videos: Sequence[tuple[int, int, int]],
    vision: VisionTokens,
) -> IntArray:
    """int64 [3, n]. Raises InvalidRequestError when the grids are not those of the image and video tokens."""
    pictures = {
        vision.image: [_size(g, vision.merge) for g in images],
        # A video's frames stand apart, each behind the text of its time.
        vision.video: [(1, h, w) for t, h, w in (_size(g, vision.merge) for g in videos) for _ in range(t)],
    }
    for token, name in ((vision.image, "image"), (vision.video, "video")):
        there, named = sum(i == token for i in ids), sum(t * h * w for t, h, w in pictures[token])
        if there != named:
            raise InvalidRequestError(
                f"{name}_grid_thw makes {named} {name} tokens ({vision.merge} x {vision.merge} patches each), the "
                f"prompt has {there}"
            )
    left = {token: list(reversed(sizes)) for token, sizes in pictures.items()}
    parts, at, start = [], 0, 0
    while at < len(ids):
        token = ids[at]
        if token not in left:
            end = at
            while end < len(ids) and ids[end] not in left:
                end += 1
            parts.append(np.tile(np.arange(start, start + end - at), (3, 1)))
            start, at = start + end - at, end
            continue
        t, h, w = left[token].pop()
        end = at + t * h * w
        if any(i != token for i in ids[at:end]):
            raise InvalidRequestError(
                f"the picture at token {at} has {t * h * w} tokens by its grid, and others stand among them"
            )
        parts.append(
            np.stack([axis.reshape(-1) for axis in np.meshgrid(*map(np.arange, (t, h, w)), indexing="ij")]) + start
        )
        start, at = start + max(t, h, w), end
    return np.concatenate(parts, 1).astype(np.int64)


def _grids(name: str, value: Any) -> list[tuple[int, int, int]]:
    value = value.tolist() if hasattr(value, "tolist") else value or []
    for grid in value:
        ok = (
            isinstance(grid, (list, tuple))
            and len(grid) == 3
            and all(type(n) is int and 0 < n < MAX_GRID for n in grid)
        )
        if not ok:
            raise InvalidRequestError(
                f"{name} has {grid!r}; it must be three whole numbers above 0: time, height, width"
            )
    return [tuple(grid) for grid in value]


def _size(grid: tuple[int, int, int], merge: int) -> tuple[int, int, int]:
    """A grid in tokens."""
    t, h, w = grid
    if h % merge or w % merge:
        raise InvalidRequestError(
            f"grid {list(grid)}: height and width must be multiples of {merge}, patches per token"
        )
    return t, h // merge, w // merge


def _embeds(value: Any, rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise InvalidRequestError(f"prompt_embeds must be a tensor of real numbers, not {type(value).__name__}")
    if tuple(value.shape) != (rows, hidden):
        raise InvalidRequestError(
            f"prompt_embeds has shape {list(value.shape)}; the prompt needs [{rows}, {hidden}], a row for each "
            "token that they stand for"
        )
    if value.device.type != "cpu":
        raise UnsupportedError(f"prompt_embeds on {value.device} are not taken yet; pass them on the CPU")
    embeds_MH: Tensor = value.detach().to(dtype).contiguous()
    if not bool(embeds_MH.isfinite().all()):
        raise InvalidRequestError("prompt_embeds has numbers that are not finite")
    return embeds_MH
