"""The text side of a request: checks before it runs, its tokens to text while it runs.

The same code wherever the engine is: `LLM` has it in its own process, the server in another one. An `Answer` reads the
engine's events and says what the engine must be told: tokens that were returned, or a cut at a stop string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from slipstream.errors import InvalidRequestError
from slipstream.logprobs import TokenLogprob
from slipstream.models.mrope import Media
from slipstream.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput, StreamChunk
from slipstream.text import TextStream, Tokenizer
from slipstream.text.grammar import Grammars
from slipstream.text.token_rules import bad_word_ids
from slipstream.types import Request, SamplingParams, TokenEvent

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or (offline) a mapping with token ids and what else there is."""

MAX_SALT = 256


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an engine can take. num_drafts: drafts per round it makes. eos_ids: ids that end a sequence.
    processors: names of custom ones."""

    vocab_size: int
    max_model_len: int
    max_stop_ids: int
    num_drafts: int
    eos_ids: tuple[int, ...]
    processors: tuple[str, ...] = ()

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Every id that ends the request on the device."""
        ends = () if params.ignore_eos else self.eos_ids
        return tuple(dict.fromkeys((*ends, *params.stop_token_ids)))


@dataclass(frozen=True, kw_only=True)
class Service:
    """What a request asks of the engine beside its tokens.

    priority: from -2**31 to 2**31 - 1; lower ones are admitted first and preempted last. cache_salt: it shares cached
    prefixes only with requests of the same salt, of at most 256 characters. Raises InvalidRequestError.
    """

    priority: int = 0
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if not -(2**31) <= self.priority < 2**31:
            raise InvalidRequestError(f"priority={self.priority} must be from {-(2**31)} to {2**31 - 1}")
        if len(self.cache_salt) > MAX_SALT:
            raise InvalidRequestError(f"cache_salt has {len(self.cache_salt)} characters; the limit is {MAX_SALT}")


USUAL = Service()


class Prepared(NamedTuple):
    """A request that passed every check. text: None for a token-id prompt. media: of a prompt that is more."""

    text: str | None
    ids: tuple[int, ...]
    params: SamplingParams
    service: Service = USUAL
    media: Media | None = None


class Receipt(NamedTuple):
    """For the engine: the first `upto` output tokens are returned to the user; cut: and it ends there."""

    child: int
    upto: int
    cut: bool


def default_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams with the model's generation_config, where it names one of these."""
    if generation_config.get("do_sample") is False:
        return SamplingParams()
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return SamplingParams(**{k: generation_config[k] for k in names if generation_config.get(k) is not None})


def prepare(
    prompt: Prompt,
    params: SamplingParams,
    tokenizer: Tokenizer,
    limits: Limits,
    grammars: Grammars,
    service: Service = USUAL,
) -> Prepared:
    """Text to ids, and every check that can refuse the request. Raises InvalidRequestError with value and limit.

    A grammar is compiled for the check, which blocks for as long.
    """
    text = prompt if isinstance(prompt, str) else None
    if isinstance(prompt, Mapping):
        raise InvalidRequestError("a prompt with prompt_embeds or grids is taken by LLM only, not by a server")
    ids = tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    vocab, context = limits.vocab_size, limits.max_model_len
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab:
            raise InvalidRequestError(f"prompt token id {i!r} must be a whole number from 0 to {vocab - 1}")
    for i in params.stop_token_ids:
        if i >= vocab:
            raise InvalidRequestError(f"stop token id {i} must be below the vocabulary size {vocab}")
    for name in params.logits_processors or ():
        if name not in limits.processors:
            known = ", ".join(limits.processors) or "it has none"
            raise InvalidRequestError(f"logits_processors {name[:40]!r} is not one of the engine's: {known}")
    for i in params.logit_bias or ():
        if i >= vocab:
            raise InvalidRequestError(f"logit_bias token id {i} must be below the vocabulary size {vocab}")
    if not ids:
        raise InvalidRequestError("the prompt is empty; it needs at least one token")
    if len(ids) >= context:
        raise InvalidRequestError(f"the prompt has {len(ids)} tokens; the limit is {context - 1} (context {context})")
    if params.max_tokens is not None and len(ids) + params.max_tokens > context:
        raise InvalidRequestError(
            f"max_tokens={params.max_tokens} and a prompt of {len(ids)} tokens exceed the context of {context}; "
            f"at most {context - len(ids)} fit"
        )
    if params.min_tokens > context - len(ids):
        raise InvalidRequestError(f"min_tokens={params.min_tokens} is above the {context - len(ids)} tokens that fit")
    stops, most = len(limits.stop_ids(params)), limits.max_stop_ids
    if stops > most:
        raise InvalidRequestError(f"{stops} stop token ids; the limit is {most}")
    drafts, engine = params.num_drafts, limits.num_drafts
    if drafts is not None and drafts > engine:
        why = f"the engine makes {engine} drafts per round" if engine else "the engine has no drafter"
        raise InvalidRequestError(f"speculative={drafts}, but {why}; the limit is {engine}")
    if params.stop and not tokenizer.present:
        raise InvalidRequestError(f"stop={list(params.stop)!r} needs a tokenizer, and this model has none")
    for name, listed in (
        ("allowed_token_ids", (params.allowed_token_ids or (),)),
        ("bad_word_ids", params.bad_word_ids),
    ):
        for i in (i for some in listed for i in some):
            if i >= vocab:
                raise InvalidRequestError(f"{name}: token id {i} must be below the vocabulary size {vocab}")
    if params.bad_words:
        if not tokenizer.present:
            raise InvalidRequestError(
                f"bad_words={list(params.bad_words)!r:.100} needs a tokenizer; this model has none"
            )
        more = bad_word_ids(tokenizer, params.bad_words)
        params = replace(params, bad_words=(), bad_word_ids=(*params.bad_word_ids, *more))
    if params.structured_outputs is not None:
        grammars.check(params.structured_outputs)
    return Prepared(text, ids, params, service)


@dataclass
class Answer:
    """A request in flight: its output so far, one text stream per child.

    open: children that have not ended. needs_ack: it has stop strings, so each event gets a receipt.
    """

    output: RequestOutput
    streams: list[TextStream]
    needs_ack: bool
    tokenizer: Tokenizer
    open: set[int] = field(default_factory=set)

    @classmethod
    def begin(cls, request_id: str, request: Prepared, tokenizer: Tokenizer, limits: Limits) -> Answer:
        params = request.params
        drafts = limits.num_drafts if params.num_drafts is None else params.num_drafts
        outputs = [CompletionOutput(i) for i in range(params.n)]
        if params.logprobs is not None:
            for out in outputs:
                out.logprobs = []
        return cls(
            output=RequestOutput(request_id, request.text, list(request.ids), outputs, num_drafts=drafts),
            streams=[TextStream.for_request(tokenizer, params, continues=True) for _ in outputs],
            needs_ack=bool(params.stop),
            tokenizer=tokenizer,
            open=set(range(params.n)),
        )

    def requests(self, request: Prepared, limits: Limits, key: int) -> list[Request]:
        """One per child, as the engine takes them. key: their noise key, see `sampling.rng.request_key`."""
        params, context = request.params, limits.max_model_len
        salt, media = request.service.cache_salt, request.media
        # Token ids do not say what a picture shows.
        salt = salt if media is None else f"{salt}\0{media.key}"
        max_len = context if params.max_tokens is None else len(request.ids) + params.max_tokens
        return [
            Request(
                request_id=self.output.request_id, prompt_token_ids=request.ids, params=params, child=child, key=key,
                stop_ids=limits.stop_ids(params), max_len=max_len, needs_ack=self.needs_ack,
                num_drafts=params.num_drafts, salt=salt, priority=request.service.priority, media=media,
            )
            for child in range(params.n)
        ]  # fmt: skip

    def take(self, event: TokenEvent) -> tuple[StreamChunk, Receipt | None]:
        """Tokens of an open child to text. The last chunk of the last child carries the output."""
        out, stream = self.output.outputs[event.child], self.streams[event.child]
        before = len(out.token_ids)
        tokens, reason, receipt = list(event.tokens), event.finish_reason, None
        delta = stream.push(tokens, stop_token=reason == "stop")
        text = delta.text
        if delta.cut is not None:
            tokens = tokens[: delta.cut - before]
            reason = "stop"
            receipt = Receipt(event.child, delta.cut, cut=True)
        elif self.needs_ack:
            receipt = Receipt(event.child, before + len(tokens), cut=False)
        if event.drafted is not None and tokens:
            self.output.spec.add_round(event.drafted, min(event.accepted, len(tokens)), len(tokens))
        out.token_ids += tokens
        logprobs = None
        if out.logprobs is not None:  # one for each token that is returned, none for what a cut took away
            logprobs = self._logprobs(tokens, (event.logprobs or ())[: len(tokens)])
            out.logprobs += logprobs
        if event.prompt_logprobs is not None:
            self.output.prompt_logprobs = [
                None, *self._logprobs(self.output.prompt_token_ids[1:], event.prompt_logprobs)
            ]  # fmt: skip
        if reason is not None:
            text += stream.finish()
            out.finish_reason, out.error = reason, event.error
            self.open.discard(event.child)
        out.text += text
        output = None if self.open else self.output
        accepted = min(event.accepted, len(tokens))
        return StreamChunk(text, tokens, accepted, event.child, reason, output, logprobs), receipt

    def _logprobs(self, tokens: Sequence[int], values: Sequence[TokenLogprob]) -> list[Logprobs]:
        return [
            {
                token: Logprob(of.logprob, of.rank, self._text(token)),
                **{i: Logprob(x, rank, self._text(i)) for rank, (i, x) in enumerate(of.top, 1) if i != token},
            }
            for token, of in zip(tokens, values, strict=True)
        ]

    def _text(self, token: int) -> str | None:
        return self.tokenizer.token_bytes(token).decode("utf-8", "replace") if self.tokenizer.present else None
