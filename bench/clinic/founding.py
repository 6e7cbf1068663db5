"""The founding cases, each put back into the production function where it would stand in this engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

from bench.clinic import engine_case
from slipstream.device import frame
from slipstream.device.logits import LogitStages
from slipstream.draft.ngram import NgramDrafter
from slipstream.draft.protocol import DraftSlots
from slipstream.types import RECORD_COLUMNS

PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
NGRAM = {"draft": "ngram", "num_drafts": 3, "synthetic_acceptance": 3.0, "row_tiers": (4,)}
"""One row tier, so that every frame has one shape, whether drafts were offered or not."""
EAGER = {**NGRAM, "cuda_graphs": False}


@contextlib.contextmanager
def positions_from_device_scalars() -> Iterator[None]:
    """Founding case 1: in the verify step, offsets of a text-only batch listed as device scalars, made a tensor."""
    production = frame.row_positions

    def original_form(state: Any, slot_R: torch.Tensor, pos_R: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros(pos_R.shape[0], dtype=pos_R.dtype, device=pos_R.device)
        deltas_R = torch.tensor([zero[row] for row in range(pos_R.shape[0])], device=pos_R.device)
        return production(state, slot_R, pos_R) + deltas_R

    frame.row_positions = original_form
    try:
        yield
    finally:
        frame.row_positions = production


for _name, _about, _after in (
    ("founding case 1: positions from device scalars", "run eagerly before and after: only the list differs", EAGER),
    ("founding case 1, beside the captured frame", "the eager frame with it, and the frame as shipped", NGRAM),
):
    engine_case(
        _name,
        rule="tensor-from-scalars",
        about=f"n-gram frame with 3 drafts: {_about}",
        options=EAGER,
        after_options=_after,
    )(positions_from_device_scalars)


@contextlib.contextmanager
def scalar_per_draft_step() -> Iterator[None]:
    """Founding case 2: the draft step makes its step number a device tensor with torch.tensor(n, device=cuda)."""
    production = NgramDrafter.draft_slots

    def original_form(self: NgramDrafter, slots: DraftSlots) -> None:
        for step in range(self.max_drafts):
            torch.tensor(step, device=slots.slot_B.device)
        production(self, slots)

    with patch.object(NgramDrafter, "draft_slots", original_form):
        yield


engine_case(
    "founding case 2: torch.tensor(n, device) per draft step",
    rule="tensor-literal",
    about="n-gram frame with 3 drafts, run eagerly before and after: only the scalars differ",
    options=EAGER,
)(scalar_per_draft_step)

engine_case(
    "founding case 2, beside the captured frame",
    rule="tensor-literal",
    about="the original form cannot be captured in a CUDA graph: the eager frame with it, and the frame as shipped",
    options=EAGER,
    after_options=NGRAM,
)(scalar_per_draft_step)


@contextlib.contextmanager
def last_tokens_from_a_list() -> Iterator[None]:
    """Founding case 4: penalties count tokens that the host lists and copies up, from pageable memory, each step."""
    production = LogitStages.committed

    def original_form(self: LogitStages, plan: Any, slot_B: torch.Tensor, record_BC: torch.Tensor, *rest: Any) -> None:
        listed = [[0] * (record_BC.shape[1] - RECORD_COLUMNS) for _ in range(slot_B.shape[0])]
        last_BW = torch.tensor(listed).to(slot_B.device, non_blocking=True)
        production(self, plan, slot_B, record_BC + 0 * last_BW.sum(), *rest)

    with patch.object(LogitStages, "committed", original_form):
        yield


engine_case(
    "founding case 4: last tokens from a pageable list",
    rule="pageable-copy",
    about="n-gram frame with penalties, run eagerly before and after: only the list and its copy differ",
    options=EAGER,
    sampling=PENALTIES,
)(last_tokens_from_a_list)

engine_case(
    "founding case 4 beside the captured frame",
    rule="pageable-copy",
    about="the original form cannot be captured in a CUDA graph: the eager frame with it, and the frame as shipped",
    options=EAGER,
    after_options=NGRAM,
    sampling=PENALTIES,
)(last_tokens_from_a_list)
