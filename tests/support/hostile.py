"""Random request bodies: good ones, good ones with a few bad fields, and bytes that are no request at all."""

from __future__ import annotations

import json
import random
from typing import Any

ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
FIELDS = (
    "prompt", "messages", "tokens", "model", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop",
    "stop_token_ids", "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "speculative", "stream", "stream_options", "return_token_ids", "priority", "cache_salt",
    "user", "add_generation_prompt", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "best_of", "response_format", "tools",
    "tool_choice", "parallel_tool_calls", "guided_json", "guided_regex", "structured_outputs", "logits_processors",
    "guided_choice", "guided_grammar", "guided_decoding", "chat_template_kwargs", "reasoning_effort",
    "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "add_special_tokens", "continue_final_message",
    "documents", "metadata",
    "__proto__", "prompt\u0000", "",
)  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -0.0, 1, -1, 2, 3.5, 96, 95, 2**31, -(2**31), 2**63, 2**64, -(2**63), 10**40, 1e-300, 1e308,
    "", "w5", "w5 w9", "off", "auto", "none", "\u0000", "\ud83d\ude00 \u202e ﷽", "a" * 5000,
    "\\u0000{{7*7}}{% for x in y %}",
    "../../etc/passwd", [], [[]], [5, 9], [5, 96], [5, -1], ["w5", "w9"], ["w5", 5], [True], [None], [[5], [9]], [1.5],
    ["a"] * 20, list(range(40)), {}, {"a": 1}, {"include_usage": True}, {"type": "json_object"}, {"5": 100},
    {"5": "x"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
    {"type": "regex", "pattern": "(a+)+$"}, [{"role": "user", "content": "w5"}], [{"role": "user"}],
    [{"role": "x", "content": [{"type": "text", "text": "w5"}]}], [{"role": "user", "content": {"a": []}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], [{"type": "function"}],
]  # fmt: skip
FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
SHAPES: list[Any] = [
    {"json": {"type": "object"}}, {"json": '{"type": "x"}'}, {"regex": "(w5|w9)+"}, {"regex": "("}, {"choice": []},
    {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, {"regex": "(a{1,1000}){1,1000}"},
    {"choice": ["w5", "w9"]}, {"choice": [""] * 3}, {"grammar": 'start: start start | "w5"'}, {"grammar": "%"},
    {"grammar": 'root ::= "w5" root'}, {"regex": "a", "json": {}}, {"type": "json_object"}, {"type": "regex"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "maxLength": -1}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(?=a)"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"allOf": [{}] * 500}}},
    {"type": "array", "items": {"enum": ["w5"]}}, "(w5|w9) w7", "[" * 2000, "(", ["w5", "w9 w7"], {"enum": ["w5", 5]},
    'start: "w5" start | "w9"', "", 'start: "w5" b\nb: /( w7)+/ " w7"', 'start: A{9000}\nA: " w5"{900}',
    {"$ref": "http://127.0.0.1:1/schema"}, {"$ref": "#/nowhere"},
]  # fmt: skip
"""What an answer should look like, most of it nonsense."""


def good(rng: random.Random, route: str) -> dict[str, Any]:
    if route == "/tokenize":
        return {"prompt": "w5 w9"}
    if route == "/detokenize":
        return {"tokens": [5, 9]}
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 6), "temperature": rng.choice([0, 0.8])}
    if route == "/v1/completions":
        body["prompt"] = rng.choice(["w5 w9", [5, 9, 31], [[5], [9, 7]], ["w5", "w60"]])
    else:
        body["messages"] = [{"role": "user", "content": "w5 w9"}]
    if rng.random() < 0.3:
        body["stream"] = True
    return body


def nested(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(ODD)
    if rng.random() < 0.5:
        return [nested(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    return {rng.choice(FIELDS): nested(rng, depth - 1) for _ in range(rng.randint(0, 4))}


def mangled(rng: random.Random, data: bytes) -> bytes:
    """Cut, with bytes flipped, doubled, or deeper than any parser likes."""
    kind = rng.randrange(5)
    if kind == 0:
        return data[: rng.randrange(len(data) + 1)]
    if kind == 1:
        out = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            out[rng.randrange(len(out))] = rng.randrange(256)
        return bytes(out)
    if kind == 2:
        return data + data
    if kind == 3:
        return rng.choice([b"[", b'{"a":', b'{"prompt":[']) * rng.choice([10, 1000, 50_000])
    return rng.randbytes(rng.randint(0, 300))


def hostile(rng: random.Random) -> tuple[str, bytes]:
    """A route and a body for it."""
    route = rng.choice(ROUTES)
    body = good(rng, route)
    kind = rng.random()
    if kind < 0.2:
        body[rng.choice(FORMS)] = rng.choice(SHAPES)
    elif kind < 0.65:
        for _ in range(rng.randint(1, 3)):
            body[rng.choice(FIELDS)] = rng.choice(ODD)
    elif kind < 0.77:
        body[rng.choice(FIELDS)] = nested(rng, 4)
    data = json.dumps(body).encode()
    return route, mangled(rng, data) if kind > 0.85 else data
