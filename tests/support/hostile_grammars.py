"""Random schemas, regular expressions and grammars that nobody means well with."""

from __future__ import annotations

import random
from typing import Any

_PARTS = (
    "a", "(a|b)", "[a-z]*", ".*", "(x+x+)+", "a{1000}", r"\d+", "(?=a)", "(", r"\p{L}", r"[^\x00-\xff]", "(a*)*", "{",
    "^", "$", r"\b", "(?i)abc", ".{0,5000}", "(a|aa)+", "[\u4e00-\u9fff]{50}",
    "a{9000}",
)  # fmt: skip
_GRAMMARS = (
    'start: a\na: b | a "x"\nb: /[a-z]+/', 'start: start start | "a"', 'root ::= root root | "a"',
    "root ::= [a-z]* (root)?", 'start: "a"{1,100000}', 'start: %json {"type": "object"}',
    "start: <[1]>", "start: <[999999]>", "import x",
    "start: @x",
    "%llguidance {}\nstart: /a/", "root ::= " + "(" * 200 + '"a"' + ")" * 200, "start: a\na[max_tokens=5]: /.*/",
    "start: " + " | ".join(f'"x{i}"' for i in range(3000)), 'start: "a" start "b" | ', "root ::= \u0000",
    'start: "a" b\nb: /x+/ "x"', 'start: A{9000}\nA: "x"{9000}', 'start: a\na: b{9} b{9}\nb: c{9} c{9}\nc: "d"{99}',
)  # fmt: skip


def regex(rng: random.Random) -> str:
    return "".join(rng.choice(_PARTS) for _ in range(rng.randrange(1, 8)))


def schema(rng: random.Random, depth: int = 0) -> Any:
    def inner() -> Any:
        return schema(rng, depth + 1) if depth < 5 else {}

    pick = rng.choice
    made: list[Any] = [
        {"type": pick(["string", "integer", "null", "object", "array", "bogus", ["string", "null"], 5])},
        {"type": "string", "pattern": regex(rng)},
        {"type": "array", "items": inner(), "minItems": pick([0, 1, 10**6, -1, 2.5]), "maxItems": pick([0, 5, 10**9])},
        {"type": "object", "properties": {pick(["a", "\u0000", "x" * 50]): inner()}, "required": pick([["a"], 5])},
        {pick(["anyOf", "oneOf", "allOf"]): [inner() for _ in range(rng.randrange(4))]},
        {"$ref": pick(["#", "#/$defs/x", "http://x.y/z", "file:///x", ""]), "$defs": {"x": {"$ref": "#/$defs/x"}}},
        {"enum": [pick([1, "a", None, {"k": [1]}, 1e308]) for _ in range(rng.randrange(4))]},
        {"type": "integer", "minimum": pick([-(10**30), 0, 5, 1e300]), "maximum": pick([10**30, 0, -5])},
        {"type": "number", "multipleOf": pick([0, 0.1, 7, 1e-300])},
        {"type": "string", "format": pick(["date", "uuid", "nope"]), "minLength": pick([0, 10**9])},
        {"type": "object", "patternProperties": {regex(rng): {}}, "minProperties": pick([0, 50])},
        pick([True, False, {}, {"not": {}}, {"x-guidance": {"lenient": True}}, {"if": {}, "then": {}}]),
    ]  # fmt: skip
    return pick(made)


def hostile(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(3)
    if kind == 0:
        return {"json": schema(rng)}
    return {"regex": regex(rng)} if kind == 1 else {"grammar": rng.choice(_GRAMMARS)}
