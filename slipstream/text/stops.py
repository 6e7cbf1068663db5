"""Stop strings over a token stream, and the stream that joins them with the detokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.errors import InvalidRequestError
from slipstream.text.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from slipstream.text.tokenizer import Tokenizer
    from slipstream.types import SamplingParams


class _Matcher:
    """Knuth-Morris-Pratt automaton of one stop string.

    state: length of the longest proper or whole prefix of the string that ends the text seen so far.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._fail = [0] * (len(stop) + 1)
        k = 0
        for i in range(1, len(stop)):
            while k and stop[i] != stop[k]:
                k = self._fail[k]
            k += stop[i] == stop[k]
            self._fail[i + 1] = k

    def feed(self, text: str) -> int | None:
        """Reads `text`; the offset in it just after the first complete match, or None."""
        stop, fail, state = self.stop, self._fail, self.state
        found: int | None = None
        i = 0
        while i < len(text):
            if state == 0:
                i = text.find(stop[0], i)
                if i < 0:
                    break
            char = text[i]
            while state and stop[state] != char:
                state = fail[state]
            state += stop[state] == char
            i += 1
            if state == len(stop):
                found = i if found is None else found
                state = fail[state]
        self.state = state
        return found


class StopStringChecker:
    """Looks for stop strings in text that arrives in pieces, one piece per token.

    Of the matches that one piece completes, the one that begins first wins; of those that begin
    together, the one that ends first. Costs O(1) per character and stop string, amortised.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        self._matchers = [_Matcher(s) for s in stop]
        self._include = include_stop
        self._held = ""
        self.stopped_by: str | None = None

    def feed(self, text: str, *, ignore: bool = False) -> str:
        """Reads one piece; the text that is now safe to show. Sets `stopped_by` on a match.

        ignore: matches that end in this piece do not count (min_tokens); one that only begins in it may.
        """
        self._held += text
        base = len(self._held) - len(text)
        best: tuple[int, int] | None = None
        for matcher in self._matchers:
            end = matcher.feed(text)
            if end is not None and not ignore:
                match = (base + end - len(matcher.stop), base + end)
                if best is None or match < best:
                    best, self.stopped_by = match, matcher.stop
        if best is not None:
            safe, self._held = self._held[: best[self._include]], ""
            return safe
        hold = max((m.state for m in self._matchers), default=0)
        cut = len(self._held) - hold
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def flush(self) -> str:
        """The text held back, once no more can come."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True)
class TextDelta:
    """What a push brought.

    text: new text, safe to show. cut: None, or the number of output tokens (since the start) that count,
    up to and including the one that completed a stop string. stop: that string.
    """

    text: str
    cut: int | None = None
    stop: str | None = None


class TextStream:
    """Output tokens of one request to text, with stop strings.

    Tokens are read one by one, so the result does not depend on how many arrive together. As in vLLM, a
    match completed by one of the first `min_tokens` tokens does not count. With a tokenizer that is absent
    the text stays empty, and stop strings are an InvalidRequestError.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        continues: bool = False,
    ) -> None:
        if stop and not tokenizer.present:
            raise InvalidRequestError(f"stop={list(stop)!r} needs a tokenizer, and this model has none")
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, continues=continues
        )
        self._checker = StopStringChecker(stop, include_stop=include_stop_str_in_output)
        self._checks = bool(stop)
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.cut: int | None = None

    @classmethod
    def for_request(cls, tokenizer: Tokenizer, params: SamplingParams, *, continues: bool = False) -> TextStream:
        """The stream that `params` ask for."""
        stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop)
        return cls(
            tokenizer,
            stop=stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            continues=continues,
        )

    def push(self, token_ids: Iterable[int], *, stop_token: bool = False) -> TextDelta:
        """Reads tokens; after a cut every further token is ignored.

        stop_token: the last id ended the request on the device; it counts as a token, and its text is
        shown only with include_stop_str_in_output.
        """
        ids = list(token_ids)
        if self.cut is not None:
            return TextDelta("", self.cut, self._checker.stopped_by)
        hidden = 1 if stop_token and ids and not self._include else 0
        visible = ids[: len(ids) - hidden]
        if not self._checks:
            self.num_tokens += len(ids)
            return TextDelta(self._detokenizer.push(visible))
        out: list[str] = []
        for token_id in visible:
            self.num_tokens += 1
            ignore = self.num_tokens <= self._min_tokens
            out.append(self._checker.feed(self._detokenizer.push((token_id,)), ignore=ignore))
            if self._checker.stopped_by is not None:
                self.cut = self.num_tokens
                return TextDelta("".join(out), self.cut, self._checker.stopped_by)
        self.num_tokens += hidden
        return TextDelta("".join(out))

    def finish(self) -> str:
        """The last text: what was held back, and U+FFFD for an unfinished character. '' after a cut."""
        return "" if self.cut is not None else self._checker.flush() + self._detokenizer.flush()
