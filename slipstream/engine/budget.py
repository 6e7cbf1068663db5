"""How many draft rows a frame should verify, from confidences of frames that are already collected.

Source: DSpark report, confidence-scheduled verification. With survival a[r][j] = prod_{i<=j} c[r][i], R requests and
SPS(rows) the measured frames per second, the budget maximises (R + sum of the K largest a) * SPS(R + K). Reading only
collected frames is what keeps the output exact: a draft's fate must not depend on drafts after it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Frames per second by verified rows; a count between two entries takes the lower one's value."""

    rows: tuple[int, ...]
    frames_per_second: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.frames_per_second):
            raise ConfigError(
                f"cost table: {len(self.rows)} row counts and {len(self.frames_per_second)} speeds; they must pair up"
            )
        if list(self.rows) != sorted(set(self.rows)):
            raise ConfigError(f"cost table: row counts {list(self.rows)} must rise")
        for speed in self.frames_per_second:
            if not speed > 0:
                raise ConfigError(f"cost table: {speed} frames per second must be above 0")

    def at(self, rows: int) -> float:
        return self.frames_per_second[max(0, bisect_right(self.rows, rows) - 1)]


def best_budget(survival: Sequence[Sequence[float]], table: CostTable) -> tuple[int, float]:
    """The smallest K of highest expected tokens per second, and that figure.

    survival: per request, non-increasing over its drafts; drafts of survival 0 are never worth a row. The whole range
    of K is looked at: measured tables are jagged, and stopping at the first decrease stops too early.
    """
    requests = len(survival)
    gains = sorted((a for row in survival for a in row if a > 0), reverse=True)
    budget, tokens = 0, float(requests)
    best = tokens * table.at(requests)
    for k, gain in enumerate(gains, start=1):
        tokens += gain
        value = tokens * table.at(requests + k)
        if value > best:
            budget, best = k, value
    return budget, best
