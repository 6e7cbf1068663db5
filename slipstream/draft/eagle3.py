"""EAGLE-3 drafting (Li et al. 2025, arXiv 2503.01840): a head that reads taps of three of the target's layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.draft.eagle3_model import Eagle3Model, load_eagle3
from slipstream.draft.feature import FeatureDrafter


class Eagle3Drafter(FeatureDrafter):
    """A chain from an `Eagle3Model`."""

    rounds = True

    @staticmethod
    def load(
        folder: Path, values: Mapping[str, Any], target: Any, *, seed: int | None = None, rounded: bool = False
    ) -> Eagle3Model:
        return load_eagle3(folder, values, target, seed=seed, rounded=rounded)
