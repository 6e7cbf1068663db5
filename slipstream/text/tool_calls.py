"""Tool calls in an answer's text, character by character: what comes out does not depend on how the text was cut.

Formats are those that models are trained on: `hermes` (Qwen, Hermes: JSON between <tool_call> tags), `llama3_json`
(Llama 3: the answer is JSON, perhaps after <|python_tag|>), `mistral` ([TOOL_CALLS], then a list of JSON objects, or a
name and its arguments). Arguments are handed out as they come, as the model wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from slipstream.errors import UnsupportedError


class Piece(NamedTuple):
    """One of: content; name, which begins a call; arguments, more text of the last call's."""

    content: str = ""
    name: str | None = None
    arguments: str = ""


Pieces = list[Piece]
_SPACE = " \t\r\n"
MAX_HEAD = 200
"""Characters between Mistral's mark and a call's arguments."""
_NAMES, _ARGUMENTS = ("name",), ("arguments", "parameters")


class ToolParser:
    """Feed it text, in pieces of any size; `finish` at the end. What is no call comes out as content, unchanged but for
    white space around calls."""

    def __init__(self) -> None:
        self.out: Pieces = []
        self.calls = 0
        self._held = ""  # white space that is dropped if a call follows
        self._state: Callable[[str], None] = self._text

    def feed(self, text: str) -> Pieces:
        """What these characters complete."""
        for c in text:
            self._state(c)
        return self._taken()

    def finish(self) -> Pieces:
        """The rest: what was held back in case it became a call."""
        self._end()
        if not self.calls:
            self.out.append(Piece(self._held))
        self._held = ""
        return self._taken()

    def _taken(self) -> Pieces:
        """Neighbouring pieces of one kind as one."""
        joined: Pieces = []
        for p in self.out:
            last = joined[-1] if joined else None
            if last is not None and last.name is p.name is None and bool(last.content) == bool(p.content):
                joined[-1] = Piece(last.content + p.content, None, last.arguments + p.arguments)
            elif p.content or p.arguments or p.name is not None:
                joined.append(p)
        self.out = []
        return joined

    def _content(self, text: str) -> None:
        for c in text:
            if c in _SPACE:
                self._held += c
            else:
                self.out.append(Piece(self._held + c))
                self._held = ""

    def _begin(self, name: str) -> None:
        self._held = ""
        self.calls += 1
        self.out.append(Piece(name=name))

    def _arguments(self, text: str) -> None:
        self.out.append(Piece(arguments=text))

    def _text(self, c: str) -> None:
        self._content(c)

    def _end(self) -> None:
        pass


class _Quotes:
    """Which characters of JSON belong to strings. inside: the next one does."""

    def __init__(self) -> None:
        self.inside = self._escape = False

    def holds(self, c: str) -> bool:
        """Whether the next character is of a string, its quotes included."""
        if not self.inside:
            self.inside = c == '"'
            return self.inside
        if self._escape:
            self._escape = False
        elif c == "\\":
            self._escape = True
        elif c == '"':
            self.inside = False
        return True


class _Call:
    """A JSON object with a name and arguments, character by character. done: its brace is closed; failed: it is no
    call. raw: its text, as long as it may turn out to be none."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self.raw: list[str] = []
        self.done = self.failed = self.begun = False
        self._state: Callable[[str], None] = self._open
        self._key: list[str] = []
        self._value: list[str] = []
        self._nested = 0
        self._quotes = _Quotes()
        self._before_name: list[str] = []  # arguments that came first
        self._given = False

    def feed(self, c: str) -> None:
        if not self.begun:
            self.raw.append(c)
        self._state(c)

    def _open(self, c: str) -> None:
        self.failed = c != "{"
        self._state = self._before_key

    def _before_key(self, c: str) -> None:
        if self._quotes.holds(c):
            self._key, self._state = [c], self._in_key
        elif c == "}":
            self._close()
        elif c not in _SPACE + ",":
            self.failed = True

    def _in_key(self, c: str) -> None:
        self._key.append(c)
        self._quotes.holds(c)
        if not self._quotes.inside:
            self._state = self._before_value

    def _before_value(self, c: str) -> None:
        if c == ":":
            self._value, self._state = [], self._in_value
        elif c not in _SPACE:
            self.failed = True

    def _in_value(self, c: str) -> None:
        if not self._value and c in _SPACE:
            return
        if self._quotes.holds(c):
            pass
        elif c in "{[":
            self._nested += 1
        elif c in "}]" and self._nested:
            self._nested -= 1
        elif c in ",}" and not self._nested:  # behind a number or a word
            self._finish_value()
            self._after_value(c)
            return
        self._value.append(c)
        if self._streams:
            self._hand_out(c)
        if self._value[0] in '"{[' and not self._nested and not self._quotes.inside:
            self._finish_value()

    @property
    def _streams(self) -> bool:
        """Whether the value is the arguments: an object, which is handed out as it comes."""
        return not self._given and self._value[0] == "{" and _decoded("".join(self._key)) in _ARGUMENTS

    def _after_value(self, c: str) -> None:
        if c == "}":
            self._close()
        elif c == ",":
            self._state = self._before_key
        elif c not in _SPACE:
            self.failed = True

    def _finish_value(self) -> None:
        streamed = bool(self._value) and self._streams
        key, value = _decoded("".join(self._key)), "".join(self._value).rstrip(_SPACE)
        self._state = self._after_value
        if key in _NAMES and not self.begun:
            name = _decoded(value)
            if not isinstance(name, str) or not name:
                self.failed = True
                return
            self.begun = True
            self._parser._begin(name)
            self._parser._arguments("".join(self._before_name))
        elif key in _ARGUMENTS and not self._given:
            self._given = True
            if not streamed:  # as a string that holds JSON, or nothing
                text = _decoded(value)
                self._hand_out(text if isinstance(text, str) and text else "{}" if text in (None, "") else value)

    def _hand_out(self, text: str) -> None:
        if self.begun:
            self._parser._arguments(text)
        else:
            self._before_name.append(text)

    def _close(self) -> None:
        self.done, self.failed = True, self.failed or not self.begun
        if self.begun and not self._given:
            self._parser._arguments("{}")


class _Marked(ToolParser):
    """A parser that looks for a mark in the text. `_marked` is called once it has come."""

    mark = ""

    def __init__(self) -> None:
        super().__init__()
        self._seen = ""  # what may be the beginning of the mark
        self._call: _Call | None = None

    def _text(self, c: str) -> None:
        self._seen += c
        while self._seen and not self.mark.startswith(self._seen):
            self._content(self._seen[0])
            self._seen = self._seen[1:]
        if self._seen == self.mark:
            self._seen = ""
            self._marked()

    def _marked(self) -> None:
        raise AssertionError("a parser says what follows its mark")

    def _read_call(self, c: str) -> bool:
        """Whether the character ended the call, one way or another."""
        call = self._call
        assert call is not None
        call.feed(c)
        return call.done or call.failed

    def _end(self) -> None:
        call, self._call = self._call, None
        if call is not None and not call.begun:
            self._give_back("".join(call.raw))
        self._content(self._seen)
        self._seen = ""

    def _give_back(self, text: str) -> None:
        """It was no call after all."""
        self._content(self.mark + text)


class HermesParser(_Marked):
    """<tool_call> and </tool_call> around {"name": ..., "arguments": {...}}."""

    mark, close = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._space: list[str] = []

    def _marked(self) -> None:
        self._call, self._space, self._state = None, [], self._inside

    def _inside(self, c: str) -> None:
        if self._call is None:
            if c in _SPACE:
                self._space.append(c)
                return
            self._call = _Call(self)
        if not self._read_call(c):
            return
        call, self._call = self._call, None
        if call.begun:
            self._seen, self._state = "", self._closing
        else:
            self._state = self._text
            self._content(self.mark + "".join(self._space))
            for again in call.raw:
                self._text(again)

    def _closing(self, c: str) -> None:
        """What stands between the object and the closing tag has no meaning; another object or tag does."""
        self._seen += c
        while self._seen and not (self.close.startswith(self._seen) or self.mark.startswith(self._seen)):
            self._seen = self._seen[1:]
        if self._seen == self.close:
            self._seen, self._state = "", self._text
        elif self._seen == self.mark:
            self._seen = ""
            self._marked()

    def _end(self) -> None:
        if self._state == self._closing:
            self._seen = ""
        if self._state == self._inside and self._call is None:
            self._content(self.mark + "".join(self._space))
        super()._end()

    def _give_back(self, text: str) -> None:
        self._content(self.mark + "".join(self._space) + text)


class Llama3JsonParser(_Marked):
    """The whole answer is {"name": ..., "parameters": {...}}, or several with semicolons between."""

    mark = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._state = self._start

    def _start(self, c: str) -> None:
        """Before the first object: the answer is text as soon as something else comes."""
        if c in _SPACE and not self._seen:
            self._held += c
        elif c == "{" and not self._seen:
            self._call, self._state = _Call(self), self._inside
            self._inside(c)
        elif self.mark.startswith(self._seen + c):
            self._seen = "" if self._seen + c == self.mark else self._seen + c
        else:
            text, self._seen, self._state = self._seen + c, "", self._content
            self._content(text)

    def _inside(self, c: str) -> None:
        if not self._read_call(c):
            return
        call, self._call = self._call, None
        assert call is not None
        if call.begun:
            self._state = self._between
        else:
            self._state = self._content
            self._content("".join(call.raw))

    def _between(self, c: str) -> None:
        if c == "{":
            self._call, self._state = _Call(self), self._inside
            self._inside(c)
        elif c not in _SPACE + ";,":
            self._state = self._content
            self._content(c)

    def _give_back(self, text: str) -> None:
        self._content(text)


class MistralParser(_Marked):
    """[TOOL_CALLS] before a list of {"name": ..., "arguments": {...}}, or before a name and an object."""

    mark = "[TOOL_CALLS]"

    def _marked(self) -> None:
        self._raw: list[str] | None = []  # since the mark, as long as no call has begun
        self._state = self._after_mark

    def _after_mark(self, c: str) -> None:
        """White space, then a list or an object, or a name."""
        assert self._raw is not None
        self._raw.append(c)
        if c in _SPACE:
            return
        if c in "[{":
            self._state = self._in_list
            if c == "{":
                self._call = _Call(self)
                self._read_call(c)
        else:
            self._state = self._in_name

    def _in_name(self, c: str) -> None:
        assert self._raw is not None
        if c == "{":
            self._named("".join(self._raw))
            self._in_object(c)
            return
        self._raw.append(c)
        if c in _SPACE or len(self._raw) > MAX_HEAD:
            self._no_call()

    def _no_call(self) -> None:
        """Back to text, with what stands behind the mark, or is left of the list."""
        self._state = self._text
        if self._raw is not None:
            self._content(self.mark + "".join(self._raw))

    def _named(self, head: str) -> None:
        self._begin(head.split("[", 1)[0].strip())  # [CALL_ID] and [ARGS] may follow it
        self._raw, self._state = None, self._in_object
        self._nested, self._quotes = 0, _Quotes()

    def _in_object(self, c: str) -> None:
        self._arguments(c)
        if self._quotes.holds(c):
            return
        if c in "{[":
            self._nested += 1
        elif c in "}]":
            self._nested -= 1
            if not self._nested:
                self._state = self._text

    def _in_list(self, c: str) -> None:
        if self._raw is not None:
            self._raw.append(c)
        if self._call is None:
            if c == "]" and self._raw is None:
                self._state = self._text
            elif c == "{":
                self._call = _Call(self)
                self._read_call(c)
            elif c not in _SPACE + ",":
                self._no_call()
                if self._raw is None:
                    self._text(c)
            return
        ended = self._read_call(c)
        if self._call.begun:
            self._raw = None
        if not ended:
            return
        call, self._call = self._call, None
        if not call.begun:
            self._no_call()
            if self._raw is None:
                self._content("".join(call.raw))

    def _end(self) -> None:
        call, self._call = self._call, None
        if self._state in (self._after_mark, self._in_name) or (self._state == self._in_list and self._raw is not None):
            self._no_call()
        elif call is not None and not call.begun:
            self._content("".join(call.raw))
        super()._end()


PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser, "llama3_json": Llama3JsonParser, "mistral": MistralParser,
}  # fmt: skip


def tool_parser(name: str) -> type[ToolParser]:
    """Raises UnsupportedError for a format that is not known."""
    if name not in PARSERS:
        raise UnsupportedError(f"tool-call parser {name[:64]!r} is not supported; there are {', '.join(PARSERS)}")
    return PARSERS[name]


def _decoded(text: str) -> object:
    try:
        found: object = json.loads(text)
    except ValueError:
        return None
    return found
