"""How many draft rows a frame should verify, from confidences of frames that are already collected.

Source: DSpark report, confidence-scheduled verification. With survival a[r][j] = prod_{i<=j} c[r][i], R requests and
SPS(rows) the measured frames per second, the budget maximises (R + sum of the K largest a) * SPS(R + K). Only survivals
of drafts that a launched frame has judged already are read (`Sequence.noted`): a budget that depends on the drafts it
is for would let a draft's fate depend on those after it, and bias the output.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from slipstream.config import EngineConfig
from slipstream.engine.rows import slot_bucket
from slipstream.errors import ConfigError
from slipstream.types import SURVIVAL_ONE


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

    @classmethod
    def of_tiers(cls, seconds: Sequence[tuple[int, float]]) -> CostTable:
        """Of captured frames (rows, seconds): so many rows or fewer take one frame of that size."""
        first = [1, *(rows + 1 for rows, _ in seconds[:-1])]
        return cls(rows=tuple(first), frames_per_second=tuple(1 / s for _, s in seconds))

    @classmethod
    def of_counts(cls, seconds: Sequence[tuple[int, float]]) -> CostTable:
        """Of frames (rows, seconds) that may have any count of rows: on a line between two that were timed."""
        rows, speeds = [1], [1 / seconds[0][1]]
        for (low, fast), (high, slow) in pairwise(seconds):
            for n in range(low + 1, high + 1):
                rows.append(n)
                speeds.append(1 / (fast + (slow - fast) * (n - low) / (high - low)))
        return cls(rows=tuple(rows), frames_per_second=tuple(speeds))

    def at(self, rows: int) -> float:
        return self.frames_per_second[max(0, bisect_right(self.rows, rows) - 1)]


def best_budget(survival: Iterable[Sequence[float]], table: CostTable, one: float = 1.0) -> tuple[int, float]:
    """The smallest K of highest expected tokens per second, and that figure.

    survival: per request, non-increasing over its drafts, in units of 1 / one; drafts of survival 0 are never worth a
    row. The whole range of K is looked at: measured tables are jagged, and stopping at the first decrease stops too
    early. While the table is level every draft is worth its row, so only the last K of each step can be the best.
    """
    each = list(survival)
    requests = len(each)
    gains = [a for a in chain.from_iterable(each) if a > 0]
    gains.sort(reverse=True)
    tokens = list(accumulate(gains, initial=requests * one))  # [K]
    budget, best = 0, -1.0
    at = max(0, bisect_right(table.rows, requests) - 1)
    for step in range(at, len(table.rows)):
        end = table.rows[step + 1] if step + 1 < len(table.rows) else requests + len(tokens)
        k = min(end - requests, len(tokens)) - 1
        value = tokens[k] / one * table.frames_per_second[step]
        if value > best:
            budget, best = bisect_left(tokens, tokens[k], 0, k), value  # gains too small to count are not taken
        if k + 1 == len(tokens):
            break
    return budget, best


class Schedule:
    """The budget of each frame; one per engine."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError where no frame was timed."""
        self.config = config
        timed = dict[int, list[tuple[int, float]]]()
        for slots, rows, seconds in sorted(config.row_seconds):
            timed.setdefault(slots, []).append((rows, seconds))
        if not timed:
            raise ConfigError("confidence_schedule=True needs row_seconds: what frames take by their rows")
        make = CostTable.of_tiers if config.row_tiers else CostTable.of_counts
        self.tables = {slots: make(seconds) for slots, seconds in timed.items()}
        self._slots = sorted(self.tables)
        self._unknown = (SURVIVAL_ONE,) * config.num_drafts

    def table(self, slots: int) -> CostTable:
        """The table of the fewest timed slots that hold so many."""
        return self.tables[self._slots[min(bisect_left(self._slots, slots), len(self._slots) - 1)]]

    def choose(self, known: Sequence[Sequence[int] | None], most_drafts: Sequence[int]) -> tuple[int, int, int]:
        """Budget, R and width of a frame over slots with these survivals (None: nothing judged yet, all are hoped for).

        most_drafts: what each slot may verify. R has one row for every slot, padding included; what padding leaves free
        goes to drafts too.
        """
        n, config = len(known), self.config
        hoped = [self._unknown[:most] if a is None else a for a, most in zip(known, most_drafts, strict=True)]
        bucket = slot_bucket(n, config)
        budget, _ = best_budget(hoped, self.table(bucket), SURVIVAL_ONE)
        widest = 1 + config.num_drafts
        if config.row_tiers:
            tier = min(t for t in config.row_tiers if bucket * t >= n + budget)
            return budget, bucket * tier, widest
        width = min(widest, 1 + budget + bucket - n)
        return budget, bucket + budget, width
