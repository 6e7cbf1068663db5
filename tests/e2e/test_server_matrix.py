"""The composition matrix over HTTP: every kind of draft with every field, streamed and not, on both routes.

An answer with drafts equals that of plain decoding, asked alone: text, ids, log-probabilities, finish reason, usage.
The cells of a drafter run side by side, so that frames mix all of their features.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
for extra in ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client", "llguidance"):
    pytest.importorskip(extra)

from tests.support.equality_cells import TREE, model_dirs
from tests.support.in_process import InProcessServer
from tests.support.pairwise import all_cells, pairwise
from tests.support.server import TEMPLATE

FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": -0.3, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {"5": 3.0, "7": -100.0}, "top_k": 30, "min_p": 0.01},
    "logprobs": {"logprobs": 3},
    "prompt-logprobs": {"prompt_logprobs": 1},
    "stop": {"stop": ["w3", " w5", "w61 w"]},
    "stop-ids": {"stop_token_ids": list(range(0, 96, 9)), "min_tokens": 6},
    "n": {"n": 3},
    "tenant": {"cache_salt": "a", "priority": 3},
    "fewer": {"speculative": 1},
    "lists": {
        "allowed_token_ids": list(range(96)), "bad_words": ["w3", "w61 w8", "w9 w31"], "min_tokens": 6,
        "stop_token_ids": [11, 40], "ignore_eos": False,
    },
    "lists-grammar": {
        "structured_outputs": {"regex": "( ?w[0-9]+){5,9}"}, "bad_words": ["w5", "w6"], "ignore_eos": False,
    },
    "grammar": {"structured_outputs": {"regex": "( ?w[0-9]+){5,9}"}, "ignore_eos": False},
}  # fmt: skip
DRAFTERS = ("ngram", "suffix", "draft-good", "draft-bad", "eagle3", "eagle3-tree", "mtp", "dflash", "dspark")
FACTORS = {
    "drafter": DRAFTERS, "fields": tuple(FIELDS), "sampling": ("greedy", "seeded"), "route": ("completions", "chat"),
    "stream": (False, True), "prefix": ("miss", "hit"),
}  # fmt: skip
CELLS = all_cells(FACTORS) if os.environ.get("SLIPSTREAM_FULL") == "1" else pairwise(FACTORS, seed=3)
SAMPLING = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 11}}
MAX_TOKENS = 18


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = model_dirs(tmp_path_factory.mktemp("matrix"))
    (made["target"] / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return made


@pytest.fixture(scope="module")
def plain(dirs: dict[str, Path]) -> Iterator[InProcessServer]:
    with InProcessServer(model=str(dirs["target"]), dtype="float64", max_model_len=160, max_slots=4) as server:
        yield server


def request(cell: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    words = "w5 w9 w31 w7 w60 " * 8 if cell["prefix"] == "hit" else "w8 w40 w2"
    body = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "return_token_ids": True, **SAMPLING[cell["sampling"]]}
    body |= FIELDS[cell["fields"]]
    if cell["route"] == "completions":
        return "/v1/completions", {**body, "prompt": words}
    if "logprobs" in body:
        body["logprobs"], body["top_logprobs"] = True, body["logprobs"]
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": words}]}


def refused(cell: dict[str, Any]) -> bool:
    """One of the allowed refusals."""
    return cell["fields"] == "prompt-logprobs" and cell["stream"]


def asked(cell: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}} if cell["stream"] else body


def read(answer: Any) -> dict[str, Any]:
    """What was answered, in one form for both ways: choices by index, and the usage."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == "application/json":
        whole = answer.json()
        choices = [
            {
                "text": c["text"] if "text" in c else c["message"]["content"], "ids": c["token_ids"],
                "logprobs": _entries(c["logprobs"]), "finish": c["finish_reason"],
            }
            for c in whole["choices"]
        ]  # fmt: skip
        return {"choices": choices, "usage": whole["usage"], "prompt": _of_prompt(whole)}
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    found: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        [c] = event["choices"]
        choice = found.setdefault(c["index"], {"text": "", "ids": [], "logprobs": [], "finish": None})
        choice["text"] += c["text"] if "text" in c else c["delta"].get("content", "")
        choice["ids"] += c.get("token_ids", [])
        choice["logprobs"] += _entries(c.get("logprobs"))
        assert choice["finish"] is None, "nothing comes after the end"
        choice["finish"] = c["finish_reason"]
    return {"choices": [found[i] for i in range(len(found))], "usage": events[-1]["usage"], "prompt": None}


def _entries(logprobs: dict[str, Any] | None) -> list[Any]:
    """One entry per token, of either route."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        tops = [sorted([t["token"], t["logprob"]] for t in e["top_logprobs"]) for e in logprobs["content"]]
        return [[e["token"], e["logprob"], top] for e, top in zip(logprobs["content"], tops, strict=True)]
    names, values, tops = logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]
    return [[n, v, sorted(map(list, (t or {}).items()))] for n, v, t in zip(names, values, tops, strict=True)]


def _of_prompt(whole: dict[str, Any]) -> Any:
    return whole.get("prompt_logprobs", whole["choices"][0].get("prompt_logprobs"))


def near(got: Any, want: Any) -> bool:
    """Equal, numbers to 1e-4."""
    if isinstance(want, float) and isinstance(got, float):
        return abs(got - want) <= 1e-4
    if isinstance(want, list) and isinstance(got, list):
        return len(got) == len(want) and all(map(near, got, want))
    if isinstance(want, dict) and isinstance(got, dict):
        return got.keys() == want.keys() and all(near(got[k], want[k]) for k in want)
    return bool(got == want)


COUNTED = ("prompt_tokens", "completion_tokens", "total_tokens")


def differences(got: dict[str, Any], want: dict[str, Any]) -> list[Any]:
    found: list[Any] = [] if near(got["choices"], want["choices"]) else [(got["choices"], want["choices"])]
    counts = [{k: out["usage"][k] for k in COUNTED} for out in (got, want)]
    found += [] if counts[0] == counts[1] else [counts]
    if got["prompt"] is not None and not near(got["prompt"], want["prompt"]):
        found.append((got["prompt"], want["prompt"]))
    spec, details = got["usage"]["speculative"], got["usage"]["completion_tokens_details"]
    if spec["accepted"] > spec["drafted"] or details["accepted_prediction_tokens"] != spec["accepted"]:
        found.append(got["usage"])
    return found


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_answers_with_drafts_are_those_of_plain_decoding(
    dirs: dict[str, Path], plain: InProcessServer, drafter: str
) -> None:
    cells = [cell for cell in CELLS if cell["drafter"] == drafter]
    assert len(cells) >= len(FIELDS) and sum(map(refused, cells)) < 0.2 * len(cells)
    name = drafter.removesuffix("-tree")
    shape: dict[str, Any] = {"draft_tree": TREE} if name != drafter else {"num_drafts": 3}
    with InProcessServer(
        model=str(dirs["target"]), dtype="float64", max_model_len=160, max_slots=6, page_size=4, prefill_chunk=16,
        run_ahead=2, draft=name if name in ("ngram", "suffix") else str(dirs[name]), **shape,
    ) as server:  # fmt: skip
        flights = [server.post(path, asked(cell, body)) for cell in cells for path, body in [request(cell)]]
        replies = [flight.result(120) for flight in flights]
        server.check_idle()
    answers, wrong = [], []
    for cell, reply in zip(cells, replies, strict=True):
        if refused(cell):
            assert reply.status_code == 400 and "needs stream=false" in reply.text
            continue
        got = read(reply)
        answers.append(got)
        path, body = request(cell)
        body.pop("speculative", None)
        want = read(plain.post(path, body).result(120))
        if cell["fields"] == "logprobs":
            assert len(want["choices"][0]["logprobs"]) == len(want["choices"][0]["ids"])
        wrong += [(cell, difference) for difference in differences(got, want)]
    assert not wrong, wrong[:3]
    if drafter == "draft-good":
        assert sum(out["usage"]["speculative"]["accepted"] for out in answers) > 40


def test_the_comparison_sees_each_part(plain: InProcessServer) -> None:
    cell = {"fields": "logprobs", "sampling": "greedy", "route": "chat", "stream": False, "prefix": "miss"}
    path, body = request(cell)
    want = read(plain.post(path, body).result(60))
    assert differences(read(plain.post(path, body).result(60)), want) == []
    for change in (
        lambda c: c.update(text=c["text"] + "x"), lambda c: c["ids"].pop(), lambda c: c.update(finish="stop"),
        lambda c: c["logprobs"].pop(), lambda c: c["logprobs"][2].__setitem__(1, c["logprobs"][2][1] - 2e-4),
    ):  # fmt: skip
        got = json.loads(json.dumps(want))
        change(got["choices"][0])
        assert differences(got, want)
    got = json.loads(json.dumps(want))
    got["usage"]["completion_tokens"] += 1
    assert differences(got, want)
