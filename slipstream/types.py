"""What crosses rooms: requests, plans, results. Plain Python and numpy, no torch.

A `FramePlan` goes down from the engine to the device, a `FrameResult` comes up. The host fills a plan
with *upper bounds* only: what a frame really does (who is still active, how many drafts are verified,
how many tokens come out) is decided by device state.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.logprobs import FrameLogprobs, TokenLogprob
from slipstream.params import MAX_DRAFTS as MAX_DRAFTS  # noqa: PLC0414 (it is part of this module)
from slipstream.params import MAX_LOGIT_BIAS as MAX_LOGIT_BIAS  # noqa: PLC0414 (it is part of this module)
from slipstream.params import SamplingParams as SamplingParams  # noqa: PLC0414 (it is part of this module)
from slipstream.structured import Masks

MAX_STOP_IDS = 16
"""Stop token ids of a request, end-of-sequence ids included. A model that has more than half of these of its own gets
a wider table, see `EngineConfig.max_stop_ids`."""

MIN_TEMPERATURE = 1e-5
"""Temperatures between 0 and this are raised to it, so that scaled logits stay finite in float32."""

MAX_TREE_NODES = 64
"""Most nodes of a draft tree, the root included: its rows see one another by the bits of an int64."""


class VerifyMode(enum.IntEnum):
    """How a slot's drafts are judged (design: greedy, coupled for seeded requests, rejection)."""

    GREEDY = 0
    COUPLED = 1
    REJECTION = 2


class FinishCode(enum.IntEnum):
    """Why the device ended a slot. Stop strings and aborts are the host's, see `finish_reason`.

    INVALID: no token could be chosen, see NO_TOKEN.
    """

    NONE = 0
    STOP = 1
    LENGTH = 2
    INVALID = 3


NO_TOKEN = -1
"""Chosen for a row whose largest logit is no finite number: NaN or infinity from the model, or every token banned."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to generate, as the engine sees it (child `child` of `params.n`).

    key: 64-bit noise key as a signed int64; from the seed when there is one, else drawn per request.
    stop_ids: token ids that end it, eos included unless ignore_eos; at most EngineConfig.max_stop_ids.
    max_len: most tokens the sequence may have, prompt included.
    needs_ack: the text side looks for stop strings; tokens count as returned only once acknowledged.
    salt: prefix-cache tenant; sequences share pages only within one salt.
    priority: lower ones are admitted first and preempted last; equal ones in order of arrival.
    media: models.mrope.Media of a prompt that is more than text (offline only), or None.
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
    media: Any = None
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
    penalties / biases / custom: some slot has a penalty, a logit_bias, a custom processor. logprobs: some slot asks
    for them, of its output; prompt_logprobs: some prompt of the chunk does.
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
    custom: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    masks: tuple[Masks, ...] = ()
    masked: bool = False

    @property
    def adjusted(self) -> bool:
        """Whether logits are changed between the target and the temperature, in greedy rows too."""
        return self.penalties or self.biases or self.custom or self.masked

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

    def with_tally(self, kinds: Sequence[Round], tally: Sequence[int]) -> SpecStats:
        """These and tally[i] more rounds of each kinds[i]."""
        return SpecStats(self.counts + Counter(dict(zip(kinds, tally, strict=True))))

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
