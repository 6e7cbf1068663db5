"""Allocators that follow an engine's own pool: what an offloading store and a back end of another platform need."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.engine.pages import PagePool, pages_for


class HostPages(PagePool):
    """Pages of KV kept in host memory: the pool's own bookkeeping, nothing of it shared through the prefix cache."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.start: dict[int, int] = {}
        self.counts: list[int | None] = []

    def open(self, slot: int, shared: Sequence[int], max_tokens: int) -> None:
        super().open(slot, (), max_tokens)
        self.start[slot] = len(shared) * self.page_size

    def extend(
        self, slots: Sequence[int], old_len: Sequence[int], new_len: Sequence[int], num_pages: int | None = None
    ) -> list[tuple[int, ...]]:
        self.counts.append(num_pages)
        old = [n - self.start[s] for s, n in zip(slots, old_len, strict=True)]
        new = [n - self.start[s] for s, n in zip(slots, new_len, strict=True)]
        return super().extend(slots, old, new, num_pages)

    def close(self, slot: int) -> list[int]:
        pages = super().close(slot)
        self.free(pages)
        return []


class BlockTables:
    """A platform's block tables, such as an NPU back end's: blocks of its own numbering, longest sequences first."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.blocks = list(range(num_pages))
        self.tables: dict[int, list[int]] = {}
        self.counts: list[int | None] = []

    @property
    def num_free(self) -> int:
        return len(self.blocks)

    def open(self, slot: int, shared: Sequence[int], max_tokens: int) -> None:
        assert slot not in self.tables
        self.tables[slot] = []

    def extend(
        self, slots: Sequence[int], old_len: Sequence[int], new_len: Sequence[int], num_pages: int | None = None
    ) -> list[tuple[int, ...]]:
        self.counts.append(num_pages)
        before, out = len(self.blocks), []
        for slot, old, new in zip(slots, old_len, new_len, strict=True):
            n = max(0, pages_for(new, self.page_size) - pages_for(old, self.page_size))
            out.append(tuple(self.blocks.pop() for _ in range(n)))
            self.tables[slot] += out[-1]
        assert num_pages is None or before - len(self.blocks) == num_pages
        return out

    def close(self, slot: int) -> list[int]:
        self.blocks += self.tables.pop(slot)
        return []
