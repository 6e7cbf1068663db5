"""Grammars: what a request's answer may look like, as masks over the vocabulary. By llguidance, imported on use.

Nothing here runs on the engine's loop: compiling a grammar and computing masks happen in threads of `Grammars`, the
library leaves the interpreter's lock meanwhile. `Grammars.check` compiles where a request comes in, so that a grammar
that cannot work is refused there; `Grammars.open` gives the engine a `GrammarMasks` per sequence.
"""

from __future__ import annotations

import importlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any

import numpy as np

from slipstream.errors import InvalidRequestError, RequestFailedError, SlipstreamError, UnsupportedError
from slipstream.structured import MaskRows, RoundMasks, StructuredOutputsParams
from slipstream.text.repeats import (
    MAX_FOLLOWED,
    check_lark,
    check_regex,
    check_schema,
    short_regex,
    short_schema,
    short_schemas,
    unforced,
)
from slipstream.text.token_rules import RuledMasks
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import Request

COMPILE_SECONDS = 10.0
"""Most time from asking for a grammar to its first mask, queueing included."""
MASK_SECONDS = 10.0
"""Most time for the masks of one round."""
THREADS = 2
MAX_LOST = 4
"""Compilations beyond their time that are replaced by new threads."""
GRAMMAR_FAULT = "the grammar"
"""How every error begins that ends a request in its middle."""
_GUIDANCE = "x-guidance"
"""In a schema that stands in a grammar: what its JSON may look like."""
_STUCK = "NoExtension"  # in an error of the library: no token of the vocabulary goes on
CACHED = 64
"""Compiled grammars kept; a request takes a copy."""
MAX_ERROR_CHARS = 300

# The library's own fuel: a step of it takes some 0.1 s at most, whatever the grammar.
LIMITS = {
    "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 100_000, "step_max_items": 50_000, "max_items_in_row": 2_000,
    "max_lexer_states": 50_000, "max_grammar_size": 200_000, "verbose_errors": False,
}  # fmt: skip


class Grammars:
    """Compiles grammars for one tokenizer and computes their masks; thread-safe.

    vocab_size: the model's, masks are that wide. eos_ids: ids that may follow once a grammar is complete. unavailable:
    why grammars cannot work here, None where they can.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        compile_seconds: float = COMPILE_SECONDS,
        unavailable: str | None = None,
    ) -> None:
        self.tokenizer, self.unavailable = tokenizer, unavailable
        self.vocab_size, self.eos_ids = vocab_size, tuple(i for i in eos_ids if 0 <= i < vocab_size)
        self.words = -(-vocab_size // 32)
        inside_np = np.zeros(32 * self.words, dtype=np.uint8)
        inside_np[:vocab_size] = 1
        self._inside = np.packbits(inside_np, bitorder="little").view(np.int32)
        self.compile_seconds = compile_seconds
        self.changed = threading.Event()
        """Set when some masks have become ready, or failed."""
        self._lock, self._building = threading.Lock(), threading.Lock()
        self._compiled: OrderedDict[StructuredOutputsParams, Future[Any]] = OrderedDict()
        self._library: Any = None
        self._vocabulary: Any = None
        self._pieces: list[bytes] = []
        self._compilers: ThreadPoolExecutor | None = None
        self._lost: list[Future[Any]] = []
        self._fillers: ThreadPoolExecutor | None = None

    # -- for those who take requests -----------------------------------------------------------------------------

    def check(self, spec: StructuredOutputsParams) -> None:
        """Compile it, blocking. Raises InvalidRequestError if it cannot be compiled in time, UnsupportedError where
        the library or the model's tokenizer is missing."""
        self.require()
        compiling = self.compiled(spec)
        try:
            compiling.result(self.compile_seconds)
        except FutureTimeout:
            self._overdue(spec, compiling)
            raise InvalidRequestError(
                f"structured_outputs: compiling the {spec.kind} takes more than {self.compile_seconds:g} s"
            ) from None
        except SlipstreamError as error:  # kept with the compiled grammars, so raised as a new one
            raise type(error)(str(error)) from None

    def require(self) -> None:
        """Raise UnsupportedError if grammars cannot work here."""
        if self.unavailable is not None:
            raise UnsupportedError(f"structured_outputs: {self.unavailable}")
        if not self.tokenizer.present:
            raise UnsupportedError("structured_outputs needs a tokenizer, and this model has none")
        if not self.eos_ids:
            raise UnsupportedError("structured_outputs needs an end-of-sequence token, and this model names none")
        if self._library is None:
            try:
                self._library = importlib.import_module("llguidance")
            except ImportError:
                raise UnsupportedError(
                    "structured_outputs needs llguidance; install the extra: pip install 'slipstream[grammar]'"
                ) from None

    # -- for the engine --------------------------------------------------------------------------------------------

    def open(self, request: Request) -> GrammarMasks | RuledMasks:
        """Masks of a request's sequence; what is wrong with its grammar comes out of `poll`."""
        params, made = request.params, None
        if params.structured_outputs is not None:
            made = GrammarMasks(
                self, params.structured_outputs, stop_ids=request.stop_ids, min_tokens=params.min_tokens
            )
            if params.allowed_token_ids is None and not params.bad_word_ids:
                return made
        return RuledMasks(request, self._inside, made)

    def wait(self, seconds: float) -> None:
        """Block until some masks are ready, or for so long."""
        self.changed.wait(seconds)
        self.changed.clear()

    # -- threads ---------------------------------------------------------------------------------------------------

    def compiled(self, spec: StructuredOutputsParams) -> Future[Any]:
        """The compiled grammar, by whoever asks first."""
        key = replace(spec, after="")
        with self._lock:
            if self._compilers is None:
                self._compilers = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar-compile")
            found = self._compiled.get(key)
            if found is None:
                found = self._compiled[key] = self._compilers.submit(self._built, key)
                while len(self._compiled) > CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
        return found

    def _overdue(self, spec: StructuredOutputsParams, compiling: Future[Any]) -> None:
        """Its time is over: if it never began, it is tried again when asked for; if it runs on, others do without its
        thread, but for MAX_LOST times."""
        with self._lock:
            if compiling.cancel():
                self._compiled.pop(replace(spec, after=""), None)
            elif self._compilers is not None and compiling not in self._lost and len(self._lost) < MAX_LOST:
                self._lost.append(compiling)
                self._compilers.shutdown(wait=False)
                self._compilers = None

    def submit(self, work: Callable[..., None], *args: Any) -> None:
        """Run it in a thread for masks; a slow compilation does not hold those up."""
        with self._lock:
            if self._fillers is None:
                self._fillers = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar-masks")
        self._fillers.submit(work, *args)

    def _built(self, spec: StructuredOutputsParams) -> Any:
        try:
            return self._build(spec)
        except SlipstreamError:
            raise
        except BaseException as fault:  # the library's panics derive from it
            raise InvalidRequestError(
                f"structured_outputs: {spec.kind}: compiling it failed ({type(fault).__name__})"
            ) from fault

    def _build(self, spec: StructuredOutputsParams) -> Any:
        """A matcher that has computed its first mask."""
        library = self._library
        try:
            text = _grammar(library, spec)
        except ValueError as error:
            raise InvalidRequestError(f"structured_outputs: {spec.kind}: {_short(error)}") from None
        limits = library.LLParserLimits(**LIMITS)
        matcher = library.LLMatcher(self._words(), text, log_level=0, limits=limits)
        if not matcher.is_error():
            copy = matcher.deep_copy()
            row = self.mask(copy)
            if not row.any() or _STUCK in copy.get_error():
                raise InvalidRequestError(f"structured_outputs: {spec.kind}: this tokenizer has no token to begin with")
            if not copy.is_error():  # drafts need the way back, which max_tokens= and stop= in a grammar do not have
                copy.consume_token(int(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0]))
                copy.rollback(1)
            matcher = copy if copy.is_error() else matcher
        if matcher.is_error():
            raise InvalidRequestError(f"structured_outputs: {spec.kind}: {_short(matcher.get_error())}")
        return matcher

    def _words(self) -> Any:
        """The vocabulary as the library has it; built once, in a thread."""
        with self._building:  # not the lock that the engine's loop takes
            if self._vocabulary is None:
                tokenizer = self.tokenizer
                self._pieces = [tokenizer.token_bytes(i) for i in range(self.vocab_size)]
                wrapped = self._library.TokenizerWrapper(_Words(tokenizer, self._pieces, self.eos_ids))
                self._vocabulary = self._library.LLTokenizer(
                    wrapped, n_vocab=self.vocab_size, eos_token=list(self.eos_ids)
                )
            return self._vocabulary

    def piece(self, token: int) -> bytes:
        return self._pieces[token]

    def mask(self, matcher: Any) -> MaskRows:
        """What may come next, [words]; no bits behind the vocabulary."""
        found: MaskRows = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)[: self.words] & self._inside
        return found


class GrammarMasks:
    """One sequence's grammar. One `ask` at a time: `poll` must have given its answer before the next.

    A mask is a row of 32-bit words; bit t % 32 of word t // 32 says that token t may come next.
    """

    def __init__(
        self, owner: Grammars, spec: StructuredOutputsParams, *, stop_ids: Sequence[int], min_tokens: int
    ) -> None:
        self._owner, self._spec = owner, spec
        self._min_tokens = min_tokens
        self._ban = np.zeros(owner.words, dtype=np.int32)
        for i in stop_ids if min_tokens else ():
            self._ban[i // 32] |= np.uint32(1 << (i % 32)).astype(np.int32)
        self._matcher: Any = None
        self._read = 0  # output tokens that the matcher has consumed
        self._free = _Until(spec.after.encode()) if spec.after else None
        self._job: Future[RoundMasks] | None = None
        self._asked = 0.0
        self._seconds = owner.compile_seconds

    def ask(self, outputs: Sequence[int], drafts: Sequence[int], parents: Sequence[int], most: int = 0) -> None:
        """Start on the masks after `outputs`, and after each draft behind them.

        parents[i]: the row that draft i follows, 0 for the outputs' end, j for draft j - 1. most: above 0, and of a
        chain, drafts that the answer may have instead: where the grammar leaves one token, that one, whatever was
        drafted; nothing stands behind a draft that it forbids.
        """
        owner = self._owner
        assert self._job is None, "asked twice"
        self._job, self._asked = Future(), time.monotonic()
        args = (self._job, tuple(outputs[self._read :]), tuple(drafts), tuple(parents), most)
        if self._matcher is not None:
            owner.submit(self._run, *args)
            return
        try:
            owner.require()
            owner.compiled(self._spec).add_done_callback(lambda _: owner.submit(self._run, *args))
        except SlipstreamError as error:
            self._job.set_exception(error)

    def poll(self) -> RoundMasks | None:
        """Masks and what to verify, or None while they are not there.

        Raises what ended them: InvalidRequestError, RequestFailedError.
        """
        job = self._job
        if job is None:
            return None
        if not job.done():
            if time.monotonic() - self._asked > self._seconds:
                raise RequestFailedError(f"{GRAMMAR_FAULT}'s masks took more than {self._seconds:g} s")
            return None
        self._job, self._seconds = None, MASK_SECONDS
        return job.result()

    def _run(
        self, job: Future[RoundMasks], new: Sequence[int], drafts: Sequence[int], parents: Sequence[int], most: int
    ) -> None:
        try:
            if self._matcher is None:
                self._matcher = self._owner.compiled(self._spec).result().deep_copy()
            for token in new:
                self._consume(token)
            self._read += len(new)
            found = self._along(drafts, most) if most else RoundMasks(self._rows(drafts, parents))
        except SlipstreamError as error:
            job.set_exception(error)
        except BaseException as error:  # the library's panics derive from it
            job.set_exception(RequestFailedError(f"{GRAMMAR_FAULT} failed: {type(error).__name__}"))
        else:
            job.set_result(found)
        self._owner.changed.set()

    def _along(self, drafts: Sequence[int], most: int) -> RoundMasks:
        """Masks along one chain: the drafts, but what the grammar forces where it does."""
        free, consumed = None if self._free is None else self._free.copy(), 0
        rows: list[MaskRows] = []
        chain: list[int] = []
        wanted = list(drafts[:most])
        while True:
            row = np.full(self._owner.words, -1, dtype=np.int32)
            self._fill(row, self._read + len(chain))
            rows.append(row)
            at = len(chain)
            if chain and chain[-1] in self._owner.eos_ids:
                break
            token = _only(row)
            drafted = wanted[at] if at < len(wanted) and chain == wanted[:at] else None
            if at == most or (token is None and drafted is None):
                break
            if token is None and drafted is not None:
                token = drafted
                if not self._allows(row, token):  # judged all the same, and refused
                    chain.append(token)
                    rows.append(np.full(self._owner.words, -1, dtype=np.int32))
                    break
            assert token is not None
            consumed += self._consume(token)
            chain.append(token)
        self._back(consumed, free)
        return RoundMasks(np.stack(rows), None if tuple(chain) == tuple(drafts) else tuple(chain))

    def _rows(self, drafts: Sequence[int], parents: Sequence[int]) -> MaskRows:
        out = np.full((1 + len(drafts), self._owner.words), -1, dtype=np.int32)
        children: list[list[int]] = [[] for _ in range(1 + len(drafts))]
        for i, parent in enumerate(parents):
            children[parent].append(i + 1)
        self._walk(0, self._read, out, drafts, children)
        return out

    def _walk(
        self, node: int, index: int, out: MaskRows, drafts: Sequence[int], children: Sequence[Sequence[int]]
    ) -> None:
        """Row `node`, for output number `index`, and the rows below it. What a row forbids has none: never reached."""
        row = out[node]
        self._fill(row, index)
        for child in children[node]:
            token = drafts[child - 1]
            if self._allows(row, token):
                free = None if self._free is None else self._free.copy()
                consumed = self._consume(token)
                self._walk(child, index + 1, out, drafts, children)
                self._back(consumed, free)

    def _fill(self, row: MaskRows, index: int) -> None:
        """What may be output number `index`; a row that comes as all ones."""
        if self._free is None:
            row[:] = self._owner.mask(self._matcher)
            self._check()
            if not row.any():
                raise RequestFailedError(f"{GRAMMAR_FAULT} cannot go on: no token of the vocabulary continues it")
        if index < self._min_tokens and (row & ~self._ban).any():
            row &= ~self._ban  # a grammar that leaves only the end wins over min_tokens

    def _allows(self, row: MaskRows, token: int) -> bool:
        return 0 <= token < self._owner.vocab_size and bool(row[token // 32] >> (token % 32) & 1)

    def _back(self, consumed: int, free: _Until | None) -> None:
        if consumed and not self._matcher.rollback(consumed):
            raise RequestFailedError(f"{GRAMMAR_FAULT} could not go back over a draft")
        self._free = free

    def _consume(self, token: int) -> int:
        """Read a token; how many the matcher took for it."""
        matcher = self._matcher
        if self._free is not None:
            rest = self._free.feed(self._owner.piece(token))
            if rest is None:
                return 0
            self._free = None
            tokens = self._owner._vocabulary.tokenize_bytes(rest) if rest else []
            if tokens and matcher.try_consume_tokens(tokens) != len(tokens):
                raise RequestFailedError(f"{GRAMMAR_FAULT} does not allow the text right behind {self._spec.after!r}")
            return len(tokens)
        if matcher.is_stopped() and token in self._owner.eos_ids:
            return 0  # with ignore_eos more of them follow
        if not matcher.consume_token(token):
            self._check()
            raise RequestFailedError(f"{GRAMMAR_FAULT} does not allow token {token}, which was emitted")
        return 1

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestFailedError(f"{GRAMMAR_FAULT} failed: {_short(self._matcher.get_error())}")


def _only(row: MaskRows) -> int | None:
    """The one token that a mask allows; None if there are more."""
    at = np.flatnonzero(row)
    word = int(row[at[0]]) & 0xFFFFFFFF if len(at) == 1 else 0
    return int(at[0]) * 32 + word.bit_length() - 1 if word and not word & (word - 1) else None


class _Until:
    """Looks for a text in a stream of pieces."""

    def __init__(self, text: bytes, tail: bytes = b"") -> None:
        self._text, self._tail = text, tail

    def copy(self) -> _Until:
        return _Until(self._text, self._tail)

    def feed(self, piece: bytes) -> bytes | None:
        """What follows the text, without leading whitespace; None while it has not come."""
        seen = self._tail + piece
        at = seen.find(self._text)
        if at >= 0:
            return seen[at + len(self._text) :].lstrip()
        self._tail = seen[max(0, len(seen) - len(self._text) + 1) :]
        return None


class _Words:
    """The vocabulary as the library's wrapper wants it."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokens
        self.eos_token_id, self.bos_token_id = eos_ids[0], tokenizer.bos_id
        # What ends an answer is never text in it, special token or not.
        self.special_token_ids = sorted({*(i for i in tokenizer.special_ids if i < len(tokens)), *eos_ids})

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of exactly this text; none where the tokenizer changes or cannot write it."""
        data = text.encode() if isinstance(text, str) else text
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        except SlipstreamError:
            return []
        same = all(i < len(self.tokens) for i in ids) and b"".join(self.tokens[i] for i in ids) == data
        return ids if same else []


def _grammar(library: Any, spec: StructuredOutputsParams) -> str:
    """The library's own form. What leaves no choice for too long, or may, is not followed. Raises ValueError for text
    that it cannot read, InvalidRequestError for repeats that make too much of it."""
    matcher = library.LLMatcher
    if spec.regex is not None:
        check_regex("regex", spec.regex)
        made, short = str(matcher.grammar_from_regex(spec.regex)), short_regex(spec.regex)
    elif spec.grammar is not None:
        lark = re.search(r"^\s*start\s*:(?!:=)", spec.grammar, re.M)
        made = spec.grammar if lark else str(library.grammar_from("grammar", spec.grammar))
        check_lark("grammar", made)
        short = spec.own and _GUIDANCE not in made and short_schemas(made)
    elif spec.choice is not None:
        made = str(library.grammar_from("choice", json.dumps(spec.choice)))
        short = max(map(len, spec.choice)) <= MAX_FOLLOWED
    else:
        text = spec.json or '{"type": "object"}'
        schema, spaced = json.loads(text), not spec.disable_any_whitespace
        check_schema("json", schema)
        made = str(matcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": spaced}))
        short = short_schema(schema, spaced=spaced)
    if not short and made.startswith("{"):  # the library's JSON, of one grammar
        [inner] = json.loads(made)["grammars"]
        made = inner["lark_grammar"] or f"start: %json {json.dumps(inner['json_schema'])}"
    if not short:
        made = unforced(made)
    return made if made.startswith("{") else str(matcher.grammar_from_lark(made))


def _short(error: object) -> str:
    """One line of the library's message, without its internal state."""
    text = str(error).split("<state>")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:6])[:MAX_ERROR_CHARS]
