"""Page pool and prefix cache against brute-force models."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import EngineConfig
from slipstream.engine.pages import PagePool, pages_for, pages_for_extension
from slipstream.engine.radix import Node, RadixCache
from slipstream.engine.rows import choose_rows


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=8), st.integers(1, 33))
def test_pages_for_extension_counts_pages_that_begin(pairs: list[tuple[int, int]], p: int) -> None:
    old, new = [a for a, _ in pairs], [a + b for a, b in pairs]
    # A page begins at every multiple of p that the growth passes.
    want = sum(i % p == 0 for a, b in zip(old, new, strict=True) for i in range(a, b))
    assert pages_for_extension(old, new, p) == want


@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_pages=st.integers(1, 40), p=st.sampled_from([1, 4, 16]))
def test_pool_against_a_set(data: st.DataObject, num_pages: int, p: int) -> None:
    pool, model = PagePool(num_pages, p), dict[int, list[int]]()
    free = set(range(1, num_pages + 1))
    for _ in range(data.draw(st.integers(1, 25))):
        slot = data.draw(st.integers(1, 5))
        if slot not in model:
            pool.open(slot, (), data.draw(st.integers(1, 80)))
            model[slot] = []
        elif data.draw(st.booleans()):
            old = len(model[slot]) * p
            new = data.draw(st.integers(old, old + len(free) * p))
            (pages,) = pool.extend([slot], [old], [new])
            assert len(pages) == pages_for(new, p) - len(model[slot]) and set(pages) <= free
            free -= set(pages)
            model[slot] += pages
        else:
            assert pool.close(slot) == model[slot]
            pool.free(model[slot])
            free |= set(model.pop(slot))
        for s, table in model.items():
            run = bool(table) and table == list(range(table[0], table[0] + len(table)))
            assert pool.first_page(s) == (table[0] if run else -1)
        assert pool.num_free == len(free)
        pool.check([], [page for table in model.values() for page in table])


def test_slots_that_grow_in_turns_stay_ascending_runs() -> None:
    pool = PagePool(64, 4)
    slots = [1, 2, 3, 4]
    for s in slots:
        pool.open(s, (), 40)
    for n in range(4, 44, 4):
        pool.extend(slots, [n - 4] * 4, [n] * 4)
    assert all(pool.first_page(s) > 0 for s in slots)
    assert pool.first_page(1) == 1


def test_pool_refuses_double_free_and_foreign_pages() -> None:
    pool = PagePool(8, 4)
    pool.open(1, (), 32)
    (pages,) = pool.extend([1], [0], [12])
    pool.free(pool.close(1))
    for page in (pages[0], 8, 9, 0):
        with pytest.raises(AssertionError):
            pool.free([page])
    with pytest.raises(AssertionError):
        pool.check([], [1])
    pool.check([], [])


class TreeModel:
    """The prefix cache as a dict from (salt, tokens of the path) to page, last use and locks."""

    def __init__(self, p: int) -> None:
        self.p, self.clock = p, 0
        self.entries: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def paths(self, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [tokens[:n] for n in range(self.p, len(tokens) + 1, self.p)]

    def match(self, tokens: tuple[int, ...], salt: str) -> list[int]:
        self.clock += 1
        pages = []
        for path in self.paths(tokens[:-1]):
            if (salt, path) not in self.entries:
                break
            self.entries[salt, path][1] = self.clock
            pages.append(self.entries[salt, path][0])
        return pages

    def insert(self, tokens: tuple[int, ...], pages: list[int], salt: str) -> list[int]:
        self.clock += 1
        taken = []
        for path, page in zip(self.paths(tokens), pages, strict=False):
            if (salt, path) not in self.entries:
                self.entries[salt, path] = [page, self.clock, 0]
                taken.append(page)
            self.entries[salt, path][1] = self.clock
        return taken

    def lock(self, tokens: tuple[int, ...], salt: str, n: int) -> None:
        for path in self.paths(tokens):
            self.entries[salt, path][2] += n

    def evict(self, n: int) -> list[int]:
        """Least recently used leaf first. A time is shared only by the nodes of one path."""
        pages: list[int] = []
        while len(pages) < n:
            leaves = [
                (used, key)
                for key, (_, used, locks) in self.entries.items()
                if not locks
                and not any(k[0] == key[0] and k != key and k[1][: len(key[1])] == key[1] for k in self.entries)
            ]
            if not leaves:
                break
            pages.append(self.entries.pop(min(leaves)[1])[0])
        return pages


@settings(max_examples=200, deadline=None)
@given(data=st.data(), p=st.sampled_from([1, 2, 4]))
def test_radix_against_a_dict(data: st.DataObject, p: int) -> None:
    radix, model = RadixCache(p), TreeModel(p)
    locked: list[tuple[Node, tuple[int, ...], str]] = []
    fresh = 0
    for _ in range(data.draw(st.integers(1, 30))):
        tokens = tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9)))
        salt = data.draw(st.sampled_from(["", "x"]))
        action = data.draw(st.sampled_from(["match", "insert", "insert", "lock", "unlock", "evict"]))
        if action == "insert":
            pages = list(range(fresh, fresh + len(tokens) // p))
            fresh += len(pages)
            assert radix.insert(tokens, pages, salt)[1] == model.insert(tokens, pages, salt)
        elif action == "unlock" and locked:
            node, path, s = locked.pop(data.draw(st.integers(0, len(locked) - 1)))
            radix.unlock(node)
            model.lock(path, s, -1)
        elif action == "evict":
            n = data.draw(st.integers(1, 6))
            assert radix.evict(n) == model.evict(n)
        else:
            node, pages = radix.match(tokens, salt)
            assert pages == model.match(tokens, salt)
            if action == "lock":
                path = tokens[: len(pages) * p]
                radix.lock(node)
                model.lock(path, salt, 1)
                locked.append((node, path, salt))
        assert radix.num_pages == len(model.entries) and sorted(radix.pages()) == sorted(
            page for page, _, _ in model.entries.values()
        )
        assert radix.evictable == sum(not locks for _, _, locks in model.entries.values())
    for node, _, _ in locked:
        radix.unlock(node)
    assert len(radix.evict(10**6)) == len(model.entries) and radix.num_pages == radix.evictable == 0


def test_rows() -> None:
    exact = EngineConfig(num_drafts=3)
    assert choose_rows([1, 4, 2], exact) == (7, 4)
    assert choose_rows([1, 4, 2], exact, cap=2) == (5, 2)
    padded = EngineConfig(num_drafts=3, max_slots=4, slot_buckets=(1, 4))
    assert choose_rows([1, 4, 2], padded) == (8, 4)
    tiers = EngineConfig(num_drafts=3, max_slots=4, slot_buckets=(1, 2, 4), row_tiers=(1, 2, 4, 8))
    assert choose_rows([1, 1, 1], tiers) == (4, 1)
    assert choose_rows([1, 4, 2], tiers) == (8, 2)
    assert choose_rows([4], tiers) == (4, 4)
    assert choose_rows([1, 4], tiers, cap=2) == (4, 2)
