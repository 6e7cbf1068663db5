"""How the kernels are cut, as pure functions of the shapes: measured on an H200, see docs/log.md.

A row's result depends on (bk, split) and on the attention's (block, splits), never on its neighbours. Where these
differ between row buckets, results differ in the last bits between those buckets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

MAX_STREAM_ROWS = 128
"""Most rows that a weight-streaming product can take; `PassConfig` says up to where it is used."""

MAX_FUSED_ROWS = 2048
"""Most rows of one fused pass, frame or prompt chunk."""


class Epilogue(IntEnum):
    """What follows the product; the numbers are those of the device code."""

    STORE = 0
    SILU = 1
    RESIDUAL = 2
    HEAD = 3
    ROPE = 4


_WIDE = {(14336, 4096)}
"""Gate and up products (outputs, k) that beat the library and its small kernel at 128 rows, too."""


@dataclass(frozen=True, kw_only=True)
class PassConfig:
    """Most rows at which each product of a pass streams; above, the library multiplies and small kernels follow.

    library_pdl: the kernel behind a library product is a dependent launch too.
    """

    rope: int = 64
    residual: int = 64
    silu: int = 64
    head: int = 64
    linear: int = 64
    library_pdl: bool = False

    def __post_init__(self) -> None:
        most = max(self.rope, self.residual, self.silu, self.head, self.linear)
        assert most <= MAX_STREAM_ROWS, f"products stream up to {MAX_STREAM_ROWS} rows, not {most}"

    def most(self, epilogue: Epilogue, outputs: int, k: int) -> int:
        """Rows up to which a SwiGLU or a head streams: more than `silu` and `head` where that was measured to pay."""
        most = self.silu if epilogue is Epilogue.SILU else self.head
        wide = (outputs, k) in _WIDE if epilogue is Epilogue.SILU else k >= 4096 and outputs % 128 == 0
        return max(most, MAX_STREAM_ROWS) if most and wide else most


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
    """block: keys per step. splits: programs that share the keys of a tile. queries: rows of a tile, times the query
    heads of a KV head."""

    splits: int = 8
    block: int = 64
    warps: int = 4
    stages: int = 2
    queries: int = 16


def rows_bucket(rows: int) -> int:
    """Rows of the activation tile: 16, 32, 64 or 128."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128


_MEASURED: dict[tuple[Epilogue, int, int], dict[int, GemmConfig]] = {
    # (epilogue, outputs N, K): from this `rows_bucket` on. bench/tune_stream.py prints such lines.
    (Epilogue.ROPE, 6144, 4096): {
        16: GemmConfig(bk=64, split=8, stages=3, hold=True),
        32: GemmConfig(bk=64, split=2, stages=5, hold=True),
        64: GemmConfig(bk=64, split=2, stages=6),
        128: GemmConfig(bk=64, split=4, warps=8),
    },
    (Epilogue.RESIDUAL, 4096, 4096): {
        16: GemmConfig(split=4, stages=3, hold=True),
        64: GemmConfig(split=2, stages=6),
        128: GemmConfig(split=4, stages=3),
    },
    (Epilogue.RESIDUAL, 4096, 14336): {
        16: GemmConfig(split=4, stages=4, hold=True),
        32: GemmConfig(split=2, stages=6),
        128: GemmConfig(bn=128, bk=64, split=4, warps=8),
    },
    (Epilogue.RESIDUAL, 4096, 12288): {
        16: GemmConfig(split=4, stages=4, hold=True),
        32: GemmConfig(split=4, stages=3, hold=True),
        64: GemmConfig(split=2, stages=6),
        128: GemmConfig(bn=128, bk=64, split=4, warps=8),
    },
    (Epilogue.SILU, 14336, 4096): {16: GemmConfig(), 128: GemmConfig(bn=128, bk=64, warps=8)},
    (Epilogue.SILU, 12288, 4096): {
        16: GemmConfig(),
        32: GemmConfig(bn=32, stages=3, hold=True),
        64: GemmConfig(tma=True),
        128: GemmConfig(bk=64, warps=8),
    },
    (Epilogue.ROPE, 6144, 8192): {
        16: GemmConfig(bk=64, split=8, stages=3, hold=True),
        32: GemmConfig(bk=64, split=2, stages=5, hold=True),
        64: GemmConfig(bk=64, split=2, stages=6),
        128: GemmConfig(bk=64, split=4, warps=8),
    },
    (Epilogue.STORE, 4096, 12288): {
        16: GemmConfig(split=4, stages=4, hold=True),
        32: GemmConfig(split=4, stages=3, hold=True),
        64: GemmConfig(split=2, stages=6, hold=True),
    },
    (Epilogue.STORE, 12352, 4096): {
        16: GemmConfig(split=2, stages=3),
        32: GemmConfig(bk=64, stages=6),
        64: GemmConfig(stages=3),
    },
    (Epilogue.STORE, 10240, 4096): {16: GemmConfig(split=2, stages=3), 32: GemmConfig(bn=128, bk=64, stages=6)},
    (Epilogue.ROPE, 3072, 2048): {16: GemmConfig(split=4, stages=3), 128: GemmConfig(bk=64, split=4, warps=8)},
    (Epilogue.RESIDUAL, 2048, 2048): {16: GemmConfig(bk=256, split=4, stages=3), 128: GemmConfig(split=4, stages=3)},
    (Epilogue.RESIDUAL, 2048, 8192): {16: GemmConfig(bk=256, split=4, stages=3), 128: GemmConfig(split=4, stages=3)},
}


def gemm_config(epilogue: Epilogue, outputs: int, k: int, rows: int, itemsize: int = 2) -> GemmConfig:
    """Configuration for `outputs` values per row (SILU: after the product; ROPE: all of q, k, v)."""
    if itemsize != 2:
        return GemmConfig(bk=32, split=_split(epilogue, outputs, k, 32), stages=2)
    bucket = rows_bucket(rows)
    found = _MEASURED.get((epilogue, outputs, k))
    if found is not None:
        return found[max(b for b in found if b <= bucket)]
    if epilogue is Epilogue.HEAD and k <= 512:
        # A low-rank bias: few steps each, so many small programs that hide one another's start.
        bk = 128 if k % 128 == 0 else 64
        return GemmConfig(bk=bk, stages=3, tma=outputs % 64 == 0 and k % bk == 0)
    if epilogue is Epilogue.HEAD:
        bn, bk = (64, 128) if bucket <= (32 if k >= 4096 else 16) else (128, 64)
        return GemmConfig(
            bn=bn,
            bk=bk,
            warps=8 if bucket == 128 else 4,
            stages=3 if bucket == 128 else 4,
            tma=outputs % bn == 0 and k % bk == 0,
        )
    if epilogue in (Epilogue.SILU, Epilogue.ROPE) and bucket == 128:
        # Two weight tiles beside 128 rows: shared memory holds no longer step, registers need two warpgroups.
        return GemmConfig(bk=64, split=_split(epilogue, outputs, k, 128), warps=8)
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


def attention_config(rows: int, dim: int = 128, per_slot: int = 1, itemsize: int = 2) -> AttentionConfig:
    """Few slots: many splits, to use the whole GPU. Many slots fill it by themselves.

    per_slot: rows of one slot. A frame is cut alike with up to 4 of them and with one. Page numbers and then keys are
    loaded ahead, so of 2 to 4 stages one block is in flight, of 5 and 6 two, of 7 three.
    """
    slots = -(-rows // per_slot)
    if itemsize > 2:
        c = attention_config(rows, dim, per_slot)
        return replace(c, warps=max(4, c.warps), stages=2)
    if dim > 128:  # the blocks of keys and values of such heads have to fit into shared memory
        return AttentionConfig(splits=8 if slots <= 16 else 2, block=32, stages=2 if slots <= 4 else 5)
    if slots <= 4:
        return AttentionConfig(splits=8, block=64, warps=8)
    if dim <= 64:
        return AttentionConfig(splits=4 if slots <= 16 else 1, block=128, stages=7)
    if slots <= 16:
        return AttentionConfig(splits=4 if per_slot <= 4 else 2, block=32, warps=2, stages=5)
    if per_slot <= 4:
        return AttentionConfig(splits=2, block=32, warps=2, stages=5)
    return AttentionConfig(splits=1, block=128, queries=32)


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """queries: rows of a program's tile, query heads counted. block: keys per step, the same for all row counts."""

    queries: int = 128
    block: int = 64
    warps: int = 8
    stages: int = 3


def prefill_config(rows: int, dim: int = 128, itemsize: int = 2) -> PrefillConfig:
    """Attention of a prompt chunk: small tiles for few rows, so that there is a program for every multiprocessor."""
    if itemsize > 2 or dim > 128:
        return PrefillConfig(queries=16 if dim > 64 else 32, block=32, warps=4, stages=2)
    if rows <= 128:
        return PrefillConfig(queries=32, warps=4)
    if rows <= 512:
        return PrefillConfig(queries=64, warps=4)
    return PrefillConfig()


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """The delta rule over a decode frame's rows. columns: values of a head whose states a program holds. registers:
    most of a thread, None: as ptxas likes. by_slot: programs of one slot start together, rather than those of one head.

    A warp by itself waits for nobody between two rows, and eight of them keep 128 KiB of states on their way to each
    multiprocessor: the fastest cut at 1, 8 and 32 slots, with drafts and without.
    """

    columns: int = 32
    warps: int = 1
    registers: int | None = None
    by_slot: bool = True
