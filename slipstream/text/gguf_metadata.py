"""The key-value section of a GGUF file.

The `gguf` package builds several Python objects per array element, which takes seconds on the vocabularies of
today; start-up needs only plain values, so this reads them in one pass and never touches the tensors.
Layout: the GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import ModelLoadError, UnsupportedError

# GGUF value type -> little-endian numpy type; 8 is a string, 9 an array.
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_MAX_ENTRIES = 1 << 16
_U64 = struct.Struct("<Q").unpack_from


class _Cursor:
    """A read position that never leaves the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise ModelLoadError(f"truncated: it needs {end} bytes and has {len(self.data)}")
        chunk = self.data[self.at : end]
        self.at = end
        return chunk

    def number(self, kind: str) -> Any:
        dtype = np.dtype(kind)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def string(self) -> str:
        return self.take(self.number("<u8")).decode("utf-8")

    def strings(self, count: int) -> list[str]:
        """`count` strings; the hot loop, a vocabulary and its merges are 10^5 of them."""
        data, at, size = self.data, self.at, len(self.data)
        out: list[str] = []
        for _ in range(count):
            if at + 8 > size:
                raise ModelLoadError(f"truncated: {count} strings announced, {len(out)} there")
            end = at + 8 + _U64(data, at)[0]
            if end > size:
                raise ModelLoadError(f"truncated: {count} strings announced, {len(out)} there")
            out.append(data[at + 8 : end].decode("utf-8"))
            at = end
        self.at = at
        return out

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY or depth > 3:
            raise ModelLoadError(f"value type {kind} is not a GGUF type")
        inner, count = self.number("<u4"), self.number("<u8")
        if inner == _STRING:
            return self.strings(count)
        if inner in _SCALARS:
            dtype = np.dtype(_SCALARS[inner])
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        if count > _MAX_ENTRIES:
            raise ModelLoadError(f"nested array of {count} entries; the limit is {_MAX_ENTRIES}")
        return [self.value(inner, depth + 1) for _ in range(count)]


def read_gguf_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """All key-value pairs of a GGUF file; arrays as lists.

    Raises ModelLoadError for a file that is missing, damaged or truncated, UnsupportedError for another
    version or byte order.
    """
    file = Path(path)
    try:
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data))
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{file}: damaged GGUF: a string is not UTF-8 ({error.reason})") from error
    except (ModelLoadError, UnsupportedError) as error:
        raise type(error)(f"{file}: {error}") from error
    except (OSError, ValueError) as error:  # mmap of an empty file is a ValueError
        raise ModelLoadError(f"{file}: cannot be read as GGUF: {error}") from error


def _parse(cursor: _Cursor) -> dict[str, Any]:
    if cursor.take(4) != b"GGUF":
        raise ModelLoadError("not a GGUF file (wrong magic)")
    version = cursor.number("<u4")
    if version not in (2, 3):
        raise UnsupportedError(f"GGUF version {version}; versions 2 and 3, little-endian, are supported")
    cursor.number("<u8")  # tensor count
    count = cursor.number("<u8")
    if count > _MAX_ENTRIES:
        raise ModelLoadError(f"{count} metadata entries; the limit is {_MAX_ENTRIES}")
    pairs: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        pairs[key] = cursor.value(cursor.number("<u4"))
    return pairs
