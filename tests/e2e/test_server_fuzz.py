"""Bodies that nobody should send: none crashes the server, none gives a 5xx, none leaks a slot or a page."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
for extra in ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client"):
    pytest.importorskip(extra)

from tests.support.hostile import ROUTES, hostile
from tests.support.server import ENGINE, RunningServer, served_models

CLIENTS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Short contexts: a body that asks for all the tokens there are costs little."""
    models = served_models(tmp_path_factory.mktemp("fuzz"))
    words = (models["target"], "--draft", models["draft"], "--run-ahead", "2", "--max-model-len", "64", *ENGINE)
    with RunningServer(*words) as running:
        yield running


def fuzz(server: RunningServer, count: int, seed: int) -> Counter[tuple[str, int]]:
    """Send `count` bodies from a few clients; how often each route gave each status."""
    seen: Counter[tuple[str, int]] = Counter()
    wrong: list[Any] = []

    def client(number: int) -> None:
        rng = random.Random(f"{seed},{number}")
        for _ in range(count // CLIENTS):
            route, body = hostile(rng)
            try:
                answer = server.http.post(route, content=body)
            except httpx.HTTPError as error:
                wrong.append((route, body[:500], repr(error)))
                continue
            seen[route, answer.status_code] += 1
            errors = "Traceback" in answer.text or "slipstream/" in answer.text
            broken = "data: " in answer.text and "[DONE]" not in answer.text and '"error"' not in answer.text
            if answer.status_code >= 500 or errors or broken:
                wrong.append((route, body[:500], answer.status_code, answer.text[:500]))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:5]
    return seen


def check_after(server: RunningServer) -> None:
    state = server.idle()
    assert not [line for line in server.log if "Traceback" in line or '"level": "error"' in line]
    assert state["counters"].get("finished_error", 0) == 0
    answer = server.post("/v1/completions", prompt=[5, 9], max_tokens=4, temperature=0, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 4


def test_500_hostile_bodies(server: RunningServer) -> None:
    seen = fuzz(server, 500, seed=1)
    check_after(server)
    for route in ROUTES:  # the control: bodies of both kinds reach every route
        assert seen[route, 200] > 5 and seen[route, 400] > 20, seen


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_20000_hostile_bodies(server: RunningServer) -> None:
    fuzz(server, 20_000, seed=2)
    check_after(server)


SCHEMATHESIS = pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed")


def schemathesis(server: RunningServer, folder: Path, *words: str) -> None:
    """Bodies made from our OpenAPI document: no 5xx, and every answer is as the document says."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    url = f"{server.url}/openapi.json"
    more = ("--checks", checks, "--request-timeout", "120", *words)
    command = [sys.executable, "-m", "schemathesis.cli", "run", url, *more]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0 and "10 selected" in done.stdout, done.stdout[-4000:] + done.stderr[-1000:]
    check_after(server)


@SCHEMATHESIS
def test_schemathesis_finds_nothing(server: RunningServer, tmp_path: Path) -> None:
    schemathesis(server, tmp_path, "--phases", "fuzzing", "--max-examples", "10", "--seed", "1")


@SCHEMATHESIS
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_schemathesis_finds_nothing_in_a_long_run(server: RunningServer, tmp_path: Path) -> None:
    schemathesis(server, tmp_path, "--phases", "examples,coverage,fuzzing", "--max-examples", "200", "--seed", "2")
