"""Draft checkpoints: small, in safetensors or an old `.bin`, with integer tables beside the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.errors import ModelLoadError
from slipstream.models.blocks import Int4Blocks, Int8Blocks
from slipstream.models.config import read_json
from slipstream.models.weights import DenseSource, WeightSource

_SAFE, _SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
_BIN, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def tensor_names(folder: Path) -> set[str]:
    """Names in a folder's safetensors files, from their headers; empty where there are none."""
    names: set[str] = set()
    for path in _files(folder, _SAFE, _SAFE_INDEX):
        with _open(path) as f:
            names |= set(f.keys())
    return names


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint on the CPU, in their own types.

    `model.safetensors` or its shards, else `pytorch_model.bin` or its shards; those are read with weights_only, which
    runs no code. Raises ModelLoadError that names the file, or a tensor with values that are not finite.
    """
    tensors: dict[str, Tensor] = {}
    safe = _files(folder, _SAFE, _SAFE_INDEX)
    for path in safe:
        with _open(path) as f:
            for name in f.keys():  # noqa: SIM118 - not a dict
                tensors[name] = check_finite(name, f.get_tensor(name))
    if safe:
        return tensors
    for path in _files(folder, _BIN, _BIN_INDEX):
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as e:  # damaged files raise all kinds
            raise ModelLoadError(f"{path} is not a readable file of weights: {str(e).splitlines()[0]}") from None
        if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
            raise ModelLoadError(f"{path} does not hold a table of tensors")
        tensors.update((name, check_finite(name, tensor)) for name, tensor in loaded.items())
    if not tensors:
        raise ModelLoadError(f"{folder} has neither {_SAFE} nor {_BIN}")
    return tensors


def check_finite(name: str, tensor: Tensor) -> Tensor:
    """The tensor, if all its values are finite. A verifier would hide a draft that is not: it only costs time."""
    if tensor.is_floating_point() and tensor.numel():
        low, high = (tensor.float() if tensor.element_size() == 1 else tensor).aminmax()
        if not (low.isfinite() and high.isfinite()):
            raise ModelLoadError(f"tensor {name!r} of the draft has values that are not finite (NaN or infinity)")
    return tensor


def _files(folder: Path, single: str, index: str) -> list[Path]:
    if (folder / single).is_file():
        return [folder / single]
    if not (folder / index).is_file():
        return []
    table = read_json(folder / index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelLoadError(f"{folder / index} has no weight_map")
    files = sorted({str(file) for file in table.values()})
    for file in files:
        # A plain name only: an index must not lead out of its own folder.
        if Path(file).name != file or not (folder / file).is_file():
            raise ModelLoadError(f"{index} names {file!r}, which is not a file in {folder}")
    return [folder / file for file in files]


def _open(path: Path):  # type: ignore[no-untyped-def]
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as e:
        raise ModelLoadError(f"{path} is not a readable safetensors file: {e}") from None


class PartOf:
    """The tensors of another source whose names are wanted. Those with values that are not finite raise."""

    def __init__(self, source: WeightSource, wanted: Callable[[str], bool] = lambda name: True) -> None:
        self.source = source
        self._names = {name for name in source.names() if wanted(name)}

    def names(self) -> set[str]:
        return set(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return check_finite(name, self.source.read(name, start, stop))

    def packed_kind(self, name: str) -> Literal["int4", "int8"] | None:
        return self.source.packed_kind(name)

    def read_packed(self, name: str) -> Int4Blocks | Int8Blocks:
        return self.source.read_packed(name)


class TensorTable(DenseSource):
    """`WeightSource` over tensors in memory. rename: a checkpoint's name -> ours."""

    def __init__(self, tensors: Mapping[str, Tensor], rename: Callable[[str], str] = lambda name: name) -> None:
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            ours = rename(name)
            if ours in self.tensors:
                raise ModelLoadError(f"the checkpoint has the tensor {ours!r} twice, once as {name!r}")
            self.tensors[ours] = tensor

    def take(self, name: str) -> Tensor | None:
        """Remove and return a tensor that is no weight (a table of ids), None where there is none."""
        return self.tensors.pop(name, None)

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.tensors[name][start:stop]
