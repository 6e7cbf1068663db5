"""Who holds which slot and which page: the allocator, the prefix cache and late release in one place.

A slot and its pages return only when the last launch that names the slot has been collected: launches are
numbered, `Sequence.last_launch` is the epoch. Nothing depends on the order of work on the device.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq

from slipstream.config import EngineConfig
from slipstream.engine.pages import PagePool, pages_for
from slipstream.engine.pools import Allocator, Pools
from slipstream.engine.radix import Node, RadixCache
from slipstream.engine.saved import SavedStates
from slipstream.engine.sequence import Sequence
from slipstream.engine.window import WindowPages
from slipstream.types import PrefillSpan


class Ledger:
    def __init__(self, config: EngineConfig, followers: Seq[Allocator] = ()) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages, config.page_size)
        self.pools = Pools(self.pool, followers)
        self.window = WindowPages(config) if config.window else None
        """Pages of the layers with a sliding window, where the model has some."""
        self.saved = SavedStates(config) if config.saved_states else None
        """Saved states of recurrent layers, where the model has some and the prefix cache is on."""
        self.radix = RadixCache(config.page_size, self._dropped)
        self.free_slots = list(range(1, config.max_slots + 1))
        self.collected = -1
        """Newest launch whose result is in."""
        self._retired: list[Sequence] = []

    @property
    def room(self) -> int:
        """Pages that can be had now: free ones and unlocked ones of the prefix cache."""
        return self.pool.num_free + self.radix.evictable

    @property
    def coming(self) -> int:
        """Pages that ended sequences give back once their last launch is collected."""
        return sum(self.holding(s) for s in self._retired)

    def holding(self, seq: Sequence) -> int:
        """Pages that become free or evictable when `seq` leaves its slot."""
        assert seq.node is not None
        return len(self.pool.tables[seq.slot]) - len(seq.shared) + self.radix.only_user(seq.node)

    def missing(self, seq: Sequence, tokens: int) -> int:
        """Pages to add so that `seq` has pages for `tokens` positions."""
        return max(0, pages_for(tokens, self.config.page_size) - len(self.pool.tables[seq.slot]))

    def admit(self, seq: Sequence, generation: int, reserve: int | None) -> bool:
        """Give `seq` a slot, pages for seq.tokens and one frame, and the longest cached prefix.

        reserve: pages that must stay available for the others; None when it is alone. With others around its
        own second frame must be coverable too. False, and nothing changed, if there are too few pages.
        """
        page_size, salt = self.config.page_size, seq.request.salt
        if not self.free_slots:
            return False
        node, shared = self.radix.root(salt), list[int]()
        if self.config.prefix_cache and not seq.reports_prompt:
            node, shared = self._match(seq)
        self.radix.lock(node)
        start = len(shared) * page_size
        new = len(seq.tokens) + seq.overhang
        later = new if reserve is None else min(new, seq.request.max_len) + seq.overhang
        count = self.pools.count([start], [new])
        if count + pages_for(later, page_size) - pages_for(new, page_size) > self.room - (reserve or 0):
            self.radix.unlock(node)
            return False
        seq.restart(
            slot=heapq.heappop(self.free_slots), generation=generation, start=start, node=node,
            rereads=self.config.rereads,
        )  # fmt: skip
        seq.shared = set(shared)
        self.pools.open(seq.slot, shared, seq.request.max_len + seq.overhang)
        if self.window is not None:
            self.window.enter(seq.slot, _from_root(node))
        self._extend([seq.slot], [start], [new], count)
        self._measure(seq)
        if self.saved is not None:
            seq.restores = node.state if start else 0
            seq.places = self.saved.enter(seq.slot, start, len(seq.tokens), seq.covered)
        return True

    def grow(self, seqs: list[Sequence], rows: list[int], stock: int = 0) -> list[tuple[int, tuple[int, ...]]]:
        """Pages for one more frame of rows[i] rows; per sequence the first new table index, and the ids.

        stock: positions beyond that which each gets too, as far as it can come.
        """
        slots = [s.slot for s in seqs]
        old = [s.covered for s in seqs]
        most = [s.max_len + s.overhang for s in seqs]
        new = [max(o, min(s.cover(r) + stock, m)) for o, s, r, m in zip(old, seqs, rows, most, strict=True)]
        count = self.pools.count(old, new)
        pages = self._extend(slots, old, new, count)
        if self.window is not None:
            for s in seqs:
                self.window.slide(s.slot, s.length)
            self.window.extend(slots, old, new, count)
        for s in seqs:
            self._measure(s)
        if self.saved is not None:
            self.saved.cover(slots, [s.covered for s in seqs])
        return [(o // self.config.page_size, p) for o, p in zip(old, pages, strict=True)]

    def read(self, spans: list[tuple[Sequence, PrefillSpan]]) -> None:
        """Window pages for prompt rows that are about to be read; the last ones' slots decode from then on."""
        window = self.window
        if window is None or not spans:
            return
        for _, span in spans:
            window.slide(span.slot, span.start)
        slots = [span.slot for _, span in spans]
        old = [window.covered(slot) for slot in slots]
        new = [
            s.covered if span.last else max(o, span.start + span.length)
            for o, (s, span) in zip(old, spans, strict=True)
        ]
        window.extend(slots, old, new, self.pools.count(old, new))

    def _match(self, seq: Sequence) -> tuple[Node, list[int]]:
        """The longest cached prefix that everything kept for it is there of."""
        node, shared = self.radix.match(seq.tokens, seq.request.salt)
        if self.window is not None or self.saved is not None:
            path, most = _from_root(node), -1
            while most != len(path):
                most = len(path)
                path = path if self.window is None else path[: self.window.usable(path)]
                path = path if self.saved is None else path[: self.saved.usable(path)]
            node, shared = path[-1] if path else self.radix.root(seq.request.salt), shared[: len(path)]
        return node, shared

    def _dropped(self, node: Node) -> None:
        """The prefix cache evicts a node: what else was kept for its tokens goes too."""
        if self.window is not None:
            self.window.forget(node)
        if self.saved is not None:
            self.saved.forget(node)

    def _measure(self, seq: Sequence) -> None:
        seq.covered = len(self.pool.tables[seq.slot]) * self.config.page_size

    def retire(self, seq: Sequence) -> None:
        """`seq` is done with its slot: cache its returned tokens, release slot and pages when it is safe."""
        if seq.prefilled and not seq.tainted:
            known = (*seq.request.prompt_token_ids, *seq.outputs)
            # What the drafter has not read stays out: who hits the cache would find a hole there.
            read = max(0, seq.length - seq.behind)
            self._insert(seq, known[: min(self._returned(seq), read)], running=False)
        self._retired.append(seq)
        self.settle()

    def share_prompt(self, seq: Sequence) -> None:
        """Its prefill is in: full pages of returned tokens (the prompt, usually) go to the cache."""
        self._insert(seq, seq.tokens[: min(self._returned(seq), seq.length)], running=True)

    def settle(self) -> None:
        """Release what no launch in flight can touch any more."""
        waiting = []
        for seq in self._retired:
            if seq.last_launch > self.collected:
                waiting.append(seq)
                continue
            assert seq.node is not None
            self.radix.unlock(seq.node)
            if self.window is not None:
                self.window.leave(seq.slot)
            if self.saved is not None:
                self.saved.leave(seq.slot)
            self.pool.free(p for p in self.pools.close(seq.slot) if p not in seq.shared)
            heapq.heappush(self.free_slots, seq.slot)
            seq.node, seq.slot, seq.shared = None, 0, set()
        self._retired = waiting

    def check(self, holders: list[Sequence]) -> None:
        """Assert free + cached + held = total. holders: every sequence with a slot that is not retired."""
        held = []
        for seq in (*holders, *self._retired):
            held += [p for p in self.pool.tables[seq.slot] if p not in seq.shared]
        self.pool.check(self.radix.pages(), held)
        self.pools.check(bool(holders or self._retired))
        if self.window is not None:
            self.window.check(self.radix.nodes())
        if self.saved is not None:
            self.saved.check(self.radix.nodes())
        assert len(self.radix.pages()) == self.radix.num_pages, "the prefix cache miscounts its pages"
        slots = sorted([*self.free_slots, *(s.slot for s in (*holders, *self._retired))])
        assert slots == list(range(1, self.config.max_slots + 1)), f"slots leaked or doubled: {slots}"

    def _returned(self, seq: Sequence) -> int:
        """Tokens that a user has seen; only these may become a key of the cache."""
        return len(seq.request.prompt_token_ids) + seq.acked

    def _extend(self, slots: list[int], old: list[int], new: list[int], count: int) -> list[tuple[int, ...]]:
        if count > self.pool.num_free:
            self.pool.free(self.radix.evict(count - self.pool.num_free))
        return self.pools.extend(slots, old, new, count)

    def _insert(self, seq: Sequence, tokens: tuple[int, ...], *, running: bool) -> None:
        if not self.config.prefix_cache:
            return
        assert seq.node is not None
        table = self.pool.tables[seq.slot]
        node, taken = self.radix.insert(tokens, table, seq.request.salt, stop_at_foreign=running)
        path = _from_root(node) if self.window is not None or self.saved is not None else []
        # Without new nodes, what a running sequence uses of the tree is locked already; both paths are prefixes of one
        # sequence. An ended one may give window pages to nodes of others, which then have to stay until it has left.
        if taken or (self.window is not None and path and len(path) > seq.node.depth):
            self.radix.lock(node)
            self.radix.unlock(seq.node)
            seq.node = node
            seq.shared.update(taken)
        if self.window is not None:
            self.window.adopt(seq.slot, path)
        if self.saved is not None:
            # A state is there when the frame that writes it has been collected: the last one began so far back at most.
            there = max(len(seq.tokens), seq.length + 1 - seq.most_tokens)
            self.saved.adopt(seq.slot, path, there, seq.len_ub + 1)


def _from_root(node: Node) -> list[Node]:
    """The path to a node, the root left out."""
    return list(node.path())[::-1]
