"""What the offline facade gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.types import SpecStats


@dataclass(frozen=True)
class Logprob:
    """Of one token at one position: its log-probability by the model alone, before penalties, biases, temperature and
    filters; its rank, 1 for the likeliest; its text, U+FFFD for what is no whole character, None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


Logprobs = dict[int, Logprob]
"""Of one position: the token that stands there first, then the likeliest ones."""


@dataclass
class CompletionOutput:
    """One of a request's n continuations. finish_reason: "stop", "length", "abort" or "error".

    logprobs: one entry per token of token_ids; None unless asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[Logprobs] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over token_ids; None unless asked for."""
        if self.logprobs is None:
            return None
        return sum(of[token].logprob for of, token in zip(self.logprobs, self.token_ids, strict=True))


@dataclass
class RequestOutput:
    """A request's result. prompt is None for token-id prompts. spec: its draft statistics over all n.

    num_drafts: most drafts per round that it could have, 0 where speculation was off for it.
    prompt_logprobs: one entry per prompt token, None for the first, which follows nothing; None unless asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    spec: SpecStats = field(default_factory=SpecStats)
    num_drafts: int = 0
    prompt_logprobs: list[Logprobs | None] | None = None

    @property
    def finished(self) -> bool:
        return all(o.finish_reason is not None for o in self.outputs)


@dataclass(frozen=True)
class StreamChunk:
    """A piece of a streamed answer: new text, its token ids, how many of the first ones accepted drafts gave.

    Text may lag behind its tokens (unfinished characters, possible stop strings). `output` comes on the
    last chunk only. logprobs: one entry per token id, None unless asked for.
    """

    text: str
    token_ids: list[int]
    accepted: int = 0
    index: int = 0
    finish_reason: str | None = None
    output: RequestOutput | None = None
    logprobs: list[Logprobs] | None = None
