"""A device without tensors that is strict about its contract with the host.

KV is a dict page -> {offset: digest of the token history up to that row}, and the next token is a function of
what the rows *read*: a page that was given to two slots, freed too early or cached under the wrong tokens
changes the output or trips an assertion. `expected` is the pure function that the engine's output must equal.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.engine.budget import Schedule
from slipstream.structured import MaskRows
from slipstream.types import FinishCode, FramePlan, FrameResult, Request
from tests.support.fake_grammar import allowed_after, allowed_by


def digest(previous: int, token: int) -> int:
    """Digest of a history that ends in `token`; `previous` is that of the history before."""
    return int.from_bytes(hashlib.blake2b(f"{previous},{token}".encode(), digest_size=8).digest(), "big")


def next_token(request: Request, history: int, output_index: int, vocab: int, allowed: list[int] | None = None) -> int:
    """The token after a history (its digest); stop ids are banned while below min_tokens. allowed: by a grammar, which
    has the ban in it."""
    if allowed is None:
        ban = request.stop_ids if output_index < request.params.min_tokens else ()
        allowed = [t for t in range(vocab) if t not in ban]
    return allowed[digest(history, request.key) % len(allowed)]


def expected(request: Request, vocab: int) -> tuple[list[int], str]:
    """Output tokens and finish reason of plain decoding."""
    history, out = 0, list[int]()
    for t in request.prompt_token_ids:
        history = digest(history, t)
    while True:
        grammar = request.params.structured_outputs is not None
        token = next_token(request, history, len(out), vocab, allowed_after(request, out, vocab) if grammar else None)
        history = digest(history, token)
        out.append(token)
        if token in request.stop_ids:
            return out, "stop"
        if len(request.prompt_token_ids) + len(out) >= request.max_len:
            return out, "length"


@dataclass
class _Slot:
    """live: admitted, not finished, not dropped. It decodes once `filled` has reached its tokens."""

    generation: int
    request: Request
    tokens: list[int]
    table: list[int]
    shared: int
    reread_from: int
    filled: int
    committed: int = 0
    live: bool = True
    window_table: dict[int, int] = field(default_factory=dict)
    next_drafts: int = 0
    asked: int = 0
    drafts: list[int] = field(default_factory=list)
    masks: MaskRows | None = None
    judged: int = -1  # last launch that decoded it
    said: list[tuple[int, list[int]]] = field(default_factory=list)  # launch, survivals in its record

    @property
    def active(self) -> bool:
        return self.live and self.committed > 0

    @property
    def grammar(self) -> bool:
        return self.request.params.structured_outputs is not None

    @property
    def outputs(self) -> list[int]:
        return self.tokens[len(self.request.prompt_token_ids) :]


Record = tuple[int, int, list[int], int, int, FinishCode, int, bool]
"""slot, generation, tokens, accepted, drafted, finish, next drafts, is prefill"""


@dataclass
class FakeDevice:
    """drafts(key, position) -> (drafts ready, how many of them are right): the scripted acceptance."""

    num_drafts: int
    page_size: int
    run_ahead: int
    vocab: int
    drafts: Callable[[int, int], tuple[int, int]]
    rereads: int = 0
    window_quota: int = 0
    adaptive: bool = False
    window: int = 0
    window_kv: dict[int, dict[int, int]] = field(default_factory=dict)
    schedule: Schedule | None = None
    survivals: Callable[[int, int, int], int] = lambda key, position, j: 0
    """key, position, draft: of the drafts that a record announces, made non-increasing here; with a schedule."""
    collected: int = -1
    slots: dict[int, _Slot] = field(default_factory=dict)
    kv: dict[int, dict[int, int]] = field(default_factory=dict)
    queue: deque[tuple[FrameResult, set[tuple[int, int, int]]]] = field(default_factory=deque)
    plans: list[FramePlan] = field(default_factory=list)
    idle_rows: int = 0

    def launch(self, plan: FramePlan) -> None:
        assert plan.seq == len(self.plans), "launches are numbered without gaps"
        assert len(self.queue) < self.run_ahead, "more than run_ahead launches uncollected"
        assert plan.decode or plan.prefill, "an empty launch"
        self.plans.append(plan)
        for d in plan.drops:
            slot = self.slots.get(d.slot)
            if slot is not None and slot.generation == d.generation:
                slot.live = False
        for a in plan.admits:
            own = a.pages[a.start // self.page_size :]
            self._claim(a.slot, a.generation, own)
            assert a.start % self.page_size == 0 and a.start < len(a.tokens)
            for slot in self.slots.values():
                assert slot.generation < a.generation, "generation numbers grow"
            self.slots[a.slot] = _Slot(
                generation=a.generation,
                request=a.request,
                tokens=list(a.tokens),
                table=list(a.pages),
                shared=a.start // self.page_size,
                reread_from=max(0, a.start - self.rereads),
                filled=max(0, a.start - self.rereads),
            )
        for p in plan.pages:
            slot = self.slots[p.slot]
            self._claim(p.slot, slot.generation, p.pages)
            assert len(slot.table) == p.first, "page table has a gap"
            slot.table += p.pages
        assert self.window or not plan.window_pages
        for p in plan.window_pages:
            assert min(p.pages) > 0 and len(p.pages) <= self.window_quota
            self.slots[p.slot].window_table |= {p.first + i: page for i, page in enumerate(p.pages)}
        self._check_shapes(plan)
        self._take_masks(plan)
        if self.schedule is not None and plan.decode:
            self._check_rows(plan, self.schedule)
        records = [*self._decode(plan), *self._prefill(plan)]
        self.queue.append((self._result(plan, records), self._touched(plan)))

    def collect(self) -> FrameResult:
        self.collected += 1
        return self.queue.popleft()[0]

    # -- checks --------------------------------------------------------------------------------

    def _claim(self, slot: int, generation: int, pages: tuple[int, ...]) -> None:
        """Pages that a slot gets to write: no other live slot has them, no queued launch may touch them."""
        for page in pages:
            assert page > 0, "the sink page was given away"
            for _, touched in self.queue:
                others = {(s, g) for s, g, p in touched if p == page} - {(slot, generation)}
                assert not others, f"page {page} is reused while a launch that touches it is queued"
            for other, state in self.slots.items():
                if other != slot and state.live:
                    assert page not in state.table, f"page {page} of live slot {other} was given away"
        for _, touched in self.queue:
            assert not {g for s, g, _ in touched if s == slot and g != generation}, f"slot {slot} is reused too early"

    def _touched(self, plan: FramePlan) -> set[tuple[int, int, int]]:
        named = {s for s in plan.decode if s} | {span.slot for span in plan.prefill}
        return {(s, self.slots[s].generation, p) for s in named for p in self.slots[s].table}

    def _check_shapes(self, plan: FramePlan) -> None:
        real = [s for s in plan.decode if s]
        assert (len(set(real)) == len(real) and len(plan.decode) <= plan.rows) or not plan.decode
        assert len(plan.first_page) == len(plan.decode) and len(plan.prefill_first_page) == len(plan.prefill)
        slots = [*zip(plan.decode, plan.first_page, strict=True)]
        slots += zip((s.slot for s in plan.prefill), plan.prefill_first_page, strict=True)
        for s, first in slots:
            table = self.slots[s].table if s else []
            run = bool(table) and table == list(range(table[0], table[0] + len(table)))
            assert first == (table[0] if run else -1)
        members = [self.slots[s] for s in real]
        sampling = [self.slots[s] for s in (*real, *(p.slot for p in plan.prefill if p.last))]
        assert plan.sampled == any(not s.request.params.greedy for s in sampling)
        assert plan.rejection == any(s.request.mode == 2 for s in sampling)
        assert plan.coupled == any(s.request.mode == 1 for s in sampling)
        wanted = [self.num_drafts if s.request.num_drafts is None else s.request.num_drafts for s in members]
        most = self.num_drafts if any(wanted) else 0
        assert plan.drafts == most or (self.adaptive and 0 <= plan.drafts <= most)
        assert plan.min_tokens == any(s.request.params.min_tokens > 0 for s in sampling)

    def _take_masks(self, plan: FramePlan) -> None:
        """Every slot with a grammar has masks in its launch, and they are those of its tokens and drafts."""
        for slot in self.slots.values():
            slot.masks = None
        for s, rows, drafts in plan.masks:
            self.slots[s].masks = rows
            assert drafts is None
        ends = [p.slot for p in plan.prefill if p.last]
        named = [self.slots[s] for s in (*(s for s in plan.decode if s), *ends)]
        assert plan.masked == any(s.grammar for s in named)
        for s in (*(s for s in plan.decode if s), *ends):
            slot = self.slots[s]
            assert (slot.masks is not None) == slot.grammar, f"slot {s} runs without the masks of its grammar"
            if slot.masks is None or not slot.live:
                continue
            outputs, drafts = slot.outputs, slot.drafts if slot.active else []
            assert len(slot.masks) == 1 + len(drafts), f"slot {s} has {len(drafts)} drafts"
            assert allowed_by(slot.masks[0], self.vocab) == allowed_after(slot.request, outputs, self.vocab)

    def _check_rows(self, plan: FramePlan, schedule: Schedule) -> None:
        """Rows follow from collected survivals of drafts that a launched frame has judged, of this owner, and nothing
        else."""
        members = [self.slots[s] for s in plan.decode if s]
        known: list[list[int] | None] = []
        for slot in members:
            old = [said for launch, said in slot.said if launch <= self.collected and launch < slot.judged]
            known.append(old[-1] if old else None)
            slot.judged = plan.seq
        most = [self.num_drafts if s.request.num_drafts is None else s.request.num_drafts for s in members]
        assert plan.rows == schedule.choose(known, most)[1], "rows do not follow from what may be known"

    # -- the frame -----------------------------------------------------------------------------

    def _read(self, slot: _Slot, end: int) -> int:
        """Attend to the rows [0, end): each must be of this slot's own history."""
        history = 0
        for i in range(end):
            history = digest(history, slot.tokens[i])
            row = self.kv.get(slot.table[i // self.page_size], {}).get(i % self.page_size)
            assert row == history, f"KV of position {i} is not that of the slot's own history"
            if i > end - self.window:
                page = slot.window_table.get(i // self.page_size, 0)
                row = self.window_kv.get(page, {}).get(i % self.page_size)
                assert row == history, f"window page {page} does not hold position {i} of the slot's own history"
        return history

    def _write(self, slot: _Slot, position: int, value: int) -> None:
        index = position // self.page_size
        assert index < len(slot.table), f"position {position} has no page"
        cells = self.kv.setdefault(slot.table[index], {})
        # What is read again for a drafter may write what is there; nothing else may touch a page of the prefix cache.
        same = position >= slot.reread_from and cells.get(position % self.page_size) == value
        assert index >= slot.shared or same, "a page of the prefix cache was changed"
        cells[position % self.page_size] = value
        if self.window:
            page = slot.window_table.get(index, 0)
            assert page > 0, f"position {position} has no window page"
            cells = self.window_kv.setdefault(page, {})
            same = position >= slot.reread_from and cells.get(position % self.page_size) == value
            assert index >= slot.shared or same, "a window page of the prefix cache was changed"
            cells[position % self.page_size] = value

    def _decode(self, plan: FramePlan) -> list[Record]:
        spare, records = plan.rows - len(plan.decode), list[Record]()
        for s in plan.decode:
            slot = self.slots.get(s)
            if slot is not None:
                slot.asked = plan.drafts
            if slot is None or not slot.active:
                self.idle_rows += slot is not None
                records.append((s, slot.generation if slot else 0, [], 0, 0, FinishCode.NONE, 0, False))
                continue
            drafted = min(slot.next_drafts, plan.width - 1, spare)
            spare -= drafted
            assert slot.committed + 1 + drafted <= plan.len_ub, "len_ub is no upper bound"
            records.append(self._round(s, slot, drafted))
        return records

    def _round(self, s: int, slot: _Slot, drafted: int) -> Record:
        """Verify the bonus token and `drafted` drafts, of which the script says how many are right."""
        c, emitted, finish = slot.committed, list[int](), FinishCode.NONE
        right = min(self.drafts(slot.request.key, c)[1], drafted)
        history, token = self._read(slot, c), slot.tokens[c]
        for depth in range(1 + drafted):
            if depth > right or finish is not FinishCode.NONE:
                self._write(slot, c + depth, -1)  # a rejected draft's row is written all the same
                continue
            history = digest(history, token)
            self._write(slot, c + depth, history)
            token, finish = self._sample(slot, history, depth)
            emitted.append(token)
        slot.committed += len(emitted)
        slot.next_drafts = min(slot.asked, self._ready(slot))
        self._draft(slot)
        return s, slot.generation, emitted, min(len(emitted), right), drafted, finish, slot.next_drafts, False

    def _sample(self, slot: _Slot, history: int, row: int) -> tuple[int, FinishCode]:
        request = slot.request
        allowed = None if slot.masks is None else allowed_by(slot.masks[row], self.vocab)
        token = next_token(request, history, len(slot.outputs), self.vocab, allowed)
        slot.tokens.append(token)
        finish = FinishCode.NONE
        if token in request.stop_ids:
            finish = FinishCode.STOP
        elif len(slot.tokens) >= request.max_len:
            finish = FinishCode.LENGTH
        slot.live = finish is FinishCode.NONE
        return token, finish

    def _draft(self, slot: _Slot) -> None:
        """Of a slot with a grammar: as many right tokens as the script says, then wrong ones."""
        slot.drafts = []
        if not slot.grammar or not slot.live:
            return
        right, history, tokens = self.drafts(slot.request.key, slot.committed)[1], 0, list(slot.tokens)
        for t in tokens:
            history = digest(history, t)
        for i in range(slot.next_drafts):
            outputs = tokens[len(slot.request.prompt_token_ids) :]
            allowed = allowed_after(slot.request, outputs, self.vocab)
            token = next_token(slot.request, history, len(outputs), self.vocab, allowed)
            token = token if i < right else (token + 1) % self.vocab
            slot.drafts.append(token)
            tokens.append(token)
            history = digest(history, token)

    def _ready(self, slot: _Slot) -> int:
        k = self.num_drafts if slot.request.num_drafts is None else slot.request.num_drafts
        return min(self.drafts(slot.request.key, slot.committed)[0], k)

    def _prefill(self, plan: FramePlan) -> list[Record]:
        records = list[Record]()
        for span in plan.prefill:
            slot = self.slots[span.slot]
            assert span.start == slot.filled and span.length > 0, "prompt rows out of order"
            history = self._read(slot, span.start)
            for i in range(span.start, span.start + span.length):
                history = digest(history, slot.tokens[i])
                self._write(slot, i, history)
            slot.filled += span.length
            assert span.last == (slot.filled == len(slot.tokens))
            if span.last and slot.live:
                slot.committed = len(slot.tokens)
                token, finish = self._sample(slot, history, 0)
                slot.next_drafts = self._ready(slot)
                self._draft(slot)
                records.append((span.slot, slot.generation, [token], 0, 0, finish, slot.next_drafts, True))
        return records

    def _result(self, plan: FramePlan, records: list[Record]) -> FrameResult:
        """As a device's: every record as wide as the widest, with tokens that nobody may read behind its own."""
        width = max((len(tokens) for _, _, tokens, *_ in records), default=0)
        return FrameResult(
            seq=plan.seq,
            slots=tuple(r[0] for r in records),
            records=[[*_counts(r), *self._survivals(plan, r), *r[2], *(-1,) * (width - len(r[2]))] for r in records],
            decoded=sum(not prefill for *_, prefill in records),
            seconds=1e-3 * (10 + plan.rows + plan.drafts),
            drafts=[self._pending(r[0]) for r in records] if plan.masked else None,
        )

    def _pending(self, s: int) -> list[int]:
        """Of all slots when some has a grammar; what is not valid is anything."""
        drafts = self.slots[s].drafts if s in self.slots else []
        return [-1, *drafts, *(-1,) * (self.num_drafts - len(drafts))]

    def _survivals(self, plan: FramePlan, record: Record) -> list[int]:
        """What stands in front of a record's tokens where verification is scheduled."""
        s, generation, *_, ready, _ = record
        if self.schedule is None:
            return []
        slot = self.slots.get(s)
        if slot is None or slot.generation != generation:
            return [0] * self.num_drafts
        drawn = [self.survivals(slot.request.key, slot.committed, j) for j in range(self.num_drafts)]
        said = [min(drawn[: j + 1]) if j < ready else 0 for j in range(self.num_drafts)]
        slot.said.append((plan.seq, said))
        return said


def _counts(record: Record) -> list[int]:
    _, generation, tokens, accepted, drafted, finish, ready, _ = record
    return [generation, len(tokens), accepted, drafted, int(finish), ready]
