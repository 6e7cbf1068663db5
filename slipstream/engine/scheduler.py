"""What the next launch does: who decodes, whose prompt is read, who is admitted, who has to leave.

First come, first served, among requests of equal priority. All lengths here are upper bounds; a frame is only
planned when pages cover the worst case. A slot without pages sits the frame out while the others run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from time import perf_counter_ns
from typing import Any

from slipstream.config import STOCK_PAGES, EngineConfig
from slipstream.engine.adaptive import Adaptive
from slipstream.engine.admission import check_request
from slipstream.engine.batch import Batch, Flags, Queued
from slipstream.engine.budget import Schedule
from slipstream.engine.grammar import GrammarDesk, Grammars, masks_of, may_decode
from slipstream.engine.ledger import Ledger
from slipstream.engine.pages import pages_for
from slipstream.engine.pools import Allocator
from slipstream.engine.rows import choose_rows, chunk_rows, slot_bucket
from slipstream.engine.sequence import Key, Sequence, State, round_kinds
from slipstream.errors import InvalidRequestError
from slipstream.logprobs import PROMPT_ROWS
from slipstream.metrics import Metrics
from slipstream.types import Admit, Drop, FramePlan, PageAppend, PrefillSpan, Request

WAITING_RUN_AHEAD = 2
"""Run-ahead while requests wait: one launch runs, one is queued behind it, so the device still has no gap."""


class Scheduler:
    """Owns the waiting queue and the running slots; `plan` is called once per launch.

    In steady decode a plan costs little per slot: what depends on who decodes is kept in a `Batch`, and while `_calm`
    says that no slot can come to its end or run short of pages, neither is looked at. All slots are stocked with pages
    together, so that few launches carry any: what goes up stands between two frames.
    """

    def __init__(
        self,
        config: EngineConfig,
        metrics: Metrics,
        followers: Iterable[Allocator] = (),
        grammars: Grammars | None = None,
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.ledger = Ledger(config, tuple(followers))
        self.desk = GrammarDesk(grammars, drafts=config.grammar_drafts, laws=config.draft_laws)
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        """By slot, in order of admission; preempted ones stay until their last launch is collected."""
        self.sequences: dict[Key, Sequence] = {}
        """Every sequence that is not closed."""
        self.round_kinds = round_kinds(config.num_drafts, config.tree_depth or config.num_drafts)
        metrics.tells(self.round_kinds)
        self.queued: deque[Queued] = deque()
        """Decode frames that are not collected, oldest first."""
        self.left = 0
        """How often a sequence has left its slot."""
        self._calm = -1
        self._leaving = False
        self._drops: list[Drop] = []
        self._generation = 0
        self._arrivals = 0
        self._batch = self._before = self._gather([])
        self._first_page: tuple[int, ...] = ()
        # No slot needs more for its next two frames: its pages cover at least its length, with what is queued.
        self._most_pages = pages_for(2 * (max(config.num_drafts, config.lookahead) + 1), config.page_size)
        # Room that stocks leave alone: none where there are enough pages for every slot at its longest.
        enough = config.num_pages >= config.max_slots * config.pages_per_slot
        self._kept = 0 if enough else config.num_pages // 2
        self.adaptive = Adaptive.of(config) if config.adaptive else None
        self.schedule = Schedule(config) if config.confidence_schedule else None

    def add(self, request: Request) -> None:
        """Check a request and queue it. Raises InvalidRequestError; nothing else is affected."""
        num_drafts = check_request(request, self.config)
        self.desk.check(request)
        key, limit = (request.request_id, request.child), self.config.max_waiting
        if key in self.sequences:
            raise InvalidRequestError(f"request_id={key[0]!r} child={key[1]} is running already")
        if len(self.waiting) >= limit:
            raise InvalidRequestError(f"{len(self.waiting)} requests are waiting; the limit is max_waiting={limit}")
        self._arrivals += 1
        tree_depth = min(self.config.tree_depth, num_drafts)
        self.sequences[key] = seq = Sequence(
            request=request,
            arrival=self._arrivals,
            arrived_ns=perf_counter_ns(),
            num_drafts=num_drafts,
            tally=[0] * len(self.round_kinds),
            lookahead=self.config.lookahead if tree_depth else min(self.config.lookahead, num_drafts),
            tree_depth=tree_depth,
        )
        if not self.desk.open(seq):
            self.enqueue(seq)

    @property
    def busy(self) -> bool:
        """Whether some sequence has not ended."""
        return bool(self.waiting or self.running or self.desk.pending)

    def enqueue(self, seq: Sequence) -> None:
        """Into the queue by priority, then arrival; most often it is simply the last."""
        seq.state = State.WAITING
        at = len(self.waiting)
        while at and self.waiting[at - 1].order > seq.order:
            at -= 1
        self.waiting.insert(at, seq)

    def close(self, seq: Sequence) -> None:
        """The sequence has ended and its returned tokens are known: it leaves queue or slot."""
        if seq.state is State.WAITING:
            self.waiting.remove(seq)
        elif seq.state is not State.HELD:
            if seq.state is State.RUNNING:
                self.drop(seq)
            self.leave(seq)
            self.ledger.retire(seq)
        seq.state = State.CLOSED
        del self.sequences[seq.key]

    def leave(self, seq: Sequence) -> None:
        """The sequence does not run any more, if it did: records of frames in flight are not its any longer."""
        if self.running.pop(seq.slot, None) is not None:
            self.left += 1
            self._calm = -1

    def drop(self, seq: Sequence) -> None:
        self._drops.append(Drop(slot=seq.slot, generation=seq.generation))

    def settle(self, collected: int) -> None:
        """Launch `collected` is in: release what waited for it, queue preempted sequences again."""
        self.ledger.collected = collected
        self.ledger.settle()
        if self._leaving:
            leaving = [s for s in self.running.values() if s.state is State.LEAVING]
            for seq in leaving:
                self._let_go(seq)
            self._leaving = bool(leaving)

    def check(self) -> None:
        """Assert free + cached + held = total, for pages and slots."""
        self.ledger.check([s for s in self.sequences.values() if s.state not in (State.WAITING, State.HELD)])

    # -- planning ------------------------------------------------------------------------------

    @property
    def run_ahead(self) -> int:
        """Launches that may be queued now. Few while requests wait: then what frees a slot or pages is known soon."""
        return min(self.config.run_ahead, WAITING_RUN_AHEAD) if self.waiting else self.config.run_ahead

    def plan(self, seq: int) -> FramePlan | None:
        """The plan of launch `seq`, or None when there is nothing to run."""
        self._preempt()
        ready, reading = self._split()
        drafts = self.config.num_drafts
        if self.adaptive is not None and ready:
            drafts = self.adaptive.choose(slot_bucket(len(ready), self.config))
        decoding, rows, width = self._choose_decode(ready, 1 + drafts)
        renewed = decoding != self._batch.members
        if renewed:
            # Slots with a grammar come and go every launch: two batches take turns.
            again = self._before.has(decoding)
            self._before, self._batch = self._batch, self._before if again else self._gather(decoding)
        batch = self._batch
        slots, padding, flags = batch.slots, batch.padding, batch.flags
        drafts = min(drafts, batch.drafts)
        reach, appends = self._cover(decoding, width, seq)
        if decoding:
            self.queued.append(Queued(seq, width, batch, self.left))
            if self._calm < 0 and not reading and len(decoding) == len(self.running) and not flags.masked:
                self._calm = min([s.calm for s in decoding])
        if renewed or appends:
            first_page = self.ledger.pool.first_page
            self._first_page = (*(first_page(s.slot) for s in decoding), *(-1,) * padding)
        admits: list[Admit] = []
        spans = self._choose_prefill(reading, rows if decoding else 0, admits, seq)
        if not decoding and not spans:
            return None
        asked = batch.asked
        if spans:
            flags = Flags.of([*decoding, *(s for s, span in spans if span.last)])
            asked = flags.asked() | self._prefill(spans)
        if self.adaptive is not None and decoding:
            self.adaptive.launched(seq, len(slots), width, drafts, alone=not spans)
        drops, self._drops = tuple(self._drops), []
        return FramePlan(
            seq=seq,
            drops=drops,
            admits=tuple(admits),
            pages=tuple(appends),
            window_pages=() if self.ledger.window is None else self.ledger.window.news(),
            saved=() if self.ledger.saved is None else self.ledger.saved.news(),
            decode=slots,
            rows=rows,
            width=width,
            len_ub=max(reach, default=0),
            reach=(*reach, *(1,) * padding),
            first_page=self._first_page,
            prefill_prompts=self.config.prefill_prompts,
            drafts=drafts,
            catch_up=bool(self.config.catch_up) and self._catch_up(decoding, width, drafts),
            masks=masks_of(decoding, spans) if flags.masked else (),
            **asked,
        )

    def _prefill(self, spans: list[tuple[Sequence, PrefillSpan]]) -> dict[str, Any]:
        """Fields of a plan that reads these prompts."""
        return {
            "prefill": tuple([span for _, span in spans]),
            "prefill_first_page": tuple([self.ledger.pool.first_page(s.slot) for s, _ in spans]),
            "prefill_rows": chunk_rows(sum([span.length for _, span in spans]), self.config),
            "prompt_logprobs": any(s.reports_prompt for s, _ in spans),
        }

    def _split(self) -> tuple[list[Sequence], list[Sequence]]:
        """Slots that can decode in the next frame, and those whose prompt is still read; oldest first."""
        if self._calm >= 0:  # nobody has come, left or begun to leave
            return self._batch.members, []
        ready, reading = list[Sequence](), list[Sequence]()
        running = State.RUNNING
        for s in self.running.values():
            if s.state is not running:
                continue
            if s.planned < len(s.tokens):
                reading.append(s)
            # Whether it cannot be known to end before the frame: an active slot emits at least one token per frame,
            # so length + 1 + frames queued is a lower bound.
            elif s.length + 1 + s.queued < s.max_len and (s.grammar is None or may_decode(s)):
                ready.append(s)
        return ready, reading

    def _gather(self, members: list[Sequence]) -> Batch:
        padding = slot_bucket(len(members), self.config) - len(members) if members else 0
        # A drafter with KV of its own that cannot catch up has to see every position, whoever wants its drafts.
        always = self.config.lookahead and not self.config.catch_up
        wanted = self.config.num_drafts and (always or any(s.num_drafts for s in members))
        return Batch(members, padding, self.config.num_drafts if wanted else 0)

    def _choose_decode(self, ready: list[Sequence], most: int) -> tuple[list[Sequence], int, int]:
        """Slots of the decode frame, R and width, at most `most` rows per slot; who has no pages sits out."""
        if not ready:
            return [], 0, 0
        rows, cap = self._choose_rows(ready, most)
        room = self.ledger.room
        if len(ready) * self._most_pages <= room:
            return ready, rows, cap
        chosen = []
        for s in ready:  # oldest first: it must make progress
            need = self.ledger.missing(s, s.cover(min(cap, s.most_rows)))
            if need <= room:
                room -= need
                chosen.append(s)
        if not chosen:
            return [], 0, 0
        rows, width = self._choose_rows(chosen, most, cap)
        return chosen, rows, width

    def _choose_rows(self, members: list[Sequence], most: int, cap: int | None = None) -> tuple[int, int]:
        """R and width, at most `cap` of it: what records have asked for, or what the schedule finds worth its time."""
        if self.schedule is not None:
            budget, rows, width = self.schedule.choose([s.survival for s in members], [s.num_drafts for s in members])
            self.metrics.budget = budget
            return rows, width if cap is None else min(width, cap)
        wanted = [s.wanted for s in members]
        if most <= self.config.num_drafts:
            wanted = [min(w, most) for w in wanted]
        return choose_rows(wanted, self.config, cap)

    def _cover(self, decoding: list[Sequence], width: int, seq: int) -> tuple[list[int], list[PageAppend]]:
        """Count the frame to its slots. Bounds on position + 1 over each one's rows, and the pages they need."""
        reach, short = list[int](), False
        if self._calm >= 0:
            self._calm -= min(width, self._batch.most_tokens)
            reach = [s.length + s.ahead + (width if width < s.most_rows else s.most_rows) for s in decoding]
            for s in decoding:
                if s.fresh is not None:
                    s.launched(seq, width)
                    continue
                s.queued += 1  # as `Sequence.launched`, without the call
                s.ahead += width if width < s.most_tokens else s.most_tokens
                s.last_launch = seq
            return reach, []
        for s in decoding:
            rows = s.most_rows if s.most_rows < width else width
            bound = s.length + s.ahead
            end = (bound if bound < s.max_len else s.max_len) + rows
            reach.append(end)
            # The first test is cheap and, for a tree's many rows, a little early.
            short = short or (end + s.lookahead > s.covered and s.cover(rows) > s.covered)
        appends = self._append(decoding, width) if short else []
        for s in decoding:
            s.launched(seq, width)
        return reach, appends

    def _append(self, decoding: list[Sequence], width: int) -> list[PageAppend]:
        """Pages for the slots that are short; from plenty for many frames, and to all that would be short soon."""
        ledger, stock = self.ledger, STOCK_PAGES * self.config.page_size
        left = ledger.room - len(decoding) * (STOCK_PAGES + self._most_pages)
        if left < self._kept or (self.waiting and ledger.free_slots):  # the head of the queue waits for pages
            stock = 0
        low = [(s, rows) for s in decoding if s.cover(rows := min(width, s.most_rows)) + stock // 2 > s.covered]
        grown = ledger.grow([s for s, _ in low], [rows for _, rows in low], stock)
        return [PageAppend(s.slot, first, pages) for (s, _), (first, pages) in zip(low, grown, strict=True) if pages]

    def _catch_up(self, decoding: list[Sequence], width: int, drafts: int) -> bool:
        """Whether the drafter has to read what it lacks before this frame; and count what the frame adds to that."""
        most = self.config.catch_up - (0 if drafts else width)
        due = any(s.behind > (0 if drafts else most) for s in decoding)
        for s in decoding:
            s.behind = (0 if due else s.behind) + (0 if drafts else min(width, s.most_rows))
        return due

    def _choose_prefill(
        self, reading: list[Sequence], rows: int, admits: list[Admit], seq: int
    ) -> list[tuple[Sequence, PrefillSpan]]:
        """Prompt rows of this launch: started prompts first, then the queue, within one chunk's rows and prompts.

        rows: of the frame before it; 0: nobody decodes.
        """
        budget = self.config.prefill_chunk
        if rows:
            budget = max(self.config.prefill_chunk_busy, min(budget, self.config.prefill_busy_share * rows))
        spans: list[tuple[Sequence, PrefillSpan]] = []
        if not reading and not self.waiting:
            return spans
        started = deque(reading)
        most = self.config.prefill_prompts or self.config.max_slots
        room = min(self.config.prefill_tiers, default=PROMPT_ROWS)
        window = self.ledger.window
        while budget and len(spans) < most:
            s = started.popleft() if started else self._admit(admits)
            if s is None:
                break
            s.last_launch = seq
            if s.reports_prompt:  # of few rows at once, so that their logits are few
                budget = min(budget, room)
                if budget <= 0:
                    break
            left = len(s.tokens) - s.planned
            length = min(budget, left)
            if window is not None:
                length = window.fits(s.slot, s.planned, length, left, s.covered)
            last = s.planned + length == len(s.tokens)
            spans.append((s, PrefillSpan(slot=s.slot, start=s.planned, length=length, last=last)))
            s.planned += length
            budget -= length
            room -= length
        self.ledger.read(spans)
        return spans

    def _admit(self, admits: list[Admit]) -> Sequence | None:
        """Admit the head of the queue if a slot and pages are there; nobody overtakes it."""
        if (
            not self.waiting
            or not self.ledger.free_slots
            or any(s.state is State.LEAVING for s in self.running.values())
        ):
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
        self._calm = -1
        waited = perf_counter_ns() - s.arrived_ns if s.arrived_ns else None
        s.arrived_ns = 0
        self.metrics.admitted(len(s.tokens), s.planned, waited)
        pages = tuple(self.ledger.pool.tables[s.slot])
        admits.append(
            Admit(
                slot=s.slot,
                generation=s.generation,
                request=s.request,
                tokens=s.tokens,
                start=s.cached,
                pages=pages,
                absorbed=s.planned if s.restores else 0,
                restores=s.restores,
                saved=s.places,
            )
        )
        return s

    # -- preemption ----------------------------------------------------------------------------

    def _demand(self) -> int:
        """Pages that every running slot may need soon."""
        return sum(self.ledger.missing(s, s.soon) for s in self.running.values() if s.state is State.RUNNING)

    def _preempt(self) -> None:
        """Send the most recently admitted of the least urgent away while free pages do not cover the worst case of all.

        The last one stays: alone it always fits, once pages in flight have come back.
        """
        while len(self.running) * self._most_pages > self.ledger.room:
            stay = [s for s in self.running.values() if s.state is State.RUNNING]
            if len(stay) < 2:
                return
            coming = sum(self.ledger.holding(s) for s in self.sequences.values() if _gives_back(s))
            if self._demand() <= self.ledger.room + self.ledger.coming + coming:
                return
            victim = max(reversed(stay), key=lambda s: s.request.priority)
            victim.state = State.LEAVING
            self._leaving, self._calm = True, -1
            self.drop(victim)
            self.metrics.count("preemptions", 1)
            self._let_go(victim)

    def _let_go(self, seq: Sequence) -> None:
        """A preempted sequence whose launches are all collected goes back to the queue with what it has."""
        if seq.last_launch <= self.ledger.collected:
            self.leave(seq)
            self.ledger.retire(seq)
            if seq.grammar is not None and seq.masks is None:
                seq.state = State.HELD
            else:
                self.enqueue(seq)


def _gives_back(s: Sequence) -> bool:
    return s.state in (State.LEAVING, State.ENDED)
