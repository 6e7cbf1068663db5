"""float32 means float32 inside the engine, whatever the process allows elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

_CPU: Any = torch.backends.mkldnn
_BACKENDS: tuple[Any, ...] = (torch.backends.cuda.matmul, _CPU.matmul)


class IeeeProducts:
    """While entered, float32 matrix products are computed in float32: no TF32 on a GPU, no bf16 on a CPU.

    The process may allow those for its own models (`torch.set_float32_matmul_precision`); that setting is put back at
    the end. It is one for all threads: a product that another thread starts meanwhile is exact too. Convolutions
    (cuDNN) have a setting of their own; no model here has one. A captured graph keeps what held at its capture.
    """

    def __init__(self, *, wanted: bool) -> None:
        """wanted: the model computes in float32; else entering does nothing."""
        self.backends = _BACKENDS if wanted else ()
        self._before: list[str] = []

    def __enter__(self) -> None:
        self._before = [b.fp32_precision for b in self.backends]
        for backend, before in zip(self.backends, self._before, strict=True):
            if before != "ieee":
                backend.fp32_precision = "ieee"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for backend, before in zip(self.backends, self._before, strict=True):
            if before != "ieee":
                backend.fp32_precision = before
