"""MTP drafting: the prediction head that a model comes with, fed with the model's final hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.draft.feature import FeatureDrafter
from slipstream.draft.mtp_model import MTPModel, load_mtp


class MTPDrafter(FeatureDrafter):
    """A chain from an `MTPModel`: one layer, fed with its own output for every draft after the first."""

    @staticmethod
    def load(folder: Path, values: Mapping[str, Any], target: Any, *, seed: int | None = None) -> MTPModel:
        return load_mtp(folder, values, target, seed=seed)
