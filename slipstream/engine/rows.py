"""How many rows a launch has: those that a decode frame verifies, from collected records only; those of a chunk."""

from __future__ import annotations

from functools import lru_cache

from slipstream.config import EngineConfig


def slot_bucket(n: int, config: EngineConfig) -> int:
    """Slots of a frame for n decoding ones: the smallest bucket that holds them, n itself without buckets."""
    return _smallest(config.slot_buckets, n, n)


def choose_rows(wanted: list[int], config: EngineConfig, cap: int | None = None) -> tuple[int, int]:
    """(R, width) of a frame for slots that want wanted[i] rows, 1 bonus row included.

    Without row tiers R is the exact sum (padding slots take one row each) and width the largest wish. With
    tiers R = bucket * t and width = t for the smallest tier t that gives every wish a row.
    cap: most rows per slot that pages were counted for.
    """
    bucket = slot_bucket(len(wanted), config)
    if config.row_tiers:
        tier = _smallest(config.row_tiers, -(-sum(wanted) // bucket))
        tier = tier if cap is None else min(tier, cap)
        return bucket * tier, tier
    width = max(wanted) if cap is None else min(max(wanted), cap)
    return sum(min(w, width) for w in wanted) + bucket - len(wanted), width


def chunk_rows(n: int, config: EngineConfig) -> int:
    """Rows of a prefill chunk for n prompt rows: the smallest tier that holds them, n itself without tiers."""
    return _smallest(config.prefill_tiers, n, n) if n else 0


@lru_cache(maxsize=1024)  # asked again in each launch, about few counts
def _smallest(sizes: tuple[int, ...], n: int, otherwise: int | None = None) -> int:
    """The smallest size that holds n."""
    fits = [size for size in sizes if size >= n]
    if otherwise is None:
        return min(fits)
    return min(fits, default=otherwise)
