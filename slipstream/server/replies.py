"""Shapes of what the server answers: choices, chunks, usage, errors. Plain dictionaries in, JSON out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.outputs import CompletionOutput, RequestOutput, StreamChunk
from slipstream.server import logprobs
from slipstream.text import Tokenizer
from slipstream.text.detokenizer import IncrementalDetokenizer
from slipstream.text.turns import CallDelta, Turn
from slipstream.types import Round, SpecStats

MAX_ERROR_CHARS = 500


def as_json(value: Any) -> bytes:
    """ASCII only, so that it can carry whatever characters a client sent; never NaN."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message[:MAX_ERROR_CHARS], "type": kind, "param": param, "code": code}}


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens, and under "speculative" the draft statistics over all choices, see `SpecStats`."""
    counts: Counter[Round] = Counter()
    for output in outputs:
        counts.update(output.spec.counts)
    spec = SpecStats(counts)
    prompt = sum(len(o.prompt_token_ids) for o in outputs)
    completion = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {
            "accepted_prediction_tokens": spec.accepted,
            "rejected_prediction_tokens": spec.drafted - spec.accepted,
        },
        "speculative": spec.as_dict(),
    }


class Shape:
    """How one route writes its choices. chat: messages and deltas, else text.

    token_ids: with the ids; chunks then have the text that each token adds (no stop string holds it back), and how many
    of their first tokens came from accepted drafts.
    echo: the choices' prompts as text, to stand before the answers; None: they do not. silent: the answers themselves
    are left out (max_tokens=0). turn: reads a chat's answers, see `formats.Conversation`. top: alternatives in a chat's
    log-probabilities.
    """

    def __init__(
        self, *, chat: bool, head: dict[str, Any], token_ids: bool, tokenizer: Tokenizer, top: int = 0,
        echo: Sequence[str] | None = None, silent: bool = False, turn: Callable[[], Turn] | None = None,
    ) -> None:  # fmt: skip
        self.chat = chat
        self.echo, self._silent, self._top = echo, silent, top
        self._turn, self._turns = turn, dict[int, Turn]()
        self._offsets: Counter[int] = Counter()
        self._head = {**head, "object": "chat.completion" if chat else "text_completion"}
        self._chunk_head = {**head, "object": "chat.completion.chunk" if chat else "text_completion"}
        self._token_ids = token_ids
        self._tokenizer = tokenizer
        self._texts: dict[int, IncrementalDetokenizer] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        of_prompts = [o.prompt_logprobs and logprobs.prompt(o.prompt_logprobs) for o in outputs]
        for output, of_prompt in zip(outputs, of_prompts, strict=True):
            for out in output.outputs:
                if self._silent:
                    self._silence(out)
                choice: dict[str, Any] = {"index": len(choices), "logprobs": None, "finish_reason": out.finish_reason}
                if out.logprobs is not None:
                    choice["logprobs"] = self._logprobs(output, out)
                if self.chat:
                    choice["message"], choice["finish_reason"] = self._message(out.text, out.finish_reason)
                else:
                    choice["text"] = ("" if self.echo is None else self.echo[len(choices)]) + out.text
                    if of_prompt is not None:
                        choice["prompt_logprobs"] = of_prompt
                if self._token_ids:
                    choice["token_ids"] = out.token_ids
                    choice["prompt_token_ids"] = output.prompt_token_ids
                choices.append(choice)
        extra = {"prompt_logprobs": of_prompts[0]} if self.chat and of_prompts[0] is not None else {}
        return {**self._head, "choices": choices, "usage": usage(outputs), **extra}

    def _message(self, text: str, reason: str | None) -> tuple[dict[str, Any], str | None]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._turn is None:
            return message, reason
        turn = self._turn()
        parts = (turn.feed(text), turn.finish())
        calls: list[dict[str, Any]] = []
        for call in (c for part in parts for c in part.calls):
            if call.call == len(calls):
                calls.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}})
            calls[call.call]["function"]["arguments"] += call.arguments
        message["content"] = "".join(p.content for p in parts) or (None if calls else "")
        if reasoning := "".join(p.reasoning for p in parts):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message, _reason(turn, reason)

    def _silence(self, out: CompletionOutput) -> None:
        out.text, out.token_ids, out.finish_reason = "", [], "length"
        out.logprobs = None if out.logprobs is None else []

    def _logprobs(self, output: RequestOutput, out: CompletionOutput) -> dict[str, Any]:
        assert out.logprobs is not None
        if self.chat:
            return logprobs.chat(out.token_ids, out.logprobs, self._tokenizer, self._top)
        tokens, entries = list(out.token_ids), [*out.logprobs]
        if self.echo is not None and output.prompt_logprobs is not None:
            of_prompt = [*output.prompt_logprobs, *entries]
            return logprobs.completion([*output.prompt_token_ids, *tokens], of_prompt, self._tokenizer, 0)
        return logprobs.completion(tokens, entries, self._tokenizer, 0)

    def said(self, index: int) -> dict[str, Any]:
        """The first chunk of a choice that echoes its prompt."""
        assert self.echo is not None
        return self._one({"index": index, "text": self.echo[index], "logprobs": None, "finish_reason": None})

    def role(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat choice."""
        return self._one({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def piece(self, index: int, chunk: StreamChunk) -> dict[str, Any] | None:
        """None for a chunk that shows nothing (its text is still held back)."""
        delta, reason = self._delta(index, chunk) if self.chat else ({}, chunk.finish_reason)
        shows = bool(delta) if self.chat else bool(chunk.text)
        if not shows and reason is None and not self._token_ids and not chunk.logprobs:
            return None
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": reason}
        if self.chat:
            choice["delta"] = delta
        else:
            choice["text"] = chunk.text
        if self._token_ids:
            choice["token_ids"] = chunk.token_ids
            choice["token_texts"] = self._token_texts(index, chunk.token_ids)
            choice["accepted_tokens"] = chunk.accepted
        if chunk.logprobs is not None and self.chat:
            choice["logprobs"] = logprobs.chat(chunk.token_ids, chunk.logprobs, self._tokenizer, self._top)
        elif chunk.logprobs is not None:
            of = logprobs.completion(chunk.token_ids, chunk.logprobs, self._tokenizer, self._offsets[index])
            self._offsets[index] += sum(len(name) for name in of["tokens"])
            choice["logprobs"] = of
        return self._one(choice)

    def _delta(self, index: int, chunk: StreamChunk) -> tuple[dict[str, Any], str | None]:
        """What a chunk adds to the choice's message, and the reason if it is its end."""
        if self._turn is None:
            return ({"content": chunk.text} if chunk.text else {}), chunk.finish_reason
        if index not in self._turns:
            self._turns[index] = self._turn()
        turn = self._turns[index]
        parts = [turn.feed(chunk.text)] + ([turn.finish()] if chunk.finish_reason is not None else [])
        delta: dict[str, Any] = {}
        if content := "".join(p.content for p in parts):
            delta["content"] = content
        if reasoning := "".join(p.reasoning for p in parts):
            delta["reasoning_content"] = reasoning
        if calls := [c for p in parts for c in p.calls]:
            delta["tool_calls"] = [_call_delta(c) for c in calls]
        return delta, _reason(turn, chunk.finish_reason)

    def _token_texts(self, index: int, token_ids: Sequence[int]) -> list[str]:
        if not self._tokenizer.present:
            return [""] * len(token_ids)
        if index not in self._texts:
            self._texts[index] = IncrementalDetokenizer(self._tokenizer, continues=True)
        return [self._texts[index].push((token_id,)) for token_id in token_ids]

    def last(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The chunk of stream_options.include_usage."""
        return {**self._chunk_head, "choices": [], "usage": usage(outputs)}

    def _one(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._chunk_head, "choices": [choice]}


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.call, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.call, "id": call.id, "type": "function", "function": function}


def _reason(turn: Turn, reason: str | None) -> str | None:
    return "tool_calls" if turn.calls and reason == "stop" else reason
