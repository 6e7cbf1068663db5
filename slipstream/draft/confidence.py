"""Calibration of draft confidences: sequential temperature scaling, one temperature per draft position.

Source: DSpark report. A table is fitted on held-out rollouts so that prod_{i<=k} sigmoid(z_i / T_i) is the rate at
which the first k drafts are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError
from slipstream.models.config import read_json


def load_temperatures(source: str | Path | Sequence[float], drafts: int) -> list[float]:
    """The `drafts` temperatures of a list, or of a JSON file with the key "temperatures".

    Raises ConfigError that names a table of another length, or a value that is no number above 0.
    """
    name = "temperatures"
    values: Any = source
    if isinstance(source, str | Path):
        name = f"temperatures of {source}"
        values = read_json(Path(source)).get("temperatures")
    if not isinstance(values, list | tuple):
        raise ConfigError(f"{name} must be a list of numbers, or a JSON file that holds one as 'temperatures'")
    if len(values) != drafts:
        raise ConfigError(f"{name} has {len(values)} values; the draft has {drafts} positions")
    for i, t in enumerate(values):
        if isinstance(t, bool) or not isinstance(t, int | float) or not math.isfinite(t) or t <= 0:
            raise ConfigError(f"{name}: value {i} is {t!r}; it must be a number above 0")
    return [float(t) for t in values]
