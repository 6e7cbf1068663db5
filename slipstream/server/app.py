"""The routes."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from slipstream import __version__
from slipstream.answers import Prepared, Prompt, Service
from slipstream.errors import (
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
    SlipstreamError,
    UnsupportedError,
)
from slipstream.server.engine_client import AnswerFailedError, EngineClient, QueueFullError
from slipstream.server.formats import PLAIN, Formats, converse, structured
from slipstream.server.guard import BodyTooLargeError, BodyTooSlowError, Guard
from slipstream.server.openapi import describe, gets, posts
from slipstream.server.page import FILES, page
from slipstream.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    StreamOptions,
    TokenizeBody,
    read_body,
    sampling,
)
from slipstream.server.replies import Shape, as_json, error_body
from slipstream.server.streams import ClientLeftError, EventStream, finish
from slipstream.text.grammar import GRAMMAR_FAULT
from slipstream.text.token_rules import RULES_FAULT
from slipstream.text.turns import Turn
from slipstream.types import SamplingParams

COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions when it is not given; a chat answer may fill the context."""
TIMELINE = 64
"""Launches that the page shows."""


class Server:
    """State of the routes. draining: SIGTERM has come; what runs is finished, nothing new is taken."""

    def __init__(self, engine: EngineClient, *, name: str, watchdog: float, formats: Formats = PLAIN) -> None:
        self.engine = engine
        self.name = name
        self.watchdog = watchdog
        self.formats = formats
        self.draining = False
        self.started = int(time.time())

    # -- answers -----------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        body = read_body(await request.body(), CompletionBody)
        limit = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        params = sampling(body, self.engine.defaults, limit, structured(body))
        return await self._answer(request, body, body.prompts(), params)

    async def chat(self, request: Request) -> Response:
        body = read_body(await request.body(), ChatBody)
        params = sampling(body, self.engine.defaults, body.limit, structured(body))
        said = await asyncio.to_thread(converse, body, params, self.engine.tokenizer, self.formats)
        return await self._answer(request, body, [said.ids], said.params, said.turn)

    async def _answer(
        self, request: Request, body: CompletionBody | ChatBody, prompts: Sequence[Prompt], params: SamplingParams,
        turn: Callable[[], Turn] | None = None,
    ) -> Response:  # fmt: skip
        self._check_model(body.model)
        if self.draining:
            raise HTTPException(503, "the server is shutting down")
        service = Service(priority=body.priority, cache_salt=body.cache_salt)
        chat = isinstance(body, ChatBody)
        if body.truncate_prompt_tokens is not None or not (chat or body.add_special_tokens):
            prompts = await asyncio.to_thread(self._as_ids, body, prompts, params)
        prepared = await asyncio.to_thread(self._prepare, prompts, params, service)
        head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.name,
        }
        echoes = isinstance(body, CompletionBody) and body.echo
        echo = await asyncio.to_thread(self._texts, prepared) if echoes else None
        shape = Shape(
            chat=chat, head=head, token_ids=body.return_token_ids, tokenizer=self.engine.tokenizer,
            top=params.logprobs or 0, echo=echo, silent=body.max_tokens == 0, turn=turn,
        )  # fmt: skip
        flight = self.engine.submit(prepared, request.state.request_id)
        request.state.summary = flight.summary
        if body.stream:
            return EventStream(flight, shape, body.stream_options or StreamOptions())
        outputs = await finish(flight, request.receive)
        failed = [out for output in outputs for out in output.outputs if out.finish_reason == "error"]
        for fault, param in ((GRAMMAR_FAULT, "structured_outputs"), (RULES_FAULT, "allowed_token_ids")):
            if failed and all((out.error or "").startswith(fault) for out in failed):
                return _json(error_body(str(failed[0].error), "invalid_request_error", param=param), 400)
        if failed:
            return _json(error_body("an answer failed; others are not affected", "server_error"), 500)
        return _json(shape.whole(outputs))

    def _as_ids(
        self, body: CompletionBody | ChatBody, prompts: Sequence[Prompt], params: SamplingParams
    ) -> list[Prompt]:
        """Prompts as the body says that text becomes tokens, and how many of them are read."""
        most, context = body.truncate_prompt_tokens, self.engine.ready.limits.max_model_len
        if most is not None and most != -1 and not 1 <= most < context:
            raise InvalidRequestError(f"truncate_prompt_tokens={most} must be -1 or from 1 to {context - 1}")
        fits = max(1, context - (params.max_tokens or 1))
        encode = self.engine.tokenizer.encode
        made: list[Prompt] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                prompt = encode(prompt, add_special_tokens=body.add_special_tokens)
            assert not isinstance(prompt, Mapping)
            made.append([*prompt] if most is None else [*prompt][-(fits if most == -1 else most) :])
        return made

    def _prepare(self, prompts: Sequence[Prompt], params: SamplingParams, service: Service) -> list[Prepared]:
        return [self.engine.prepare(prompt, params, service) for prompt in prompts]

    def _texts(self, prepared: Sequence[Prepared]) -> list[str]:
        """The prompt of each choice."""
        decode = self.engine.tokenizer.decode
        texts = [decode(p.ids, skip_special_tokens=False) if p.text is None else p.text for p in prepared]
        return [text for text, p in zip(texts, prepared, strict=True) for _ in range(p.params.n)]

    def _conversation(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        return self.engine.tokenizer.apply_chat_template(
            [m.plain() for m in messages], add_generation_prompt=add_generation_prompt, tokenize=True
        )

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise HTTPException(404, f"the model {name[:100]!r} is not served here; {self.name!r} is")

    # -- text --------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        body = read_body(await request.body(), TokenizeBody)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give prompt or messages, one of the two")
        if body.messages is not None:
            ids = await asyncio.to_thread(self._conversation, body.messages, body.add_generation_prompt)
        else:
            assert body.prompt is not None
            encode = self.engine.tokenizer.encode
            ids = await asyncio.to_thread(encode, body.prompt, add_special_tokens=body.add_special_tokens)
        return _json({"tokens": ids, "count": len(ids), "max_model_len": self.engine.ready.limits.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        body = read_body(await request.body(), DetokenizeBody)
        self._check_model(body.model)
        vocab = self.engine.ready.limits.vocab_size
        for i in body.tokens:
            if not 0 <= i < vocab:
                raise InvalidRequestError(f"tokens: id {i} must be a whole number from 0 to {vocab - 1}")
        decode = self.engine.tokenizer.decode
        return _json({"prompt": await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)})

    # -- about the server --------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        model = {
            "id": self.name, "object": "model", "created": self.started, "owned_by": "slipstream",
            "max_model_len": self.engine.ready.limits.max_model_len,
        }  # fmt: skip
        return _json({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        """200 while the engine makes progress or has nothing to do."""
        status = self._health()
        return _json({"status": status}, 200 if status == "ok" else 503)

    def _health(self) -> str:
        if self.engine.dead is not None:
            return "dead"
        if self.draining:
            return "draining"
        return "stalled" if self.engine.stalled(self.watchdog) else "ok"

    async def metrics(self, request: Request) -> Response:
        try:
            engine = await self.engine.stats()
        except (EngineDeadError, TimeoutError):
            engine = None
        page = self.engine.telemetry.exposition(engine, stalled=self.engine.stalled(self.watchdog))
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def stats(self, request: Request) -> Response:
        """What the page at / shows, as JSON."""
        engine = self.engine
        try:
            state = await engine.stats(timeline=TIMELINE)
        except (EngineDeadError, TimeoutError):
            state = None
        return _json({
            "model": self.name, "version": __version__, "uptime": time.time() - self.started,
            "health": self._health(), "num_drafts": engine.ready.limits.num_drafts,
            "answers": engine.telemetry.snapshot(), "engine": state,
        })  # fmt: skip

    async def version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def server_info(self, request: Request) -> Response:
        """The resolved configuration and the state of the engine, its pools checked."""
        try:
            state = await self.engine.stats(check=True)
        except TimeoutError:
            raise HTTPException(503, "the engine did not answer in time") from None
        ready = self.engine.ready
        return _json({
            "version": __version__, "model": self.name, "resolved": ready.resolved, "notes": ready.notes,
            "max_queue": self.engine.max_queue, "watchdog_seconds": self.watchdog,
            "tool_call_parser": self.formats.tools, "reasoning_parser": self.formats.reasoning,
            "engine_pid": self.engine.process.pid, "engine": state,
        })  # fmt: skip


def build_app(server: Server, keys: Sequence[str], *, admin: bool = True) -> Any:
    """The ASGI application. admin: with what an operator sees, /metrics, /stats, /server_info and the page."""
    app = FastAPI(title="Slipstream", version=__version__, docs_url=None, redoc_url=None)
    for path, route, body in (
        ("/v1/completions", server.completions, CompletionBody),
        ("/v1/chat/completions", server.chat, ChatBody),
        ("/tokenize", server.tokenize, TokenizeBody),
        ("/detokenize", server.detokenize, DetokenizeBody),
    ):
        app.add_api_route(path, route, methods=["POST"], response_model=None, openapi_extra=posts(body))
    routes = [("/v1/models", server.models), ("/health", server.health), ("/version", server.version)]
    if admin:
        routes += [("/metrics", server.metrics), ("/stats", server.stats), ("/server_info", server.server_info)]
    for path, route in routes:
        app.add_api_route(path, route, methods=["GET"], response_model=None, openapi_extra=gets(path))
    if admin:
        for path in FILES:
            app.add_api_route(path, page, methods=["GET"], response_model=None, include_in_schema=False)
    describe(app)
    app.add_exception_handler(SlipstreamError, _slipstream_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(BodyTooLargeError, _too_large)
    app.add_exception_handler(BodyTooSlowError, _too_slow)
    app.add_exception_handler(ClientLeftError, _client_left)
    app.add_exception_handler(ClientDisconnect, _client_left)  # before its body was here
    app.add_exception_handler(Exception, _internal)
    return Guard(app, keys, server.engine.telemetry)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(as_json(value), status, headers, "application/json")


async def _slipstream_error(request: Request, error: Exception) -> Response:
    text = str(error)
    if isinstance(error, QueueFullError):
        body = error_body(text, "rate_limit_error", code="queue_full")
        return _json(body, 429, {"retry-after": str(error.retry_after)})
    if isinstance(error, EngineDeadError):
        return _json(error_body("the engine stopped", "server_error", code="dead"), 503)
    if isinstance(error, AnswerFailedError):
        return _json(error_body(text, "server_error"), 500)
    if isinstance(error, (InvalidRequestError, UnsupportedError, RequestFailedError)):
        field = re.match(r"(?:unknown field ')?([a-z_]+)", text)
        param = field[1] if field else None
        request.state.summary = lambda: {"param": param}  # the message may hold the client's text, the name does not
        return _json(error_body(text, "invalid_request_error", param=param), 400)
    raise error


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    headers = dict(error.headers or {})
    if error.status_code == 503:
        headers["retry-after"] = "1"
    return _json(error_body(str(error.detail), kind), error.status_code, headers)


async def _too_large(request: Request, error: Exception) -> Response:
    return _json(error_body("the body is too large", "invalid_request_error"), 413, {"connection": "close"})


async def _too_slow(request: Request, error: Exception) -> Response:
    return _json(error_body("the body did not come in time", "invalid_request_error"), 408, {"connection": "close"})


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _internal(request: Request, error: Exception) -> Response:
    """The traceback goes to the log; the client gets the request id to ask for it."""
    return _json(error_body(f"internal error in {request.state.request_id}", "server_error"), 500)
