"""Sampling fields over HTTP: log-probabilities of both routes, echo, penalties; each equals the offline answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")
for extra in ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client"):
    pytest.importorskip(extra)

from slipstream import LLM, SamplingParams
from slipstream.outputs import Logprob
from slipstream.server import logprobs as written
from slipstream.text import Tokenizer
from tests.support.kit import perturb, tiny_model_dir
from tests.support.server import RunningServer

PROMPT = "w5 w9 w31 w7 w60"
FIELDS = {
    "temperature": 0, "ignore_eos": True, "presence_penalty": 0.5, "frequency_penalty": 0.25,
    "repetition_penalty": 1.25, "logit_bias": {"7": 2.5, "31": -3.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("server")
    target = tiny_model_dir(root / "target", seed=1)
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return {"target": str(target), "draft": str(perturb(target, root / "draft", scale=0.02))}


@pytest.fixture(scope="module")
def llm(models: dict[str, str]) -> LLM:
    return LLM(model=models["target"], dtype="float64", device="cpu")


@pytest.fixture(scope="module")
def server(models: dict[str, str]) -> Iterator[RunningServer]:
    with RunningServer(
        models["target"], "--draft", models["draft"], "--run-ahead", "2", "--dtype", "float64", "--device", "cpu"
    ) as running:
        yield running
        running.idle()


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def stream(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]


def near(got: Any, want: Any) -> None:
    assert got == pytest.approx(want, abs=1e-4)


def test_completion_logprobs_equal_the_offline_ones(server: RunningServer, llm: LLM) -> None:
    [want] = llm.generate([PROMPT], SamplingParams(max_tokens=16, logprobs=3, **FIELDS))
    out = want.outputs[0]
    assert out.logprobs is not None
    got = server.post("/v1/completions", prompt=PROMPT, max_tokens=16, logprobs=3, return_token_ids=True, **FIELDS)
    [choice] = got["choices"]
    assert choice["token_ids"] == out.token_ids and choice["text"] == out.text
    assert got["usage"]["speculative"]["accepted"] > 0
    of = choice["logprobs"]
    assert "".join(of["tokens"]) == out.text and of["text_offset"][:2] == [0, len(of["tokens"][0])]
    near(of["token_logprobs"], [x[t].logprob for x, t in zip(out.logprobs, out.token_ids, strict=True)])
    for top, x in zip(of["top_logprobs"], out.logprobs, strict=True):
        near(top, {v.decoded_token: v.logprob for v in x.values()})
    # In pieces it is the same, whole.
    events = stream(server, prompt=PROMPT, max_tokens=16, logprobs=3, **FIELDS)
    pieces = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
    assert {key: [x for p in pieces for x in p[key]] for key in of} == of


def test_a_stop_string_takes_logprobs_with_it(server: RunningServer, llm: LLM) -> None:
    [want] = llm.generate([PROMPT], SamplingParams(max_tokens=16, **FIELDS))
    stop = llm.tokenizer.decode(want.outputs[0].token_ids[6:8]).strip()
    got = server.post("/v1/completions", prompt=PROMPT, max_tokens=16, logprobs=0, stop=stop, **FIELDS)
    count = got["usage"]["completion_tokens"]
    assert count < 16 and len(got["choices"][0]["logprobs"]["tokens"]) == count


def test_chat_logprobs_through_the_official_client(client: Any, server: RunningServer, llm: LLM) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    extra = {k: FIELDS[k] for k in ("ignore_eos", "repetition_penalty")}
    plain = {k: v for k, v in FIELDS.items() if k not in extra}
    asked = {"model": None, "messages": messages, "max_tokens": 8, "logprobs": True, "top_logprobs": 2, **plain}
    asked["model"] = client.models.list().data[0].id
    answer = client.chat.completions.create(**asked, extra_body=extra)
    ids = llm.chat_prompt(messages)
    [want] = llm.generate([ids], SamplingParams(max_tokens=8, logprobs=2, **FIELDS))
    out = want.outputs[0]
    content = answer.choices[0].logprobs.content
    assert out.logprobs is not None and len(content) == len(out.token_ids) == 8
    for got, token, x in zip(content, out.token_ids, out.logprobs, strict=True):
        assert got.token == x[token].decoded_token and bytes(got.bytes).decode() == got.token
        near(got.logprob, x[token].logprob)
        best = sorted((v for v in x.values() if v.rank <= 2), key=lambda v: v.rank)
        near([t.logprob for t in got.top_logprobs], [v.logprob for v in best])
    streamed = [
        c.choices[0] for c in client.chat.completions.create(**asked, stream=True, extra_body=extra) if c.choices
    ]
    assert [x.token for c in streamed if c.logprobs for x in c.logprobs.content] == [x.token for x in content]


def test_echo_gives_the_prompt_and_its_logprobs(server: RunningServer, llm: LLM) -> None:
    """As evaluation harnesses score a text: echo with logprobs, one token or none beside it."""
    [want] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=1))
    assert want.prompt_logprobs is not None and want.outputs[0].logprobs is not None
    ids = want.prompt_token_ids
    of_prompt = [x and x[t].logprob for t, x in zip(ids, want.prompt_logprobs, strict=True)]
    asked = {"prompt": PROMPT, "echo": True, "logprobs": 1, "temperature": 0}
    one = server.post("/v1/completions", max_tokens=1, **asked)
    [choice] = one["choices"]
    assert choice["text"] == PROMPT + want.outputs[0].text
    own = want.outputs[0].logprobs[0][want.outputs[0].token_ids[0]].logprob
    assert choice["logprobs"]["token_logprobs"][0] is None and choice["logprobs"]["top_logprobs"][0] is None
    near(choice["logprobs"]["token_logprobs"][1:], [*of_prompt[1:], own])
    none = server.post("/v1/completions", max_tokens=0, **{**asked, "prompt": [ids, ids[:2]], "n": 2})
    assert [len(c["logprobs"]["tokens"]) for c in none["choices"]] == [5, 5, 2, 2]
    near(none["choices"][0]["logprobs"]["token_logprobs"][1:], of_prompt[1:])
    assert none["usage"]["completion_tokens"] == 0 and none["choices"][0]["finish_reason"] == "length"
    assert none["choices"][0]["text"] == llm.tokenizer.decode(ids, skip_special_tokens=False)
    said = stream(server, prompt=PROMPT, echo=True, max_tokens=1, temperature=0)
    assert "".join(e["choices"][0]["text"] for e in said) == choice["text"]


def test_prompt_logprobs_of_a_chat(server: RunningServer) -> None:
    got = server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}], max_tokens=1, prompt_logprobs=0
    )
    assert got["prompt_logprobs"][0] is None and all(len(x) == 1 for x in got["prompt_logprobs"][1:])


def test_what_json_cannot_say_is_a_large_number() -> None:
    none = Tokenizer.absent()
    of = {3: Logprob(float("-inf"), 9, None), 4: Logprob(float("nan"), 1, None)}
    got = written.completion([3], [of], none, 0)
    assert got["token_logprobs"] == [-9999.0] and got["top_logprobs"] == [
        {"token_id:3": -9999.0, "token_id:4": -9999.0}
    ]
    assert written.chat([3], [of], none, 1)["content"][0]["top_logprobs"][0]["token"] == "token_id:4"
