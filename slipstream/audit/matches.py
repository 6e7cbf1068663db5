"""The tests behind the rules: each says what exactly happened in an event, or None.

Source for the copy tests (ATen/native/cuda/Copy.cu, `copy_kernel_cuda`): a copy is asynchronous if the call is
`non_blocking`, the host side is pinned, and the host side needs no temporary: it is contiguous, or both sides have the
same dtype and dense strides. A non-blocking copy converts dtypes on the device, a blocking one on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slipstream.audit.events import Event, flat_tensors, is_tensor

# Calls that build a tensor from Python values.
LITERAL_CALLS = frozenset({"tensor", "as_tensor", "asarray", "Tensor.new_tensor"})
_INDEX_CALLS = frozenset({"Tensor.__getitem__", "Tensor.__setitem__"})
_PRINT_CALLS = frozenset({"Tensor.__repr__", "Tensor.__format__", "Tensor.__str__"})
_HOST_ARRAY_CALLS = frozenset({"Tensor.tolist", "Tensor.numpy", "Tensor.__array__"})


def _shape(t: Any) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def _op(*names: str) -> Callable[[Event], bool]:
    wanted = frozenset(names)
    return lambda e: e.kind == "op" and e.name in wanted


def simple(what: str, *names: str) -> Callable[[Event], str | None]:
    is_op = _op(*names)

    def test(e: Event) -> str | None:
        if is_op(e) and any(e.world.on_device(t) for t in flat_tensors(e.args)):
            return f"{e.call or e.name} {what}"
        return None

    return test


def host(*names: str) -> Callable[[Event], str | None]:
    wanted = frozenset(names)
    return lambda e: (e.detail or e.name) if e.kind == "host" and e.name in wanted else None


def is_bool_index(x: Any) -> bool:
    return is_tensor(x) and str(x.dtype) in ("torch.bool", "torch.uint8")


# --- reads -------------------------------------------------------------------------------------------------


def tensor_from_scalars(e: Event) -> str | None:
    if e.kind != "call" or e.name not in LITERAL_CALLS:
        return None
    data = e.arg(1 if e.name == "Tensor.new_tensor" else 0, "data")
    if not isinstance(data, (list, tuple)):
        return None
    reads = sum(e.world.on_device(t) for t in flat_tensors(data))
    return f"{e.name} over a list reads {reads} device tensor(s) one by one" if reads else None


def host_read(e: Event) -> str | None:
    if e.kind == "call":
        if e.name in _PRINT_CALLS and e.args and e.world.on_device(e.args[0]):
            return f"formatting a device tensor {_shape(e.args[0])}"
        return None
    ops = ("aten._local_scalar_dense", "aten.item", "aten.is_nonzero", "aten.equal", "aten.allclose")
    return simple("reads a device value on the host", *ops, "aten._linalg_check_errors")(e)


def host_array(e: Event) -> str | None:
    if e.kind == "call":
        if e.name in _HOST_ARRAY_CALLS and e.args and e.world.on_device(e.args[0]):
            return f"{e.name} of {_shape(e.args[0])}"
        return None
    copy = _copy(e)
    if copy is None or not (e.world.on_device(copy.src) and copy.to_host):
        return None
    if copy.dst is None:
        return None if copy.non_blocking else f"device {_shape(copy.src)} copied to the host, blocking"
    if not e.world.is_pinned(copy.dst):
        return f"device {_shape(copy.src)} copied into pageable host memory"
    if not copy.non_blocking:
        return f"device {_shape(copy.src)} copied into pinned memory without non_blocking=True"
    if not copy.dst.is_contiguous() and not _same_dense_layout(copy.src, copy.dst):
        return f"the pinned {_shape(copy.dst)} with strides {tuple(copy.dst.stride())} needs a temporary on the host"
    return None  # another dtype or other strides of the device side are settled on the device


def async_host_array(e: Event) -> str | None:
    copy = _copy(e)
    if copy is None or not (e.world.on_device(copy.src) and copy.to_host and copy.dst is None):
        return None
    return f"{_shape(copy.src)} into newly allocated pinned memory"


# --- shapes that depend on values --------------------------------------------------------------------------


def bool_index(e: Event) -> str | None:
    if not _op("aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_")(e):
        return None
    masks = [i for i in e.args[1] if is_bool_index(i)]
    if not e.world.on_device(e.args[0]) or not any(e.world.on_device(m) for m in masks):
        return None
    if e.name == "aten.index":
        return f"x[mask] with a mask {list(masks[0].shape)}: the size of the result is read from the device"
    value = e.arg(2, "values")
    if not e.arg(3, "accumulate", False) and value.numel() == 1 and value.device.type == "cpu":
        return None  # a host scalar is written through masked_fill
    return "x[mask] = tensor: the mask is turned into indices, whose number is read from the device"


def repeat_interleave(e: Event) -> str | None:
    if not _op("aten.repeat_interleave")(e) or not e.args or not e.world.on_device(e.args[0]):
        return None
    if e.kwargs.get("output_size") is not None or len(flat_tensors(e.args)) != 1:
        return None  # a number of repeats, or a known size
    return "repeat_interleave with a repeats tensor and no output_size"


def data_dependent(e: Event) -> str | None:
    if e.kind != "op" or not e.tags & {"dynamic_output_shape", "data_dependent_output"}:
        return None
    if e.name in ("aten.index", "aten.repeat_interleave"):
        return None  # judged above
    if not any(e.world.on_device(t) for t in flat_tensors([list(e.args), dict(e.kwargs)])):
        return None
    return f"{e.name} is tagged as data-dependent"


# --- copies ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Copy:
    src: Any
    dst: Any  # None: a new tensor
    to_device: bool
    to_host: bool
    non_blocking: bool
    dtype: Any


def _copy(e: Event) -> _Copy | None:
    if e.kind != "op":
        return None
    if e.name == "aten.copy_":
        dst, src = e.args[0], e.args[1]
        flag = bool(e.arg(2, "non_blocking", False))
        return _Copy(src, dst, e.world.on_device(dst), e.world.on_host(dst), flag, dst.dtype)
    if e.name in ("aten._to_copy", "aten.to") and e.kwargs.get("device") is not None:
        kind = str(e.kwargs["device"]).split(":")[0]
        src = e.args[0]
        to_host = kind == "cpu" and e.world.device_type != "cpu"
        dtype = e.kwargs.get("dtype") or src.dtype
        flag = bool(e.kwargs.get("non_blocking", False))
        return _Copy(src, None, kind == e.world.device_type, to_host, flag, dtype)
    return None


def _upload(e: Event) -> _Copy | None:
    copy = _copy(e)
    return copy if copy is not None and copy.to_device and e.world.on_host(copy.src) else None


def tensor_literal(e: Event) -> str | None:
    if e.kind == "call":
        return e.detail if e.name in LITERAL_CALLS and e.detail else None
    if e.call in LITERAL_CALLS and _upload(e) is not None:
        return f"{e.call} builds the value on the host and copies it to the device"
    return None


def host_index(e: Event) -> str | None:
    if e.kind == "call" and e.name in _INDEX_CALLS and e.world.on_device(e.args[0]):
        index = e.args[1] if isinstance(e.args[1], tuple) else (e.args[1],)
        if e.world.device_type != "cpu" and any(_holds_numbers(i) for i in index):
            return "a Python list or numpy array is used as an index"
        return None
    if _op("aten.index", "aten.index_put", "aten.index_put_")(e) and e.world.on_device(e.args[0]):
        if any(e.world.on_host(i) for i in e.args[1]):
            return "a host tensor indexes a device tensor: it is copied to the device on each call"
    if e.call in _INDEX_CALLS and e.name == "aten._to_copy" and _upload(e) is not None:
        return "a host sequence is used as an index: it is copied to the device on each call"
    return None


def _holds_numbers(index: Any) -> bool:
    if isinstance(index, list):
        return bool(index) and not flat_tensors(index)
    return type(index).__module__ == "numpy" and getattr(index, "ndim", 0) > 0


def pageable(e: Event) -> str | None:
    copy = _upload(e)
    if copy is None or e.world.is_pinned(copy.src):
        return None
    flag = "non_blocking=True has no effect on it" if copy.non_blocking else "blocking"
    hint = "; write a slice or use fill_ to pass a number" if e.call == "Tensor.__setitem__" else ""
    return f"host {_shape(copy.src)} is pageable, {flag}{hint}"


def strided(e: Event) -> str | None:
    copy = _upload(e)
    if copy is None:
        return None
    if copy.src.dtype != copy.dtype and not copy.non_blocking:
        return f"pinned {copy.src.dtype} is converted to {copy.dtype} in a pageable temporary on the host"
    if copy.dst is None:
        # The new tensor takes over dense strides.
        flat = copy.src.is_contiguous() or (copy.src.dtype == copy.dtype and _is_dense(copy.src))
    else:
        same_shape = tuple(copy.dst.shape) == tuple(copy.src.shape) or copy.dst.numel() == copy.src.numel() == 1
        flat = same_shape and (copy.src.is_contiguous() or _same_dense_layout(copy.src, copy.dst))
    return None if flat else f"pinned {_shape(copy.src)} with strides {tuple(copy.src.stride())}"


def _same_dense_layout(a: Any, b: Any) -> bool:
    """Whether one plain memory copy moves the elements of one tensor to the other."""
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and _is_dense(a))


def _is_dense(t: Any) -> bool:
    """Non-overlapping and dense: some order of the dimensions is contiguous."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(t.stride(), t.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def blocking_upload(e: Event) -> str | None:
    copy = _upload(e)
    return None if copy is None or copy.non_blocking else f"pinned {_shape(copy.src)} without non_blocking=True"


def pin(e: Event) -> str | None:
    if e.kind != "op":
        return None
    if e.name == "aten._pin_memory":
        return f"{_shape(e.args[0])} is pinned"
    return f"{e.name} allocates pinned memory" if e.kwargs.get("pin_memory") is True else None
