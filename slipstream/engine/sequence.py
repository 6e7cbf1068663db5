"""What the host knows of one request: its output so far, and bounds on what the device has made of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.engine.radix import Node
from slipstream.logprobs import TokenLogprob
from slipstream.structured import RoundMasks
from slipstream.types import Request, Round, SpecStats

if TYPE_CHECKING:
    from slipstream.engine.grammar import MaskSource

Key = tuple[str, int]
"""(request_id, child)"""


def round_kinds(num_drafts: int, deepest: int) -> tuple[Round, ...]:
    """Rounds that end no request, by drafted * (deepest + 1) + accepted: they emit the accepted drafts and one more.

    deepest: most drafts that a round can accept.
    """
    return tuple([(drafted, n, n + 1) for drafted in range(num_drafts + 1) for n in range(deepest + 1)])


class State(enum.Enum):
    HELD = "held"  # its grammar's masks are not here: not in the queue yet, or not again after a preemption
    WAITING = "waiting"
    RUNNING = "running"  # owns a slot; prefill or decode
    LEAVING = "leaving"  # preempted; launches that may still bring tokens are not collected yet
    ENDED = "ended"  # finished; pages are kept until the text side has acknowledged the tokens
    CLOSED = "closed"


@dataclass(eq=False, slots=True)
class Sequence:
    """One request child.

    arrived_ns: when it came, on perf_counter_ns; 0 once it has had a slot.
    outputs: tokens collected, over all its generations. told: how many of them a text side has acknowledged.
    prompt_logprobs: where asked for, of the prompt's second token and on, as far as collected; prompt_told: an event
    has had them. tally: how often each of `round_kinds` occurred, so that a frame adds one per slot; counted: others.
    grammar: where its masks come from, None without one; masks: those for its next round, None until they are here.
    The rest is valid while it owns a slot: tokens (known at admission), cached (tokens of a prefix hit), planned
    (prefill rows planned so far), prefilled (the record of the last chunk is collected, so `length` is a fact), length
    (committed length by collected records; before that len(tokens)), queued (how many decode frames are not collected),
    ahead (the most tokens that they can bring), wanted (rows that its last collected record asks for; all of them while
    nothing is known), covered (positions that its pages cover), last_launch (the last launch that names the slot),
    tainted (its pages may hold what is not finite), survival (of the newest drafts that a launched frame has judged,
    None before that; with scheduled verification only), fresh (wanted and survival of drafts that no launched frame
    judges yet, where rows may not depend on them), behind (most committed positions that a drafter's own cache lacks),
    node (deepest locked radix node), shared (pages of its table that the radix tree owns).
    """

    request: Request
    arrival: int
    num_drafts: int
    tally: list[int]
    lookahead: int = 0
    tree_depth: int = 0
    arrived_ns: int = 0
    state: State = State.WAITING
    outputs: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_told: bool = False
    told: int = 0
    counted: SpecStats = field(default_factory=SpecStats)
    grammar: MaskSource | None = None
    masks: RoundMasks | None = None
    slot: int = 0
    generation: int = 0
    tokens: tuple[int, ...] = ()
    cached: int = 0
    planned: int = 0
    prefilled: bool = False
    length: int = 0
    queued: int = 0
    ahead: int = 0
    wanted: int = 1
    covered: int = 0
    last_launch: int = -1
    behind: int = 0
    restores: int = 0
    places: tuple[int, ...] = ()
    tainted: bool = False
    survival: list[int] | None = None
    fresh: tuple[int, list[int]] | None = None
    node: Node | None = None
    shared: set[int] = field(default_factory=set)
    key: Key = field(init=False)
    order: tuple[int, int] = field(init=False)
    max_len: int = field(init=False)
    most_rows: int = field(init=False)
    most_tokens: int = field(init=False)
    overhang: int = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.request.request_id, self.request.child)
        self.order = (self.request.priority, self.arrival)
        self.max_len = self.request.max_len
        self.most_rows = 1 + self.num_drafts
        self.most_tokens = min(self.most_rows, 1 + (self.tree_depth or self.num_drafts))
        # Cells past the limit that a frame may write: the target's rows, or the drafter's behind them.
        self.overhang = max(self.most_rows, 1 + self.lookahead)

    @property
    def acked(self) -> int:
        """How many of the outputs count as returned: all, where nobody acknowledges."""
        return self.told if self.request.needs_ack else len(self.outputs)

    @property
    def reports_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to come: then all of it is read."""
        return self.request.params.prompt_logprobs is not None and self.request.child == 0 and not self.prompt_told

    def stats(self, kinds: tuple[Round, ...]) -> SpecStats:
        """Its rounds so far. kinds: what `tally` counts."""
        return self.counted.with_tally(kinds, self.tally)

    @property
    def len_ub(self) -> int:
        """Most tokens its committed length can have once all queued frames have run."""
        return min(self.length + self.ahead, self.max_len)

    def cover(self, rows: int) -> int:
        """Positions that need pages so that one more frame of `rows` rows is safe.

        A drafter with KV of its own writes `lookahead` positions beyond the rows, but none past the limit.
        """
        beyond = max(rows, min(rows, self.most_tokens) + self.lookahead)
        return min(self.len_ub + beyond, self.max_len + self.overhang)

    @property
    def calm(self) -> int:
        """How far length and queued tokens may grow before it could end, or need pages, with one frame more.

        A frame adds `most_tokens` at most, and what it brings is no more than that.
        """
        pages = self.covered - self.most_rows - self.lookahead
        return min(self.max_len - 2, pages) - self.length - self.ahead

    def launched(self, launch: int, width: int) -> None:
        """A decode frame of that width is queued."""
        self.queued += 1
        self.ahead += width if width < self.most_tokens else self.most_tokens
        self.last_launch = launch
        if self.fresh is not None:  # judged by this frame, so known to the next plans
            (self.wanted, self.survival), self.fresh = self.fresh, None

    def noted(self, wanted: int, survival: list[int]) -> None:
        """What a collected record, of this generation, says of the drafts that it leaves behind.

        How many rows a frame has must not depend on the drafts that it judges: they wait until it is launched.
        """
        if self.queued:
            self.wanted, self.survival, self.fresh = wanted, survival, None
        else:
            self.fresh = wanted, survival

    def advanced(self, width: int, emitted: int) -> None:
        """Its oldest queued frame, of that width, is collected."""
        most = width if width < self.most_tokens else self.most_tokens
        assert emitted <= most, f"{self.key}: {emitted} tokens of at most {most}"
        self.queued -= 1
        self.ahead -= most
        self.length += emitted

    @property
    def soon(self) -> int:
        """Positions that two frames from what is collected can reach, in the worst case.

        Frames in flight are left out on purpose: when pages run short for these bounds, sitting out until
        they are collected is cheaper than a preemption.
        """
        return min(self.length + self.most_tokens, self.max_len) + self.overhang

    def restart(self, *, slot: int, generation: int, start: int, node: Node, rereads: int = 0) -> None:
        """It owns `slot` now; KV of the first `start` tokens is there, the last `rereads` of them are read again."""
        self.state = State.RUNNING
        self.slot, self.generation = slot, generation
        self.cached, self.planned = start, max(0, start - rereads)
        self.prefilled, self.length = False, len(self.tokens)
        self.queued = self.ahead = 0
        self.behind, self.wanted = 0, self.most_rows
        self.survival = self.fresh = None
        self.node = node
