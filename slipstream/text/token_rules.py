"""Tokens that a request allows and words that it bans, as masks over the vocabulary, beside a grammar or alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from slipstream.errors import RequestFailedError
from slipstream.structured import MaskRows, RoundMasks
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import Request

if TYPE_CHECKING:
    from slipstream.text.grammar import GrammarMasks

RULES_FAULT = "allowed_token_ids and bad_words"
"""How the error begins that ends a request with nothing left to say."""
Words = tuple[tuple[int, ...], ...]


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> Words:
    """Token ids of each word as it is written at the beginning of a text and behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            if ids := tuple(tokenizer.encode(text, add_special_tokens=False)):
                found[ids] = None
    return tuple(found)


class RuledMasks:
    """Masks of one sequence, of the engine's `MaskSource`: a bit for each token that the rules allow.

    inner: a grammar's, of which the rules take away; None: no grammar. A word is banned by its last token, where the
    output ends with those before it, as in vLLM. Where the rules leave only stop tokens, that wins over min_tokens.
    words: of 32 bits in a row; inside [words]: the vocabulary's bits.
    """

    def __init__(self, request: Request, inside: MaskRows, inner: GrammarMasks | None) -> None:
        params = request.params
        self._inner = inner
        self._base: MaskRows = inside if params.allowed_token_ids is None else _bits(params.allowed_token_ids, inside)
        self._min_tokens = 0 if inner is not None else params.min_tokens
        self._stops = _bits(request.stop_ids if self._min_tokens else (), inside)
        self._banned: dict[tuple[int, ...], list[int]] = {}
        for word in map(tuple, params.bad_word_ids):
            self._banned.setdefault(word[:-1], []).append(word[-1])
        self._lengths = sorted({len(before) for before in self._banned})
        self._asked: tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...]] | None = None

    def ask(self, outputs: Sequence[int], drafts: Sequence[int], parents: Sequence[int], most: int = 0) -> None:
        assert self._asked is None, "asked twice"
        tail = max(self._lengths, default=0)
        self._asked = (
            tuple(outputs[len(outputs) - tail :] if tail else ()),
            len(outputs),
            tuple(drafts),
            tuple(parents),
        )
        if self._inner is not None:
            self._inner.ask(outputs, drafts, parents, most)

    def poll(self) -> RoundMasks | None:
        """The answer, once; without a grammar it is there at once. Raises RequestFailedError if no token is left."""
        if self._asked is None:
            return None
        found = None if self._inner is None else self._inner.poll()
        if found is None and self._inner is not None:
            return None
        (tail, length, drafts, parents), self._asked = self._asked, None
        if found is not None and found.drafts is not None:
            drafts, parents = found.drafts, tuple(range(len(found.drafts)))
        rows = np.empty((1 + len(drafts), len(self._base)), dtype=np.int32)
        paths = [tail]
        for row in range(1 + len(drafts)):
            if row:
                paths.append((*paths[parents[row - 1]], drafts[row - 1]))
            self._fill(rows[row], paths[row], length + len(paths[row]) - len(tail))
        if found is not None:
            rows &= found.rows
        if not rows[0].any():
            beside = "" if self._inner is None else " beside the grammar"
            raise RequestFailedError(f"{RULES_FAULT} leave no token{beside}")
        return RoundMasks(rows, None if found is None else found.drafts)

    def _fill(self, row: MaskRows, path: tuple[int, ...], index: int) -> None:
        """Of output number `index`, behind what the path ends with."""
        row[:] = self._base
        for n in self._lengths:
            if n <= len(path):
                for token in self._banned.get(path[len(path) - n :], ()):
                    row[token // 32] &= ~_bit(token)
        if index < self._min_tokens and (row & ~self._stops).any():
            row &= ~self._stops


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token % 32)).astype(np.int32)


def _bits(tokens: Iterable[int], inside: MaskRows) -> MaskRows:
    bits = np.zeros(32 * len(inside), dtype=np.uint8)
    bits[np.fromiter(tokens, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
