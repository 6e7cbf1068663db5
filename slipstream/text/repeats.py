"""How large a grammar is once its repeats are written out, told from its text before it is compiled.

A compiler of regular expressions writes `a{1000000}` out, a million characters, before any of its own limits looks, and
text that a grammar leaves no choice about is followed to its end, however far that is. What is counted here is that: a
character, a class, a string's characters are one each, `x{n}` is n times x, repeats in repeats multiply, and so do
Lark's terminals that name others. Repeats of Lark's rules and a schema's minItems, maxItems, minLength and maxLength
are counters in the compiled grammar, whatever they say, and are free there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from slipstream.errors import InvalidRequestError, UnsupportedError

MAX_WRITTEN_OUT = 20_000
"""Characters of a grammar with its repeats written out."""
MAX_FOLLOWED = 2048
"""Characters of text without a choice that are followed. They become tokens for every mask, which holds the
interpreter's lock, and so everybody: 3 ms for so many, 0.1 s for 64 K."""
MAX_COUNT = 2**31 - 1
"""Of minItems and its like."""

COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_COUNT = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")


def check_regex(name: str, regex: str) -> None:
    """Raises InvalidRequestError, with value and limit, if the repeats of `regex` write out more than the limit."""
    _check(name, _regex_size(regex))


def check_schema(name: str, schema: Any) -> None:
    """The same for the patterns of a JSON schema, all together; and its counts have a limit."""
    for value in _objects(schema):
        for count in COUNTS:
            if isinstance(value.get(count), (int, float)) and value[count] > MAX_COUNT:
                raise InvalidRequestError(
                    f"structured_outputs: {name}: {count}={value[count]!r:.40} is above the limit {MAX_COUNT}"
                )
    _check(name, sum(map(_regex_size, _patterns(schema))))


def check_lark(name: str, text: str) -> None:
    """The same for a grammar in Lark's syntax: its regular expressions, and its terminals with what they name."""
    lark = _Lark(text)
    for schema in lark.schemas:
        check_schema(name, schema)
    _check(name, lark.size())


def unforced(text: str) -> str:
    """The grammar, in Lark's syntax, without following what it leaves no choice about.

    That may be text without end (`start: /x+/ "x"`: the first takes every x, so none is left for the second), and the
    library follows it to the end. Raises UnsupportedError for a grammar that says itself whether it is to be followed.
    """
    for found in re.finditer(r"%llguidance\s*", text):
        try:
            options, _ = _DECODER.raw_decode(text, found.end())
        except (ValueError, RecursionError):
            continue  # the library says what is wrong with it
        if isinstance(options, dict) and "no_forcing" in options:
            raise UnsupportedError("structured_outputs: grammar: no_forcing is not a grammar's to say; leave it out")
    return f'{text}\n%llguidance {{"no_forcing": true}}\n'


def short_regex(regex: str) -> bool:
    """Whether what a regular expression leaves no choice about is at most MAX_FOLLOWED characters."""
    return _regex_size(regex) <= MAX_FOLLOWED


def short_schema(schema: Any, *, spaced: bool) -> bool:
    """The same for a JSON schema. spaced: its JSON may have white space, so there is a choice between any two parts;
    else all that it requires is one text, as far as can be told without following references."""
    if not spaced:
        return _forced(schema) <= MAX_FOLLOWED
    parts = (part for value in _objects(schema) for part in (value.get("const"), value.get("enum"), [*value]))
    return _longest([*parts]) <= MAX_FOLLOWED and all(map(short_regex, _patterns(schema)))


def short_schemas(text: str) -> bool:
    """The same for the schemas in a grammar in Lark's syntax."""
    return all(short_schema(schema, spaced=True) for schema in _Lark(text).schemas)


def _longest(value: Any) -> int:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return max(map(_longest, value), default=0) if isinstance(value, list) else len(str(value))


def _forced(schema: Any) -> int:
    """Characters of JSON that a schema may leave no choice about, at most."""
    if isinstance(schema, list):
        return sum(map(_forced, schema))
    if not isinstance(schema, dict):
        return 2
    if not {"$ref", "$dynamicRef", "$recursiveRef"}.isdisjoint(schema):
        return 10**15
    size = 2
    for key, value in schema.items():
        if key == "properties" and isinstance(value, dict):
            size += sum(len(json.dumps(name)) + 2 + _forced(inner) for name, inner in value.items())
        elif key == "enum" and isinstance(value, list):
            size += max((len(json.dumps(one)) for one in value), default=0)
        elif key == "const":
            size += len(json.dumps(value))
        elif key == "pattern" and isinstance(value, str):
            size += _regex_size(value)
        elif key in _PARTS:
            size += (
                sum(map(_forced, value.values()))
                if key == "patternProperties" and isinstance(value, dict)
                else _forced(value)
            )
    times = [value for name in ("minItems", "minProperties") if isinstance(value := schema.get(name), (int, float))]
    return min(10**15, int(max(1, *times, 1)) * size)


_PARTS = (
    "items", "prefixItems", "additionalItems", "contains", "additionalProperties", "patternProperties", "allOf",
    "anyOf", "oneOf", "not", "if", "then", "else",
)  # fmt: skip
"""Of a schema, what is a schema or several."""


def _check(name: str, size: int) -> None:
    if size > MAX_WRITTEN_OUT:
        value = str(size) if size < 10**12 else "more than 10**12"
        raise InvalidRequestError(
            f"structured_outputs: {name}: its repeats, written out, make {value} characters; the limit is "
            f"{MAX_WRITTEN_OUT}"
        )


class _Sum:
    """A sequence being read: its size, and of the item that a repeat behind it would repeat."""

    def __init__(self) -> None:
        self.size = self.item = 0

    def add(self, size: int) -> None:
        self.size += size
        self.item = size

    def repeat(self, times: int) -> None:
        # An empty group repeated is still so many nodes; numbers stay small enough to print and multiply.
        more = min(max(1, self.item) * max(1, times), 10**15)
        self.size += more - self.item
        self.item = more


def _times(*numbers: str | None) -> int:
    """The largest number of a repeat; only its length counts where that is absurd."""
    return max((10**15 if len(n.lstrip("0")) > 15 else int(n) for n in numbers if n), default=1)


def _regex_size(text: str) -> int:
    """Of a regular expression in Rust's syntax. What is no valid one has some size, too."""
    groups, at = [_Sum()], 0
    while at < len(text):
        char = text[at]
        if char == "{" and (count := _COUNT.match(text, at)):
            groups[-1].repeat(_times(*count.groups()))
            at = count.end()
            continue
        if char == "(":
            groups.append(_Sum())
        elif char == ")":
            if len(groups) > 1:
                inner = groups.pop().size
                groups[-1].add(inner)
        elif char == "[":
            at = _class_end(text, at)
            groups[-1].add(1)
            continue
        elif char == "\\":
            at += 1
            if text[at : at + 1] in "pPxuU" and text[at + 1 : at + 2] == "{":  # not a repeat
                end = text.find("}", at)
                at = len(text) if end < 0 else end
            groups[-1].add(1)
        elif char not in "*+?|^$":
            groups[-1].add(1)
        at += 1
    while len(groups) > 1:
        inner = groups.pop().size
        groups[-1].add(inner)
    return groups[0].size


def _class_end(text: str, at: int) -> int:
    """Behind the class that begins at `at`; classes may stand in classes."""
    depth = 0
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "[":
            depth += 1
            at += text[at + 1 : at + 2] == "^"
            at += text[at + 1 : at + 2] == "]"  # a literal one
        elif text[at] == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return at


_DATA = ("const", "enum", "default", "examples")
"""Keywords whose values are data: what looks like a schema in them is none."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values hold schemas by names of the author's choice."""


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            for key, inner in value.items():
                if key in _NAMED and isinstance(inner, dict):
                    left += inner.values()
                elif key not in _DATA:
                    left.append(inner)
        elif isinstance(value, list):
            left += value


def _patterns(schema: Any) -> Iterator[str]:
    for value in _objects(schema):
        if isinstance(value.get("pattern"), str):
            yield value["pattern"]
        if isinstance(value.get("patternProperties"), dict):
            yield from value["patternProperties"]


_TOKEN = re.compile(
    r"""(?://|\#)[^\n]*
    | "(?P<string>(?:[^"\\\n]|\\.)*)"
    | /(?P<regex>(?:[^/\\\n]|\\.)+)/
    | %(?P<json>json|regex)\s*(?=[{\[tf])
    | \{\s*(?P<least>\d*)\s*(?:,\s*(?P<most>\d*)\s*)?\}
    | ~\s*(?P<low>\d+)(?:\s*\.\.\s*(?P<high>\d+))?
    | (?P<name>\w[\w-]*)
    | (?P<open>[(\[]) | (?P<close>[)\]])
    """,
    re.X,
)
_IS_DEFINED = re.compile(r"(?:::\w+)?\s*(?:\[[^\n]{0,500}?\]\s*)?:(?!:)")
_DECODER = json.JSONDecoder()
_Item = tuple[str, int | str]


class _Lark:
    """The definitions of a grammar: of each what its size is made of, in order. Items: ("add", size), ("name", name),
    ("repeat", times), ("open", 0), ("close", 0)."""

    def __init__(self, text: str) -> None:
        self._terminals: dict[str, list[_Item]] = {}
        self.schemas: list[Any] = []
        self._inline = 0  # of regular expressions in rules
        items, at, line = list[_Item](), 0, 0
        within = False  # a terminal
        while found := _TOKEN.search(text, at):
            at = found.end()
            kind = found.lastgroup
            if kind == "name":
                name = found["name"]
                line = max(line, text.rfind("\n", line, found.start()) + 1)
                first = found.start() - line < 64 and not text[line : found.start()].strip(" \t\r!?")
                defined = _IS_DEFINED.match(text, at) if first else None
                if defined:
                    within, items = name.lstrip("_")[:1].isupper(), []
                    if within:
                        items = self._terminals.setdefault(name, items)
                    at = defined.end()
                else:
                    items.append(("name", name))
            elif kind == "string":
                items.append(("add", len(found["string"])))
            elif kind == "regex":
                size = _regex_size(found["regex"])
                items.append(("add", size))
                self._inline += 0 if within else size
            elif kind == "json":
                try:
                    schema, at = _DECODER.raw_decode(text, at)
                except (ValueError, RecursionError):
                    continue  # the library says what is wrong with it
                if found["json"] == "json":
                    self.schemas.append(schema)
            elif kind in ("least", "most"):
                items.append(("repeat", _times(found["least"], found["most"])))
            elif kind in ("low", "high"):
                items.append(("repeat", _times(found["low"], found["high"])))
            elif kind in ("open", "close"):
                items.append((kind, 0))

    def size(self) -> int:
        """Terminals with everything they name, and what stands in rules."""
        sizes: dict[str, int] = {}
        entered = set[str]()
        for name in self._terminals:
            left = [(name, iter(self._terminals[name]))]
            while left:
                here, needs = left[-1]
                entered.add(here)
                for kind, needed in needs:
                    needed = str(needed)
                    if kind == "name" and needed in self._terminals and needed not in entered:
                        left.append((needed, iter(self._terminals[needed])))
                        break
                else:  # a circle, which the library refuses, counts one where it closes
                    if here not in sizes:
                        sizes[here] = self._made(self._terminals[here], sizes)
                    left.pop()
        patterns = sum(_regex_size(p) for schema in self.schemas for p in _patterns(schema))
        return self._inline + patterns + sum(sizes.values())

    @staticmethod
    def _made(items: list[_Item], sizes: dict[str, int]) -> int:
        groups = [_Sum()]
        for kind, value in items:
            if kind == "open":
                groups.append(_Sum())
            elif kind == "close":
                if len(groups) > 1:
                    inner = groups.pop().size
                    groups[-1].add(inner)
            elif kind == "repeat":
                groups[-1].repeat(int(value))
            else:
                groups[-1].add(sizes.get(str(value), 1) if kind == "name" else int(value))
        return sum(g.size for g in groups)
