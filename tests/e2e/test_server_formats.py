"""Structured output, tools and reasoning over HTTP, by the official client and by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
for extra in ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client", "llguidance"):
    pytest.importorskip(extra)

from slipstream.cli import main
from tests.support.grammar_kit import character_models, fits
from tests.support.server import RunningServer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.city }}>{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% if think %}<think>{% endif %}{% endif %}"
)
SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "maximum": 99,
    "minimum": 0}, "ok": {"type": "boolean"}}, "required": ["name", "n", "ok"], "additionalProperties": False,
}  # fmt: skip
ASK = [{"role": "user", "content": "Tell me."}]
CITY = {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
NOTHING = {"type": "object", "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "stop", "parameters": NOTHING}},
]
LAWS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.2, "seed": 3}, {"temperature": 1.2}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    dirs = character_models(tmp_path_factory.mktemp("formats"))
    (dirs["target"] / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return dirs


@pytest.fixture(scope="module")
def server(models: dict[str, Path]) -> Iterator[RunningServer]:
    words = (
        str(models["target"]), "--draft", str(models["draft"]), "--run-ahead", "2", "--dtype", "float64", "--device",
        "cpu", "--reasoning-parser", "qwen3",
    )  # fmt: skip
    with RunningServer(*words) as running:
        yield running
        running.idle()


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def chat(client: Any, limit: int = 300, **fields: Any) -> Any:
    """Never thinking: the prompt closes the block."""
    fields = {"model": "target", "messages": [*ASK, {"role": "system", "content": "<think></think>"}], **fields}
    return client.chat.completions.create(max_completion_tokens=limit, **fields)


def joined(stream: Any) -> tuple[str, str, list[list[str]], str | None]:
    """content, reasoning, [id, name, arguments] of calls, finish reason."""
    content = reasoning = ""
    calls: list[list[str]] = []
    reason = None
    for chunk in stream:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(calls) and call.type == "function"
                calls.append([call.id, call.function.name, ""])
            calls[call.index][2] += call.function.arguments
        reason = choice.finish_reason or reason
    return content, reasoning, calls, reason


FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("law", LAWS, ids=["greedy", "seeded", "unseeded"])
def test_json_schema(client: Any, law: dict[str, Any]) -> None:
    whole = chat(client, response_format=FORMAT, **law)
    assert whole.choices[0].finish_reason == "stop"
    assert fits(json.loads(whole.choices[0].message.content), SCHEMA)
    content, _, calls, reason = joined(chat(client, response_format=FORMAT, stream=True, **law))
    assert reason == "stop" and not calls and fits(json.loads(content), SCHEMA)
    if law != LAWS[2]:
        assert content == whole.choices[0].message.content


def test_json_schema_by_the_clients_own_parser(client: Any) -> None:
    import pydantic

    class Thing(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        ok: bool
        kind: str = pydantic.Field(json_schema_extra={"enum": ["a", "b"]})

    messages = [*ASK, {"role": "system", "content": "<think></think>"}]
    done = client.chat.completions.parse(model="target", messages=messages, response_format=Thing, temperature=0)
    assert isinstance(done.choices[0].message.parsed, Thing)


def test_completions_by_vllms_names(server: RunningServer) -> None:
    def ask(**fields: Any) -> str:
        answer = server.post("/v1/completions", prompt="say", max_tokens=200, temperature=0, **fields)
        assert answer["choices"][0]["finish_reason"] == "stop"
        return answer["choices"][0]["text"]

    assert ask(guided_choice=["true", "ab10"]) in ("true", "ab10")
    assert ask(structured_outputs={"choice": ["true", "ab10"]}) == ask(guided_choice=["true", "ab10"])
    assert len(ask(guided_regex="[0-9]{7}")) == 7
    assert fits(json.loads(ask(guided_json=SCHEMA)), SCHEMA)
    assert fits(json.loads(ask(guided_json=json.dumps(SCHEMA))), SCHEMA)
    assert ask(guided_grammar='root ::= "a" "b"+ "."').startswith("ab")
    assert isinstance(json.loads(ask(response_format={"type": "json_object"}, logit_bias={"7": -50})), dict)
    usage = server.post("/v1/completions", prompt="say", max_tokens=9, guided_regex="[ab]{20}", logprobs=2, n=2)
    assert [c["finish_reason"] for c in usage["choices"]] == ["length"] * 2
    assert len(usage["choices"][0]["logprobs"]["tokens"]) == 9


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(("choice", "law"), [("required", LAWS[0]), (NAMED, LAWS[1]), ("required", LAWS[2])])
def test_tools_that_must_be_called(client: Any, choice: Any, law: dict[str, Any]) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, **law}
    whole = chat(client, **fields).choices[0]
    [call] = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    content, _, calls, reason = joined(chat(client, stream=True, **fields))
    assert (content, reason, len(calls)) == ("", "tool_calls", 1)
    for name, arguments in ((call.function.name, call.function.arguments), calls[0][1:]):
        assert name == "get_weather" or choice == "required"
        values = json.loads(arguments)
        assert values == {} if name == "stop" else values["city"] in ("Paris", "Rome")
    if law != LAWS[2]:
        assert calls[0][1:] == [call.function.name, call.function.arguments] and calls[0][0] != call.id


def test_tools_may_be_called(client: Any, server: RunningServer) -> None:
    """A random model does not: its text is content; with a schema beside the tools it is one or the other."""
    free = chat(client, 30, tools=TOOLS, temperature=0).choices[0]
    assert free.finish_reason == "length" and free.message.tool_calls is None and free.message.content
    assert joined(chat(client, 30, tools=TOOLS, temperature=0, stream=True))[0] == free.message.content
    for seed in range(4):
        bound = chat(client, tools=TOOLS, response_format=FORMAT, temperature=1.5, seed=seed).choices[0]
        if bound.message.tool_calls:
            assert bound.finish_reason == "tool_calls"
        else:
            assert fits(json.loads(bound.message.content), SCHEMA)
    none = chat(client, 30, tools=TOOLS, tool_choice="none", temperature=0).choices[0].message.content
    assert none == chat(client, 30, temperature=0).choices[0].message.content != free.message.content


def test_a_conversation_with_calls_goes_on(server: RunningServer, client: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]  # fmt: skip
    ids = server.post("/tokenize", messages=messages)["tokens"]
    text = server.post("/detokenize", tokens=ids)["prompt"]
    assert text == "[user] Tell me.\n[assistant] <get_weather Rome>\n[tool] sunny\n[assistant] "
    assert chat(client, 10, messages=messages, temperature=0, tools=TOOLS).choices[0].finish_reason == "length"


def test_a_schema_behind_reasoning(client: Any) -> None:
    """S35 over HTTP: the answer is free until </think> has come, then it is an instance."""
    bias = {"4": 2}  # </think>
    fields = {
        "response_format": FORMAT, "temperature": 1.0, "seed": 3, "logit_bias": bias,
        "extra_body": {"chat_template_kwargs": {"think": True}}, "messages": ASK,
    }  # fmt: skip
    whole = chat(client, **fields).choices[0]
    assert whole.finish_reason == "stop" and len(whole.message.reasoning_content) >= 1
    assert fits(json.loads(whole.message.content), SCHEMA)
    content, reasoning, _, reason = joined(chat(client, stream=True, **fields))
    assert (content, reasoning, reason) == (whole.message.content, whole.message.reasoning_content, "stop")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "bogus"}}}}, "json"),
    ({"response_format": {"type": "json_object", "x": 1}}, "response_format"),
    ({"response_format": FORMAT, "guided_regex": "a"}, "leave one out"),
    ({"guided_regex": "(a"}, "regex"),
    ({"guided_regex": "a" * 9000}, "limit is 8192"),
    ({"guided_regex": "a{1000000}"}, "1000000 characters; the limit is 20000"),
    ({"guided_grammar": "start: nothing"}, "grammar"),
    ({"guided_choice": []}, "choice"),
    ({"guided_choice": ["a"] * 2000}, "guided_choice"),
    ({"guided_json": "{"}, "json"),
    ({"guided_json": {"type": "object", "properties": {"x": {"$ref": "http://example.com/x"}}}}, "json"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "exactly one"),
    ({"structured_outputs": {"nope": 1}}, "nope"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
    ({"tools": TOOLS[:1] * 2}, "two functions"),
    ({"tools": TOOLS * 70}, "tools"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "needs tools"),
    ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "leave one out"),
    ({"tools": TOOLS, "guided_regex": "a"}, "leave one out"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "bogus"}}}],
      "tool_choice": "required"}, "grammar"),
    ({"messages": [{"role": "user", "content": None}]}, "content"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "says"), BAD, ids=range(len(BAD)))
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_work_is_refused_before_anything_runs(
    server: RunningServer, fields: dict[str, Any], says: str, stream: bool
) -> None:
    answer = server.http.post("/v1/chat/completions", json={"messages": ASK, "stream": stream, **fields})
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("words", [("--tool-call-parser", "pythonic"), ("--reasoning-parser", "granite")])
def test_other_parsers_are_refused_at_the_start(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *words]) == 2
    assert "is not supported; there are" in capsys.readouterr().err
