"""Clients for `slipstream bench serve`: they stream answers of any server that speaks OpenAI's API.

*Closed loop*: `concurrency` clients, each asks again as soon as it has its answer. *Open loop*: requests come as a
Poisson process of a given rate, whether earlier ones are answered or not: as users do, and what shows a queue.

Times are the client's, in seconds: ttft, request sent to the first text; e2e, to the end of the stream; tpot, first to
last text over the tokens after the first. Tokens are the server's count (usage), since a chunk may hold several.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from slipstream.errors import ConfigError

_clock = time.perf_counter
DONE = "[DONE]"
_DELTAS = ("content", "reasoning_content", "tool_calls")
Prompt = str | list[int]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where and how to ask. chat: messages, else plain completions, which may have token ids as prompts.

    fields: more of the body, for every request.
    """

    url: str
    model: str
    chat: bool
    fields: dict[str, Any]
    key: str | None = field(default=None, repr=False)
    timeout: float = 600.0


@dataclass
class Sample:
    """One request. tokens: of the answer; from_usage: counted by the server, else chunks with text were counted.

    rounds, round_tokens, accepted_per_position: draft statistics, where the server's usage has them. error: None or why
    it failed.
    """

    sent: float
    ttft: float | None = None
    last: float = 0.0
    e2e: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    from_usage: bool = False
    rounds: int = 0
    round_tokens: float = 0.0
    accepted_per_position: tuple[int, ...] = ()
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        if self.error is not None or self.ttft is None or self.tokens < 2:
            return None
        return (self.last - self.ttft) / (self.tokens - 1)


@dataclass(frozen=True)
class Load:
    """One point: either `concurrency` clients or `rate` requests per second."""

    concurrency: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        return f"concurrency {self.concurrency}" if self.concurrency else f"{self.rate:g} requests/s"


async def drive(
    target: Target, load: Load, prompts: Sequence[Prompt], seed: int, done: Callable[[], None] = lambda: None
) -> tuple[list[Sample], float]:
    """Ask every prompt once; the samples, and the seconds that all of it took."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.concurrency or 256)
    headers = {} if target.key is None else {"authorization": f"Bearer {target.key}"}
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=target.timeout, trust_env=False) as http:
        began = _clock()
        if load.concurrency:
            samples = await _closed(http, target, load.concurrency, prompts, done)
        else:
            samples = await _open(http, target, load.rate, prompts, random.Random(seed), done)
        return samples, _clock() - began


async def _closed(
    http: httpx.AsyncClient, target: Target, clients: int, prompts: Sequence[Prompt], done: Callable[[], None]
) -> list[Sample]:
    todo: Iterator[Prompt] = iter(prompts)
    samples: list[Sample] = []

    async def client() -> None:
        for prompt in todo:
            samples.append(await ask(http, target, prompt))
            done()

    await asyncio.gather(*(client() for _ in range(min(clients, len(prompts)))))
    return samples


async def _open(
    http: httpx.AsyncClient, target: Target, rate: float, prompts: Sequence[Prompt], rng: random.Random,
    done: Callable[[], None],
) -> list[Sample]:  # fmt: skip
    async def one(prompt: Prompt, at: float) -> Sample:
        await asyncio.sleep(max(0.0, at - _clock()))
        sample = await ask(http, target, prompt)
        done()
        return sample

    at, tasks = _clock(), []
    for prompt in prompts:
        tasks.append(asyncio.create_task(one(prompt, at)))
        at += rng.expovariate(rate)
    return list(await asyncio.gather(*tasks))


async def ask(http: httpx.AsyncClient, target: Target, prompt: Prompt) -> Sample:
    """One streamed request. What goes wrong is in the sample, not raised."""
    body: dict[str, Any] = {
        "model": target.model, "stream": True, "stream_options": {"include_usage": True}, **target.fields,
    }  # fmt: skip
    if target.chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    path = "/v1/chat/completions" if target.chat else "/v1/completions"
    sample, ended = Sample(sent=_clock()), False
    try:
        async with http.stream("POST", target.url + path, json=body) as answer:
            if answer.status_code != 200:
                sample.error = f"status {answer.status_code}: {(await answer.aread())[:300].decode('utf-8', 'replace')}"
                return sample
            async for line in answer.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == DONE:
                    ended = True
                    continue
                _read(sample, json.loads(data))
    except (httpx.HTTPError, ValueError) as error:
        sample.error = f"{type(error).__name__}: {error}"[:300]
    sample.e2e = _clock() - sample.sent
    if sample.error is None and not ended:
        sample.error = f"the stream ended without {DONE}"
    if sample.error is None and sample.ttft is None and sample.tokens == 0:
        sample.error = "the answer is empty"
    return sample


def _read(sample: Sample, event: dict[str, Any]) -> None:
    """One event of a stream."""
    if "error" in event:
        sample.error = str(event["error"])[:300]
        return
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        shown = (*(choice.get(k) for k in ("text", "token_ids")), *(delta.get(k) for k in _DELTAS))
        if any(shown):
            sample.last = _clock() - sample.sent
            if sample.ttft is None:
                sample.ttft = sample.last
            if not sample.from_usage:
                sample.tokens += 1
    usage = event.get("usage")
    if usage:
        sample.tokens, sample.from_usage = int(usage["completion_tokens"]), True
        sample.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        spec = usage.get("speculative") or {}
        sample.rounds = int(spec.get("rounds") or 0)
        sample.round_tokens = float(spec.get("acceptance_length") or 0.0) * sample.rounds
        sample.accepted_per_position = tuple(spec.get("accepted_per_position") or ())


def look_up(url: str, key: str | None) -> str:
    """Name of the first model that the server has. Raises ConfigError when it does not answer as OpenAI's does."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=30.0, trust_env=False)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.ConnectError as error:
        raise ConfigError(f"--url {url!r}: no server answers there: {error}") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--url {url!r}: /v1/models does not answer as OpenAI's does: {error}") from None


DRAFT_COUNTERS = (
    ("slipstream_engine_rounds_total", "slipstream_engine_round_tokens_total", False),
    ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total", True),
)
"""Rounds, tokens, and whether the tokens are without the bonus token of each round."""


def draft_counts(url: str, key: str | None) -> tuple[float, float] | None:
    """(rounds, tokens of rounds) that the server's /metrics has counted so far; None where it has none."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{url}/metrics", headers=headers, timeout=30.0, trust_env=False)
    except httpx.HTTPError:
        return None
    if answer.status_code != 200:
        return None
    sums: dict[str, float] = {}
    for line in answer.text.splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        if any(name in pair for pair in DRAFT_COUNTERS):
            sums[name] = sums.get(name, 0.0) + float(value)
    for rounds, tokens, without_bonus in DRAFT_COUNTERS:
        if sums.get(rounds):
            return sums[rounds], sums.get(tokens, 0.0) + (sums[rounds] if without_bonus else 0.0)
    return None
