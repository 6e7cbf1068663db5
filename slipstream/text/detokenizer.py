"""Token ids to text, a few at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Text of a growing token sequence; each `push` returns only what is new.

    The deltas, with the one of `flush`, join to exactly `tokenizer.decode(ids)` however the ids were
    grouped. A delta never holds part of a character: bytes of an unfinished UTF-8 sequence wait for the
    next token, and become U+FFFD if it does not continue them. Each token costs its own length.

    continues: the ids follow a prompt, so a SentencePiece leading space is text and stays.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = _UTF8("replace")
        self._first = not continues
        self._strip = 0 if continues else tokenizer.leading_spaces

    def push(self, token_ids: Iterable[int]) -> str:
        """New text that `token_ids` complete; may be empty."""
        data = bytearray()
        for token_id in token_ids:
            if token_id in self._skip:
                continue
            piece = self._tokenizer.token_bytes(token_id, first=self._first)
            self._first = self._first and not self._tokenizer.has_token(token_id)
            while self._strip and piece:
                # Only spaces before the first other character count.
                self._strip = self._strip - 1 if piece[:1] == b" " else 0
                piece = piece[1:] if piece[:1] == b" " else piece
            data += piece
        return self._utf8.decode(bytes(data))

    def flush(self) -> str:
        """Ends the text: U+FFFD for bytes that still wait for the rest of their character, else ''."""
        return self._utf8.decode(b"", final=True)
