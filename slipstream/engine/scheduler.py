"""What the next launch does: who decodes, whose prompt is read, who is admitted, who has to leave.

First come, first served. All lengths here are upper bounds; a frame is only planned when pages cover the
worst case. A slot without pages sits the frame out while the others run.
"""

from __future__ import annotations

from collections import deque

from slipstream.config import EngineConfig
from slipstream.engine.admission import check_request
from slipstream.engine.ledger import Ledger
from slipstream.engine.rows import choose_rows, slot_bucket
from slipstream.engine.sequence import Key, Sequence, State
from slipstream.errors import InvalidRequestError
from slipstream.metrics import Metrics
from slipstream.types import Admit, Drop, FramePlan, PageAppend, PrefillSpan, Request, VerifyMode


class Scheduler:
    """Owns the waiting queue and the running slots; `plan` is called once per launch."""

    def __init__(self, config: EngineConfig, metrics: Metrics) -> None:
        self.config = config
        self.metrics = metrics
        self.ledger = Ledger(config)
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        """By slot, in order of admission; preempted ones stay until their last launch is collected."""
        self.sequences: dict[Key, Sequence] = {}
        """Every sequence that is not closed."""
        self._drops: list[Drop] = []
        self._generation = 0
        self._arrivals = 0

    def add(self, request: Request) -> None:
        """Check a request and queue it. Raises InvalidRequestError; nothing else is affected."""
        num_drafts = check_request(request, self.config)
        key, limit = (request.request_id, request.child), self.config.max_waiting
        if key in self.sequences:
            raise InvalidRequestError(f"request_id={key[0]!r} child={key[1]} is running already")
        if len(self.waiting) >= limit:
            raise InvalidRequestError(f"{len(self.waiting)} requests are waiting; the limit is max_waiting={limit}")
        self._arrivals += 1
        self.sequences[key] = seq = Sequence(
            request=request,
            arrival=self._arrivals,
            num_drafts=num_drafts,
            lookahead=min(self.config.lookahead, num_drafts),
        )
        self.enqueue(seq)

    def enqueue(self, seq: Sequence) -> None:
        """Into the queue by arrival; only a preempted sequence is not simply the last."""
        seq.state = State.WAITING
        at = len(self.waiting)
        while at and self.waiting[at - 1].arrival > seq.arrival:
            at -= 1
        self.waiting.insert(at, seq)

    def close(self, seq: Sequence) -> None:
        """The sequence has ended and its returned tokens are known: it leaves queue or slot."""
        if seq.state is State.WAITING:
            self.waiting.remove(seq)
        else:
            if seq.state is State.RUNNING:
                self.drop(seq)
            self.running.pop(seq.slot, None)
            self.ledger.retire(seq)
        seq.state = State.CLOSED
        del self.sequences[seq.key]

    def drop(self, seq: Sequence) -> None:
        self._drops.append(Drop(slot=seq.slot, generation=seq.generation))

    def settle(self, collected: int) -> None:
        """Launch `collected` is in: release what waited for it, queue preempted sequences again."""
        self.ledger.collected = collected
        self.ledger.settle()
        for seq in [s for s in self.running.values() if s.state is State.LEAVING]:
            self._let_go(seq)

    def check(self) -> None:
        """Assert free + cached + held = total, for pages and slots."""
        self.ledger.check([s for s in self.sequences.values() if s.state is not State.WAITING])

    # -- planning ------------------------------------------------------------------------------

    def plan(self, seq: int) -> FramePlan | None:
        """The plan of launch `seq`, or None when there is nothing to run."""
        decoding, rows, width = self._choose_decode()
        reach = [s.reach(min(width, s.most_rows)) for s in decoding]
        appends = self._cover(decoding, width, seq)
        admits: list[Admit] = []
        spans = self._choose_prefill(bool(decoding), admits, seq)
        if not decoding and not spans:
            return None
        drops, self._drops = tuple(self._drops), []
        tables = self.ledger.pool
        pad = slot_bucket(len(decoding), self.config) - len(decoding) if decoding else 0
        sampled = [*decoding, *(s for s, span in spans if span.last)]
        draws = [s for s in sampled if not s.request.params.greedy]
        return FramePlan(
            seq=seq,
            drops=drops,
            admits=tuple(admits),
            pages=tuple(appends),
            decode=(*(s.slot for s in decoding), *(0,) * pad),
            rows=rows,
            width=width,
            len_ub=max(reach, default=0),
            reach=(*reach, *(1,) * pad),
            first_page=(*(tables.first_page(s.slot) for s in decoding), *(-1,) * pad),
            prefill=tuple(span for _, span in spans),
            prefill_first_page=tuple(tables.first_page(s.slot) for s, _ in spans),
            sampled=bool(draws),
            filtered=any(_filters(s) for s in draws),
            rejection=any(s.request.mode is VerifyMode.REJECTION for s in draws),
            coupled=any(s.request.mode is VerifyMode.COUPLED for s in draws),
            min_tokens=any(s.request.params.min_tokens > 0 for s in sampled),
        )

    def _choose_decode(self) -> tuple[list[Sequence], int, int]:
        """Slots of the decode frame, R and width; preempts when pages run short."""
        self._preempt()
        ready = [s for s in self.running.values() if s.decodes]
        if not ready:
            return [], 0, 0
        _, cap = choose_rows([s.wanted_rows for s in ready], self.config)
        room, chosen = self.ledger.room, []
        for s in ready:  # oldest first: it must make progress
            need = self.ledger.missing(s, s.cover(min(cap, s.most_rows)))
            if need <= room:
                room -= need
                chosen.append(s)
        if not chosen:
            return [], 0, 0
        rows, width = choose_rows([s.wanted_rows for s in chosen], self.config, cap)
        return chosen, rows, width

    def _cover(self, decoding: list[Sequence], width: int, seq: int) -> list[PageAppend]:
        rows = [min(width, s.most_rows) for s in decoding]
        grown = self.ledger.grow(decoding, rows)
        for s, r in zip(decoding, rows, strict=True):
            s.queued.append((seq, r))
            s.last_launch = seq
        return [
            PageAppend(slot=s.slot, first=first, pages=pages)
            for s, (first, pages) in zip(decoding, grown, strict=True)
            if pages
        ]

    def _choose_prefill(self, busy: bool, admits: list[Admit], seq: int) -> list[tuple[Sequence, PrefillSpan]]:
        """Prompt rows of this launch: started prompts first, then the queue, within one chunk's rows."""
        budget = self.config.prefill_chunk_busy if busy else self.config.prefill_chunk
        spans: list[tuple[Sequence, PrefillSpan]] = []
        started = deque(s for s in self.running.values() if s.reads)
        while budget:
            s = started.popleft() if started else self._admit(admits)
            if s is None:
                break
            length = min(budget, len(s.tokens) - s.planned)
            last = s.planned + length == len(s.tokens)
            spans.append((s, PrefillSpan(slot=s.slot, start=s.planned, length=length, last=last)))
            s.planned += length
            s.last_launch = seq
            budget -= length
        return spans

    def _admit(self, admits: list[Admit]) -> Sequence | None:
        """Admit the head of the queue if a slot and pages are there; nobody overtakes it."""
        if not self.waiting or any(s.state is State.LEAVING for s in self.running.values()):
            return None
        s = self.waiting[0]
        s.tokens = (*s.request.prompt_token_ids, *s.outputs)
        # The others keep the worst case of their next frames, so does the new one, or it would leave at once.
        reserve = self._demand() if self.running else None
        if not self.ledger.admit(s, self._generation + 1, reserve):
            return None
        self.waiting.popleft()
        self._generation += 1
        self.running[s.slot] = s
        self.metrics.count("prompt_tokens", len(s.tokens))
        self.metrics.count("cached_prompt_tokens", s.planned)
        pages = tuple(self.ledger.pool.tables[s.slot])
        admits.append(
            Admit(
                slot=s.slot,
                generation=s.generation,
                request=s.request,
                tokens=s.tokens,
                start=s.cached,
                pages=pages,
            )
        )
        return s

    # -- preemption ----------------------------------------------------------------------------

    def _demand(self) -> int:
        """Pages that every running slot may need soon."""
        return sum(self.ledger.missing(s, s.soon) for s in self.running.values() if s.state is State.RUNNING)

    def _preempt(self) -> None:
        """Send the most recently admitted away while free pages do not cover the worst case of all.

        The last one stays: alone it always fits, once pages in flight have come back.
        """
        while True:
            stay = [s for s in self.running.values() if s.state is State.RUNNING]
            if len(stay) < 2:
                return
            coming = sum(self.ledger.holding(s) for s in self.sequences.values() if _gives_back(s))
            if self._demand() <= self.ledger.room + self.ledger.coming + coming:
                return
            victim = stay[-1]
            victim.state = State.LEAVING
            self.drop(victim)
            self.metrics.count("preemptions", 1)
            self._let_go(victim)

    def _let_go(self, seq: Sequence) -> None:
        """A preempted sequence whose launches are all collected goes back to the queue with what it has."""
        if seq.last_launch <= self.ledger.collected:
            del self.running[seq.slot]
            self.ledger.retire(seq)
            self.enqueue(seq)


def _filters(s: Sequence) -> bool:
    p = s.request.params
    return p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0


def _gives_back(s: Sequence) -> bool:
    return s.state in (State.LEAVING, State.ENDED)
