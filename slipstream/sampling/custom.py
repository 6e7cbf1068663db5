"""Custom processors: functions of third parties that change logits on the device, captured with the frame.

    def soften(logits_RV: Tensor, rows: ProcessorRows) -> Tensor:
        return logits_RV / (1 + rows.argument_R[:, None].to(logits_RV.dtype))

A package offers one under the entry point group `slipstream.processors`; an engine is built with it by name (`LLM(...,
processors=["soften"])`) and a request asks for it with a number: `SamplingParams(logits_processors={"soften": 0.5})`.
Only tensor code can be captured and may stand in a frame, so a processor is run once when it is registered, and what
reads a tensor's value, takes data from the host, draws from a generator or looks at other rows is refused there.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.errors import ConfigError
from slipstream.params import MAX_PROCESSORS

GROUP = "slipstream.processors"
"""Entry point group: the name is what requests say, the value "module:function"."""


@dataclass(frozen=True, kw_only=True)
class ProcessorRows:
    """What a processor may know of its rows, all [R]: argument_R (float64), the request's own number; position_R, which
    position's token is chosen; prompt_len_R; token_R, the token before it. Each row must be treated by itself: R is
    the number of rows of a frame, never of one request."""

    argument_R: Tensor
    position_R: Tensor
    prompt_len_R: Tensor
    token_R: Tensor


Processor = Callable[[Tensor, ProcessorRows], Tensor]
"""(logits [R, V] after penalties and biases, its own copy; rows) -> logits [R, V] of the same dtype."""


def load_processors(given: Iterable[str] | Mapping[str, Processor], vocab: int) -> dict[str, Processor]:
    """Names of entry points, or functions by name, checked. Raises ConfigError that says what cannot be captured."""
    if isinstance(given, str) or not isinstance(given, (Mapping, list, tuple, set, frozenset)):
        raise ConfigError(f"processors={given!r} must be a list of names, or a dictionary of functions by name")
    found = dict(given) if isinstance(given, Mapping) else {name: _entry_point(name) for name in given}
    if len(found) > MAX_PROCESSORS:
        raise ConfigError(f"{len(found)} processors; the limit is {MAX_PROCESSORS}")
    for name, function in found.items():
        check(name, function, vocab)
    return found


def _entry_point(name: object) -> Processor:
    points = {p.name: p for p in importlib.metadata.entry_points(group=GROUP)}
    if not isinstance(name, str) or name not in points:
        known = ", ".join(sorted(points)) or "none is installed"
        raise ConfigError(f"no processor {name!r} in the entry point group {GROUP}; known: {known}")
    try:
        loaded: Processor = points[name].load()
    except Exception as error:
        raise ConfigError(f"processor {name!r} does not load: {type(error).__name__}: {error}") from error
    return loaded


class RefusedError(Exception):
    """Why a function cannot stand in a frame."""


class _Watch(TorchDispatchMode):
    """Refuses operations that wait, take data from the host, or draw from a global generator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func), kwargs or {}
        if torch.Tag.data_dependent_output in func.tags or "_local_scalar_dense" in name:
            raise RefusedError("it reads a tensor's value (item, bool, int, a branch on a tensor)")
        if torch.Tag.dynamic_output_shape in func.tags:
            raise RefusedError(f"the shape of {name} depends on data")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RefusedError(f"{name} draws from a global generator, so no request could be repeated")
        if "lift_fresh" in name:
            raise RefusedError("it builds a tensor from Python values (torch.tensor), a copy from the host per frame")
        if "_to_copy" in name and kwargs.get("device") is not None and kwargs["device"] != args[0].device:
            raise RefusedError(f"it moves a tensor from {args[0].device} to {kwargs['device']}")
        if "index.Tensor" in name and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            raise RefusedError("a boolean index makes its shape depend on data")
        return func(*args, **kwargs)


def check(name: str, function: Any, vocab: int) -> None:
    """Run it on fake tensors, then on real ones, together and row by row. Raises ConfigError with the reason."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"processor {name!r} must be named like a variable")
    try:
        if not callable(function):
            raise RefusedError(f"it is a {type(function).__name__}, not a function of (logits, rows)")
        with FakeTensorMode() as fake, _Watch():
            for rows in (1, 5):
                logits = fake.from_tensor(torch.zeros(rows, vocab))
                asked = ProcessorRows(
                    argument_R=fake.from_tensor(torch.ones(rows, dtype=torch.float64)),
                    position_R=fake.from_tensor(torch.ones(rows, dtype=torch.int64)),
                    prompt_len_R=fake.from_tensor(torch.ones(rows, dtype=torch.int64)),
                    token_R=fake.from_tensor(torch.zeros(rows, dtype=torch.int64)),
                )
                _shaped(function(logits, asked), logits)
        _alone(function, vocab)
    except RefusedError as error:
        raise ConfigError(_message(name, str(error))) from None
    except Exception as error:
        raise ConfigError(_message(name, f"{type(error).__name__}: {str(error)[:300]}")) from error


def _message(name: str, why: str) -> str:
    return (
        f"processor {name!r} cannot be captured: {why}. Only functions of tensors can stand in a frame; masks that the "
        f"host computes are what structured_outputs is for"
    )


def _shaped(out: Any, logits: Tensor) -> None:
    if not isinstance(out, Tensor):
        raise RefusedError(f"it returns a {type(out).__name__}, not the logits")
    if out.shape != logits.shape or out.dtype != logits.dtype or out.device != logits.device:
        raise RefusedError(
            f"it returns {list(out.shape)} {out.dtype} on {out.device} for {list(logits.shape)} {logits.dtype} on "
            f"{logits.device}"
        )


def _alone(function: Processor, vocab: int) -> None:
    """A row's result must not depend on the rows beside it."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, vocab, generator=g) * 3
    rows = [
        torch.tensor([0.5, 1.0, 2.0, -1.0], dtype=torch.float64), torch.tensor([9, 3, 3, 40]),
        torch.tensor([3, 3, 1, 8]), torch.randint(0, vocab, (4,), generator=g),
    ]  # fmt: skip
    names = ("argument_R", "position_R", "prompt_len_R", "token_R")
    whole = function(logits.clone(), ProcessorRows(**dict(zip(names, rows, strict=True))))
    for r in range(4):
        one = {name: t[r : r + 1].clone() for name, t in zip(names, rows, strict=True)}
        alone = function(logits[r : r + 1].clone(), ProcessorRows(**one))
        if not torch.allclose(alone[0], whole[r], rtol=1e-5, atol=1e-5, equal_nan=True):
            raise RefusedError("a row's result depends on the rows beside it")
