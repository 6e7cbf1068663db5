"""The HTTP process's side of the engine, without an engine: messages in, messages out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

for extra in ("zmq", "msgspec", "prometheus_client"):
    pytest.importorskip(extra)

from slipstream.answers import Limits, Prepared
from slipstream.errors import EngineDeadError
from slipstream.server.engine_client import AnswerFailedError, EngineClient, QueueFullError
from slipstream.server.messages import Abort, Add, Progress, Ready, decode_up, encode
from slipstream.text import Tokenizer
from slipstream.types import SamplingParams, TokenEvent


class Sent(list):
    """A socket that keeps what is sent."""

    def send(self, data: bytes) -> None:
        self.append(decode_up(data))


def client() -> tuple[EngineClient, Sent]:
    sent = Sent()
    engine = EngineClient(None, sent, None, max_queue=1)  # type: ignore[arg-type]
    limits = Limits(vocab_size=96, max_model_len=64, max_stop_ids=16, num_drafts=0, eos_ids=(2,))
    engine.ready = Ready(limits, None, {}, {}, [], max_slots=1)
    engine.tokenizer = Tokenizer.absent()
    return engine, sent


REQUEST = Prepared(None, (5, 6), SamplingParams(max_tokens=4))


async def drain(flight: Any) -> list[int]:
    return [token async for _, chunk in flight for token in chunk.token_ids]


def test_a_fault_in_one_answer_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        engine, sent = client()
        bad, good = engine.submit([REQUEST]), engine.submit([REQUEST])
        first, second = (m.request.request_id for m in sent if isinstance(m, Add))
        monkeypatch.setattr(engine._live[first].answer.streams[0], "push", lambda *_, **__: 1 / 0)
        for name in (first, second):
            engine._take(TokenEvent(name, 0, (7, 8), finish_reason="length"))
        with pytest.raises(AnswerFailedError, match="others are not affected"):
            await drain(bad)
        assert await drain(good) == [7, 8]
        assert sent[2:] == [Abort(first)] and engine._children == 0 and not engine._live

    asyncio.run(scenario())


def test_the_queue_is_bounded_and_death_ends_all() -> None:
    async def scenario() -> None:
        engine, sent = client()
        flights = [engine.submit([REQUEST]) for _ in range(2)]
        with pytest.raises(QueueFullError, match="the limit is 2") as full:
            engine.submit([REQUEST])
        assert full.value.retry_after >= 1 and len(sent) == 2
        engine._die("gone")
        for flight in flights:
            with pytest.raises(EngineDeadError, match="gone"):
                await drain(flight)
        with pytest.raises(EngineDeadError, match="gone"):
            engine.submit([REQUEST])
        assert engine.died.is_set() and engine._children == 0

    asyncio.run(scenario())


def test_chunks_that_wait_are_handed_out_together_and_an_error_after_them() -> None:
    async def scenario() -> None:
        engine, sent = client()
        flight = engine.submit([REQUEST])
        name = sent[0].request.request_id
        for token in (7, 8):
            engine._take(TokenEvent(name, 0, (token,)))
        engine._die("gone")
        got = []
        with pytest.raises(EngineDeadError, match="gone"):
            async for items in flight.batches():
                got.append([token for _, chunk in items for token in chunk.token_ids])
        assert got == [[7, 8]]

        engine, sent = client()
        flight = engine.submit([REQUEST])
        name = sent[0].request.request_id
        engine._take(TokenEvent(name, 0, (7,)))
        batches = aiter(flight.batches())
        assert [chunk.token_ids for _, chunk in await anext(batches)] == [[7]]
        engine._take(TokenEvent(name, 0, (8, 9), finish_reason="length"))
        assert [chunk.token_ids for _, chunk in await anext(batches)] == [[8, 9]]
        with pytest.raises(StopAsyncIteration):
            await anext(batches)

    asyncio.run(scenario())


def test_an_engine_that_never_pauses_does_not_keep_others_from_writing() -> None:
    """recv of a socket that always has a message never suspends."""

    async def scenario() -> None:
        engine, _ = client()
        data = encode(Progress())

        async def recv() -> bytes:
            return data

        engine._socket = type("Full", (), {"recv": staticmethod(recv)})
        reading = asyncio.create_task(engine._read())
        for _ in range(3):  # each turn of the loop comes back to this task
            await asyncio.wait_for(asyncio.sleep(0), 5)
        reading.cancel()

    asyncio.run(scenario())
