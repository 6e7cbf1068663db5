"""Every allocator of an engine behind one interface: what grows when tokens are added is counted once, for all of them.

The pages of a step are sum(ceil(new / p) - ceil(old / p)) over its slots. Working that out in each allocator again is
host time in every step that grows with the batch (founding case 3), so the count is made here and handed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slipstream.engine.pages import PagePool, pages_for_extension
from slipstream.errors import ConfigError


class Allocator(Protocol):
    """Memory that grows with the tokens of slots, page by page: a pool of ids, or what a platform keeps of its own.

    num_free == num_pages when no slot is open.
    """

    page_size: int
    num_pages: int

    @property
    def num_free(self) -> int: ...

    def open(self, slot: int, shared: Sequence[int], max_tokens: int) -> None:
        """A request takes `slot`. shared: pages of the engine's own pool that it finds in the prefix cache, in order;
        what it extends begins behind their tokens. max_tokens: the most it may come to hold."""

    def extend(
        self, slots: Sequence[int], old_len: Sequence[int], new_len: Sequence[int], num_pages: int | None = None
    ) -> list[tuple[int, ...]]:
        """Grow slots from old_len to new_len tokens; returns the new page ids of each.

        num_pages: the pages that takes over all slots, where the caller has counted them; None: count them here.
        """

    def close(self, slot: int) -> Sequence[int]:
        """The slot's request is gone, and no launch names it any more: give everything back."""


class Pools:
    """The engine's own pool of KV pages, and the allocators that follow it.

    A follower holds no page for tokens that a slot shares with the prefix cache, and everything else as the own pool
    does. With at least as many pages it therefore never runs out before the own pool; fewer are refused here, as is
    another page size: one count could not serve both.
    """

    def __init__(self, own: PagePool, followers: Sequence[Allocator] = ()) -> None:
        self.own, self.followers = own, tuple(followers)
        self.counted = 0
        """How often pages were counted; a test holds it against the number of extensions."""
        for f in self.followers:
            name = type(f).__name__
            if f.page_size != own.page_size:
                raise ConfigError(
                    f"{name} has pages of {f.page_size} tokens and the engine page_size={own.page_size}; the "
                    "allocators of an engine need one size, because pages are counted once for all of them"
                )
            if f.num_pages < own.num_pages:
                raise ConfigError(
                    f"{name} has {f.num_pages} pages and the engine num_pages={own.num_pages}; it needs as many"
                )

    def count(self, old_len: Sequence[int], new_len: Sequence[int]) -> int:
        """Pages that slots need to grow so: the one count of a step, for `extend`."""
        self.counted += 1
        return pages_for_extension(old_len, new_len, self.own.page_size)

    def open(self, slot: int, shared: Sequence[int], max_tokens: int) -> None:
        for pool in (self.own, *self.followers):
            pool.open(slot, shared, max_tokens)

    def extend(
        self, slots: Sequence[int], old_len: Sequence[int], new_len: Sequence[int], num_pages: int
    ) -> list[tuple[int, ...]]:
        """As `Allocator.extend`, in all of them; the own pool's new pages."""
        for follower in self.followers:
            follower.extend(slots, old_len, new_len, num_pages)
        return self.own.extend(slots, old_len, new_len, num_pages)

    def close(self, slot: int) -> list[int]:
        """As `PagePool.close`: the own pool's pages of the slot, which the caller frees."""
        for follower in self.followers:
            follower.close(slot)
        return self.own.close(slot)

    def check(self, slots_open: bool) -> None:
        """Assert that followers have everything back when no slot is open."""
        for f in self.followers:
            assert slots_open or f.num_free == f.num_pages, (
                f"{type(f).__name__}: {f.num_free} of {f.num_pages} pages are free with no slot open"
            )
