"""Scopes: deliberate exceptions, hot-path marks and staging buffers. Imports torch only where it must."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from slipstream.audit.report import AuditError, Report, Site, user_stack

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])


class Watcher(Protocol):
    """What listens to events of a scope: `thread` is the ident of the thread that opened it."""

    thread: int
    report: Report


class _Exception_(Protocol):
    reason: str
    rules: frozenset[str]
    site: Site


# A context variable, so that threads and asyncio tasks that did not open the scope are never inside it.
_WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("slipstream_audit_watchers", default=())
_ALLOWED: ContextVar[tuple[_Exception_, ...]] = ContextVar("slipstream_audit_allowed", default=())


def active_watchers() -> tuple[Watcher, ...]:
    """Watchers opened by the calling thread in the calling context, outermost first."""
    me = threading.get_ident()
    return tuple(w for w in _WATCHERS.get() if w.thread == me)


def push_watcher(watcher: Watcher) -> Token[tuple[Watcher, ...]]:
    return _WATCHERS.set((*_WATCHERS.get(), watcher))


def pop_watcher(token: Token[tuple[Watcher, ...]]) -> None:
    _WATCHERS.reset(token)


def allowed_here(rule: str) -> _Exception_ | None:
    """The innermost open exception that covers `rule`, or None."""
    for entry in reversed(_ALLOWED.get()):
        if not entry.rules or rule in entry.rules:
            return entry
    return None


class allow_sync(contextlib.ContextDecorator):
    """Allow waits inside a `with` block or a decorated function, with a reason that the report repeats.

    `rules` narrows the exception to some rule ids; without it every rule is covered. An empty reason is an error.
    """

    def __init__(self, reason: str, *, rules: tuple[str, ...] | list[str] = ()) -> None:
        if not isinstance(reason, str) or not reason.strip():
            raise AuditError("allow_sync needs a reason: allow_sync('the first token is read once per request')")
        self.reason = reason
        self.rules = frozenset(rules)
        self.site = Site("<unknown>", 0, "")
        self._tokens: list[Token[tuple[_Exception_, ...]]] = []

    def __call__(self, func: F) -> F:
        if inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func):
            raise AuditError(f"allow_sync cannot decorate {func.__qualname__}: it is async or a generator; use `with`")
        site = Site(func.__code__.co_filename, func.__code__.co_firstlineno, func.__qualname__)

        @functools.wraps(func)
        def inner(*args: Any, **kwargs: Any) -> Any:
            scope = allow_sync(self.reason, rules=tuple(self.rules))
            scope.site = site
            with scope:
                return func(*args, **kwargs)

        return inner  # type: ignore[return-value]

    def __enter__(self) -> allow_sync:
        if self.site.line == 0:
            self.site = user_stack(2)[0]
        self._tokens.append(_ALLOWED.set((*_ALLOWED.get(), self)))
        for watcher in active_watchers():
            watcher.report.allow(self.reason, self.site)
        return self

    def __exit__(self, *exc: object) -> None:
        _ALLOWED.reset(self._tokens.pop())


def hot(func: F) -> F:
    """Mark a function as a hot path for the linter. Does nothing at run time."""
    return func


_STAGING: dict[int, Any] = {}


def mark_staging(tensor: torch.Tensor) -> torch.Tensor:
    """Tell the auditor that a host tensor's storage stands for pinned memory where nothing can be pinned.

    Only read on machines without CUDA (tests, `prove`); on CUDA the real `is_pinned()` decides. Returns `tensor`.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    for key in [k for k, ref in _STAGING.items() if ref.expired()]:
        del _STAGING[key]
    ref = StorageWeakRef(tensor.untyped_storage())
    _STAGING[ref.cdata] = ref  # the weak reference keeps the address from being used again
    return tensor


def is_staging(tensor: torch.Tensor) -> bool:
    """Whether the tensor shares its storage with one given to `mark_staging`."""
    ref = _STAGING.get(tensor.untyped_storage()._cdata)
    return ref is not None and not ref.expired()
