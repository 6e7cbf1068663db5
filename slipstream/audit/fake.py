"""Fake CUDA tensors on a machine without CUDA, and modes that carry on after each finding.

Only for a process of its own: `install_device_guard` changes a table inside libc10 for good.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from slipstream.audit.events import AuditRule, flat_tensors
from slipstream.audit.matches import LITERAL_CALLS, is_bool_index
from slipstream.audit.report import AuditError, user_stack
from slipstream.audit.rules import BY_ID
from slipstream.audit.runtime import CallMode, OpMode, Recorder
from slipstream.audit.scope import mark_staging

# Fixed by c10/core/DeviceType.h.
_CUDA, _META, _DEVICE_TYPES = 1, 14, 21
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"

_BUILTIN_NAMESPACES = frozenset({"aten", "prim", "prims", "profiler", "inductor", "debugprims"})


def install_device_guard() -> None:
    """Give the CUDA device type the guard of the meta device, which does nothing.

    `copy_`, indexing and `.to` on fake CUDA tensors open a device guard: a CPU build has none, and the one of a CUDA
    build looks for a real device. Raises AuditError where libc10 does not export its registry.
    """
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    name = next((n for n in ("libc10.so", "libc10.dylib") if os.path.exists(os.path.join(folder, n))), None)
    if name is None:
        raise AuditError(f"no libc10 in {folder}: the proof needs Linux or macOS")
    try:
        registry = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(ctypes.CDLL(os.path.join(folder, name)), _REGISTRY)
    except ValueError as error:
        raise AuditError(f"{name} of torch {torch.__version__} exports no device guard registry") from error
    if not registry[_META]:
        raise AuditError(f"torch {torch.__version__} has no guard for the meta device")
    registry[_CUDA] = registry[_META]


def plain_attention() -> None:
    """Let scaled_dot_product_attention take its plain form: a CUDA build asks the device which kernel to choose."""

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        return torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    torch.nn.functional.scaled_dot_product_attention = attention
    torch._C._nn.scaled_dot_product_attention = attention


@contextlib.contextmanager
def fake_world(recorder: Recorder, calls: Counter[str]) -> Iterator[ProofOps]:
    """Run the body under fake tensors; `calls` counts custom operations ("namespace::name").

    Order of the modes: the function mode sees calls first, then the proof's dispatch mode, then Fake.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), ProofOps(recorder, calls) as ops, ProofCalls(recorder):
        yield ops


class ProofOps(OpMode):
    """Returns a stand-in where a value or a size would have to be read, so that the frame runs on."""

    def __init__(self, recorder: Recorder, calls: Counter[str]) -> None:
        super().__init__(recorder)
        self.calls = calls
        self.reads: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # "cuda" without an index becomes the current device of the guard, and the borrowed guard says "meta".
        if kwargs and isinstance(device := kwargs.get("device"), torch.device) and device.type == "meta":
            kwargs = {**kwargs, "device": torch.device("cuda", 0)}
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, rule: AuditRule | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.recorder.paused and func.namespace not in _BUILTIN_NAMESPACES:
            self.calls[f"{func.namespace}::{func.overloadpacket.__name__}"] += 1
        name = func.overloadpacket.__name__
        if name == "_pin_memory":
            return mark_staging(torch.empty_like(args[0]))
        stand_in = _STAND_INS.get(name)
        if stand_in is not None and (rule is not None or name in _READS):
            if name in _READS and not self.recorder.world.on_device(args[0]):
                try:
                    return func(*args, **kwargs)  # a constant on the host can be read
                except DataDependentOutputException:
                    pass  # the host copy of a device value: the copy has been reported
            return stand_in(self, func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if rule is None:
                detail = f"{func.namespace}.{name} needs the values of a tensor"
                self.recorder.emit(BY_ID["data-dependent"], detail, user_stack())
            return self._like_schema(func, args)
        if kwargs.get("pin_memory") is True:
            mark_staging(result)
        return result

    def flip(self) -> bool:
        """True, then False, and so on, per place in the program: loops that read a flag end either way."""
        site = user_stack()[0]
        self.reads[site.file, site.line] += 1
        return self.reads[site.file, site.line] % 2 == 1

    def _like_schema(self, func: Any, args: tuple[Any, ...]) -> Any:
        """A result for an unknown operation: tensors like its first one, and small numbers."""
        model = (flat_tensors(args) or [torch.empty(1)])[0]
        values: dict[str, Any] = {"bool": self.flip(), "int": 1, "float": 1.0, "number": 1}
        out = [
            torch.empty_like(model) if str(r.type) == "Tensor" else values.get(str(r.type))
            for r in func._schema.returns
        ]
        return out[0] if len(out) == 1 else tuple(out)


def _scalar(ops: ProofOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = args[0].dtype
    if dtype == torch.bool:
        return ops.flip()
    return 1.0 if dtype.is_floating_point else (1 + 0j if dtype.is_complex else 1)


def _flag(ops: ProofOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return ops.flip()


def _nothing(ops: ProofOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    return None


def _index(ops: ProofOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x[mask] as if one element were true. Host indices are moved, as the real kernel does."""
    x, indices = args[0], list(args[1])
    out: list[Any] = []
    for index in indices:
        if is_bool_index(index):
            out += [torch.zeros(1, dtype=torch.int64, device=x.device)] * index.dim()
        else:
            out.append(index)
    return func(x, out)


def _same(ops: ProofOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if func.overloadpacket.__name__.endswith("_") else args[0].clone()


def _rows(ops: ProofOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.zeros((1, args[0].dim()), dtype=torch.int64, device=args[0].device)


def _one(ops: ProofOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.empty(1, dtype=args[0].dtype, device=args[0].device)


def _unique(ops: ProofOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As if all values were distinct: values, inverse, counts (a superset for `_unique`)."""
    x = args[0]
    along = func.overloadpacket.__name__ == "unique_dim"
    n = x.shape[args[1]] if along else x.numel()
    values = torch.empty_like(x) if along else torch.empty(n, dtype=x.dtype, device=x.device)
    inverse = torch.zeros((n,) if along else x.shape, dtype=torch.int64, device=x.device)
    counts = torch.ones(n, dtype=torch.int64, device=x.device)
    return (values, inverse, counts)[: len(func._schema.returns)]


def _repeats(ops: ProofOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.zeros(args[0].numel(), dtype=torch.int64, device=args[0].device)


def _counts(ops: ProofOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    minlength = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    dtype = torch.int64 if weights is None else torch.float64
    return torch.zeros(max(1, minlength), dtype=dtype, device=args[0].device)


_READS = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"})
_STAND_INS: dict[str, Any] = {
    "_local_scalar_dense": _scalar,
    "item": _scalar,
    "is_nonzero": _flag,
    "equal": _flag,
    "allclose": _flag,
    "_linalg_check_errors": _nothing,
    "index": _index,
    "index_put": _same,
    "index_put_": _same,
    "_index_put_impl_": _same,
    "nonzero": _rows,
    "argwhere": _rows,
    "masked_select": _one,
    "repeat_interleave": _repeats,
    "_unique": _unique,
    "_unique2": _unique,
    "unique_dim": _unique,
    "unique_consecutive": _unique,
    "bincount": _counts,
}


class ProofCalls(CallMode):
    """Replaces calls that cannot run on fake tensors by stand-ins."""

    def run(self, rule: AuditRule | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self.recorder.call
        first = args[0] if args else None
        if name in ("Tensor.numpy", "Tensor.__array__") and isinstance(first, FakeTensor):
            import numpy as np

            return np.zeros(tuple(first.shape), dtype=str(first.dtype).removeprefix("torch.").replace("bfloat16", "f4"))
        if name == "Tensor.__format__" and isinstance(first, FakeTensor):
            return format(1.0, args[1]) if first.dim() == 0 else object.__format__(first, "")
        if name in LITERAL_CALLS and flat_tensors(args) and isinstance(first, (list, tuple)):
            return func(_numbers(first), *args[1:], **kwargs)
        if name == "Tensor.new_tensor" and len(args) > 1 and isinstance(args[1], (list, tuple)):
            return func(first, _numbers(args[1]), *args[2:], **kwargs)
        return func(*args, **kwargs)


def _numbers(x: Any) -> Any:
    """Nested lists with every tensor replaced by ones of its shape."""
    if isinstance(x, (list, tuple)):
        return [_numbers(y) for y in x]
    if isinstance(x, torch.Tensor):
        one: Any = 1.0 if x.dtype.is_floating_point else 1
        return _numbers([one] * math.prod(x.shape)) if x.dim() else one
    return x
