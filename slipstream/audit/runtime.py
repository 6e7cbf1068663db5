"""`watch`: finds waits while a program runs, in the thread and context that opened it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.audit import compiles, patches
from slipstream.audit.events import AuditRule, Event, World, flat_tensors
from slipstream.audit.matches import LITERAL_CALLS
from slipstream.audit.report import AuditError, Finding, Report, Site, user_stack
from slipstream.audit.rules import RULES, find_rule
from slipstream.audit.scope import active_watchers, allowed_here, is_staging, pop_watcher, push_watcher

F = TypeVar("F", bound=Callable[..., Any])
OnFinding = Literal["collect", "warn", "raise"]


def pinned(tensor: torch.Tensor) -> bool:
    """Whether copies of a host tensor can be asynchronous; `mark_staging` counts only where CUDA is missing."""
    return tensor.is_pinned() if torch.cuda.is_available() else is_staging(tensor)


class Recorder:
    """Turns events into findings. One per watch; `thread` is the thread it listens to."""

    def __init__(
        self,
        report: Report,
        world: World,
        *,
        rules: Sequence[AuditRule] = RULES,
        only: Sequence[str] = (),
        on_finding: OnFinding = "collect",
        call_through: bool = True,
    ) -> None:
        self.report = report
        self.world = world
        self.thread = threading.get_ident()
        self.rules = tuple(rules)
        self.only = frozenset(only)
        self.unseen = set(only)  # names below which nothing has happened yet
        self.on_finding = on_finding
        self.call_through = call_through
        self.paused = False  # a proof is building its program
        self.compiling = 0
        self.call = ""  # the outermost torch function that runs
        self.call_judged = False  # it has been reported as a whole: what happens inside it is the same fact
        self.call_seen: set[str] = set()
        self.calls: CallMode | None = None
        self._hidden = False

    def hide(self) -> None:
        """Take the function mode off the stack, if it is on top, until `show`."""
        if self.calls is not None and not self._hidden and torch.overrides._get_current_function_mode() is self.calls:
            torch.overrides._pop_mode()
            self._hidden = True

    def show(self) -> None:
        # The compiler switches itself off and on for parts of its work: none of that is the program's code.
        if self._hidden and not self.compiling:
            torch.overrides._push_mode(self.calls)
            self._hidden = False

    def end(self) -> None:
        """Put the mode stack in order, whatever compilation was interrupted."""
        self.compiling = 0
        self.show()

    def host_event(self, name: str, detail: str) -> bool:
        """A patched function was called. Returns whether the original may run."""
        self.see(Event("host", name, self.world, detail=detail))
        return self.call_through

    def see(self, event: Event) -> AuditRule | None:
        """Judge an event; returns the rule that it breaks (allowed or not), or None."""
        if self.paused or self.compiling or self not in active_watchers():
            return None
        if self.unseen:
            inside = {site.function for site in user_stack(2)}
            self.unseen -= {name for name in self.unseen if any(_named(f, frozenset((name,))) for f in inside)}
        found = find_rule(event, self.rules)
        if found is None:
            return None
        rule, detail = found
        if event.kind == "op" and (self.call_judged or rule.id in self.call_seen):
            return rule
        if event.kind == "op" and self.call:
            self.call_seen.add(rule.id)
        self.emit(rule, detail, user_stack(2))
        return rule

    def emit(self, rule: AuditRule, detail: str, stack: list[Site]) -> None:
        if self.only and not any(_named(site.function, self.only) for site in stack):
            return
        exception = allowed_here(rule.id)
        if exception is not None:
            self.report.allow(exception.reason, exception.site, rule.id)
            return
        finding = self.report.add(Finding(rule.id, rule.severity, detail, rule.explain, rule.fix, stack))
        if rule.severity != "note":
            if self.on_finding == "raise":
                raise AuditError(f"{rule.id} at {finding.site}: {detail}. {rule.explain} Fix: {rule.fix}")
            if self.on_finding == "warn" and finding.count == 1:
                warnings.warn(f"{rule.id} at {finding.site}: {detail}", stacklevel=2)


def _named(function: str, names: frozenset[str]) -> bool:
    """Whether a qualified name is one of `names`, or ends in one ("Engine.step" and "step" both match)."""
    parts = function.replace("<locals>.", "").split(".")
    return any(".".join(parts[i:]) in names for i in range(len(parts)))


class OpMode(TorchDispatchMode):
    """Sees every dispatcher operation of the thread."""

    def __init__(self, recorder: Recorder, memory: Callable[[], int] | None = None) -> None:
        super().__init__()
        self.recorder = recorder
        self.memory = memory
        self.reserved = memory() if memory else 0
        self.ops = 0

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled under this mode: it changes no result."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or func.namespace == "prim":
            return func(*args, **kwargs)  # a higher-order operation, or a query of device or layout: no kernel
        if torch.is_inference_mode_enabled():
            # Composite operations arrive whole here, which they do not outside of inference mode.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        self.ops += 1
        rule = self.recorder.see(self.event(func, args, kwargs))
        result = self.run(rule, func, args, kwargs)
        self.check_memory()
        return result

    def event(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Event:
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        tags = frozenset(str(tag).removeprefix("Tag.") for tag in func.tags)
        return Event("op", name, self.recorder.world, args, kwargs, self.recorder.call, tags)

    def run(self, rule: AuditRule | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def check_memory(self) -> None:
        if self.memory is None:
            return
        now = self.memory()
        if now > self.reserved:
            detail = f"the allocator took {(now - self.reserved) / 2**20:.1f} MiB more from the driver"
            self.reserved = now
            self.recorder.host_event("memory.growth", detail)


class CallMode(TorchFunctionMode):
    """Sees calls of torch functions: what the dispatcher does not show, and the name of what it shows."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        before = (recorder.call, recorder.call_judged, recorder.call_seen)
        name = call_name(func)
        recorder.call, recorder.call_judged, recorder.call_seen = name, False, set()
        try:
            rule = recorder.see(Event("call", name, recorder.world, args, kwargs))
            recorder.call_judged = rule is not None
            result = self.run(rule, func, args, kwargs)
            if name in LITERAL_CALLS and rule is None and not recorder.call_seen:
                self._literal(name, args, kwargs, result)
            return result
        finally:
            recorder.call, recorder.call_judged, recorder.call_seen = before

    def run(self, rule: AuditRule | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _literal(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """On real devices torch.tensor hides its copy from the dispatcher, so look at what came out."""
        world = self.recorder.world
        data = args[1] if name == "Tensor.new_tensor" and len(args) > 1 else (args[0] if args else None)
        if world.device_type != "cpu" and world.on_device(result) and not flat_tensors(data):
            detail = f"{name} builds {list(result.shape)} on the host and copies it to the device"
            self.recorder.see(Event("call", name, world, detail=detail))


def call_name(func: Any) -> str:
    """ "Tensor.item", "unique", "nn.functional.one_hot", ... for a torch function."""
    name: str = resolve_name(func) or getattr(func, "__name__", str(func))
    return name.removeprefix("torch.").removeprefix("functional.")


def _reserved_bytes() -> int:
    stats = torch.cuda.memory_stats()  # empty before CUDA is initialised
    return int(stats.get("reserved_bytes.all.allocated", 0))


def _cuda_counters() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    names = {"allocations": "allocation.all.allocated", "segments": "segment.all.allocated"}
    counters = {ours: int(stats.get(theirs, 0)) for ours, theirs in names.items()}
    host_stats = getattr(torch.cuda, "host_memory_stats", None)
    if host_stats is not None:
        counters["pinned_allocations"] = int(host_stats().get("num_host_alloc", 0))
    return counters


class watch:
    """Watch a region for waits: `with watch() as report: step()`, or `@watch(on_finding="raise")`.

    Only the opening thread and context are watched; everything is put back on exit. As a decorator each call is a
    region of its own and the function gets an attribute `report` that sums them up. Two asyncio tasks of one thread
    must not hold overlapping watches (torch's mode stack is one per thread).

    device:      the device type that counts as "the device". "cpu" treats reads of host tensors as device reads
                 (for tests without a GPU; the copy rules then do not apply).
    on_finding:  "collect", "warn" (once per place) or "raise" (AuditError at the offending line).
    only:        names of functions; only what happens below one of them counts ("step", "Engine.step"). `unseen`
                 has those below which no operation, wait or graph launch was seen: about them nothing is known.
    rules:       the table of rules, to add or leave out some.
    also:        blocking functions of other libraries, "module:function" or "module:Class.method".
    recompiles:  report torch.compile and Triton compilations (imports torch._dynamo once).
    memory:      bytes that the allocator has taken from the driver so far, a growing number; default: CUDA's.
    is_pinned:   which host tensors are pinned; default: `Tensor.is_pinned`, or `mark_staging` where CUDA is missing.
    """

    def __init__(
        self,
        *,
        device: str | torch.device = "cuda",
        on_finding: OnFinding = "collect",
        only: Sequence[str] = (),
        rules: Sequence[AuditRule] = RULES,
        also: Sequence[str] = (),
        recompiles: bool = True,
        memory: Callable[[], int] | None = None,
        is_pinned: Callable[[torch.Tensor], bool] = pinned,
        name: str = "audit",
    ) -> None:
        if on_finding not in ("collect", "warn", "raise"):
            raise AuditError(f"on_finding={on_finding!r}: expected 'collect', 'warn' or 'raise'")
        if isinstance(only, str) or isinstance(also, str):
            raise AuditError("only and also are lists of names, not one string")
        self._options = {
            "device": device,
            "on_finding": on_finding,
            "only": only,
            "rules": rules,
            "also": also,
            "recompiles": recompiles,
            "memory": memory,
            "is_pinned": is_pinned,
            "name": name,
        }
        self.world = World(torch.device(device).type, is_pinned)
        self.report = Report(name)
        self.unseen: set[str] = set()
        self._stack: contextlib.ExitStack | None = None

    def __enter__(self) -> Report:
        if self._stack is not None:
            raise AuditError("this watch is already open; make another one")
        o: dict[str, Any] = self._options
        recorder = Recorder(self.report, self.world, rules=o["rules"], only=o["only"], on_finding=o["on_finding"])
        self.unseen = recorder.unseen
        with contextlib.ExitStack() as stack:
            on_cuda = self.world.device_type == "cuda" and torch.cuda.is_available()
            memory = o["memory"] or (_reserved_bytes if on_cuda else None)
            if on_cuda:
                stack.callback(self._count, _cuda_counters())
            wraps = {"torch._dynamo.eval_frame:_maybe_set_eval_frame": compiles.stepping_aside}
            if o["recompiles"] or "torch._dynamo" in sys.modules:
                stack.enter_context(compiles.compilations(*_compile_events(recorder, o["recompiles"])))
            stack.callback(patches.uninstall, patches.install(o["also"], wraps))
            stack.callback(pop_watcher, push_watcher(recorder))
            ops = stack.enter_context(OpMode(recorder, memory))
            recorder.calls = stack.enter_context(CallMode(recorder))
            # Runs first on exit: growth that no operation showed (a graph, a custom kernel) belongs to the region.
            stack.callback(ops.check_memory)
            stack.callback(recorder.end)
            self._stack = stack.pop_all()
        return self.report

    def __exit__(self, *exc: Any) -> None:
        assert self._stack is not None, "exit of a watch that is not open"
        stack, self._stack = self._stack, None
        stack.__exit__(*exc)

    def _count(self, before: dict[str, int]) -> None:
        for key, value in _cuda_counters().items():
            self.report.counters[key] = self.report.counters.get(key, 0) + value - before.get(key, 0)

    def __call__(self, func: F) -> F:
        if inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func):
            raise AuditError(f"watch cannot decorate {func.__qualname__}: it is async or a generator; use `with`")
        total = Report(str(self._options["name"]))
        lock = threading.Lock()

        @functools.wraps(func)
        def inner(*args: Any, **kwargs: Any) -> Any:
            region = watch(**self._options)  # type: ignore[arg-type]
            try:
                with region:
                    return func(*args, **kwargs)
            finally:
                with lock:
                    total.merge(region.report)

        inner.report = total  # type: ignore[attr-defined]
        return inner  # type: ignore[return-value]


def _compile_events(recorder: Recorder, report: bool) -> tuple[Callable[[str], None], Callable[[], None]]:
    """Reports a compilation and stops judging until it ends: the compiler's own operations are not the program's."""

    def start(what: str) -> None:
        if threading.get_ident() == recorder.thread:
            try:
                if report:
                    recorder.host_event("compile", what)
            finally:
                recorder.compiling += 1

    def end() -> None:
        if threading.get_ident() == recorder.thread:
            recorder.compiling = max(0, recorder.compiling - 1)

    return start, end
