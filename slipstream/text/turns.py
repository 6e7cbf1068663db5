"""An answer of a chat as what it is: reasoning, content and tool calls, from text that comes in pieces of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from slipstream.errors import UnsupportedError
from slipstream.text.tool_calls import ToolParser

THINK = {"qwen3": ("<think>", "</think>"), "deepseek_r1": ("<think>", "</think>")}
"""Where reasoning begins and ends, by parser."""
_SPACE = " \t\r\n"


def reasoning_marks(name: str) -> tuple[str, str]:
    """Raises UnsupportedError for a parser that is not known."""
    if name not in THINK:
        raise UnsupportedError(f"reasoning parser {name[:64]!r} is not supported; there are {', '.join(THINK)}")
    return THINK[name]


def still_thinking(prompt: str, marks: tuple[str, str]) -> bool | None:
    """Whether a rendered prompt ends inside a reasoning block; None where it has none: the answer may begin one."""
    begin, end = (prompt.rfind(mark) for mark in marks)
    return None if begin == end == -1 else begin > end


class CallDelta(NamedTuple):
    """More of tool call number `call`; id and name come with its first piece."""

    call: int
    id: str | None
    name: str | None
    arguments: str


class TurnDelta(NamedTuple):
    content: str
    reasoning: str
    calls: Sequence[CallDelta]

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Reasoning:
    """Splits text at the marks. thinking: the text begins inside; None: it may, if its first word is the mark.

    White space around the marks is dropped.
    """

    def __init__(self, marks: tuple[str, str], thinking: bool | None) -> None:
        self._begin, self._end = marks
        self._state = self._inside if thinking else self._unsure if thinking is None else self._behind
        self._seen = ""  # what may be a part of a mark
        self._held = ""  # white space that is dropped if the end follows
        self._first = True
        self._reasoning: list[str] = []
        self._content: list[str] = []

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that these characters complete."""
        for c in text:
            self._state(c)
        return self._taken()

    def finish(self) -> tuple[str, str]:
        if self._state == self._unsure:
            self._content.append(self._held + self._seen)
        elif self._state == self._inside:
            self._think(self._seen)
        self._seen = self._held = ""
        return self._taken()

    def _taken(self) -> tuple[str, str]:
        out = "".join(self._reasoning), "".join(self._content)
        self._reasoning, self._content = [], []
        return out

    def _unsure(self, c: str) -> None:
        if c in _SPACE and not self._seen:
            self._held += c
            return
        self._seen += c
        if self._seen == self._begin:
            self._seen = self._held = ""
            self._state = self._inside
        elif not self._begin.startswith(self._seen):
            self._content.append(self._held + self._seen)
            self._seen = self._held = ""
            self._first, self._state = False, self._behind

    def _inside(self, c: str) -> None:
        self._seen += c
        while self._seen and not self._end.startswith(self._seen):
            self._think(self._seen[0])
            self._seen = self._seen[1:]
        if self._seen == self._end:
            self._seen = self._held = ""
            self._first, self._state = True, self._behind

    def _think(self, text: str) -> None:
        for c in text:
            if c in _SPACE:
                self._held += "" if self._first else c
            else:
                self._reasoning.append(self._held + c)
                self._held, self._first = "", False

    def _behind(self, c: str) -> None:
        if self._first and c in _SPACE:
            return
        self._first = False
        self._content.append(c)


class Turn:
    """One answer. calls: how many tool calls it has begun. most_calls: later ones are left out."""

    def __init__(
        self,
        *,
        tools: ToolParser | None = None,
        reasoning: Reasoning | None = None,
        make_id: Callable[[], str] = lambda: "call_0",
        most_calls: int | None = None,
    ) -> None:
        self._tools, self._reasoning, self._make_id, self._most = tools, reasoning, make_id, most_calls
        self._begun = 0

    @property
    def calls(self) -> int:
        return self._begun if self._most is None else min(self._begun, self._most)

    def feed(self, text: str) -> TurnDelta:
        reasoning, content = ("", text) if self._reasoning is None else self._reasoning.feed(text)
        return self._read(reasoning, content, last=False)

    def finish(self) -> TurnDelta:
        """What was held back."""
        reasoning, content = ("", "") if self._reasoning is None else self._reasoning.finish()
        return self._read(reasoning, content, last=True)

    def _read(self, reasoning: str, content: str, *, last: bool) -> TurnDelta:
        if self._tools is None:
            return TurnDelta(content, reasoning, ())
        pieces = self._tools.feed(content) + (self._tools.finish() if last else [])
        calls: list[CallDelta] = []
        for p in pieces:
            if p.name is not None:
                self._begun += 1
            if (p.name is None and not p.arguments) or (self._most is not None and self._begun > self._most):
                continue
            made = None if p.name is None else self._make_id()
            calls.append(CallDelta(self._begun - 1, made, p.name, p.arguments))
        return TurnDelta("".join(p.content for p in pieces), reasoning, calls)
