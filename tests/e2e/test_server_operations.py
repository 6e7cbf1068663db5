"""Running the server: ids and logs, metrics, the admin port, what browsers of other sites may do, a stalled engine."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
for extra in ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client"):
    pytest.importorskip(extra)

from slipstream.answers import Service
from slipstream.errors import InvalidRequestError
from slipstream.server.engine_client import STACKS, EngineClient
from slipstream.server.guard import Guard
from slipstream.server.openapi import LIMITS, schemas
from slipstream.server.telemetry import Telemetry
from slipstream.types import SamplingParams
from tests.support.server import ENGINE, REPO, RunningServer, served_models, until

PROMPT = "w5 w9 w31 w7 w60"
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return served_models(tmp_path_factory.mktemp("operations"))


@pytest.fixture(scope="module")
def server(models: dict[str, str]) -> Iterator[RunningServer]:
    words = (models["target"], "--draft", models["draft"], "--run-ahead", "2", "--admin-port", "0", *ENGINE)
    with RunningServer(*words, key="sesame") as running:
        yield running
        running.http.get("/health")
        assert running.admin.get("/server_info").json()["engine"]["idle"]


def lines(server: RunningServer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log]


def logged(server: RunningServer, request_id: str) -> dict[str, Any]:
    return until(lambda: next((e for e in lines(server) if e.get("request_id") == request_id), None), 10)


# -- ids and logs ----------------------------------------------------------------------------------------------------


def test_a_request_keeps_the_id_it_came_with(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, **GREEDY}
    for stream in (False, True):
        name = f"client:{stream}-1.0"
        answer = server.http.post("/v1/completions", json={**body, "stream": stream}, headers={"x-request-id": name})
        assert answer.headers["x-request-id"] == name
        entry = logged(server, name)
        assert (entry["method"], entry["path"], entry["status"]) == ("POST", "/v1/completions", 200)
        assert (entry["prompt_tokens"], entry["completion_tokens"], entry["finish"]) == (5, 6, ["length"])
        assert 0 < entry["ttft"] <= entry["seconds"] and 0 < entry["accepted"] < 6
    for bad in ("a b", "x" * 129, 'a"b', ""):
        got = server.http.get("/version", headers={"x-request-id": bad}).headers["x-request-id"]
        assert re.fullmatch("req-[0-9a-f]{32}", got)
    assert logged(server, server.http.post("/v1/completions", json={}).headers["x-request-id"])["status"] == 400


def test_the_log_is_json_and_holds_no_text_and_no_key(server: RunningServer) -> None:
    server.http.post("/v1/completions", json={"prompt": "w77 w78", "max_tokens": 2, "cache_salt": "w79"})
    server.http.post("/v1/completions", content=b'{"prompt": "w77", "w78": 1}')
    server.http.get("/version", headers={"authorization": "Bearer w77"})
    assert {"time", "level", "event"} <= set(lines(server)[-1])
    assert not [line for line in server.log if "w77" in line or "w78" in line or "w79" in line or "sesame" in line]


# -- metrics ---------------------------------------------------------------------------------------------------------


def series(text: str) -> dict[str, float]:
    return {n: float(v) for n, v in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")}


def test_every_metric_is_documented_and_adds_up(server: RunningServer) -> None:
    before = series(server.admin.get("/metrics").text)
    for i in range(3):
        server.post("/v1/completions", prompt=[5 + i] * 40, max_tokens=30, n=2, **GREEDY)
    text = server.admin.get("/metrics").text
    assert "_created" not in text
    now = series(text)
    families = set(re.findall(r"^# TYPE (\S+)", text, re.M))
    documented = set(re.findall(r"`(slipstream_\w+)`", (REPO / "docs" / "serving.md").read_text()))
    assert families == documented

    def more(name: str) -> float:
        return now[f"slipstream_{name}"] - before.get(f"slipstream_{name}", 0.0)

    assert more("prompts_total") == 3 and more("output_tokens_total") == 180
    for name in ("time_to_first_token", "time_per_output_token", "request"):
        assert more(f"{name}_seconds_count") == 6, name
    assert more("engine_queue_seconds_count") == 6
    assert more("inter_token_seconds_count") == 180 - 6, "one per token after the first, however they are chunked"
    assert more("engine_round_tokens_total") == 180 - 6
    accepted, drafted = more("engine_accepted_tokens_total"), more("engine_drafted_tokens_total")
    assert 0 < accepted <= drafted and more("engine_round_tokens_total") == more("engine_rounds_total") + accepted
    for kind, total in (("accepted", accepted), ("drafted", drafted)):
        positions = [more(f'engine_{kind}_by_position_total{{position="{i}"}}') for i in range(3)]
        assert sum(positions) == total and positions == sorted(positions, reverse=True)
    assert more("engine_device_busy_seconds_total") > 0 and more("engine_device_idle_seconds_total") > 0
    assert 0 < more("engine_frame_seconds_count") <= more("engine_frames_total")
    assert more('http_responses_total{code="200"}') >= 4
    assert now["slipstream_engine_up"] == 1 and now["slipstream_engine_stalled"] == 0
    assert now["slipstream_kv_pages"] >= now["slipstream_kv_pages_free"] + now["slipstream_kv_pages_cached"]


def test_tokens_of_one_chunk_share_its_time() -> None:
    telemetry = Telemetry()
    telemetry.tokens(4, 0.02)
    assert (telemetry.inter_token.total, telemetry.inter_token.sum) == (4, pytest.approx(0.02))
    assert telemetry.inter_token.counts[telemetry.inter_token.bounds.index(0.006)] == 4


def test_the_page_gets_a_timeline(server: RunningServer) -> None:
    server.post("/v1/completions", prompt=PROMPT, max_tokens=30, **GREEDY)
    data = server.admin.get("/stats").json()
    assert data["health"] == "ok" and data["num_drafts"] == 3 and data["answers"]["prompts"] >= 1
    rows = data["engine"]["timeline"]
    assert 5 < len(rows) <= 64
    for before, after in itertools.pairwise(rows):
        assert before["plan"][0] <= before["plan"][1] == before["launch"][0] <= before["device"][1]
        assert before["device"][1] <= after["device"][0] + 1e-3, "one launch after the other"


# -- who may do what -------------------------------------------------------------------------------------------------


def test_the_admin_port_has_what_the_public_one_lost(server: RunningServer) -> None:
    for path in ("/metrics", "/stats", "/server_info"):
        assert server.http.get(path).status_code == 404, path
        assert server.admin.get(path).status_code == 200, path
        assert httpx.get(f"{server.admin.base_url}".rstrip("/") + path).status_code == 401, path
    assert server.admin.base_url.host == "127.0.0.1"
    assert server.admin.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}).status_code == 200


def test_a_browser_gives_the_key_as_a_password(server: RunningServer) -> None:
    def ask(word: str, path: str = "/version") -> Any:
        words = base64.b64encode(word.encode()).decode()
        return httpx.get(server.url + path, headers={"authorization": f"Basic {words}"})

    assert ask("any:sesame").status_code == 200
    for wrong in ("any:open", "sesame", "sesame:", ":", "any:sesam"):
        assert ask(wrong).status_code == 401, wrong
    assert httpx.get(f"{server.url}/version", headers={"authorization": "Basic %%%"}).status_code == 401
    assert "Basic" in httpx.get(f"{server.url}/").headers["www-authenticate"]


@pytest.mark.parametrize(
    ("origin", "status"),
    [("https://evil.example", 403), ("null", 403), ("http://127.0.0.1:1", 403), ("", 403), (None, 200), ("own", 200)],
)
def test_pages_of_other_sites_are_refused(server: RunningServer, origin: str | None, status: int) -> None:
    headers = {} if origin is None else {"origin": server.url if origin == "own" else origin}
    answer = server.http.post("/tokenize", json={"prompt": "w5"}, headers=headers)
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers


def test_headers_are_capped(server: RunningServer) -> None:
    with pytest.raises(httpx.HTTPError):
        server.http.get("/version", headers={"x-big": "a" * (1 << 20)}).raise_for_status()
    assert server.http.get("/version").status_code == 200


def test_a_body_that_does_not_come_is_given_up() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass

    async def never() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    guard = Guard(app, [], Telemetry(), body_seconds=0.05)
    asyncio.run(asyncio.wait_for(guard(scope, never, send), 5))
    assert sent[0]["status"] == 500, "bare of the routes' own handlers, which answer 408"


def test_a_slow_body_is_answered_408(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.server import app as routes

    class Engine:
        telemetry = Telemetry()

    built = routes.build_app(routes.Server(Engine(), name="m", watchdog=1.0), [])  # type: ignore[arg-type]
    built._seconds = 0.05

    async def scenario() -> int:
        status: list[int] = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])

        async def never() -> Any:
            await asyncio.Event().wait()

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b"",
            "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 1), "root_path": "",
        }  # fmt: skip
        await asyncio.wait_for(built(scope, never, send), 5)
        return status[0]

    assert asyncio.run(scenario()) == 408


def test_an_internal_error_shows_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    from starlette.testclient import TestClient

    from slipstream.server import app as routes

    class Engine:
        telemetry = Telemetry()
        dead = None

        def stalled(self, seconds: float) -> bool:
            raise RuntimeError("/secret/path line 7")

    built = routes.build_app(routes.Server(Engine(), name="m", watchdog=1.0), [])  # type: ignore[arg-type]
    with TestClient(built, raise_server_exceptions=False) as client:
        answer = client.get("/health")
    error = answer.json()["error"]
    assert answer.status_code == 500 and error["message"] == f"internal error in {answer.headers['x-request-id']}"
    assert "secret" not in answer.text and "Traceback" not in answer.text


# -- the document ----------------------------------------------------------------------------------------------------


def test_the_document_has_every_body_with_its_limits(server: RunningServer) -> None:
    document = server.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["$ref"].removeprefix("#/components/schemas/") in document["components"]["schemas"]
    assert "/metrics" not in document["paths"], "moved to the admin port"
    fields = schemas()["CompletionBody"]["properties"]
    assert schemas()["CompletionBody"]["additionalProperties"] is False
    assert fields["seed"]["anyOf"][0]["maximum"] == 2**64 - 1


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_the_limits_in_the_document_are_the_real_ones(name: str) -> None:
    low, high = LIMITS[name]
    real = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}.get(name, name)

    def make(value: float) -> Any:
        if name == "priority":
            return Service(priority=int(value))
        return SamplingParams(**{"max_tokens": None, real: value})

    reals = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    step = 0.5 if name in reals else 1
    for good in (high, low + step if name in ("top_p", "repetition_penalty") else low):
        make(good)
    for bad in (low - step, high + step):
        with pytest.raises(InvalidRequestError, match=f"{real}="):
            make(bad)


# -- a stalled engine ------------------------------------------------------------------------------------------------

HANGS = """
import sys, time, threading
from slipstream.server.engine_process import show_stacks_on_signal
show_stacks_on_signal(sys.argv[1])
def the_place_where_it_hangs(): print("ready", flush=True); time.sleep(60)
the_place_where_it_hangs()
"""


def test_the_stacks_of_a_hanging_process_are_read(tmp_path: Path) -> None:
    class Folder:
        name = str(tmp_path)

    async def scenario() -> tuple[str, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", HANGS, str(tmp_path / STACKS), stdout=subprocess.PIPE, cwd=REPO
        )
        try:
            assert process.stdout is not None and await process.stdout.readline() == b"ready\n"
            engine = EngineClient(process, None, Folder, max_queue=1)
            first = await engine.stacks()
            os.kill(process.pid, signal.SIGSTOP)
            return first, await engine.stacks()
        finally:
            process.kill()
            await process.wait()

    running, stopped = asyncio.run(scenario())
    assert "the_place_where_it_hangs" in running and running.count("most recent call first") == 1
    assert "does not answer signals" in stopped


def test_a_stall_is_logged_with_its_requests(models: dict[str, str]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 150, "stream": True, **GREEDY}
    with RunningServer(models["target"], *ENGINE, "--watchdog-seconds", "0.5") as server:
        pid = server.info()["engine_pid"]
        with server.http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "stuck"}) as answer:
            rest = answer.iter_lines()
            assert next(rest).startswith("data: {")
            os.kill(pid, signal.SIGSTOP)
            entry = until(lambda: next((e for e in lines(server) if "no progress" in e["event"]), None), 20)
            assert entry["level"] == "error" and entry["request_ids"] == ["stuck"] and entry["engine_stacks"]
            assert series(server.http.get("/metrics").text)["slipstream_engine_stalled"] == 1
            os.kill(pid, signal.SIGCONT)
            until(lambda: any("progress again" in e["event"] for e in lines(server)), 20)
            assert [line for line in rest if line][-1] == "data: [DONE]"
        server.idle()


def test_a_port_that_is_taken_is_named(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    from slipstream.cli import main

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", "0", "--admin-port", port, models["target"], *ENGINE]) == 2
    assert f"--admin-port {port}" in capsys.readouterr().err
