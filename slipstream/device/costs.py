"""What frames cost by their rows: timed once at start-up, kept on disk per device and model.

Confidence-scheduled verification weighs drafts against it. On a GPU captured frames are replayed; on a CPU frames run
over the sink, which nobody owns. There adaptive drafting starts from a lone slot's frames, where the draft says what
acceptance to expect.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.config import EngineConfig
from slipstream.device.frame import Frame
from slipstream.types import FramePlan

if TYPE_CHECKING:
    from slipstream.device.graphs import FrameGraphs

RowSeconds = tuple[tuple[int, int, float], ...]
"""(slots, rows, seconds) of frames, in rising order."""

FORMAT = 1
PER_SLOT = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Rows per slot that a CPU's frames are timed at, and the most that there can be."""
REPEATS, ENOUGH, TURNS = 5, 0.4, 3
"""Timed runs of a frame, seconds after which fewer will do, and runs of each mode's."""
CONTEXT = 256
"""Positions that a timed frame's attention looks at on a CPU."""


def points(engine: EngineConfig) -> list[tuple[int, int]]:
    """(slots, rows) to time: what plans may ask for where shapes are fixed, else enough of it."""
    most = engine.num_drafts + 1
    slots = engine.slot_buckets or sorted({2**i for i in range(engine.max_slots.bit_length())} | {engine.max_slots})
    tiers = engine.row_tiers or sorted({n for n in PER_SLOT if n < most} | {most})
    last = min(t for t in tiers if t >= most)
    return sorted((s, s * t) for s in slots for t in tiers if t <= last)


def measure(frame: Frame, engine: EngineConfig, graphs: FrameGraphs | None) -> RowSeconds:
    """Time every point. At start-up only, while all of the plan's lists name the sink."""
    if graphs is not None:
        return tuple(sorted(graphs.row_seconds()))
    return tuple((slots, rows, _seconds(frame, engine, slots, rows)) for slots, rows in points(engine))


def measure_modes(frame: Frame, engine: EngineConfig) -> RowSeconds:
    """(1, drafts, seconds) of a CPU's frames of one slot, whose rows all hold a draft, by turns. At start-up only."""
    times: dict[int, list[float]] = {drafts: [] for drafts in engine.draft_modes}
    for _ in range(TURNS):
        for drafts, seen in times.items():
            width = drafts + 1
            if engine.row_tiers:
                width = min(tier for tier in engine.row_tiers if tier >= width)
            # Page 1 is nobody's yet: it is read as a lone request's pages are, and never written.
            plan = _plan(engine, 1, width, width=width, drafts=drafts, first_page=1)
            seen.append(_timed(frame, plan))
    return tuple((1, drafts, min(seen)) for drafts, seen in sorted(times.items()))


def _seconds(frame: Frame, engine: EngineConfig, slots: int, rows: int) -> float:
    """The least time of an eager greedy frame: what else the machine does only adds to it."""
    width = engine.num_drafts + 1 if engine.row_tiers else min(engine.num_drafts + 1, 1 + rows - slots)
    plan = _plan(engine, slots, rows, width=width, drafts=engine.num_drafts, first_page=-1)
    _timed(frame, plan)
    times = list[float]()
    while len(times) < REPEATS and (sum(times) < ENOUGH or len(times) < 2):
        times.append(_timed(frame, plan))
    return min(times)


def _plan(engine: EngineConfig, slots: int, rows: int, *, width: int, drafts: int, first_page: int) -> FramePlan:
    reach = min(CONTEXT, engine.max_model_len)
    return FramePlan(
        seq=-1, decode=(0,) * slots, rows=rows, width=width, len_ub=reach, reach=(reach,) * slots,
        first_page=(first_page,) * slots, drafts=drafts,
    )  # fmt: skip


def _timed(frame: Frame, plan: FramePlan) -> float:
    with torch.inference_mode():
        slot_B = frame.state.decode_B[: len(plan.decode)]
        began = time.perf_counter()
        frame.decode(plan, slot_B)
        return time.perf_counter() - began


def device_name(device: torch.device) -> str:
    """The GPU, or the CPU's model and how many threads it is used with."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {torch.get_num_threads()} threads"


def cache_folder() -> Path:
    """$SLIPSTREAM_CACHE, else `slipstream` in the user's cache folder."""
    named = os.environ.get("SLIPSTREAM_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"


class CostCache:
    """One table in one file, named after what it was measured on."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self.key = json.loads(json.dumps({"format": FORMAT, **key}))
        text = json.dumps(self.key, sort_keys=True)
        self.path = folder / f"costs-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def load(self, wanted: Sequence[tuple[int, int]]) -> tuple[RowSeconds | None, str | None]:
        """The table, when it holds exactly the wanted points; else what is wrong with the file, if there is one."""
        try:
            values = json.loads(self.path.read_bytes())
            if values["key"] != self.key:
                return None, self._damaged("it was measured on something else")
            found = [(int(s), int(r), float(t)) for s, r, t in values["seconds"]]
        except FileNotFoundError:
            return None, None
        except (OSError, ValueError, TypeError, KeyError) as error:
            return None, self._damaged(f"{type(error).__name__}: {error}")
        if [(s, r) for s, r, _ in found] != list(wanted):
            return None, self._damaged("its frames are not the ones that are needed")
        if not all(math.isfinite(t) and t > 0 for _, _, t in found):
            return None, self._damaged("a time is not a number above 0")
        return tuple(found), None

    def save(self, seconds: RowSeconds) -> str | None:
        """Keep the table; the file is whole or not there. Returns what went wrong, if something did."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path.parent, prefix=self.path.stem, suffix=".part", delete=False
            ) as file:
                json.dump({"key": self.key, "seconds": seconds}, file)
            os.replace(file.name, self.path)
        except OSError as error:
            return f"the measured costs of frames cannot be kept in {self.path}: {error}"
        return None

    def _damaged(self, why: str) -> str:
        return f"warning: {self.path} cannot be used ({why}); frames are timed again"


def row_seconds(
    frame: Frame, engine: EngineConfig, graphs: FrameGraphs | None, cache: CostCache
) -> tuple[RowSeconds, list[str]]:
    """The costs of frames, from the cache or measured now; and notes for the user."""
    return _kept(cache, points(engine), lambda: measure(frame, engine, graphs))


def mode_seconds(frame: Frame, engine: EngineConfig, cache: CostCache) -> tuple[RowSeconds, list[str]]:
    """As `row_seconds`, of `measure_modes`."""
    return _kept(cache, [(1, drafts) for drafts in engine.draft_modes], lambda: measure_modes(frame, engine))


def _kept(
    cache: CostCache, wanted: Sequence[tuple[int, int]], measured: Callable[[], RowSeconds]
) -> tuple[RowSeconds, list[str]]:
    found, damage = cache.load(wanted)
    if found is not None:
        return found, []
    seconds = measured()
    return seconds, [note for note in (damage, cache.save(seconds)) if note is not None]
