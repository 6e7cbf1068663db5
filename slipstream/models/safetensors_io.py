"""Weights of a Hugging Face directory: one safetensors file, or shards with an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.errors import ModelLoadError, UnsupportedError
from slipstream.models.config import read_json
from slipstream.models.weights import DenseSource

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3")


class SafetensorsWeights(DenseSource):
    """`WeightSource` over the safetensors files of a directory.

    Tensors are mapped one at a time and the map is dropped before the next, so its pages never pile up.
    fp8_block: (rows, columns) of a block that shares one `weight_scale_inv`, for FP8 checkpoints.
    Raises ModelLoadError that names the file for what is missing, truncated or damaged.
    """

    def __init__(self, folder: Path, *, fp8_block: tuple[int, int] | None = None) -> None:
        self._fp8_block = fp8_block
        self._file_of: dict[str, Path] = {}
        self._shape: dict[str, tuple[int, ...]] = {}
        files = _index(folder)
        for path in sorted(set(files.values()), key=lambda p: p.name):
            with _open(path) as f:
                for name in f.keys():  # noqa: SIM118 - not a dict
                    part = f.get_slice(name)
                    if part.get_dtype() not in _FLOATS:
                        raise UnsupportedError(f"tensor {name!r} in {path.name} has the type {part.get_dtype()}")
                    self._file_of[name] = path
                    self._shape[name] = tuple(part.get_shape())
        for name, path in files.items():
            if name and name not in self._file_of:
                raise ModelLoadError(f"{_INDEX} places the tensor {name!r} in {path.name}, which lacks it")

    def names(self) -> set[str]:
        scales = {n for n in self._file_of if self._fp8_block and n.endswith("_scale_inv")}
        return set(self._file_of) - scales

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shape[name]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        value = self._get(name, start, stop)
        if value.dtype != torch.float8_e4m3fn:
            return value
        scale_name = name + "_scale_inv"
        if self._fp8_block is None or scale_name not in self._file_of:
            raise ModelLoadError(f"the FP8 tensor {name!r} has no {scale_name!r} beside it")
        return self._times_scale(name, value, start)

    def _get(self, name: str, start: int, stop: int) -> Tensor:
        path = self._file_of[name]
        with _open(path) as f:
            try:
                value: Tensor = f.get_slice(name)[start:stop]
            except (SafetensorError, OSError, RuntimeError) as e:
                raise ModelLoadError(f"{path.name}: tensor {name!r} cannot be read: {e}") from None
        return value

    def _times_scale(self, name: str, value: Tensor, start: int) -> Tensor:
        """float32 of FP8 rows [R, K] from row `start`; scale [ceil(N/b0), ceil(K/b1)] multiplies whole blocks."""
        assert self._fp8_block is not None
        high, wide = self._fp8_block
        (rows, columns), scale_name = self._shape[name], name + "_scale_inv"
        wanted = (-(-rows // high), -(-columns // wide))
        if self._shape[scale_name] != wanted:
            raise ModelLoadError(
                f"tensor {scale_name!r} has shape {list(self._shape[scale_name])}; it needs {list(wanted)}"
            )
        scale = self._get(scale_name, 0, wanted[0]).float().repeat_interleave(wide, 1)[:, :columns]
        return value.float() * scale[torch.arange(start, start + value.shape[0]) // high]


def _index(folder: Path) -> dict[str, Path]:
    """Tensor name -> file; for a single file the one entry has the name ''."""
    if (folder / _SINGLE).is_file():
        return {"": folder / _SINGLE}
    if not (folder / _INDEX).is_file():
        raise ModelLoadError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
    table = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelLoadError(f"{folder / _INDEX} has no weight_map")
    files: dict[str, Path] = {}
    for name, file in table.items():
        # A plain name only: an index must not lead out of its own folder.
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelLoadError(f"{_INDEX} places the tensor {name!r} in {file!r}, which is not a file name")
        if not (folder / file).is_file():
            raise ModelLoadError(f"{_INDEX} names {file}, which is not in {folder}")
        files[name] = folder / file
    return files


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as e:
        raise ModelLoadError(f"{path} is not a readable safetensors file: {e}") from None
