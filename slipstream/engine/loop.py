"""The decode loop: receive -> plan -> frame -> collect. Start reading here.

Truth about running requests lives on the device; the host keeps plans and upper bounds. Each `step`

  receive   applies what callers left since the last step, acknowledgements, cuts, aborts, and takes in masks;
  plan      lets the scheduler fill a `FramePlan`: drops, admissions, pages, a decode frame, a prefill chunk;
  frame     hands the plan to the device, which enqueues it and returns at once;
  collect   reads the *oldest* result, and only when `run_ahead` launches are queued (or nothing is left to
            launch), so the device always has work while the host looks at older results.

With run_ahead D (at most 2 while requests wait) the host plans frame t knowing the records up to t-D. What
happened since is covered by bounds: pages for the most tokens the queued frames can emit (scheduler.py), release of
pages only after the last launch that names their slot (ledger.py), generation numbers in records (collect.py).

The caller of a request with `needs_ack` answers each event with `ack` (these tokens are returned to the user) or `cut`
(a stop string: the request ends there). Every request gets exactly one event with a finish reason, a cut's included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Protocol

from slipstream.config import EngineConfig
from slipstream.engine.collect import Collector
from slipstream.engine.grammar import Grammars
from slipstream.engine.scheduler import Scheduler
from slipstream.errors import EngineDeadError
from slipstream.metrics import Metrics
from slipstream.types import FramePlan, FrameResult, Request, SpecStats, TokenEvent


class Device(Protocol):
    """What the loop needs of a device, which may have `allocators` of its own (pools.py). Launches run in order."""

    def launch(self, plan: FramePlan) -> None:
        """Enqueue: drops, admissions, page appends, then the decode frame, then the prefill chunk."""

    def collect(self) -> FrameResult:
        """Result of the oldest uncollected launch; blocks until it is there."""


class EngineCore:
    """One engine in one thread of control. `add`, `ack`, `cut` and `abort` take effect at the next `step`."""

    def __init__(self, config: EngineConfig, device: Device, grammars: Grammars | None = None) -> None:
        self.config, self.device, self.metrics = config, device, Metrics()
        self.scheduler = Scheduler(config, self.metrics, getattr(device, "allocators", ()), grammars)
        self.collector = Collector(self.scheduler, self.metrics)
        self._inbox: deque[Callable[[], TokenEvent | None]] = deque()
        self._next = self._in_flight = 0  # number of the next launch; launches not collected
        self._fault: BaseException | None = None

    # -- what callers do -----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError (value and limit); nothing else is affected."""
        self.scheduler.add(request)
        self.metrics.arrived(perf_counter_ns(), alone=len(self.scheduler.sequences) == 1)

    def ack(self, request_id: str, child: int, upto: int) -> None:
        """The first `upto` output tokens have been returned to the user."""
        self._inbox.append(partial(self.collector.ack, (request_id, child), upto))

    def cut(self, request_id: str, child: int, keep_tokens: int) -> None:
        """End a request after `keep_tokens` output tokens (stop string)."""
        self._inbox.append(partial(self.collector.cut, (request_id, child), keep_tokens, "stop"))

    def abort(self, request_id: str, child: int | None = None, error: str | None = None) -> None:
        """End a request, or all its children, where it is; reason "abort", or "error" with a message."""
        for key in [k for k in self.scheduler.sequences if k[0] == request_id and child in (None, k[1])]:
            self._inbox.append(partial(self.collector.abort, key, error))

    def stats(self, request_id: str, child: int = 0) -> SpecStats | None:
        """Draft statistics of a request; after its end readable until the next `step`."""
        key = (request_id, child)
        seq = self.scheduler.sequences.get(key) or self.collector.closed.get(key)
        return None if seq is None else seq.stats(self.scheduler.round_kinds)

    @property
    def dead(self) -> bool:
        return self._fault is not None

    @property
    def has_work(self) -> bool:
        """Whether `step` can still do something."""
        return bool(self._inbox or self._in_flight or self.scheduler.busy)

    @property
    def idle(self) -> bool:
        """No work, and no ended request whose tokens still wait for an acknowledgement."""
        return not self.has_work and not self.scheduler.sequences

    def check_idle(self) -> None:
        """Run what is left to its end, then assert that nobody holds a slot or a page."""
        while self.has_work:
            self.step()
        assert self.idle, f"ended without acknowledgement: {list(self.scheduler.sequences)}"
        self.scheduler.check()

    # -- the loop ------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """One turn: the events of at most one launch, or the ends that callers asked for.

        A fault of the device is raised as it is, and EngineDeadError from then on.
        """
        if self._fault is not None:
            raise EngineDeadError(f"the engine stopped on a device fault: {self._fault!r}") from self._fault
        events = self._receive()
        try:
            began = perf_counter_ns()
            plan = self.scheduler.plan(self._next) if self._in_flight < self.scheduler.run_ahead else None
            if plan is not None:
                self._launch(plan, began)
            # Ends are handed out at once: blocking on a frame now would hold them back.
            if self._in_flight and not events and (plan is None or self._in_flight >= self.scheduler.run_ahead):
                events = self._collect()
            elif plan is None and not events:
                self.scheduler.desk.wait()
        except BaseException as fault:
            self._fault = fault  # the plans and the device no longer agree: nothing can go on from here
            raise
        return events

    def _receive(self) -> list[TokenEvent]:
        self.collector.closed.clear()
        asked = [self._inbox.popleft()() for _ in range(len(self._inbox))]
        return [event for event in asked if event is not None] + self.collector.masks_in()

    def _launch(self, plan: FramePlan, began: int) -> None:
        planned = perf_counter_ns()
        self.device.launch(plan)
        self._next += 1
        self._in_flight += 1
        self.metrics.launched(plan, began, planned, perf_counter_ns())

    def _collect(self) -> list[TokenEvent]:
        began = perf_counter_ns()
        result = self.device.collect()
        arrived = perf_counter_ns()
        self._in_flight -= 1
        events = self.collector.take(result, arrived)
        self.metrics.collected(result, events, began, arrived, perf_counter_ns())
        return events
