"""How fast this machine reads memory: the other side of `share_of_floor`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

_LARGEST = 4 << 30
"""Bytes: past this a larger buffer reads no slower, and would only cost memory."""

_SMALLEST = 1 << 20


def read_rate(weight_bytes: int, *, device: str = "cpu", seconds: float = 0.5) -> float:
    """Bytes per second of the best pure-read kernel over a buffer of `weight_bytes`, read again and again.

    The buffer has the size of the weights (between 1 MiB and 4 GiB) on purpose: a decode frame reads its
    weights cyclically too, so whatever share of them stays in a cache there stays in it here, and the floor
    stays a floor. Each candidate kernel runs for about `seconds`; the fastest single pass counts.
    """
    size = min(max(weight_bytes, _SMALLEST), _LARGEST)
    floats = torch.ones(size // 8 * 2, dtype=torch.float32, device=device)
    words = floats.view(torch.int64)
    block = 8192
    rows = floats[: floats.numel() // block * block].view(-1, block)
    candidates: list[tuple[int, Callable[[], Any]]] = [
        (words.numel() * 8, lambda: words.sum()),
        (floats.numel() * 4, lambda: floats.sum()),
        (floats.numel() * 4, lambda: floats.amax()),
        (rows.numel() * 4, lambda: rows.sum(1)),
    ]
    return max(n / _fastest(kernel, device, seconds) for n, kernel in candidates)


def matrix_rate(dtype: str, *, seconds: float = 0.3) -> float:
    """Floating-point operations per second of the GPU's best large matrix product in `dtype`, inputs at random."""
    kind = getattr(torch, dtype)
    best = 0.0
    for size in (4096, 8192):
        a = torch.randn(size, size, device="cuda", dtype=torch.float32).to(kind)
        b = torch.randn(size, size, device="cuda", dtype=torch.float32).to(kind)
        best = max(best, 2.0 * size**3 / _fastest(partial(torch.mm, a, b), "cuda", seconds))
    return best


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward pass of a frame: the weight bytes it streams, how wide a weight is, and its rows."""

    weight_bytes: int
    itemsize: int
    rows: int


def frame_floor(passes: Sequence[Pass], *, kv_bytes: float, read: float, matrix: float) -> float:
    """Seconds that no frame can beat: sum over passes of max(bytes ÷ read rate, 2 · parameters · rows ÷ matrix rate),
    plus the KV bytes ÷ read rate (docs: what to measure). Rates in bytes/s and operations/s."""
    weights = sum(max(p.weight_bytes / read, 2.0 * (p.weight_bytes / p.itemsize) * p.rows / matrix) for p in passes)
    return weights + kv_bytes / read


def _fastest(kernel: Callable[[], Any], device: str, seconds: float) -> float:
    """Seconds of the fastest pass; at least 5 passes, and `seconds` in total."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else _nothing
    kernel()
    wait()
    best, passes, end = float("inf"), 0, time.perf_counter() + seconds
    while passes < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        kernel()
        wait()
        best = min(best, time.perf_counter() - start)
        passes += 1
    return best


def _nothing() -> None:
    """The CPU has finished when the call returns."""
