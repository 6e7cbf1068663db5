"""What a request may say about how it is sampled, and every check of its values. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from slipstream.errors import InvalidRequestError, UnsupportedError
from slipstream.logprobs import MAX_LOGPROBS
from slipstream.structured import StructuredOutputsParams

MAX_DRAFTS = 31
"""Most drafts per slot and frame; the widest row tier is one more."""

MAX_LOGIT_BIAS = 300
"""Token ids that a request may bias: the width of a table on the device, one row per slot."""

MAX_PROCESSORS = 8
"""Custom processors of an engine: columns of slot state."""

MAX_ALLOWED = 1 << 14
"""Token ids in allowed_token_ids."""

MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_IDS = 256

_NOT_BUILT: dict[str, Any] = {
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
    logits_processors: custom processors of the engine by name (sampling/custom.py), each with its argument; after
    logit_bias.
    logprobs: each output token's log-probability, and those of so many of the likeliest (at most MAX_LOGPROBS), of the
    model's own logits, before any of the above. prompt_logprobs: the same for the prompt, which is then read without
    the prefix cache.
    allowed_token_ids: the only ones that the output may have, at most MAX_ALLOWED; an end token that is not among them
    does not come. bad_words: texts that the output shall not have, at most MAX_BAD_WORDS, by their tokens: at the
    beginning of a text, and behind a space; each one's last token is masked where it would complete it. bad_word_ids:
    the same as token ids; those of bad_words come to it. Both are masks as a grammar's, and may stand beside one.
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
    logits_processors: Mapping[str, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    bad_word_ids: Sequence[Sequence[int]] = ()
    # Known from other engines, refused by name until they are built.
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
        _real("repetition_penalty", self.repetition_penalty, 0.01, 100.0)  # beyond, float32 logits overflow
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "logits_processors", _processors(self.logits_processors))
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
        object.__setattr__(self, "allowed_token_ids", _allowed(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", _words(self.bad_words))
        object.__setattr__(self, "bad_word_ids", _word_ids(self.bad_word_ids))
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def masked(self) -> bool:
        """Whether what may come is masked, by a grammar or by lists of tokens."""
        lists = self.allowed_token_ids is not None or bool(self.bad_words) or bool(self.bad_word_ids)
        return lists or self.structured_outputs is not None

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


def _allowed(given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    if isinstance(given, (str, bytes)) or not isinstance(given, (Sequence, np.ndarray)) or not len(given):
        raise InvalidRequestError(f"allowed_token_ids={given!r:.100} must be a list of token ids, and not empty")
    if len(given) > MAX_ALLOWED:
        raise InvalidRequestError(f"allowed_token_ids has {len(given)} entries; the limit is {MAX_ALLOWED}")
    for i in given:
        _whole("allowed_token_ids", i, 0, 2**31 - 1)
    return tuple(int(i) for i in given)


def _words(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidRequestError(f"bad_words={given!r:.100} must be a list of texts")
    if len(given) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"bad_words has {len(given)} entries; the limit is {MAX_BAD_WORDS}")
    for word in given:
        if not isinstance(word, str) or not word:
            raise InvalidRequestError(f"bad_words {word!r:.100} must be non-empty text")
        if len(word) > MAX_BAD_WORD_CHARS:
            raise InvalidRequestError(f"bad_words has a text of {len(word)} characters; limit {MAX_BAD_WORD_CHARS}")
    return tuple(given)


def _word_ids(given: Any) -> tuple[tuple[int, ...], ...]:
    words = [tuple(word) for word in given or ()]
    if len(words) > 4 * MAX_BAD_WORDS:
        raise InvalidRequestError(f"bad_word_ids has {len(words)} entries; the limit is {4 * MAX_BAD_WORDS}")
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_IDS:
            raise InvalidRequestError(f"bad_word_ids has one of {len(word)} ids; it must be 1 to {MAX_BAD_WORD_IDS}")
        for i in word:
            _whole("bad_word_ids", i, 0, 2**31 - 1)
    return tuple(words)


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


def _processors(given: Any) -> dict[str, float] | None:
    """Name -> argument."""
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise InvalidRequestError(
            f"logits_processors of type {type(given).__name__} must map names of the engine's processors to numbers; "
            "functions are registered when the engine is built (processors=), not sent with a request"
        )
    if len(given) > MAX_PROCESSORS:
        raise InvalidRequestError(f"logits_processors has {len(given)} entries; the limit is {MAX_PROCESSORS}")
    for name, value in given.items():
        _real(f"logits_processors[{str(name)[:40]!r}]", value, -1e30, 1e30)
    return {str(name): float(value) for name, value in given.items()}
