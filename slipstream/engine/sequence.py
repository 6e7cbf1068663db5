"""What the host knows of one request: its output so far, and bounds on what the device has made of it."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from slipstream.engine.radix import Node
from slipstream.types import Request, SpecStats

Key = tuple[str, int]
"""(request_id, child)"""


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"  # owns a slot; prefill or decode
    LEAVING = "leaving"  # preempted; launches that may still bring tokens are not collected yet
    ENDED = "ended"  # finished; pages are kept until the text side has acknowledged the tokens
    CLOSED = "closed"


@dataclass(eq=False)
class Sequence:
    """One request child.

    outputs: tokens collected, over all its generations. acked: how many of them count as returned.
    The rest is valid while it owns a slot: tokens (known at admission), cached (tokens of a prefix hit),
    planned (prefill rows planned so far), prefilled (the record of the last chunk is collected, so `length`
    is a fact), length (committed length by collected records; before that len(tokens)), queued (launch, most
    tokens) of decode frames not collected, last_launch (the last launch that names the slot), node (deepest
    locked radix node), shared (pages of its table that the radix tree owns).
    """

    request: Request
    arrival: int
    num_drafts: int
    lookahead: int = 0
    state: State = State.WAITING
    outputs: list[int] = field(default_factory=list)
    acked: int = 0
    stats: SpecStats = field(default_factory=SpecStats)
    slot: int = 0
    generation: int = 0
    tokens: tuple[int, ...] = ()
    cached: int = 0
    planned: int = 0
    prefilled: bool = False
    length: int = 0
    queued: deque[tuple[int, int]] = field(default_factory=deque)
    next_drafts: int | None = None
    last_launch: int = -1
    node: Node | None = None
    shared: set[int] = field(default_factory=set)

    @property
    def key(self) -> Key:
        return self.request.request_id, self.request.child

    @property
    def reads(self) -> bool:
        """Some of its prompt is still to be planned."""
        return self.state is State.RUNNING and self.planned < len(self.tokens)

    @property
    def decodes(self) -> bool:
        """The next launch may decode it: its prompt is planned, and it cannot be known to end before.

        An active slot emits at least one token per frame, so length + 1 + frames queued is a lower bound.
        """
        lower = self.length + 1 + len(self.queued)
        return self.state is State.RUNNING and not self.reads and lower < self.request.max_len

    @property
    def most_rows(self) -> int:
        return 1 + self.num_drafts

    @property
    def wanted_rows(self) -> int:
        """Rows that its last collected record asks for; all of them while nothing is known."""
        return self.most_rows if self.next_drafts is None else 1 + min(self.num_drafts, self.next_drafts)

    @property
    def len_ub(self) -> int:
        """Most tokens its committed length can have once all queued frames have run."""
        return min(self.length + sum(rows for _, rows in self.queued), self.request.max_len)

    def cover(self, rows: int) -> int:
        """Positions that need pages so that one more frame of `rows` rows is safe.

        A drafter with KV of its own writes `lookahead` positions beyond the rows, but none past the limit.
        """
        return min(self.len_ub + rows + self.lookahead, self.request.max_len + self.most_rows)

    def reach(self, rows: int) -> int:
        """Bound on position + 1 over the rows that the next frame verifies."""
        return self.len_ub + rows

    @property
    def soon(self) -> int:
        """Positions that two frames from what is collected can reach, in the worst case.

        Frames in flight are left out on purpose: when pages run short for these bounds, sitting out until
        they are collected is cheaper than a preemption.
        """
        return min(self.length + self.most_rows, self.request.max_len) + self.most_rows

    def restart(self, *, slot: int, generation: int, start: int, node: Node, rereads: int = 0) -> None:
        """It owns `slot` now; KV of the first `start` tokens is there, the last `rereads` of them are read again."""
        self.state = State.RUNNING
        self.slot, self.generation = slot, generation
        self.cached, self.planned = start, max(0, start - rereads)
        self.prefilled, self.length = False, len(self.tokens)
        self.queued.clear()
        self.next_drafts = None
        self.node = node
