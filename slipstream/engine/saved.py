"""Saved states of recurrent layers: which place of the pool holds the state after which tokens, and who may go on
from it.

Every `state_interval` tokens a slot's state is saved on the device, when those tokens are committed (kernels/delta.py),
at the id that the host has put into the slot's row of a table. A prompt's states have ids of their own, as far as
there are any; while it decodes, a slot has two, which it uses in turn. What was saved and not overwritten goes to the
prefix cache with the tokens; there the least recently used one makes room. An id belongs to nobody, to one slot, or to
one node of the cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.config import EngineConfig
from slipstream.engine.radix import Node
from slipstream.types import PageAppend

TURNS = 2


@dataclass
class _Slot:
    """ids: by place (tokens / interval), of the prompt's states. turns: ids of later ones; last: the last two places
    that each of them was given for. upto: the last place that the table was made for."""

    ids: dict[int, int]
    turns: list[int] = field(default_factory=lambda: [0] * TURNS)
    last: list[list[int]] = field(default_factory=lambda: [[] for _ in range(TURNS)])
    upto: int = 0


class SavedStates:
    """Ids 1..saved_states. A place of a slot is c / interval for the state after c - early tokens, see DeltaMemory."""

    def __init__(self, config: EngineConfig) -> None:
        self.interval, self.total, self.early = config.state_interval, config.saved_states, config.rereads
        self.page_size, self.places = config.page_size, config.saved_places
        self.free = list(range(1, self.total + 1))
        self._slots: dict[int, _Slot] = {}
        self._nodes: dict[Node, None] = {}
        self._news: list[PageAppend] = []

    def usable(self, path: Seq[Node]) -> int:
        """How many pages of a cached path, from the root, end with a saved state; the most."""
        for n in range(len(path), 0, -1):
            node = path[n - 1]
            if node.state:
                self._nodes[node] = self._nodes.pop(node)  # used last
                return n
        return 0

    def enter(self, slot: int, start: int, tokens: int, covered: int) -> tuple[int, ...]:
        """A request takes `slot` with `start` cached of `tokens` known tokens, pages cover `covered` positions: its
        row of the table. The prompt's states get at most a quarter of all ids, the later ones first."""
        first, last = start // self.interval + 1, (tokens + self.early) // self.interval
        wanted = range(last, first - 1, -1)
        most = max(1, self.total // 4)
        stride = -(-len(wanted) // most) if wanted else 1
        held = _Slot({})
        self._slots[slot] = held
        for place in wanted[::stride]:
            if taken := self._take():
                held.ids[place] = taken
        held.upto = last
        row = [0] * self.places
        for place, taken in held.ids.items():
            row[place] = taken
        for append in self._later(slot, covered):
            row[append.first] = append.pages[0]
        return tuple(row)

    def cover(self, slots: Seq[int], covered: Seq[int]) -> None:
        """Pages of slots cover more positions now: places for the states that may be saved there, see `news`."""
        for slot, positions in zip(slots, covered, strict=True):
            if (positions + self.early) // self.interval > self._slots[slot].upto:
                self._news += self._later(slot, positions)

    def news(self) -> tuple[PageAppend, ...]:
        """What the tables on the device lack since it was asked last."""
        news, self._news = tuple(self._news), []
        return news

    def adopt(self, slot: int, path: Seq[Node], saved: int, reach: int) -> None:
        """Give the slot's states to the nodes of the cache where their tokens end.

        path: from the root. saved: tokens whose states are certainly there. reach: most tokens that a state can have by
        now, or with what is queued: what may be overwritten stays here.
        """
        held = self._slots[slot]
        for place, taken in list(held.ids.items()):
            if self._give(path, place, taken, saved):
                del held.ids[place]
        for turn, taken in enumerate(held.turns):
            for place in reversed(held.last[turn]):
                if place * self.interval - self.early > reach:
                    continue  # not written yet, so what the id had before is still there
                if taken and self._give(path, place, taken, saved):
                    held.turns[turn] = 0
                break

    def forget(self, node: Node) -> None:
        """The cache drops a node."""
        if node.state:
            heapq.heappush(self.free, node.state)
            node.state = 0
            del self._nodes[node]

    def leave(self, slot: int) -> None:
        """No launch names the slot any more."""
        held = self._slots.pop(slot)
        for taken in (*held.ids.values(), *(t for t in held.turns if t)):
            heapq.heappush(self.free, taken)

    def check(self, nodes: Iterable[Node]) -> None:
        """Assert free + cached + held = total, and that nodes of the cache and only those count as cached."""
        with_state = {node for node in nodes if node.state}
        assert with_state == set(self._nodes), "saved states of nodes that are not in the cache"
        cached = [node.state for node in with_state]
        held = [t for s in self._slots.values() for t in (*s.ids.values(), *(t for t in s.turns if t))]
        everyone = sorted([*self.free, *cached, *held])
        assert everyone == list(range(1, self.total + 1)), f"saved states leaked or doubled: {everyone}"

    def report(self) -> dict[str, int]:
        """For statistics: states in all, free, in the prefix cache; the others are running requests'."""
        return {"states": self.total, "free": len(self.free), "cached": len(self._nodes)}

    def _later(self, slot: int, covered: int) -> list[PageAppend]:
        """Table entries for states behind the prompt's, as far as pages cover their tokens: two ids in turn."""
        held, out = self._slots[slot], []
        for place in range(held.upto + 1, min((covered + self.early) // self.interval, self.places - 1) + 1):
            turn = place % TURNS
            if not held.turns[turn]:
                held.turns[turn], held.last[turn] = self._take(), []
            if held.turns[turn]:
                out.append(PageAppend(slot, place, (held.turns[turn],)))
                held.last[turn] = [*held.last[turn][-1:], place]
            held.upto = place
        return out

    def _take(self) -> int:
        """An id that nobody needs, the least recently used one of the cache if none is free; 0 if there is none."""
        if not self.free:
            if not self._nodes:
                return 0
            self.forget(next(iter(self._nodes)))
        return heapq.heappop(self.free)

    def _give(self, path: Seq[Node], place: int, taken: int, saved: int) -> bool:
        tokens = place * self.interval
        depth = tokens // self.page_size
        if tokens - self.early > saved or depth > len(path) or path[depth - 1].state:
            return False
        node = path[depth - 1]
        node.state = taken
        self._nodes[node] = None
        return True
