"""Reads GGUF files: metadata and the tensor table (format: ggml's docs/gguf.md, versions 2 and 3).

The `gguf` package builds one object per array element, which costs seconds and 160 MB on a 49k vocabulary;
this reader takes arrays whole. It never trusts a length: each is held against the bytes that are left.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import ModelLoadError, UnsupportedError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# ggml type id -> name, values per block, bytes per block.
_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
READABLE = (
    *("F32", "F16", "BF16"),
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor table. shape is in row-major order (rows first); offset and size in bytes."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    size: int


class GGUFFile:
    """Metadata and tensor table of one GGUF file; tensor bytes are read on demand.

    metadata: key -> int, float, bool, str or list of those. Raises ModelLoadError for a file that is missing,
    not GGUF, truncated or senseless, UnsupportedError for a tensor type that is known but not built.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as f, _mapped(f.fileno(), path) as data:
                self.metadata, self.tensors = _Parser(data, path).parse()
        except OSError as e:
            raise ModelLoadError(f"{path} cannot be read: {e.strerror or e}") from None

    def raw(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Stored bytes of rows [start, stop) along the first dimension, uint8 [rows, bytes per row]."""
        t = self.tensors[name]
        row = t.size // t.shape[0]
        count = (t.shape[0] if stop is None else stop) - start
        with self.path.open("rb") as f:
            f.seek(t.offset + start * row)
            data = np.fromfile(f, dtype=np.uint8, count=count * row)
        if data.size != count * row:
            raise ModelLoadError(f"{self.path} is truncated inside tensor {name!r}")
        return data.reshape(count, row)


@contextmanager
def _mapped(fileno: int, path: Path) -> Iterator[mmap.mmap]:
    try:
        data = mmap.mmap(fileno, 0, access=mmap.ACCESS_READ)
    except ValueError:  # what mmap says of an empty file
        raise ModelLoadError(f"{path} is empty") from None
    try:
        yield data
    finally:
        data.close()


class _Parser:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._take(4) != _MAGIC:
            raise ModelLoadError(f"{self.path} is not a GGUF file")
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelLoadError(f"{self.path}: GGUF version {version} is not supported; 2 and 3 are")
        tensor_count, key_count = self._scalar("Q"), self._scalar("Q")
        self._room(tensor_count * 24 + key_count * 12, "table")  # their least sizes
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        entries = [self._entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelLoadError(f"{self.path}: general.alignment={alignment!r} must be a power of two")
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in entries:
            tensors[name] = self._tensor(name, shape, kind, base + offset)
        return metadata, tensors

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = self._scalar("I")
        if not 1 <= dims <= 4:
            raise ModelLoadError(f"{self.path}: tensor {name!r} has {dims} dimensions; 1 to 4 are allowed")
        shape = tuple(self._scalar("Q") for _ in range(dims))[::-1]  # the file has the fastest dimension first
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        if kind not in _TYPES:
            raise UnsupportedError(f"{self.path}: tensor {name!r} has the unknown type id {kind}")
        type_name, values, size = _TYPES[kind]
        count = 1
        for n in shape:
            count *= n
        if count < 1 or shape[-1] % values:
            raise ModelLoadError(f"{self.path}: tensor {name!r} of shape {list(shape)} cannot be {type_name}")
        total = count // values * size
        if offset + total > len(self.data):
            raise ModelLoadError(
                f"{self.path} is truncated: tensor {name!r} ends at byte {offset + total} of {len(self.data)}"
            )
        return GGUFTensor(name, shape, type_name, offset, total)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise ModelLoadError(f"{self.path}: unknown metadata type {kind}")
            return self._scalar(_SCALARS[kind])
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            self._room(count * 8, "array")
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:  # arrays of arrays are legal but unused
            raise ModelLoadError(f"{self.path}: unknown metadata array type {kind}")
        code = _SCALARS[kind]
        return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(code))))

    def _string(self) -> str:
        raw = self._take(self._scalar("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            # Vocabulary entries may hold bytes that are no UTF-8 alone; keep them recoverable.
            return raw.decode("utf-8", errors="surrogateescape")

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize(code)))[0]

    def _room(self, count: int, what: str) -> None:
        if count > len(self.data) - self.at:
            raise ModelLoadError(f"{self.path} is truncated or damaged: a {what} runs past its end")

    def _take(self, count: int) -> bytes:
        self._room(count, "field")
        self.at += count
        return self.data[self.at - count : self.at]
