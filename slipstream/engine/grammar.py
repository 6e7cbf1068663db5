"""Sequences whose tokens a grammar decides: when their masks are asked for, and when they may run.

A mask depends on the tokens before it, so those of a frame exist only once the frame before it is collected and its
drafts are known. Masks are computed elsewhere (`Grammars`, threads of the text side); until they are here the sequence
sits frames out, and nobody else waits for it. A sequence whose masks are not here and that owns no slot is HELD: not
in the queue, where it would stand in others' way.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from slipstream.engine.sequence import Sequence, State
from slipstream.errors import InvalidRequestError, SlipstreamError
from slipstream.structured import Masks, RoundMasks
from slipstream.types import PrefillSpan, Request, VerifyMode

IDLE_SECONDS = 0.01
"""How long a step may wait for masks when nothing else can run; what callers ask meanwhile waits as long."""


class MaskSource(Protocol):
    """Masks of one sequence."""

    def ask(self, outputs: Many[int], drafts: Many[int], parents: Many[int], most: int = 0) -> None:
        """Start on the masks after all `outputs` so far, and after each draft; parents[i]: the row draft i follows.

        most: if above 0, the answer may replace the drafts, by so many at most: what the grammar has no choice about.
        """

    def poll(self) -> RoundMasks | None:
        """The answer, once; None while it is not there. Raises SlipstreamError: the request ends."""


class Grammars(Protocol):
    def open(self, request: Request) -> MaskSource:
        """Never blocks."""

    def wait(self, seconds: float) -> None:
        """Block until some masks have come, or for so long."""


class GrammarDesk:
    """Asks for masks and takes them in; one per engine. pending: sequences whose masks have been asked for. drafts,
    laws: `EngineConfig.grammar_drafts` and `draft_laws`."""

    def __init__(self, grammars: Grammars | None, *, drafts: bool = False, laws: bool = False) -> None:
        self.grammars, self.drafts, self.laws = grammars, drafts, laws
        self.pending: list[Sequence] = []

    def check(self, request: Request) -> None:
        """Raises InvalidRequestError where there are no masks."""
        if request.params.masked and self.grammars is None:
            raise InvalidRequestError("structured_outputs: this engine was built without grammars")

    def open(self, seq: Sequence) -> bool:
        """Whether the sequence has a grammar, or lists of tokens: then it is held until its first masks are here."""
        if not seq.request.params.masked:
            return False
        assert self.grammars is not None
        seq.grammar = self.grammars.open(seq.request)
        seq.state = State.HELD
        self._ask(seq, (), (), 0)
        return True

    def collected(self, seq: Sequence, drafts: Many[int], parents: Many[int] | None) -> None:
        """A record of it is in: seq.outputs are all its tokens, `drafts` the ones that its next frame verifies."""
        # What a law has drawn is judged, row for row: whether it gets a row must not depend on what it is.
        kept = not self.drafts or (self.laws and seq.request.mode is VerifyMode.REJECTION)
        most = 0 if kept else min(seq.num_drafts, seq.max_len - seq.length - 2)
        self._ask(seq, drafts, range(len(drafts)) if parents is None else parents, max(0, most))

    def _ask(self, seq: Sequence, drafts: Many[int], parents: Many[int], most: int) -> None:
        assert seq.grammar is not None
        seq.masks = None
        seq.grammar.ask(seq.outputs, drafts, parents, most)
        self.pending.append(seq)

    def arrived(self) -> list[tuple[Sequence, str | None]]:
        """Sequences whose masks have come, or that cannot go on and why."""
        found, still = list[tuple[Sequence, str | None]](), list[Sequence]()
        for seq in self.pending:
            if seq.state in (State.ENDED, State.CLOSED):
                continue
            assert seq.grammar is not None
            try:
                seq.masks = seq.grammar.poll()
            except SlipstreamError as error:
                found.append((seq, str(error)))
                continue
            if seq.masks is None:
                still.append(seq)
                continue
            if seq.masks.drafts is not None:
                seq.wanted = 1 + len(seq.masks.drafts)
            found.append((seq, None))
        self.pending = still
        return found

    def wait(self) -> None:
        """Nothing can run: block until masks come, for a short while."""
        if self.pending and self.grammars is not None:
            self.grammars.wait(IDLE_SECONDS)


def may_decode(seq: Sequence) -> bool:
    """Of a sequence with a grammar: whether its masks are those of the round that its slot would run next."""
    return seq.masks is not None and seq.prefilled and not seq.queued


def masks_of(decoding: Many[Sequence], spans: Many[tuple[Sequence, PrefillSpan]]) -> tuple[Masks, ...]:
    """What goes up with a launch: masks of the rows that its frame may verify, and of first tokens."""
    ends = [s for s, span in spans if span.last]
    return tuple(Masks(s.slot, *s.masks) for s in decoding if s.masks is not None) + tuple(
        Masks(s.slot, s.masks.rows[:1]) for s in ends if s.masks is not None
    )
