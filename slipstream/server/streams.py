"""Answers that watch their client: when it leaves, what runs for it is aborted at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

from starlette.responses import Response

from slipstream.errors import EngineDeadError, SlipstreamError
from slipstream.outputs import RequestOutput, StreamChunk
from slipstream.server.engine_client import AnswerFailedError, Flight
from slipstream.server.protocol import StreamOptions
from slipstream.server.replies import Shape, as_json, error_body

DONE = b"data: [DONE]\n\n"


class ClientLeftError(Exception):
    """Nobody reads the answer any more."""


async def unless_left(receive: Any, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`; cancel it and raise ClientLeftError when the client disconnects first."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def finish(flight: Flight, receive: Any) -> list[RequestOutput]:
    """Run a flight to its end. Raises ClientLeftError, EngineDeadError."""

    async def drain() -> None:
        async for _ in flight:
            pass

    try:
        await unless_left(receive, drain())
    finally:
        flight.close()
    return flight.outputs


class EventStream(Response):
    """Server-sent events of a flight, ended by [DONE]; an engine that dies becomes an error event."""

    media_type = "text/event-stream"

    def __init__(self, flight: Flight, shape: Shape, options: StreamOptions) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._flight, self._shape, self._options = flight, shape, options
        self._shown = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await unless_left(receive, self._write(send))
        except ClientLeftError:
            pass
        finally:
            self._flight.close()

    async def _write(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._events():
            if data:  # a chunk may show nothing yet
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        choices = sum(p.params.n for p in self._flight.prompts)
        if self._shape.chat:
            for index in range(choices):
                yield _event(self._shape.role(index))
        if self._shape.echo is not None:
            for index in range(choices):
                yield _event(self._shape.said(index))
        try:
            async for items in self._flight.batches():
                yield b"".join([event for item in items for event in self._pieces(*item)])
        except EngineDeadError:
            yield _event(error_body("the engine stopped; the answer is not complete", "server_error", code="dead"))
            return
        except SlipstreamError as error:
            kind = "server_error" if isinstance(error, AnswerFailedError) else "invalid_request_error"
            yield _event(error_body(str(error), kind))
            return
        if self._options.include_usage:
            yield _event(self._shape.last(self._flight.outputs))
        yield DONE

    def _pieces(self, index: int, chunk: StreamChunk) -> Iterator[bytes]:
        if chunk.finish_reason == "error":
            yield _event(error_body("this answer failed; others are not affected", "server_error"))
        self._shown += len(chunk.token_ids)
        piece = self._shape.piece(index, chunk)
        if piece is not None:
            if self._options.continuous_usage_stats:
                piece["usage"] = self._so_far()
            yield _event(piece)

    def _so_far(self) -> dict[str, int]:
        prompt = sum(len(p.ids) for p in self._flight.prompts)
        return {"prompt_tokens": prompt, "completion_tokens": self._shown, "total_tokens": prompt + self._shown}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + as_json(value) + b"\n\n"
