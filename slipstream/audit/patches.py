"""Replaces the CUDA functions that wait, while at least one watch is open, and puts them back afterwards.

The replacement reports to the watches of the calling thread and context only, then calls the original. Wait
functions that are C types (`torch.Event`, `torch.Stream`) cannot be replaced; the trace still shows them.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from slipstream.audit.report import AuditError
from slipstream.audit.scope import active_watchers

# (module:attribute path, event name). Modules are never imported for this, except torch's own.
TARGETS: tuple[tuple[str, str], ...] = (
    ("torch._C:_cuda_synchronize", "sync"),  # also reached through a saved `from torch.cuda import synchronize`
    ("torch.cuda:synchronize", "sync"),
    ("torch.cuda:empty_cache", "sync"),
    ("torch.cuda:Stream.synchronize", "sync"),
    ("torch.cuda:Event.synchronize", "event.synchronize"),
    ("torch.cuda:Event.query", "event.query"),
    ("torch.cuda:Stream.query", "event.query"),
    ("torch.cuda:Event.wait", "stream.wait"),
    ("torch.cuda:Stream.wait_event", "stream.wait"),
    ("torch.cuda:Stream.wait_stream", "stream.wait"),
    ("torch.accelerator:synchronize", "sync"),
    ("torch.xpu:synchronize", "sync"),
    ("torch.distributed:barrier", "sync"),
    ("torch.cuda:CUDAGraph.replay", "graph.replay"),  # no wait: a step may do nothing else, and was looked at
)

# A patched function may call another one (synchronize -> _cuda_synchronize): only the outer one is reported.
_INSIDE: ContextVar[bool] = ContextVar("slipstream_audit_inside_patch", default=False)


@dataclass
class _Patch:
    owner: Any
    attribute: str
    own: bool  # whether the owner itself had the attribute, or inherited it
    original: Any
    users: int = 0


_LOCK = threading.Lock()
_PATCHES: dict[tuple[int, str], _Patch] = {}


def _resolve(target: str, must_exist: bool) -> tuple[Any, str] | None:
    module, _, path = target.partition(":")
    owner: Any = sys.modules.get(module)
    if owner is None and must_exist:
        owner = importlib.import_module(module)
    *outer, attribute = path.split(".")
    for name in outer:
        owner = getattr(owner, name, None)
    if owner is None or not hasattr(owner, attribute):
        if must_exist:
            raise AuditError(
                f"{target!r} does not name a function; expected 'module:function' or 'module:Class.method'"
            )
        return None
    return owner, attribute


def _wrap(original: Callable[..., Any], event: str, label: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if _INSIDE.get():
            return original(*args, **kwargs)
        token = _INSIDE.set(True)
        try:
            through = True
            for watcher in active_watchers():
                through &= watcher.host_event(event, label)  # type: ignore[attr-defined]
            if through:
                return original(*args, **kwargs)
            return True if event == "event.query" else None
        finally:
            _INSIDE.reset(token)

    return replacement


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def install(also: Sequence[str] = (), wraps: Mapping[str, Wrap] = MappingProxyType({})) -> list[_Patch]:
    """Replace every target, or count one more user of a target that is replaced already.

    `also`: blocking functions of other libraries as "module:path"; each must exist. `wraps`: functions to replace
    by a wrapper of one's own, if they exist. Returns what to hand to `uninstall`. Raises AuditError for a name that
    cannot be found or replaced.
    """
    taken: list[_Patch] = []
    wanted: list[tuple[str, Wrap, bool]] = [(t, _reporter(t, e), False) for t, e in TARGETS]
    wanted += [(t, _reporter(t, "sync"), True) for t in also]
    wanted += [(t, wrap, False) for t, wrap in wraps.items()]
    with _LOCK:
        try:
            for target, wrap, must_exist in wanted:
                found = _resolve(target, must_exist)
                if found is not None:
                    taken.append(_take(*found, wrap, target, must_exist))
        except Exception:
            _release(taken)
            raise
    return taken


def _reporter(target: str, event: str) -> Wrap:
    return lambda original: _wrap(original, event, target.replace(":", "."))


def _take(owner: Any, attribute: str, wrap: Wrap, target: str, must_exist: bool) -> _Patch:
    key = (id(owner), attribute)
    patch = _PATCHES.get(key)
    if patch is None:
        original = getattr(owner, attribute)
        patch = _Patch(owner, attribute, attribute in vars(owner), original)
        try:
            setattr(owner, attribute, wrap(original))
        except (AttributeError, TypeError) as error:
            if must_exist:
                raise AuditError(f"{target!r} cannot be replaced: {error}") from error
            return _Patch(None, attribute, False, None)
        _PATCHES[key] = patch
    patch.users += 1
    return patch


def uninstall(taken: Sequence[_Patch]) -> None:
    """Give up what `install` returned; the last user restores the original."""
    with _LOCK:
        _release(taken)


def _release(taken: Sequence[_Patch]) -> None:
    for patch in taken:
        if patch.owner is None:
            continue
        patch.users -= 1
        if patch.users == 0:
            if patch.own:
                setattr(patch.owner, patch.attribute, patch.original)
            else:
                delattr(patch.owner, patch.attribute)
            del _PATCHES[id(patch.owner), patch.attribute]
