"""What the rules judge: events, and the world they happen in. Imports no torch: the linter uses the rules' texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from slipstream.audit.report import Severity


@dataclass(frozen=True)
class World:
    """What counts as the device and as pinned memory. With device "cpu" the copy rules do not apply."""

    device_type: str
    is_pinned: Callable[[Any], bool]

    def on_device(self, x: Any) -> bool:
        return is_tensor(x) and x.device.type == self.device_type

    def on_host(self, x: Any) -> bool:
        return is_tensor(x) and x.device.type == "cpu" and self.device_type != "cpu"


@dataclass(frozen=True)
class Event:
    """Something that happened. `name`: "aten.nonzero", "Tensor.tolist", "cuda.synchronize", "memory.growth", ...

    `call` is the outermost torch function around an operation ("" if unknown), `tags` the operation's torch tags.
    """

    kind: Literal["op", "call", "host"]
    name: str
    world: World
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    call: str = ""
    tags: frozenset[str] = frozenset()
    detail: str = ""

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)


class AuditRule(Protocol):
    """One rule. `match` returns what exactly happened, or None if the rule does not apply."""

    @property
    def id(self) -> str: ...
    @property
    def severity(self) -> Severity: ...
    @property
    def explain(self) -> str: ...
    @property
    def fix(self) -> str: ...
    def match(self, event: Event) -> str | None: ...


@dataclass(frozen=True)
class Rule:
    """An `AuditRule` made of a function and its texts."""

    id: str
    severity: Severity
    explain: str
    fix: str
    test: Callable[[Event], str | None]

    def match(self, event: Event) -> str | None:
        return self.test(event)


def is_tensor(x: Any) -> bool:
    return hasattr(x, "untyped_storage") and hasattr(x, "device") and not isinstance(x, type)


def flat_tensors(x: Any) -> list[Any]:
    """All tensors in nested lists and tuples (and dict values)."""
    if is_tensor(x):
        return [x]
    if isinstance(x, (list, tuple)):
        return [t for y in x for t in flat_tensors(y)]
    if isinstance(x, Mapping):
        return [t for y in x.values() for t in flat_tensors(y)]
    return []
