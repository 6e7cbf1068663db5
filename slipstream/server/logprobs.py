"""Log-probabilities as the two routes write them. JSON has no infinities: what is below LEAST is written as LEAST."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.outputs import Logprob, Logprobs
from slipstream.text import Tokenizer

LEAST = -9999.0


def _value(of: Logprob) -> float:
    return of.logprob if of.logprob > LEAST else LEAST  # NaN too


def _name(token: int, tokenizer: Tokenizer) -> str:
    """Its text; of a model without a tokenizer its id."""
    return tokenizer.token_bytes(token).decode("utf-8", "replace") if tokenizer.present else f"token_id:{token}"


def completion(
    tokens: Sequence[int], entries: Sequence[Logprobs | None], tokenizer: Tokenizer, offset: int
) -> dict[str, Any]:
    """Of a text completion. entries: None where a token follows nothing. offset: of the first token in the text."""
    names = [_name(t, tokenizer) for t in tokens]
    offsets, at = [], offset
    for name in names:
        offsets.append(at)
        at += len(name)
    return {
        "tokens": names,
        "token_logprobs": [None if of is None else _value(of[t]) for t, of in zip(tokens, entries, strict=True)],
        "top_logprobs": [
            None if of is None else {_name(t, tokenizer): _value(x) for t, x in of.items()} for of in entries
        ],
        "text_offset": offsets,
    }


def chat(tokens: Sequence[int], entries: Sequence[Logprobs], tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    """Of a chat answer; `top` alternatives for each token."""

    def one(token: int, of: Logprob) -> dict[str, Any]:
        raw = list(tokenizer.token_bytes(token)) if tokenizer.present else None
        return {"token": _name(token, tokenizer), "logprob": _value(of), "bytes": raw}

    return {
        "content": [
            {
                **one(token, of[token]),
                "top_logprobs": [one(t, x) for t, x in sorted(of.items(), key=lambda p: p[1].rank)[:top]],
            }
            for token, of in zip(tokens, entries, strict=True)
        ],
        "refusal": None,
    }


def prompt(entries: Sequence[Logprobs | None]) -> list[dict[str, Any] | None]:
    """Of a prompt's tokens, by id."""
    return [
        None if of is None
        else {
            str(t): {"logprob": _value(x), "rank": x.rank, "decoded_token": x.decoded_token} for t, x in of.items()
        }
        for of in entries
    ]  # fmt: skip
