"""An engine on the CPU that takes a GPU's way: captured shapes' padding, kernels by their definitions, fused passes."""

from __future__ import annotations

from typing import Any

import pytest

import slipstream.build as build_room
from slipstream.kernels.workspace import Workspace
from slipstream.models.fused import FusedDecoder
from slipstream.models.fused_hybrid import FusedHybrid

SHAPES: dict[str, Any] = {
    "max_slots": 4, "slot_buckets": (1, 2, 4), "row_tiers": (1, 4), "prefill_tiers": (8,), "prefill_chunk": 8,
    "prefill_chunk_busy": 8, "run_ahead": 2,
}  # fmt: skip
"""Options as a GPU's engine has them, small."""


def take_a_gpus_way(patch: pytest.MonkeyPatch, *, fused: bool) -> None:
    """Engines that are built from now on. fused: else the plain pass with the kernels' attention."""

    def made(model: Any, kv: Any, workspace: Any) -> Any:
        return (FusedHybrid if model.config.delta_layers else FusedDecoder)(model, kv, workspace) if fused else None

    patch.setattr(build_room, "_workspace", lambda *_: Workspace("cpu", floats=1 << 16))
    patch.setattr(build_room, "_fused", made)
