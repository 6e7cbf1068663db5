"""bench serve against a scripted OpenAI server, and against our own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")

from slipstream.benchmark import serve
from slipstream.benchmark.load import Load, Sample, Target, _read, draft_counts, drive
from slipstream.cli import main

GAP = 0.03


class Script(ThreadingHTTPServer):
    """Chunks of two tokens, GAP seconds apart. usage: whether it counts tokens; bad: prompts that it refuses; cut:
    prompts whose streams end early."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.usage: dict[str, Any] | None = {"completion_tokens": 6, "prompt_tokens": 3}
        self.bad, self.cut = set[str](), set[str]()
        self.bodies: list[dict[str, Any]] = []
        self.auth: list[str | None] = []
        self.busy = self.most = 0
        self.lock = threading.Lock()
        self.metrics = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Script

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "scripted"}]}) if self.path == "/v1/models" else self.server.metrics
        self.send_response(200 if body else 404)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self) -> None:
        script = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with script.lock:
            script.bodies.append({"path": self.path, **body})
            script.auth.append(self.headers["authorization"])
            script.busy += 1
            script.most = max(script.most, script.busy)
        text = str(body["messages"][0]["content"] if "messages" in body else body["prompt"])
        if text in script.bad:
            self.send_response(429)
            self.end_headers()
            self.wfile.write(b'{"error": "full"}')
        else:
            self.send_response(200)
            self.end_headers()
            self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for i in range(3):
                time.sleep(GAP)
                if text in script.cut and i == 2:
                    break
                piece = {"delta": {"content": "two words"}} if "messages" in body else {"text": "two words"}
                self.event({"choices": [{"index": 0, **piece}]})
            else:
                if script.usage:
                    self.event({"choices": [], "usage": script.usage})
                self.wfile.write(b"data: [DONE]\n\n")
        with script.lock:
            script.busy -= 1

    def event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()


@pytest.fixture
def script() -> Iterator[Script]:
    with Script() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def load(script: Script, how: Load, prompts: list[str], **fields: Any) -> tuple[list[Sample], float]:
    target = Target(url=script.url, model="scripted", chat=fields.pop("chat", True), fields=fields)
    return asyncio.run(drive(target, how, prompts, seed=0))


def test_times_are_per_token_not_per_chunk(script: Script) -> None:
    [sample], seconds = load(script, Load(concurrency=1), ["hello"])
    assert (sample.tokens, sample.prompt_tokens, sample.from_usage, sample.error) == (6, 3, True, None)
    assert GAP <= sample.ttft < sample.last <= sample.e2e <= seconds and sample.e2e >= 3 * GAP
    assert sample.tpot == pytest.approx((sample.last - sample.ttft) / 5)
    script.usage = None
    [sample], _ = load(script, Load(concurrency=1), ["hello"])
    assert (sample.tokens, sample.from_usage) == (3, False), "chunks, when nobody counts"


def test_a_closed_loop_has_so_many_clients(script: Script) -> None:
    prompts = [f"p{i}" for i in range(10)]
    samples, _ = load(script, Load(concurrency=3), prompts)
    assert script.most == 3 and len(samples) == 10 and not any(s.error for s in samples)
    assert sorted(b["messages"][0]["content"] for b in script.bodies) == sorted(prompts)


def test_an_open_loop_waits_for_nobody(script: Script) -> None:
    samples, seconds = load(script, Load(rate=200.0), [f"p{i}" for i in range(12)])
    assert script.most > 4, "twelve requests in about 60 ms, each of 90 ms"
    assert len(samples) == 12 and seconds < 12 * 3 * GAP


def test_failures_are_counted_and_not_timed(script: Script) -> None:
    script.bad, script.cut = {"p1"}, {"p2"}
    samples, seconds = load(script, Load(concurrency=2), ["p0", "p1", "p2", "p3"])
    assert sorted(str(s.error)[:10] for s in samples) == ["None", "None", "status 429", "the stream"]
    out = serve.row(Load(concurrency=2), samples, seconds)
    assert (out["requests"], out["errors"], out["output_tokens"]) == (4, 2, 12)
    assert out["ttft_ms"]["p50"] >= GAP * 1e3


def test_tau_comes_from_usage_or_from_counters(script: Script) -> None:
    spec = {"rounds": 4, "acceptance_length": 1.5, "accepted_per_position": [2, 0]}
    script.usage = {"completion_tokens": 7, "speculative": spec}
    samples, seconds = load(script, Load(concurrency=2), ["a", "b"])
    out = serve.row(Load(concurrency=2), samples, seconds, tau=9.0)
    assert out["acceptance_length"] == 1.5 and out["accepted_per_position"] == [0.5, 0.0]
    script.metrics = (
        'vllm:spec_decode_num_drafts_total{engine="0"} 10.0\nvllm:spec_decode_num_drafts_total{engine="1"} 10.0\n'
        "vllm:spec_decode_num_accepted_tokens_total 30.0\n"
    )
    assert draft_counts(script.url, None) == (20.0, 50.0)
    assert serve._delta((20.0, 50.0), (30.0, 80.0)) == 3.0 and serve._delta((20.0, 50.0), (20.0, 50.0)) is None
    script.metrics = "slipstream_engine_rounds_total 8.0\nslipstream_engine_round_tokens_total 20.0\n"
    assert draft_counts(script.url, None) == (8.0, 20.0)
    script.metrics = ""
    assert draft_counts(script.url, None) is None


def test_spread_is_of_numpy_percentiles() -> None:
    out = serve.spread([i / 1000 for i in range(1, 101)])
    assert out == {"mean": 50.5, "p50": 50.5, "p95": 95.05, "p99": 99.01, "max": 100.0}
    assert serve.spread([]) is None


def test_the_command(script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"turns": ["two", "x"]}\n')
    words = ["bench", "serve", "--url", script.url, "--concurrency", "1,2", "--requests", "3", "--warmup", "1"]
    more = ["--prompts", f"{tmp_path}/p.jsonl", "--plot", f"{tmp_path}/a.png", "--json"]
    more += ["--output", f"{tmp_path}/a.json"]
    assert main([*words, *more, "--extra", '{"speculative": "off"}', "--api-key", "secret", "--completions"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [r["requests"] for r in report["rows"]] == [3, 3] and report["model"] == "scripted"
    assert "secret" not in json.dumps(report["command"])
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    kept = json.loads((tmp_path / "a.json").read_text())
    assert [len(s) for s in kept["samples"]] == [3, 3]
    assert {b["prompt"] for b in script.bodies} == {"one", "two"} and len(script.bodies) == 7
    assert {b["path"] for b in script.bodies} == {"/v1/completions"} and set(script.auth) == {"Bearer secret"}
    assert all(b["speculative"] == "off" and b["stream_options"]["include_usage"] for b in script.bodies)

    script.bad = {"one"}
    assert main([*words, "--prompts", f"{tmp_path}/p.jsonl"]) == 1
    done = capsys.readouterr()
    assert "429" in done.err and "concurrency 2" in done.out and "1/3" in done.out


def test_prompts_and_answers_as_token_ids(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "serve", "--url", script.url, "--concurrency", "1", "--requests", "2", "--warmup", "0"]
    assert main([*words, "--token-ids", "50", "--input-len", "4"]) == 0
    assert {b["path"] for b in script.bodies} == {"/v1/completions"} and all(
        b["return_token_ids"] for b in script.bodies
    )
    assert all(len(b["prompt"]) == 4 and max(b["prompt"]) < 50 for b in script.bodies)
    sample = Sample(sent=time.perf_counter())
    _read(sample, {"choices": [{"text": "", "token_ids": [5, 6]}]})
    assert sample.ttft is not None, "ids count where there is no text"


def test_synthetic_prompts_follow_the_seed(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "serve", "--url", f"{script.url}/v1/", "--rate", "500", "--requests", "2", "--warmup", "0"]
    for seed in ("1", "1", "2"):
        assert main([*words, "--input-len", "5", "--seed", seed]) == 0
    asked = [b["messages"][0]["content"] for b in script.bodies]
    assert set(asked[:2]) == set(asked[2:4]) != set(asked[4:]) and all(len(text.split()) == 5 for text in asked)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--concurrency or --rate"),
        (["--concurrency", "1", "--rate", "1"], "--concurrency or --rate"),
        (["--concurrency", "1,x"], "--concurrency 'x'"),
        (["--concurrency", "1.5"], "--concurrency '1.5'"),
        (["--rate", "0"], "--rate '0'"),
        (["--rate", "1", "--requests", "0"], "--requests 0"),
        (["--rate", "1", "--prompts", "nowhere"], "'nowhere' is not a file"),
        (["--rate", "1", "--url", "ftp://x"], "--url 'ftp://x'"),
        (["--rate", "1", "--token-ids", "1"], "--token-ids 1"),
        (["--rate", "1", "--token-ids", "9", "--prompts", "x"], "leave --prompts out"),
        (["--rate", "1", "--extra", "{"], "--extra is not valid JSON"),
        (["--rate", "1", "--extra", "[]"], "--extra must be a JSON object"),
        (["--rate", "1", "--plot", "/nowhere/x.png"], "its folder does not exist"),
        (["--rate", "1", "--url", "http://127.0.0.1:9"], "no server answers there"),
    ],
)
def test_bad_options_are_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *words]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
