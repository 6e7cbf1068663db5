"""Fields of OpenAI's and vLLM's requests: each does what it says, or is refused with the reason; none is ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
for extra in ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client"):
    pytest.importorskip(extra)

from slipstream.errors import InvalidRequestError, UnsupportedError
from slipstream.server.protocol import INSTEAD, NOT_BUILT, ChatBody, CompletionBody, Sampling, read_body, sampling
from slipstream.types import SamplingParams
from tests.support.in_process import InProcessServer
from tests.support.server import TEMPLATE, served_models

PROMPT = "w5 w9 w31 w7 w60"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
DOCUMENTS = TEMPLATE + "{% for d in documents or [] %} {{ d.text }}{% endfor %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessServer]:
    models = served_models(tmp_path_factory.mktemp("fields"))
    (Path(models["target"]) / "tokenizer_config.json").write_text(json.dumps({"chat_template": DOCUMENTS}))
    options: dict[str, Any] = {"draft": models["draft"], "dtype": "float64", "device": "cpu", "max_model_len": 64}
    with InProcessServer(model=models["target"], max_slots=4, **options) as made:
        yield made


def post(server: InProcessServer, path: str, **body: Any) -> dict[str, Any]:
    answer = server.post(path, body).result(60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(server: InProcessServer, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    return post(server, "/v1/completions", prompt=prompt, **{**GREEDY, **fields})


def chat(server: InProcessServer, messages: Any = None, **fields: Any) -> dict[str, Any]:
    said = messages or [{"role": "user", "content": PROMPT}]
    return post(server, "/v1/chat/completions", messages=said, **{**GREEDY, **fields})


def test_only_the_last_tokens_of_a_prompt(server: InProcessServer) -> None:
    for prompt in (PROMPT, [5, 9, 31, 7, 60]):
        cut = complete(server, prompt, truncate_prompt_tokens=2, echo=True)
        assert cut["usage"]["prompt_tokens"] == 2 and cut["choices"][0]["text"].split()[:2] == ["w7", "w60"]
        assert cut["choices"][0]["token_ids"] == complete(server, "w7 w60")["choices"][0]["token_ids"]
    assert complete(server, truncate_prompt_tokens=50)["usage"]["prompt_tokens"] == 5
    assert complete(server, [7] * 500, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 64 - 6
    assert chat(server, truncate_prompt_tokens=3)["usage"]["prompt_tokens"] == 3
    for wrong in (0, -2, 64):
        answer = server.post("/v1/completions", {"prompt": PROMPT, "truncate_prompt_tokens": wrong}).result(60)
        assert answer.status_code == 400 and f"truncate_prompt_tokens={wrong} must be" in answer.text


def test_an_answer_goes_on_with_the_last_message(server: InProcessServer) -> None:
    said = [{"role": "user", "content": "w5 w9"}, {"role": "assistant", "content": "w31 w7"}]
    found = chat(server, said, continue_final_message=True, add_generation_prompt=False)
    assert found["choices"][0]["token_ids"] == complete(server, "w90 w5 w9 w91 w31 w7")["choices"][0]["token_ids"]
    answer = server.post("/v1/chat/completions", {"messages": said, "continue_final_message": True}).result(60)
    assert answer.status_code == 400 and "add_generation_prompt=false" in answer.text


def test_documents_reach_a_template_that_knows_them(server: InProcessServer) -> None:
    found = chat(server, documents=[{"title": "x", "text": "w12 w13"}])
    assert found["choices"][0]["token_ids"] == complete(server, f"w90 {PROMPT} w91 w12 w13")["choices"][0]["token_ids"]


def test_lists_of_tokens(server: InProcessServer) -> None:
    free = complete(server)["choices"][0]["token_ids"]
    banned = complete(server, bad_words=[f"w{free[0]}"])["choices"][0]["token_ids"]
    assert free[0] not in banned
    allowed = complete(server, allowed_token_ids=[3, 4, 5], speculative=2, max_tokens=12)["choices"][0]["token_ids"]
    assert set(allowed) <= {3, 4, 5} and len(allowed) == 12
    answer = server.post("/v1/completions", {"prompt": PROMPT, "allowed_token_ids": [9999]}).result(60)
    assert answer.status_code == 400 and "allowed_token_ids" in answer.text and "vocabulary" in answer.text
    nothing = {"prompt": PROMPT, "allowed_token_ids": [4], "bad_words": ["w4"], "max_tokens": 3}
    answer = server.post("/v1/completions", nothing).result(60)
    assert answer.status_code == 400 and "leave no token" in answer.text
    server.check_idle()


def test_who_asks_changes_nothing(server: InProcessServer) -> None:
    plain = complete(server)["choices"]
    named = complete(
        server, user="u", safety_identifier="s", prompt_cache_key="k", metadata={"a": "b"}, best_of=1, store=False,
        service_tier="auto", spaces_between_special_tokens=False, suffix="", length_penalty=1.0,
    )["choices"]  # fmt: skip
    assert plain == named


REFUSED: list[tuple[type[Sampling], dict[str, Any], str]] = [
    (CompletionBody, {"best_of": 3, "n": 2}, "best_of=3 .* n=2"), (CompletionBody, {"best_of": 1, "n": 2}, "best_of"),
    (CompletionBody, {"suffix": "x"}, "only continues"), (ChatBody, {"chat_template": "x"}, "a template is code"),
    (CompletionBody, {"request_id": "x"}, "x-request-id"), (ChatBody, {"echo": True}, "/v1/completions has echo"),
    (CompletionBody, {"length_penalty": 0.5}, "length_penalty"), (ChatBody, {"store": True}, "nothing is kept"),
    (CompletionBody, {"spaces_between_special_tokens": True}, "nothing is put between"),
    (ChatBody, {"top_logprobs": 2}, "needs logprobs=true"), (ChatBody, {"reasoning_effort": "high"}, "template"),
    (CompletionBody, {"stream_options": {}}, "needs stream=true"), (ChatBody, {"functions": [{}]}, "give tools"),
    (ChatBody, {"max_tokens": 2, "max_completion_tokens": 3}, "differ"),
    (CompletionBody, {"nope": 1}, "unknown field"),
    (ChatBody, {"documents": [1]}, "documents"), (CompletionBody, {"metadata": 1}, "metadata"),
    (CompletionBody, {"bad_words": [""]}, "bad_words"),
    (CompletionBody, {"allowed_token_ids": []}, "allowed_token_ids"),
    (CompletionBody, {"use_beam_search": True}, "use_beam_search"), (ChatBody, {"n": True}, "n"),
    (CompletionBody, {"logprobs": -1}, "logprobs=-1"), (CompletionBody, {"prompt_logprobs": -1}, "prompt_logprobs=-1"),
    (CompletionBody, {"logit_bias": {"1": 101}}, "logit_bias"),
    (CompletionBody, {"skip_special_tokens": 1}, "skip_special_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "says"), REFUSED, ids=range(len(REFUSED)))
def test_refused_with_a_reason(kind: type[Sampling], fields: dict[str, Any], says: str) -> None:
    more = {"messages": [{"role": "user", "content": "x"}]} if kind is ChatBody else {"prompt": "x"}
    with pytest.raises((InvalidRequestError, UnsupportedError), match=says):
        body = read_body(json.dumps({**more, **fields}).encode(), kind)
        sampling(body, SamplingParams(), body.limit if isinstance(body, ChatBody) else body.max_tokens)
        raise AssertionError("not refused before the engine is asked")


def test_what_is_refused_by_name_is_in_one_place() -> None:
    fields = {f for body in (CompletionBody, ChatBody) for f in body.__struct_fields__}
    both = set(CompletionBody.__struct_fields__) & set(ChatBody.__struct_fields__)
    assert not both & set(NOT_BUILT), "a field of both routes is not refused"
    assert set(INSTEAD) <= set(NOT_BUILT) and fields
