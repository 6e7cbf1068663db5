"""How the kernels are cut, as pure functions of the shapes: measured on an H200, see docs/log.md.

A row's result depends on (bk, split) and on the attention's (block, splits), never on its neighbours. Where these
differ between row buckets, results differ in the last bits between those buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MAX_STREAM_ROWS = 64
"""Most rows of a weight-streaming product; above that a library product is faster."""


class Epilogue(IntEnum):
    """What follows the product; the numbers are those of the device code."""

    STORE = 0
    SILU = 1
    RESIDUAL = 2
    HEAD = 3
    ROPE = 4


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """bn x bk: weight tile (SILU and ROPE stream two). split: programs per tile. hold: first tile before the wait.

    tma: weights through the bulk copy engine, whole tiles only.
    """

    bn: int = 64
    bk: int = 128
    split: int = 1
    warps: int = 4
    stages: int = 4
    tma: bool = False
    hold: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """block: keys per step. splits: programs that share the keys of a tile."""

    splits: int = 8
    block: int = 64
    warps: int = 4
    stages: int = 2


def rows_bucket(rows: int) -> int:
    """Rows of the activation tile: 16, 32 or 64."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


_MEASURED: dict[tuple[Epilogue, int, int], tuple[GemmConfig, GemmConfig]] = {
    # (epilogue, outputs N, K): up to 16 rows, up to 64 rows
    (Epilogue.ROPE, 6144, 4096): (
        GemmConfig(bk=64, split=8, stages=3, hold=True),
        GemmConfig(bk=64, split=8, stages=3, hold=True),
    ),
    (Epilogue.RESIDUAL, 4096, 4096): (
        GemmConfig(split=4, stages=3, hold=True),
        GemmConfig(split=4, stages=3, hold=True),
    ),
    (Epilogue.RESIDUAL, 4096, 14336): (
        GemmConfig(split=4, stages=4, hold=True),
        GemmConfig(bn=128, split=4, stages=3, hold=True),
    ),
    (Epilogue.ROPE, 3072, 2048): (GemmConfig(split=4, stages=3), GemmConfig(split=4, stages=3)),
    (Epilogue.RESIDUAL, 2048, 2048): (GemmConfig(bk=256, split=4, stages=3), GemmConfig(bk=256, split=4, stages=3)),
    (Epilogue.RESIDUAL, 2048, 8192): (GemmConfig(bk=256, split=4, stages=3), GemmConfig(bk=256, split=4, stages=3)),
}


def gemm_config(epilogue: Epilogue, outputs: int, k: int, rows: int, itemsize: int = 2) -> GemmConfig:
    """Configuration for `outputs` values per row (SILU: after the product; ROPE: all of q, k, v)."""
    few = rows <= 16
    if itemsize != 2:
        return GemmConfig(bk=32, split=_split(epilogue, outputs, k, 32), stages=2)
    found = _MEASURED.get((epilogue, outputs, k))
    if found is not None:
        return found[0] if few else found[1]
    if epilogue is Epilogue.HEAD:
        bn = 64 if few else 128
        bk = 128 if few else 64
        return GemmConfig(bn=bn, bk=bk, stages=4, tma=outputs % bn == 0 and k % bk == 0)
    if epilogue is Epilogue.SILU:
        return GemmConfig(split=_split(epilogue, outputs, k, 128))
    return GemmConfig(split=_split(epilogue, outputs, k, 128), stages=3)


def _split(epilogue: Epilogue, outputs: int, k: int, bk: int) -> int:
    """Enough programs to fill 132 multiprocessors about twice, at least four steps each."""
    # SILU streams two tiles per program (`outputs` counts pairs); a ROPE tile holds two halves of 64 outputs.
    tiles = max(1, (outputs // 2 if epilogue is Epilogue.ROPE else outputs) // 64)
    tiles *= 2 if epilogue is Epilogue.SILU else 1
    split = 1
    while split < 8 and tiles * split * 2 <= 400 and k // (split * 2) >= 4 * bk:
        split *= 2
    return split


def attention_config(rows: int, dim: int = 128) -> AttentionConfig:
    """Few rows: many splits, to use the whole GPU. Many rows fill it by themselves."""
    if rows <= 4:
        return AttentionConfig(splits=8, block=64, warps=8)
    if rows <= 16 or dim <= 64:
        return AttentionConfig(splits=4 if rows <= 16 else 2, block=128)
    return AttentionConfig(splits=2, block=32, stages=3)
