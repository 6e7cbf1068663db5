"""Overload, and ends that are not clean: the server is killed, told twice to go, or given too little time."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
for extra in ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client"):
    pytest.importorskip(extra)

from tests.support.server import ENGINE, RunningServer, served_models, until

LONG = {"prompt": "w5 w9", "max_tokens": 500, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return served_models(tmp_path_factory.mktemp("ends"))


def gone(pid: int) -> bool:
    """No such process, or only its exit code is left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_overload_is_answered_and_passes(models: dict[str, str]) -> None:
    """24 clients on one slot and a queue of 4: 200 or 429 with a time to wait, and room for all that come back."""
    with RunningServer(models["target"], *ENGINE, "--max-slots", "1", "--max-queue", "4") as server:
        seen: Counter[int] = Counter()
        lock = threading.Lock()

        def client(number: int) -> None:
            body = {"prompt": [5 + number], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            for _ in range(500):
                answer = server.http.post("/v1/completions", json=body)
                with lock:
                    seen[answer.status_code] += 1
                if answer.status_code == 200:
                    return
                assert 1 <= int(answer.headers["retry-after"]) <= 60
                assert answer.json()["error"]["code"] == "queue_full"
                time.sleep(0.02)

        threads = [threading.Thread(target=client, args=(i,)) for i in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a request hangs"
        assert seen.keys() == {200, 429} and seen[200] == 24, seen
        too_many = server.http.post("/v1/completions", json={**LONG, "n": 6})
        assert too_many.status_code == 400 and "the limit is 5" in too_many.json()["error"]["message"]
        server.idle()


def streaming(server: RunningServer, lines: list[str]) -> threading.Thread:
    """A client that reads a long answer as far as it comes; started, with its first line there."""

    def read() -> None:
        try:
            with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
                for line in filter(None, answer.iter_lines()):
                    lines.append(line)
        except httpx.HTTPError as error:
            lines.append(repr(error))

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: lines, 20)
    return thread


@pytest.mark.parametrize("twice", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sigterm_waits_so_long_and_no_longer(models: dict[str, str], twice: bool) -> None:
    """The engine is stopped, so the answer never ends by itself."""
    seconds = "60" if twice else "1"
    with RunningServer(models["target"], *ENGINE, "--drain-seconds", seconds) as server:
        lines: list[str] = []
        pid = server.info()["engine_pid"]
        thread = streaming(server, lines)
        os.kill(pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: any("shutting down" in line for line in server.log), 10)
        refused: Any = None
        try:
            refused = server.http.post("/v1/completions", json=LONG)
        except httpx.HTTPError:
            pass
        assert refused is None or refused.status_code == 503
        if twice:
            server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.wait() == 0
        assert time.monotonic() - began < 20
        thread.join(20)
        assert not thread.is_alive() and "data: [DONE]" not in lines
        until(lambda: gone(pid), 20)


def test_a_killed_server_takes_its_engine_along(models: dict[str, str]) -> None:
    with RunningServer(models["target"], *ENGINE) as server:
        pid = server.info()["engine_pid"]
        server.process.kill()
        server.process.wait()
        until(lambda: gone(pid), 20)


def test_a_dead_engine_answers_whoever_waits(models: dict[str, str]) -> None:
    """Kill -9 of the engine: running and waiting requests get an error at once, streaming or not."""
    with RunningServer(models["target"], *ENGINE, "--max-slots", "1") as server:
        pid = server.info()["engine_pid"]
        lines: list[str] = []
        thread = streaming(server, lines)
        waiting: list[Any] = []
        whole = threading.Thread(target=lambda: waiting.append(server.http.post("/v1/completions", json=LONG)))
        whole.start()
        until(lambda: server.info()["engine"]["waiting"] == 1, 10)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        thread.join(20)
        whole.join(20)
        assert time.monotonic() - began < 3
        assert json.loads(lines[-1][6:])["error"]["code"] == "dead"
        [answer] = waiting
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "dead"
        assert server.http.get("/health").json() == {"status": "dead"}
        assert server.http.get("/metrics").text.count("slipstream_engine_up 0.0") == 1
        assert server.wait() == 70
