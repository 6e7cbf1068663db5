"""What the text of an answer must look like: a JSON schema, a regular expression, a list of choices, a grammar; and the
masks over the vocabulary that follow from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.errors import InvalidRequestError, UnsupportedError

MAX_CHARS = 1 << 16
"""Of a schema (as JSON), a grammar, or all choices together."""
MAX_REGEX_CHARS = 1 << 13
MAX_CHOICES = 1024
MAX_DEPTH = 64
"""Levels of a JSON schema."""

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """One of json, regex, choice, grammar, json_object, the others left out. Names are vLLM's.

    json: a JSON schema, a mapping or its text; kept as text. regex: the whole answer matches it (Rust's syntax).
    choice: the answer is one of these. grammar: Lark or GBNF/EBNF text. json_object: any JSON object.
    disable_any_whitespace: JSON without the whitespace that its syntax allows. after: the answer is free until this
    text has come (the end of a reasoning block), the rest is what the grammar says. own: the grammar was written here,
    not by a client; no key of a mapping.

    Raises InvalidRequestError with value and limit, UnsupportedError for what is not built.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    after: str = ""
    own: bool = False
    # Known from other engines, refused by name.
    whitespace_pattern: str | None = None
    disable_fallback: bool = False
    disable_additional_properties: bool = False
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        for name in ("whitespace_pattern", "disable_additional_properties", "structural_tag"):
            if getattr(self, name):
                raise UnsupportedError(f"structured_outputs: {name} is not supported; leave it out")
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            said = ", ".join(given) or "none of them"
            raise InvalidRequestError(f"structured_outputs needs exactly one of {', '.join(KINDS)}; given: {said}")
        for name in ("json_object", "disable_any_whitespace", "disable_fallback"):
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise InvalidRequestError(f"structured_outputs: {name}={getattr(self, name)!r} must be true or false")
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name, limit in (("regex", MAX_REGEX_CHARS), ("grammar", MAX_CHARS), ("after", 256)):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str) or (not value and name != "after"):
                raise InvalidRequestError(f"structured_outputs: {name}={value!r:.100} must be non-empty text")
            _clean(name, value)
            if len(value) > limit:
                raise InvalidRequestError(
                    f"structured_outputs: {name} has {len(value)} characters; the limit is {limit}"
                )

    @property
    def kind(self) -> str:
        """Which of KINDS it is."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @classmethod
    def of(cls, values: Any) -> StructuredOutputsParams:
        """From a mapping, or itself. Raises InvalidRequestError for unknown keys and wrong types."""
        if isinstance(values, cls):
            return values
        if not isinstance(values, dict):
            raise InvalidRequestError(
                f"structured_outputs={values!r:.100} must be a mapping or a StructuredOutputsParams"
            )
        known = [f.name for f in fields(cls) if f.name != "own"]
        for name in values:
            if name not in known:
                raise InvalidRequestError(f"structured_outputs: unknown key {name!r:.64}; known: {', '.join(known)}")
        return cls(**{k: v for k, v in values.items() if v is not None})


def _schema(value: Any) -> str:
    """A schema as JSON text, of bounded size and depth."""
    if isinstance(value, str):
        if len(value) > MAX_CHARS:
            raise InvalidRequestError(f"json schema has {len(value)} characters; the limit is {MAX_CHARS}")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"json schema is not valid JSON: {str(error)[:100]}") from None
    if not isinstance(value, (dict, bool)):
        raise InvalidRequestError(f"json schema must be an object, not {type(value).__name__}")
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidRequestError(f"json schema is nested more than {MAX_DEPTH} levels deep")
        inner = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list, tuple))]
        level = [x for values in inner for x in values if isinstance(x, (dict, list, tuple))]
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=True)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"json schema holds what JSON cannot: {str(error)[:100]}") from None
    if len(text) > MAX_CHARS:
        raise InvalidRequestError(f"json schema has {len(text)} characters; the limit is {MAX_CHARS}")
    return text


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InvalidRequestError(f"structured_outputs: choice={value!r:.100} must be a non-empty list of texts")
    if len(value) > MAX_CHOICES:
        raise InvalidRequestError(f"structured_outputs: choice has {len(value)} entries; the limit is {MAX_CHOICES}")
    for text in value:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(f"structured_outputs: choice {text!r:.100} must be non-empty text")
        _clean("choice", text)
    if (total := sum(map(len, value))) > MAX_CHARS:
        raise InvalidRequestError(f"structured_outputs: choice has {total} characters; the limit is {MAX_CHARS}")
    return tuple(value)


def _clean(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"structured_outputs: {name} holds a lone surrogate at character {error.start}"
        ) from None


MaskRows = npt.NDArray[np.int32]
"""Masks over the vocabulary, one per row: bit t % 32 of word t // 32 says that token t may come next."""


class RoundMasks(NamedTuple):
    """Masks of a round, [1 + drafts, words]. drafts: what to verify instead of the drafter's; None: those."""

    rows: MaskRows
    drafts: tuple[int, ...] | None = None


class Masks(NamedTuple):
    """Bulk: what `slot` may emit in this launch, [n, words]: after its last token, then after each of its drafts.

    drafts: replace the slot's, a chain; None: the drafter's stay.
    """

    slot: int
    rows: MaskRows
    drafts: tuple[int, ...] | None = None
