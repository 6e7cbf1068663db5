"""Page ids of one KV pool: plain integers, no tensors.

Ids are 1..num_pages; page 0 is the sink and belongs to nobody. A page is at any time in exactly one
place: the free runs here, the table of a slot that owns it, or the prefix cache (which slots then share).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` positions take."""
    return -(-tokens // page_size)


def pages_for_extension(old_len: Sequence[int], new_len: Sequence[int], page_size: int) -> int:
    """Pages to add when slots grow from old_len[i] to new_len[i] tokens: sum of ceil(new/p) - ceil(old/p).

    Computed once per launch and handed to every pool that allocates for the same tokens.
    """
    return sum(
        max(0, pages_for(new, page_size) - pages_for(old, page_size)) for old, new in zip(old_len, new_len, strict=True)
    )


class PagePool:
    """Free pages as contiguous runs, and one table of page ids per slot.

    Slots grow at the end of their last page while the next id is free, and a new slot is placed where it
    has room to grow, so that most tables are one ascending run (KV can then be read without a gather).
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_free = num_pages
        self.tables: dict[int, list[int]] = {}
        self._ascending: dict[int, bool] = {}
        self._growth: dict[int, int] = {}
        # A free run [start, end) is known by both ends, so that freeing a page merges in O(1).
        self._end_of: dict[int, int] = {1: num_pages + 1}
        self._start_of: dict[int, int] = {num_pages + 1: 1}

    # -- slots ---------------------------------------------------------------------------------

    def open(self, slot: int, shared: Sequence[int], max_tokens: int) -> None:
        """Start the table of `slot` with cached pages; max_tokens: the most it may come to hold."""
        assert slot not in self.tables, f"slot {slot} already has pages"
        self.tables[slot] = list(shared)
        self._ascending[slot] = _is_run(shared)
        self._growth[slot] = pages_for(max_tokens, self.page_size)

    def extend(
        self,
        slots: Sequence[int],
        old_len: Sequence[int],
        new_len: Sequence[int],
        num_pages: int | None = None,
    ) -> list[tuple[int, ...]]:
        """Grow the tables of `slots` from old_len to new_len tokens; returns the new page ids per slot.

        num_pages: the count from `pages_for_extension`, when the caller has it already. The caller checks
        `num_free` first; too few free pages is a bug.
        """
        if num_pages is None:
            num_pages = pages_for_extension(old_len, new_len, self.page_size)
        assert num_pages <= self.num_free, f"{num_pages} pages wanted, {self.num_free} free"
        before = self.num_free
        grown: list[tuple[int, ...]] = []
        for slot, old, new in zip(slots, old_len, new_len, strict=True):
            table = self.tables[slot]
            n = max(0, pages_for(new, self.page_size) - pages_for(old, self.page_size))
            assert len(table) == pages_for(old, self.page_size), f"slot {slot} does not hold pages for {old} tokens"
            if n == 0:
                grown.append(())
                continue
            last = table[-1] if table else 0
            pages = self._take(n, last, max(n, self._growth[slot] - len(table)))
            self._ascending[slot] &= _is_run([*table[-1:], *pages])
            table.extend(pages)
            grown.append(tuple(pages))
        assert before - self.num_free == num_pages, "the shared page count and the pages taken differ"
        return grown

    def close(self, slot: int) -> list[int]:
        """Forget the table of `slot` and return it; the caller frees the pages that are not shared."""
        del self._ascending[slot], self._growth[slot]
        return self.tables.pop(slot)

    def first_page(self, slot: int) -> int:
        """First page of the slot when its pages are one ascending run, else -1."""
        return self.tables[slot][0] if self._ascending[slot] and self.tables[slot] else -1

    # -- free runs -----------------------------------------------------------------------------

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. Twice the same page is a bug."""
        for page in pages:
            assert 1 <= page <= self.num_pages, f"page {page} is not of this pool"
            start, end = page, page + 1
            assert start not in self._end_of and end not in self._start_of, f"page {page} is free already"
            if start in self._start_of:
                start = self._start_of.pop(start)
                del self._end_of[start]
            if end in self._end_of:
                end = self._end_of.pop(end)
                del self._start_of[end]
            self._end_of[start], self._start_of[end] = end, start
            self.num_free += 1

    def check(self, cached: Iterable[int], held: Iterable[int]) -> None:
        """Assert that free, cached and held pages are disjoint and together all there is."""
        free = [p for start, end in self._end_of.items() for p in range(start, end)]
        assert len(free) == self.num_free, f"{len(free)} pages in free runs, {self.num_free} counted"
        every = sorted([*free, *cached, *held])
        assert every == list(range(1, self.num_pages + 1)), f"free + cached + held is not the pool: {every}"

    def _take(self, n: int, last: int, room: int) -> list[int]:
        pages: list[int] = []
        if n and last and last + 1 in self._end_of:
            pages += self._cut(last + 1, last + 1, min(n, self._end_of[last + 1] - last - 1))
        while len(pages) < n:
            rest, want = n - len(pages), room - len(pages)
            fits = [(end - start, start) for start, end in self._end_of.items() if end - start >= want]
            if fits:
                size, start = min(fits)
                # The left neighbour may still grow: leave it the low end, take the high end with room.
                pages += self._cut(start, start if start == 1 else start + size - want, rest)
            else:
                size, start = max((end - start, -start) for start, end in self._end_of.items())
                pages += self._cut(-start, -start, min(size, rest))
        self.num_free -= n
        return pages

    def _cut(self, start: int, at: int, n: int) -> list[int]:
        """Take [at, at + n) out of the free run that begins at `start`."""
        end = self._end_of.pop(start)
        del self._start_of[end]
        for low, high in ((start, at), (at + n, end)):
            if low < high:
                self._end_of[low], self._start_of[high] = high, low
        return list(range(at, at + n))


def _is_run(pages: Sequence[int]) -> bool:
    return all(b == a + 1 for a, b in itertools.pairwise(pages))
