"""Sees compilations (torch.compile, Triton) inside a watch, and keeps the watch from causing any itself."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from slipstream.audit.scope import active_watchers


@contextlib.contextmanager
def compilations(on_start: Callable[[str], None], on_end: Callable[[], None]) -> Iterator[None]:
    """Call `on_start(what)` and `on_end()` around each compilation, in the thread that compiles."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_dynamo_callbacks(on_start, on_end))
        stack.enter_context(_triton_hook(on_start, on_end))
        yield


@contextlib.contextmanager
def _dynamo_callbacks(on_start: Callable[[str], None], on_end: Callable[[], None]) -> Iterator[None]:
    try:
        from torch._dynamo.callback import callback_handler
    except ImportError as error:  # a private module: another torch may have moved it
        warnings.warn(f"recompiles by torch.compile cannot be seen with this torch: {error}", stacklevel=2)
        yield
        return

    def start(*args: Any) -> None:
        trigger = getattr(args[0], "callback_trigger", None) if args else None
        on_start(f"torch.compile ({getattr(trigger, 'name', 'DYNAMO').lower()})")

    def end(*_: Any) -> None:
        on_end()

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)


@contextlib.contextmanager
def _triton_hook(on_start: Callable[[str], None], on_end: Callable[[], None]) -> Iterator[None]:
    """Triton calls the hook after each compilation of a kernel; an earlier hook is kept and called too."""
    runtime = getattr(getattr(sys.modules.get("triton"), "knobs", None), "runtime", None)
    if runtime is None or not hasattr(runtime, "jit_post_compile_hook"):
        yield
        return
    before = runtime.jit_post_compile_hook

    def hook(*args: Any, **kwargs: Any) -> Any:
        on_start(f"Triton kernel {getattr(kwargs.get('fn'), 'name', '')}".rstrip())
        on_end()
        return before(*args, **kwargs) if before is not None else None

    runtime.jit_post_compile_hook = hook
    try:
        yield
    finally:
        runtime.jit_post_compile_hook = before


def stepping_aside(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps dynamo's `_maybe_set_eval_frame`: takes the watches' function modes off while compiled code runs.

    Compiled code is guarded on the stack of function modes: with one more mode on it every compiled function would
    be compiled again, and the auditor would find its own doing. Dynamo switches itself on and off in a thread
    through this one function, so that is the place to step aside.
    """

    def set_eval_frame(callback: Any) -> Any:
        watchers: list[Any] = list(active_watchers())
        if callable(callback):
            for watcher in reversed(watchers):
                watcher.hide()
        else:
            for watcher in watchers:
                watcher.show()
        return original(callback)

    return set_eval_frame
