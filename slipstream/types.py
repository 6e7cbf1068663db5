"""What crosses rooms: requests, plans, results. Plain Python and numpy, no torch.

A `FramePlan` goes down from the engine to the device, a `FrameResult` comes up. The host fills a plan
with *upper bounds* only: what a frame really does (who is still active, how many drafts are verified,
how many tokens come out) is decided by device state.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.errors import InvalidRequestError, UnsupportedError
from slipstream.logprobs import MAX_LOGPROBS, FrameLogprobs, TokenLogprob
from slipstream.structured import StructuredOutputsParams

MAX_STOP_IDS = 16
"""Stop token ids of a request, end-of-sequence ids included. A model that has more than half of these of its own gets
a wider table, see `EngineConfig.max_stop_ids`."""

MIN_TEMPERATURE = 1e-5
"""Temperatures between 0 and this are raised to it, so that scaled logits stay finite in float32."""

MAX_DRAFTS = 31
"""Most drafts per slot and frame; the widest row tier is one more."""

MAX_TREE_NODES = 64
"""Most nodes of a draft tree, the root included: its rows see one another by the bits of an int64."""

MAX_LOGIT_BIAS = 300
"""Token ids that a request may bias: the width of a table on the device, one row per slot."""

_NOT_BUILT: dict[str, Any] = {
    "bad_words": None,
    "logits_processors": None,
    "best_of": None,
    "use_beam_search": False,
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Names and defaults are vLLM's.

    temperature 0 is greedy. `seed` makes the output reproducible: it is then the same for every
    drafter, batch, number of drafts and run-ahead. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off.
    Filters apply in the order min-p, top-k, top-p, each on the renormalised rest. Before the temperature, in this
    order: repetition_penalty divides positive and multiplies other logits of tokens that stand in the prompt or the
    output; frequency_penalty is taken off once per time that a token stands in the output, presence_penalty once if it
    does; logit_bias (at most MAX_LOGIT_BIAS ids) is added. All of it holds for greedy requests too.
    logprobs: each output token's log-probability, and those of so many of the likeliest (at most MAX_LOGPROBS), of the
    model's own logits, before any of the above. prompt_logprobs: the same for the prompt, which is then read without
    the prefix cache.
    speculative: most drafts per round for this request, "off" (or 0) for none; None: as many as the engine makes. It
    decides speed only.
    structured_outputs: what the answer's text must look like, a StructuredOutputsParams or a mapping of its fields;
    guided_decoding is its older name. Tokens that a grammar forbids are masked before the temperature; where it allows
    nothing but the end, that wins over min_tokens.

    Raises InvalidRequestError for values outside the limits, UnsupportedError for fields not built yet.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    speculative: int | str | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[Any, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # Known from other engines, refused by name until they are built.
    bad_words: Any = None
    logits_processors: Any = None
    best_of: Any = None
    use_beam_search: bool = False

    def __post_init__(self) -> None:
        for name, off in _NOT_BUILT.items():
            if getattr(self, name) != off:
                raise UnsupportedError(f"{name}={getattr(self, name)!r} is not supported yet; leave it at {off!r}")
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise InvalidRequestError("structured_outputs and guided_decoding are one thing; leave one out")
            object.__setattr__(self, "structured_outputs", self.guided_decoding)
            object.__setattr__(self, "guided_decoding", None)
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        _whole("n", self.n, 1, 128)
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _whole("top_k", self.top_k, -1, 2**31 - 1)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.speculative not in (None, "off"):
            if isinstance(self.speculative, str):
                raise InvalidRequestError(f'speculative={self.speculative!r} must be "off" or a number of drafts')
            _whole("speculative", self.speculative, 0, MAX_DRAFTS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        for s in stops:
            if not isinstance(s, str) or not s:
                raise InvalidRequestError(f"stop={s!r} must be a non-empty string")
        if len(stops) > 16:
            raise InvalidRequestError(f"stop has {len(stops)} strings; the limit is 16")
        ids = tuple(self.stop_token_ids or ())
        for i in ids:
            _whole("stop_token_ids", i, 0, 2**31 - 1)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether what has been said counts: some penalty is on."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def num_drafts(self) -> int | None:
        """`speculative` as a number: 0 for "off", None for the engine's."""
        return None if self.speculative is None else 0 if self.speculative == "off" else int(self.speculative)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """As the constructor, but an unknown key is an InvalidRequestError that names it."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise InvalidRequestError(f"{name!r} is not a sampling parameter")
        return cls(**values)


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidRequestError(f"{name}={value!r} must be a whole number")
    if not low <= int(value) <= high:
        raise InvalidRequestError(f"{name}={value} must be between {low} and {high}")


def _real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise InvalidRequestError(f"{name}={value!r} must be a number")
    x = float(value)
    if math.isnan(x) or not low <= x <= high or (open_low and x == low):
        edge = "above" if open_low else "at least"
        raise InvalidRequestError(f"{name}={value} must be {edge} {low:g} and at most {high:g}")


def _biases(given: Any) -> dict[int, float] | None:
    """Token id -> bias; ids as text, as JSON has them, become numbers."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"logit_bias of type {type(given).__name__} must map token ids to numbers")
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(f"logit_bias has {len(given)} entries; the limit is {MAX_LOGIT_BIAS}")
    biases: dict[int, float] = {}
    for key, value in given.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key
        _whole("logit_bias token id", token, 0, 2**31 - 1)
        _real(f"logit_bias[{token}]", value, -100.0, 100.0)
        biases[int(token)] = float(value)
    return biases or None


class VerifyMode(enum.IntEnum):
    """How a slot's drafts are judged (design: greedy, coupled for seeded requests, rejection)."""

    GREEDY = 0
    COUPLED = 1
    REJECTION = 2


class FinishCode(enum.IntEnum):
    """Why the device ended a slot. Stop strings and aborts are the host's, see `finish_reason`."""

    NONE = 0
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to generate, as the engine sees it (child `child` of `params.n`).

    key: 64-bit noise key as a signed int64; from the seed when there is one, else drawn per request.
    stop_ids: token ids that end it, eos included unless ignore_eos; at most EngineConfig.max_stop_ids.
    max_len: most tokens the sequence may have, prompt included.
    needs_ack: the text side looks for stop strings; tokens count as returned only once acknowledged.
    salt: prefix-cache tenant; sequences share pages only within one salt.
    priority: lower ones are admitted first and preempted last; equal ones in order of arrival.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    child: int = 0
    key: int = 0
    stop_ids: tuple[int, ...] = ()
    max_len: int
    num_drafts: int | None = None
    needs_ack: bool = False
    salt: str = ""
    priority: int = 0

    @property
    def mode(self) -> VerifyMode:
        if self.params.greedy:
            return VerifyMode.GREEDY
        return VerifyMode.REJECTION if self.params.seed is None else VerifyMode.COUPLED


@dataclass(frozen=True, kw_only=True)
class Admit:
    """Control row: give `slot` to a request. All its fields become slot state on the device.

    tokens: every token known so far (prompt, then output kept from before a preemption).
    start: tokens whose KV is already in the given pages (a prefix hit); a whole number of pages.
    pages: page ids that cover positions [0, ...) in order.
    Of recurrent layers: restores: the saved state that the slot goes on from, 0 for none, and absorbed: the tokens that
    it includes; saved: where later states are saved, by tokens // interval, 0 for nowhere.
    """

    slot: int
    generation: int
    request: Request
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    absorbed: int = 0
    restores: int = 0
    saved: tuple[int, ...] = ()


class PageAppend(NamedTuple):
    """Control row: page_table[slot, first : first + len(pages)] = pages."""

    slot: int
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Control row: deactivate `slot` if it still holds `generation` (abort, cut or preemption)."""

    slot: int
    generation: int


@dataclass(frozen=True, kw_only=True)
class PrefillSpan:
    """`length` prompt rows of `slot` from position `start`; `last` samples the first token."""

    slot: int
    start: int
    length: int
    last: bool


MaskRows = npt.NDArray[np.int32]
"""Masks over the vocabulary, one per row: bit t % 32 of word t // 32 says that token t may come next."""


class Masks(NamedTuple):
    """Bulk: what `slot` may emit in this launch, [n, words]: after its last token, then after each of its drafts."""

    slot: int
    rows: MaskRows


class FramePlan(NamedTuple):
    """What the host asks of one launch: control rows, then one decode frame, then one prefill chunk.

    decode: slots of the frame, in order; padded to the slot bucket with sink slot 0.
    window_pages: the same for the table of layers with a sliding window; what is behind a window stays as it is.
    saved: the same for the places where states of recurrent layers are saved.
    rows: R, verified rows of the whole frame, len(decode) <= rows; the device packs at most R.
    width: most rows any single slot can get.
    len_ub: upper bound on committed length + rows over the decode slots (attention width).
    reach: the same bound for each decode slot.
    first_page: per decode slot, the first page when all its pages are one ascending run, else -1.
    prefill_rows, prefill_prompts: rows of the chunk and places for ends of prompts in it, both padded with the
    sink; 0: no padding.
    drafts: most drafts that the decode frame makes for the next one; 0: it has no drafting stage.
    catch_up: before it, the drafter reads what its slots have committed in frames without drafting.
    sampled / filtered: some decode or prefill-last slot is not greedy / uses top-k, top-p or min-p.
    rejection / coupled: some slot uses that verification mode. min_tokens: some slot bans stop ids.
    penalties / biases: some slot has a penalty, a logit_bias. logprobs: some slot asks for them, of its output;
    prompt_logprobs: some prompt of the chunk does.
    """

    seq: int
    drops: tuple[Drop, ...] = ()
    admits: tuple[Admit, ...] = ()
    pages: tuple[PageAppend, ...] = ()
    window_pages: tuple[PageAppend, ...] = ()
    saved: tuple[PageAppend, ...] = ()
    decode: tuple[int, ...] = ()
    rows: int = 0
    width: int = 0
    len_ub: int = 0
    first_page: tuple[int, ...] = ()
    reach: tuple[int, ...] = ()
    prefill: tuple[PrefillSpan, ...] = ()
    prefill_first_page: tuple[int, ...] = ()
    prefill_rows: int = 0
    prefill_prompts: int = 0
    drafts: int = 0
    catch_up: bool = False
    sampled: bool = False
    filtered: bool = False
    rejection: bool = False
    coupled: bool = False
    min_tokens: bool = False
    penalties: bool = False
    biases: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    masks: tuple[Masks, ...] = ()
    masked: bool = False

    @property
    def adjusted(self) -> bool:
        """Whether logits are changed between the target and the temperature, in greedy rows too."""
        return self.penalties or self.biases or self.masked

    @property
    def stages(self) -> Stages:
        if self.adjusted or self.logprobs:
            return Stages.ALL
        return Stages.SAMPLED if self.sampled or self.min_tokens else Stages.GREEDY


class Stages(enum.IntEnum):
    """Which stages a frame needs between the target's last layer and the record; each kind is captured by itself.

    GREEDY: an argmax per row. SAMPLED: temperature, filters, the ban on stop ids, the race. ALL: with what only some
    requests ask for too, see device/logits.py.
    """

    GREEDY = 0
    SAMPLED = 1
    ALL = 2


IntArray = npt.NDArray[np.int64]


SURVIVAL_ONE = 1 << 30
"""Survivals of drafts (`kernels.schedule`) are whole numbers; this is a chance of 1."""

RECORD_COLUMNS = 6
"""Numbers of a record before its tokens, in this order:

generation (whose record it is), emitted (how many of the tokens are valid; 0: the slot was inactive), accepted
(emitted tokens that came from drafts), drafted (drafts that were verified), finish (FinishCode after the last
emitted token), next drafts (ready for the next frame). Where verification is scheduled by confidence, the survivals of
the next drafts follow, `EngineConfig.num_drafts` of them.
"""


class FrameResult(NamedTuple):
    """What one launch did: a slot and a record for each decode slot, then for each span with `last`.

    records[i]: RECORD_COLUMNS numbers, then tokens. decoded: how many of the records are of decode slots. seconds: what
    the launch took, where launching it means running it (a CPU); else 0. logprobs: None where nobody asked; prompt: the
    chunk's spans where a prompt did. drafts[i]: of a launch with a grammar, the bonus token and the drafts for the next
    frame, valid as the record says; parents[i]: the row that each follows, None where drafts are a chain.
    """

    seq: int
    slots: tuple[int, ...]
    records: list[list[int]]
    decoded: int
    seconds: float = 0.0
    logprobs: FrameLogprobs | None = None
    prompt: tuple[PrefillSpan, ...] = ()
    drafts: list[list[int]] | None = None
    parents: list[list[int]] | None = None


class TokenEvent(NamedTuple):
    """Tokens of one request that a collected frame brought, or its end.

    tokens: new token ids, in order. accepted: how many of their first ones came from accepted drafts.
    drafted: drafts that were verified; None for a prefill. finish_reason: None, "stop", "length", "abort" or "error".
    logprobs: one for each token, where asked; prompt_logprobs: of the prompt's tokens but the first, with the first
    event of child 0.
    """

    request_id: str
    child: int
    tokens: tuple[int, ...]
    accepted: int = 0
    drafted: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


Round = tuple[int, int, int]
"""(drafted, accepted, emitted) of a decode frame in which a slot was active; accepted <= drafted, always."""


@dataclass
class SpecStats:
    """Draft statistics of a request or of an engine: how often each kind of round occurred."""

    counts: Counter[Round] = field(default_factory=Counter)

    def add_round(self, drafted: int, accepted: int, emitted: int) -> None:
        self.counts[drafted, accepted, emitted] += 1

    def add_rounds(self, rounds: Iterable[Round]) -> None:
        self.counts.update(rounds)

    @property
    def rounds(self) -> int:
        return self.counts.total()

    @property
    def drafted(self) -> int:
        return self._sum(lambda r: r[0])

    @property
    def accepted(self) -> int:
        return self._sum(lambda r: r[1])

    @property
    def emitted(self) -> int:
        return self._sum(lambda r: r[2])

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per round, the bonus token included."""
        return self.emitted / self.rounds if self.counts else 0.0

    @property
    def accepted_per_position(self) -> list[int]:
        """[i]: rounds in which draft i (from 0) was accepted."""
        most = max((r[1] for r in self.counts), default=0)
        return [self._sum(lambda r, i=i: r[1] > i) for i in range(most)]  # type: ignore[misc]

    @property
    def drafted_per_position(self) -> list[int]:
        """[i]: rounds in which draft i (from 0) was verified."""
        most = max((r[0] for r in self.counts), default=0)
        return [self._sum(lambda r, i=i: r[0] > i) for i in range(most)]  # type: ignore[misc]

    def as_dict(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": round(self.acceptance_length, 4),
            "accepted_per_position": self.accepted_per_position,
            "drafted_per_position": self.drafted_per_position,
        }

    def _sum(self, of: Callable[[Round], int]) -> int:
        return sum(of(r) * n for r, n in self.counts.items())
