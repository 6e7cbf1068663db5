"""Shows an answer while it comes: text, colours for accepted drafts, and the closing line."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.outputs import RequestOutput, StreamChunk
    from slipstream.text import Tokenizer

DRAFTED = "\x1b[32m"
RESET = "\x1b[0m"


def wants_color(choice: str, out: TextIO) -> bool:
    """--color, then NO_COLOR (no-color.org: any non-empty value), then whether `out` is a terminal."""
    if choice != "auto":
        return choice == "always"
    return not os.environ.get("NO_COLOR") and out.isatty() and os.environ.get("TERM") != "dumb"


def show_notes(llm: LLM) -> None:
    """What loading had to say, such as weights that were converted."""
    for note in llm.notes:
        print(f"slipstream: note: {' '.join(note.split())}", file=sys.stderr)


class Printer:
    """Writes the chunks of one answer to `out` and measures them.

    A chunk's text need not belong to its tokens: the engine holds text back for unfinished characters and
    stop strings. Colours therefore go by position: a detokenizer of our own tells how many characters each
    token adds, and the text, whenever it comes, uses those up in order. Without a tokenizer the token ids
    are printed instead of the text.
    """

    def __init__(self, out: TextIO, tokenizer: Tokenizer | None, *, color: bool) -> None:
        self._out = out
        self._color = color
        self._spans: deque[tuple[int, bool]] = deque()
        self._started = time.perf_counter()
        self._first: float | None = None
        self._in_first = 0
        self._ends_line = True
        self.text = ""
        self.tokens = 0
        self._lengths = None
        self._ids_only = tokenizer is None or not tokenizer.present
        if color and tokenizer is not None and not self._ids_only:
            from slipstream.text import IncrementalDetokenizer

            self._lengths = IncrementalDetokenizer(tokenizer, continues=True)

    def show(self, chunk: StreamChunk) -> None:
        """Prints what the chunk adds, at once."""
        self.text += chunk.text
        if chunk.token_ids and self._first is None:
            self._first, self._in_first = time.perf_counter(), len(chunk.token_ids)
        self.tokens += len(chunk.token_ids)
        if self._ids_only:
            pieces = [(f"{i} ", n < chunk.accepted) for n, i in enumerate(chunk.token_ids)]
        else:
            self._measure(chunk)
            pieces = list(self._colored(chunk.text))
        self._write(pieces)

    def end_line(self) -> None:
        """Makes sure that what follows starts a line."""
        if not self._ends_line:
            self._out.write("\n")
            self._ends_line = True
        self._out.flush()

    def summary(self, output: RequestOutput | None) -> str:
        """ "128 tokens, 95.3 tok/s, ..."; tok/s counts from the first tokens on, so that prefill is apart."""
        now = time.perf_counter()
        parts = [f"{self.tokens} token{'s' * (self.tokens != 1)}"]
        later = self.tokens - self._in_first
        if self._first is not None:
            # A single chunk leaves nothing to time between tokens.
            seconds = now - (self._first if later else self._started)
            parts.append(f"{(later or self.tokens) / max(seconds, 1e-9):.1f} tok/s")
            parts.append(f"first after {self._first - self._started:.2f} s")
        if output is not None:
            parts.append(f"acceptance length {output.spec.acceptance_length:.2f}")
        return ", ".join(parts)

    def _measure(self, chunk: StreamChunk) -> None:
        if self._lengths is None:
            return
        accepted = min(max(chunk.accepted, 0), len(chunk.token_ids))
        for ids, drafted in ((chunk.token_ids[:accepted], True), (chunk.token_ids[accepted:], False)):
            added = len(self._lengths.push(ids))
            if added:
                self._spans.append((added, drafted))

    def _colored(self, text: str) -> Iterable[tuple[str, bool]]:
        while text and self._spans:
            length, drafted = self._spans.popleft()
            if length > len(text):
                self._spans.appendleft((length - len(text), drafted))
            yield text[:length], drafted
            text = text[length:]
        if text:
            yield text, False

    def _write(self, pieces: Iterable[tuple[str, bool]]) -> None:
        for text, drafted in pieces:
            if not text:
                continue
            self._ends_line = text.endswith("\n")
            # A model's own escape sequences must not steer the terminal.
            shown = text.replace("\x1b", "\u241b") if self._color or self._out.isatty() else text
            self._out.write(f"{DRAFTED}{shown}{RESET}" if drafted and self._color else shown)
        self._out.flush()
