"""What the offline facade gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.types import SpecStats


@dataclass
class CompletionOutput:
    """One of a request's n continuations. finish_reason: "stop", "length", "abort" or "error"."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None


@dataclass
class RequestOutput:
    """A request's result. prompt is None for token-id prompts. spec: its draft statistics over all n.

    num_drafts: most drafts per round that it could have, 0 where speculation was off for it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    spec: SpecStats = field(default_factory=SpecStats)
    num_drafts: int = 0

    @property
    def finished(self) -> bool:
        return all(o.finish_reason is not None for o in self.outputs)


@dataclass(frozen=True)
class StreamChunk:
    """A piece of a streamed answer: new text, its token ids, how many of the first ones accepted drafts gave.

    Text may lag behind its tokens (unfinished characters, possible stop strings). `output` comes on the
    last chunk only.
    """

    text: str
    token_ids: list[int]
    accepted: int = 0
    index: int = 0
    finish_reason: str | None = None
    output: RequestOutput | None = None
