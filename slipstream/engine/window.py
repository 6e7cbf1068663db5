"""Pages of layers with a sliding window: a slot holds those that its window can still see, and no others.

A page of this pool goes with one of the engine's own pool, for the same tokens: the page at the same place of a slot's
table, or the one that a node of the prefix cache owns. Rows that are not committed may be rejected, and then the next
ones stand where they stood, so the window is counted from what is known to be committed.

    ... gone | left behind | first ........ committed ........ end of table
             |  (prompt)   |<- window - 1 ->|

What a prompt leaves behind is kept while nobody needs the room: with the prompt's own pages it becomes part of the
prefix cache, so that other prompts can branch off before its end. A prefix is a hit as far as the cache has the pages
of the window before its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slipstream.config import EngineConfig
from slipstream.engine.pages import pages_for
from slipstream.engine.radix import Node
from slipstream.types import PageAppend


@dataclass
class _Held:
    """A slot's pages from place `first` of its table on; nodes: the cache's node where the page is the cache's.

    reading: its prompt is not in the cache yet.
    """

    first: int
    pages: deque[int] = field(default_factory=deque)
    nodes: deque[Node | None] = field(default_factory=deque)
    reading: bool = True

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


class WindowPages:
    """The allocator of those pages (pools.py has the interface). It never runs out: `EngineConfig.window_quota` is the
    most that a slot holds, and the configuration has that for every slot, or a page for every page of the own pool.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.num_pages, self.page_size, self.window = config.window_pages, config.page_size, config.window
        self.quota, self.rereads, self.caching = config.window_quota, config.rereads, config.prefix_cache
        self.most = 0
        """Most pages that slots have held at once."""
        self.fresh: list[PageAppend] = []
        """What the device has to be told with the next plan."""
        self._free = list(range(config.window_pages, 0, -1))
        self._slots: dict[int, _Held] = {}
        self._left: dict[tuple[int, int], int] = {}  # (slot, place) -> page, longest left first
        self._idle: dict[Node, None] = {}  # of the cache's pages those that no window covers, longest so first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        """Pages that some slot's window covers, or that its next rows are written to."""
        return self.num_pages - len(self._free) - len(self._left) - len(self._idle)

    def report(self) -> dict[str, int]:
        """For statistics: pages in all, free, held by slots now, the most that were; the others are the cache's."""
        return {"pages": self.num_pages, "free": self.num_free, "held": self.held, "most_held": self.most}

    # -- the prefix cache ----------------------------------------------------------------------

    def usable(self, path: Sequence[Node]) -> int:
        """How many nodes of a path from the root are a hit: the pages of the window before its end are all there."""
        run, best = 0, 0
        for n, node in enumerate(path, start=1):
            run = run + 1 if node.window else 0
            if run >= n - self._first(n * self.page_size - self.rereads):
                best = n
        return best

    def adopt(self, slot: int, path: Sequence[Node]) -> None:
        """The slot's tokens are in the cache as `path`: nodes without a page get the slot's, where it has one.

        What else its prompt has left behind is free.
        """
        held = self._slots[slot]
        for i, node in enumerate(held.nodes):
            place = held.first + i
            if node is None and place < len(path) and not path[place].window:
                held.nodes[i] = path[place]
                path[place].window, path[place].window_locks = held.pages[i], 1
        for key in [key for key in self._left if key[0] == slot]:
            page, place = self._left.pop(key), key[1]
            if place < len(path) and not path[place].window:
                path[place].window = page
                self._idle[path[place]] = None
            else:
                self._free.append(page)
        held.reading = False

    def forget(self, node: Node) -> None:
        """The cache drops a node."""
        if node.window:
            del self._idle[node]
            self._free.append(node.window)
            node.window = 0

    # -- slots ---------------------------------------------------------------------------------

    def enter(self, slot: int, path: Sequence[Node]) -> None:
        """A request takes `slot`, whose first tokens are those of a path that `usable` has passed."""
        first = self._first(len(path) * self.page_size - self.rereads)
        held = self._slots[slot] = _Held(first, reading=self.caching)
        for node in path[first:]:
            if node.window_locks == 0:
                del self._idle[node]
            node.window_locks += 1
            held.pages.append(node.window)
            held.nodes.append(node)
        if held.pages:
            self.fresh.append(PageAppend(slot, first, tuple(held.pages)))

    def fits(self, slot: int, start: int, rows: int, left: int, covered: int) -> int:
        """At most `rows` prompt rows from `start` that the slot's quota has pages for.

        left: rows until the prompt ends; with the last of them pages for `covered` positions are needed at once.
        """
        most = (self._first(start) + self.quota) * self.page_size
        if covered <= most:
            return min(rows, left)
        rows = min(rows, most - start, left - 1)
        assert rows > 0, f"slot {slot}: the quota of {self.quota} pages has none for the prompt row at {start}"
        return rows

    def slide(self, slot: int, position: int) -> None:
        """No row of the slot will stand before `position` any more: what only such rows see goes."""
        held, first = self._slots[slot], self._first(position)
        while held.first < first:
            page, node = held.pages.popleft(), held.nodes.popleft()
            self._release(page, node, (slot, held.first) if held.reading else None)
            held.first += 1

    def extend(
        self, slots: Sequence[int], old_len: Sequence[int], new_len: Sequence[int], num_pages: int | None = None
    ) -> list[tuple[int, ...]]:
        """As `pools.Allocator.extend`; `slide` first."""
        grown, taken = list[tuple[int, ...]](), 0
        for slot, old, new in zip(slots, old_len, new_len, strict=True):
            held = self._slots[slot]
            assert held.end == pages_for(old, self.page_size), f"slot {slot} does not hold pages up to {old} tokens"
            n = max(0, pages_for(new, self.page_size) - held.end)
            pages = tuple(self._take() for _ in range(n))
            if pages:
                self.fresh.append(PageAppend(slot, held.end, pages))
            held.pages.extend(pages)
            held.nodes.extend([None] * n)
            assert len(held.pages) <= self.quota, f"slot {slot} holds {len(held.pages)} of at most {self.quota} pages"
            grown.append(pages)
            taken += n
        assert num_pages is None or num_pages == taken, "the shared page count and the pages taken differ"
        self.most = max(self.most, self.held)
        return grown

    def covered(self, slot: int) -> int:
        """Positions up to which the slot has pages."""
        return self._slots[slot].end * self.page_size

    def leave(self, slot: int) -> None:
        """Nothing names the slot any more: its pages are free, or the cache's alone."""
        held = self._slots.pop(slot)
        for page, node in zip(held.pages, held.nodes, strict=True):
            self._release(page, node, None)
        for key in [key for key in self._left if key[0] == slot]:
            self._free.append(self._left.pop(key))

    def news(self) -> tuple[PageAppend, ...]:
        """What changed in the slots' tables since the last call."""
        fresh, self.fresh = tuple(self.fresh), []
        return fresh

    def check(self, cached: Iterable[Node]) -> None:
        """Assert that every page is in one place: free, left behind, a slot's own, or the cache's."""
        nodes = [n for n in cached if n.window]
        own = [p for h in self._slots.values() for p, n in zip(h.pages, h.nodes, strict=True) if n is None]
        every = sorted([*self._free, *self._left.values(), *own, *(n.window for n in nodes)])
        assert every == list(range(1, self.num_pages + 1)), f"free + cached + held is not the pool: {every}"
        assert set(self._idle) == {n for n in nodes if not n.window_locks}, "a page of the cache is locked by nobody"
        locks = [id(n) for h in self._slots.values() for n in h.nodes if n is not None]
        assert all(locks.count(id(n)) == n.window_locks for n in nodes), "window locks are miscounted"

    def _first(self, position: int) -> int:
        """The place of the first page that a row at `position`, or one behind it, sees."""
        return max(0, position - self.window + 1) // self.page_size

    def _release(self, page: int, node: Node | None, left: tuple[int, int] | None) -> None:
        if node is not None:
            node.window_locks -= 1
            if node.window_locks == 0:
                self._idle[node] = None
        elif left is not None:
            self._left[left] = page
        else:
            self._free.append(page)

    def _take(self) -> int:
        """A free page; else the one that a prompt left behind first; else the cache's, unused for the longest time."""
        if self._free:
            return self._free.pop()
        if self._left:
            return self._left.pop(next(iter(self._left)))
        assert self._idle, "no window page is left although every slot keeps to its quota"
        node = next(iter(self._idle))
        del self._idle[node]
        page, node.window = node.window, 0
        return page
