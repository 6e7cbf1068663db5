"""Prefix cache: a tree over token ids, one node per full page of KV, one root per tenant (`salt`).

A node owns its page. A running slot locks the path it shares; `locks` counts such slots in the whole
subtree, so a node with zero locks has an unlocked subtree and every such page can be had by evicting leaves.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence


class Node:
    """`key`: the page's token ids. `page`: the id it owns; 0 only at a root. `used`: time of the last use.

    `window`: the page it owns in the pool of window layers, 0 for none; `window_locks`: slots whose window covers it.
    `state`: the saved state of recurrent layers after its tokens, 0 for none.
    """

    __slots__ = ("children", "key", "locks", "page", "parent", "queued", "state", "used", "window", "window_locks")

    def __init__(self, parent: Node | None, key: tuple[int, ...], page: int, used: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.used = used
        self.locks = 0
        self.queued = False
        self.window = self.window_locks = self.state = 0
        self.children: dict[tuple[int, ...], Node] = {}

    @property
    def depth(self) -> int:
        """Pages up to this node; 0 at a root."""
        return sum(1 for _ in self.path())

    def path(self) -> Iterator[Node]:
        """This node and its ancestors up to the root, which is not among them."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class RadixCache:
    """Least recently used leaves without locks are evicted first. Only whole pages are kept."""

    def __init__(self, page_size: int, dropped: Callable[[Node], None] | None = None) -> None:
        """dropped: called with each node that is evicted, for what else goes with its tokens."""
        self.page_size, self.dropped = page_size, dropped
        self.num_pages = 0
        self.evictable = 0
        self.evicted = 0
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []
        self._tie = 0

    def root(self, salt: str = "") -> Node:
        """The tenant's root, or a fresh one that enters the tree only when something is inserted."""
        return self._roots.get(salt) or Node(None, (), 0, 0)

    def match(self, tokens: Sequence[int], salt: str = "") -> tuple[Node, list[int]]:
        """Deepest node that is a prefix of `tokens` but leaves at least one of them, and the pages up to it.

        The last token is never matched: its hidden state is needed to sample the next one.
        """
        node, pages = self.root(salt), list[int]()
        self._clock += 1
        for key in self._keys(tokens, max(0, len(tokens) - 1)):
            child = node.children.get(key)
            if child is None:
                break
            child.used = self._clock
            pages.append(child.page)
            node = child
        return node, pages

    def lock(self, node: Node) -> None:
        """A slot uses the pages up to `node`: none of them is evicted before `unlock`."""
        for n in node.path():
            self.evictable -= n.locks == 0
            n.locks += 1

    def unlock(self, node: Node) -> None:
        for n in node.path():
            assert n.locks > 0, "unlocked more often than locked"
            n.locks -= 1
            self.evictable += n.locks == 0
            self._offer(n)

    def only_user(self, node: Node) -> int:
        """Pages of the path that become evictable when its one lock goes."""
        return sum(n.locks == 1 for n in node.path())

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], salt: str = "", *, stop_at_foreign: bool = False
    ) -> tuple[Node, list[int]]:
        """Add the full pages of `tokens`, held in `pages`; returns the deepest node and the pages taken over.

        Where the tree already has a page for the same tokens it is kept and the caller's stays the caller's.
        With stop_at_foreign the walk ends there: a running slot then never locks a page it does not use,
        which keeps "one sequence alone always fits" true.
        """
        root = node = self.root(salt)
        self._clock += 1
        taken = []
        for key, page in zip(self._keys(tokens, len(tokens)), pages, strict=False):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key, page, self._clock)
                self.num_pages += 1
                self.evictable += 1
                taken.append(page)
            elif child.page != page and stop_at_foreign:
                break
            child.used = self._clock
            node = child
        if taken:
            self._roots[salt] = root
            self._offer(node)
        return node, taken

    def evict(self, n: int) -> list[int]:
        """Remove up to n unlocked pages, least recently used leaves first; returns their ids."""
        pages: list[int] = []
        while len(pages) < n and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if used != node.used:
                self._offer(node)  # used since it was queued: back in line
            elif node.locks == 0 and not node.children:
                parent = node.parent
                assert parent is not None
                del parent.children[node.key]
                pages.append(node.page)
                if self.dropped is not None:
                    self.dropped(node)
                self._offer(parent)
                if parent.parent is None and not parent.children:
                    self._roots = {salt: root for salt, root in self._roots.items() if root.children}
        self.num_pages -= len(pages)
        self.evicted += len(pages)
        self.evictable -= len(pages)
        return pages

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def pages(self) -> list[int]:
        """All page ids the tree owns."""
        return [node.page for node in self.nodes()]

    def _offer(self, node: Node) -> None:
        """Queue an evictable leaf, once: the queue is never longer than the tree."""
        if node.parent is not None and not node.locks and not node.children and not node.queued:
            node.queued = True
            self._tie += 1
            heapq.heappush(self._leaves, (node.used, self._tie, node))

    def _keys(self, tokens: Sequence[int], limit: int) -> Iterator[tuple[int, ...]]:
        p = self.page_size
        for start in range(0, limit - p + 1, p):
            yield tuple(tokens[start : start + p])
