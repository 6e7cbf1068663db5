"""The OpenAPI document: request bodies from the structs that read them, with the limits that sampling has."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from slipstream.answers import MAX_SALT
from slipstream.logprobs import MAX_LOGPROBS
from slipstream.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from slipstream.types import MAX_DRAFTS

BODIES = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
LIMITS: dict[str, tuple[float, float]] = {
    "n": (1, 128), "temperature": (0, 100), "top_p": (0, 1), "top_k": (-1, 2**31 - 1), "min_p": (0, 1),
    "seed": (-(2**63), 2**64 - 1), "max_tokens": (1, 2**31 - 1), "max_completion_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1), "speculative": (0, MAX_DRAFTS), "priority": (-(2**31), 2**31 - 1),
    "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "repetition_penalty": (0.01, 100),
    "top_logprobs": (0, MAX_LOGPROBS), "prompt_logprobs": (0, MAX_LOGPROBS),
    "logprobs": (0, MAX_LOGPROBS),
}  # fmt: skip
"""Least and most of each number; beyond them the answer is 400."""
_ABOVE_ZERO = ("top_p",)
_REF = "#/components/schemas/"
_ERRORS = {
    400: "A field, named by param, cannot be honoured.", 401: "No valid API key.",
    403: "A web page of another origin.", 404: "No such model.", 408: "The body did not come in time.",
    413: "The body is too large.", 429: "The queue is full; retry-after says when to try again.",
    500: "A fault of the server.", 503: "Shutting down, or the engine is gone.",
}  # fmt: skip
_TYPES = {"/metrics": "text/plain"}


def posts(body: type[msgspec.Struct]) -> dict[str, Any]:
    """What the document says of a route that takes `body`."""
    request = {"required": True, "content": {"application/json": {"schema": {"$ref": _REF + body.__name__}}}}
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if body in (CompletionBody, ChatBody):
        answer["text/event-stream"] = {"schema": {}}
    return {"requestBody": request, "responses": _responses(answer, (400, 401, 403, 404, 408, 413, 429, 500, 503))}


def gets(path: str) -> dict[str, Any]:
    kind = _TYPES.get(path, "application/json")
    codes = (401, 403, 503) if path != "/health" else (403, 503)
    out = _responses({kind: {"schema": {"type": "object" if kind == "application/json" else "string"}}}, codes)
    if path == "/health":
        out["503"] = {"description": "No progress, draining, or dead.", "content": out["200"]["content"]}
    return {"responses": out}


def _responses(answer: dict[str, Any], codes: tuple[int, ...]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF + "Error"}}}
    out: dict[str, Any] = {"200": {"description": "The answer.", "content": answer}}
    return out | {str(code): {"description": _ERRORS[code], "content": error} for code in codes}


def describe(app: FastAPI) -> None:
    """Make the document of `app` ours; it is written when it is first asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            written = get_openapi(title=app.title, version=app.version, routes=app.routes)
            written.setdefault("components", {})["schemas"] = schemas()
            written["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = written
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def schemas() -> dict[str, Any]:
    """JSON schemas of all bodies and of errors. A field may always be null, which is as if it were left out."""
    _, found = msgspec.json.schema_components(BODIES, ref_template=_REF + "{name}")
    for name in (body.__name__ for body in BODIES):
        for field, schema in found[name]["properties"].items():
            if field in LIMITS:
                _limit(schema, *LIMITS[field], above=field in _ABOVE_ZERO)
    for body in ("CompletionBody", "ChatBody"):
        fields = found[body]["properties"]
        fields["speculative"] = {"anyOf": [*fields["speculative"]["anyOf"]], "default": None}
        for choice in fields["speculative"]["anyOf"]:
            if choice.get("type") == "string":
                choice["enum"] = ["off"]
        fields["cache_salt"]["maxLength"] = MAX_SALT
    text = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    error = {
        "type": "object", "required": ["message", "type", "param", "code"], "additionalProperties": False,
        "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": text, "code": text},
    }  # fmt: skip
    found["Error"] = {"type": "object", "required": ["error"], "properties": {"error": error}}
    return dict(found)


def _limit(schema: dict[str, Any], low: float, high: float, *, above: bool) -> None:
    for choice in schema.get("anyOf", [schema]):
        if choice.get("type") in ("integer", "number"):
            choice["exclusiveMinimum" if above else "minimum"] = low
            choice["maximum"] = high
