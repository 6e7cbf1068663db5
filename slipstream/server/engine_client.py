"""The HTTP process's side of the engine: requests in, chunks of text out, and what happens when the engine dies.

Everything here runs in one asyncio loop; nothing blocks it. The engine is a child process; its end, however it comes,
ends every flight with an error at once.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from slipstream.answers import USUAL, Answer, Prepared, Prompt, Service, default_params, prepare
from slipstream.errors import ConfigError, EngineDeadError, InvalidRequestError, SlipstreamError
from slipstream.outputs import RequestOutput, StreamChunk
from slipstream.server import logs
from slipstream.server.messages import (
    Abort,
    Ack,
    Add,
    Ask,
    Cut,
    Events,
    Fault,
    Ready,
    Refused,
    Rejected,
    Stats,
    Stop,
    Up,
    decode_down,
    encode,
)
from slipstream.server.telemetry import Telemetry
from slipstream.text import Tokenizer
from slipstream.text.grammar import Grammars
from slipstream.types import SamplingParams, TokenEvent

STACKS = "stacks"
"""File in the folder of the socket to which the engine process writes its stacks when it is asked to."""
READ_SECONDS = 0.005
"""Most time spent reading the engine's messages before what they brought is written out."""
STATS_SECONDS = 5.0
"""How long a statistics request may take: the engine answers between two launches."""


class QueueFullError(SlipstreamError):
    """No room for the request now. retry_after: seconds after which a place may be free."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class AnswerFailedError(SlipstreamError):
    """A fault in the text of one answer; the others are not affected."""


@dataclass
class _Live:
    """One prompt of a flight. first: index of its child 0 among the choices of the flight."""

    answer: Answer
    flight: Flight
    first: int
    arrived: float
    first_token: dict[int, float] = field(default_factory=dict)
    last_token: dict[int, float] = field(default_factory=dict)


class Flight:
    """What one HTTP request has running: a prompt or several, each with n children.

    Iterate for (choice index, chunk) until all have ended; an engine that dies raises EngineDeadError. `close` aborts
    what still runs, and must be called.
    """

    def __init__(self, engine: EngineClient, prompts: Sequence[Prepared], request_id: str = "") -> None:
        self.prompts = prompts
        self.request_id = request_id
        self.ttft: float | None = None
        self.outputs: list[RequestOutput] = []
        self._engine = engine
        self._queue: asyncio.Queue[tuple[int, StreamChunk] | Exception] = asyncio.Queue()
        self._names: set[str] = set()
        self._open = 0

    def opened(self, name: str, output: RequestOutput) -> None:
        self._names.add(name)
        self._open += 1
        self.outputs.append(output)

    def put(self, item: tuple[int, StreamChunk] | Exception) -> None:
        self._queue.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[tuple[int, StreamChunk]]:
        async for items in self.batches():
            for item in items:
                yield item

    async def batches(self) -> AsyncIterator[list[tuple[int, StreamChunk]]]:
        """The same, all that is there at once: who cannot keep up with the engine writes fewer, larger pieces."""
        while self._open:
            items = [await self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get_nowait())
            good = [item for item in items if not isinstance(item, Exception)]
            self._open -= sum(chunk.output is not None for _, chunk in good)
            if good:
                yield good
            for item in items:
                if isinstance(item, Exception):
                    raise item

    def close(self) -> None:
        for name in self._names:
            self._engine.abort(name)

    def summary(self) -> dict[str, Any]:
        """For the log. finish: None for a choice that had not ended."""
        choices = [c for output in self.outputs for c in output.outputs]
        return {
            "prompt_tokens": sum(len(p.ids) for p in self.prompts),
            "completion_tokens": sum(len(c.token_ids) for c in choices),
            "finish": [c.finish_reason for c in choices],
            "ttft": None if self.ttft is None else round(self.ttft, 4),
            "rounds": sum(o.spec.rounds for o in self.outputs),
            "accepted": sum(o.spec.accepted for o in self.outputs),
        }


class EngineClient:
    """One engine process. Made by `start`.

    max_queue: children that may wait beyond those that run. dead: None, or why the engine is no more.
    """

    def __init__(self, process: asyncio.subprocess.Process, socket: Any, folder: Any, max_queue: int) -> None:
        self.process = process
        self.telemetry = Telemetry()
        self.dead: str | None = None
        self.died = asyncio.Event()
        self.max_queue = max_queue
        self.ready: Ready
        self.tokenizer: Tokenizer
        self.grammars: Grammars
        self.defaults: SamplingParams
        self._socket = socket
        self._folder = folder
        self._live: dict[str, _Live] = {}
        self._children = 0
        self._ids = itertools.count()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._progress = time.monotonic()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, options: dict[str, Any], *, max_queue: int, log_format: str = "text") -> EngineClient:
        """Start the process and wait until it is ready. Raises ConfigError for options it refuses."""
        folder = tempfile.TemporaryDirectory(prefix="slipstream-")  # only this user may enter
        endpoint = f"ipc://{Path(folder.name) / 'engine'}"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, 0)  # requests are bounded by max_queue, tokens by their max_tokens
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
        words = ("-m", "slipstream.server.engine_process", endpoint, str(Path(folder.name) / STACKS), log_format)
        process = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=asyncio.subprocess.PIPE)
        engine = cls(process, socket, folder, max_queue)
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(options) + b"\n")
            await engine._wait_ready()
        except BaseException:
            await engine.stop()
            raise
        engine._tasks = [asyncio.create_task(engine._read()), asyncio.create_task(engine._watch())]
        return engine

    async def _wait_ready(self) -> None:
        ended = asyncio.create_task(self.process.wait())
        message = asyncio.ensure_future(self._socket.recv())
        await asyncio.wait({ended, message}, return_when=asyncio.FIRST_COMPLETED)
        if not message.done():
            try:  # its last words may still be on their way
                await asyncio.wait_for(asyncio.shield(message), 1.0)
            except TimeoutError:
                message.cancel()
                raise ConfigError(f"the engine process ended with code {ended.result()} before it was ready") from None
        ended.cancel()
        first = decode_down(message.result())
        if isinstance(first, Refused):
            raise ConfigError(first.error)
        assert isinstance(first, Ready), f"first message of the engine: {first}"
        self.know(first)

    def know(self, engine: Ready) -> None:
        """What the engine says of itself; from now on requests may come."""
        self.ready = engine
        self.tokenizer = Tokenizer.from_path(None if engine.tokenizer is None else Path(engine.tokenizer))
        self.defaults = default_params(engine.generation_config)
        limits = engine.limits
        self.grammars = Grammars(self.tokenizer, vocab_size=limits.vocab_size, eos_ids=limits.eos_ids)

    # -- requests ----------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Children that may run and wait at once."""
        return self.ready.max_slots + self.max_queue

    def prepare(self, prompt: Prompt, params: SamplingParams, service: Service = USUAL) -> Prepared:
        """See `answers.prepare`; safe in a thread."""
        return prepare(prompt, params, self.tokenizer, self.ready.limits, self.grammars, service)

    def submit(self, prompts: Sequence[Prepared], request_id: str = "") -> Flight:
        """Raises QueueFullError when there is no place, EngineDeadError, InvalidRequestError if there can be none."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        children = sum(p.params.n for p in prompts)
        if children > self.capacity:
            raise InvalidRequestError(f"n × prompts = {children} answers; the limit is {self.capacity} at once")
        if self._children + children > self.capacity:
            self.telemetry.refused += 1
            raise QueueFullError(
                f"{self._children} answers are running or waiting; the limit is {self.capacity}", self._retry_after()
            )
        flight, first = Flight(self, prompts, request_id), 0
        if not self._live:
            self._progress = time.monotonic()
        for request in prompts:
            name = f"r{next(self._ids)}"
            answer = Answer.begin(name, request, self.tokenizer, self.ready.limits)
            self._live[name] = _Live(answer, flight, first, time.monotonic())
            flight.opened(name, answer.output)
            self._tell(Add(answer.requests(request, self.ready.limits, key=0)[0]))
            first += request.params.n
            self._children += request.params.n
            self.telemetry.prompt(len(request.ids))
        return flight

    def abort(self, name: str) -> None:
        """End a request; one that has ended is ignored."""
        live = self._live.get(name)
        if live is None:
            return
        self.telemetry.finished["abort"] += len(live.answer.open)
        self._forget(name)
        self._tell(Abort(name))

    def _retry_after(self) -> int:
        """Seconds until about one slot is free, from how long answers took so far."""
        return min(60, max(1, math.ceil(self.telemetry.mean_seconds / self.ready.max_slots)))

    def _forget(self, name: str) -> None:
        self._children -= len(self._live.pop(name).answer.open)

    def _tell(self, message: Up) -> None:
        if self.dead is None:
            self._socket.send(encode(message))

    # -- what comes from the engine ----------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            await self._read_all()
        except Exception:
            logs.error("a message of the engine could not be read", trace=True)
            self._die("a message of the engine could not be read")

    async def _read_all(self) -> None:
        turn = time.monotonic()
        while True:
            if time.monotonic() - turn > READ_SECONDS:
                await asyncio.sleep(0)  # recv does not suspend while messages are there: others want to write them out
                turn = time.monotonic()
            message = decode_down(await self._socket.recv())
            if not isinstance(message, Stats):  # those come from an engine that only answers, too
                self._progress = time.monotonic()
            match message:
                case Events(events):
                    for event in events:
                        self._take(event)
                case Rejected(request_id, error):
                    if request_id in self._live:
                        self._live[request_id].flight.put(InvalidRequestError(error))
                        self._forget(request_id)
                case Stats(number, data):
                    if (asked := self._asked.pop(number, None)) and not asked.done():
                        asked.set_result(data)
                case Fault(error):
                    self._die(f"the engine stopped on a fault ({error})")

    def _take(self, event: TokenEvent) -> None:
        live = self._live.get(event.request_id)
        if live is None or event.child not in live.answer.open:
            return
        try:
            chunk, receipt = live.answer.take(event)
        except Exception:  # the request's own fault: it ends alone
            logs.error("the text of an answer failed", trace=True, request_id=live.flight.request_id)
            live.flight.put(AnswerFailedError("the text of this answer failed; others are not affected"))
            self.abort(event.request_id)
            return
        if receipt is not None:
            kind = Cut if receipt.cut else Ack
            self._tell(kind(event.request_id, receipt.child, receipt.upto))
        self._time(live, event.child, chunk)
        if chunk.output is not None:
            del self._live[event.request_id]
        live.flight.put((live.first + event.child, chunk))

    def _time(self, live: _Live, child: int, chunk: StreamChunk) -> None:
        now = time.monotonic()
        if chunk.token_ids:
            if child not in live.first_token:
                live.first_token[child] = now
                self.telemetry.ttft.observe(now - live.arrived)
                if live.flight.ttft is None:
                    live.flight.ttft = now - live.arrived
            else:
                self.telemetry.tokens(len(chunk.token_ids), now - live.last_token[child])
            live.last_token[child] = now
        if chunk.finish_reason is not None:
            self._children -= 1
            tokens = len(live.answer.output.outputs[child].token_ids)
            after_first = live.last_token[child] - live.first_token[child] if tokens else 0.0
            self.telemetry.ended(chunk.finish_reason, tokens, now - live.arrived, after_first)

    async def _watch(self) -> None:
        code = await self.process.wait()
        self._die(f"the engine process ended ({f'signal {-code}' if code < 0 else f'code {code}'})")

    def _die(self, why: str) -> None:
        if self.dead is not None or self._stopping:
            return
        self.dead = why
        for name, live in list(self._live.items()):
            live.flight.put(EngineDeadError(why))
            self._forget(name)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(EngineDeadError(why))
        self._asked.clear()
        self.died.set()

    # -- health and statistics ---------------------------------------------------------------------------------

    @property
    def since_progress(self) -> float:
        """Seconds since a launch was last known to be collected, or since the first request after none."""
        return time.monotonic() - self._progress

    def stalled(self, seconds: float) -> bool:
        """Requests are there, but for this long no launch was collected."""
        return bool(self._live) and self.since_progress > seconds

    def request_ids(self) -> list[str]:
        """Of what runs or waits, oldest first."""
        return list(dict.fromkeys(live.flight.request_id for live in self._live.values()))

    async def stacks(self) -> str:
        """Where each thread of the engine process is; a signal asks for it, so one that hangs can tell too."""
        written = Path(self._folder.name) / STACKS
        before = written.stat().st_size
        self.process.send_signal(signal.SIGUSR1)
        text = ""
        for _ in range(20):
            await asyncio.sleep(0.05)
            text, last = written.read_bytes()[before:].decode("utf-8", "replace"), text
            if text and text == last:  # it writes line by line, and has stopped to
                return text
        return "the engine process does not answer signals: it is stopped, or inside the kernel"

    async def stats(self, *, check: bool = False, timeline: int = 0) -> dict[str, Any]:
        """The engine's statistics. timeline: with so many of the last launches.

        Raises EngineDeadError, TimeoutError when it does not answer.
        """
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        number = next(self._ids)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        self._tell(Ask(number, check, timeline))
        try:
            return await asyncio.wait_for(asked, STATS_SECONDS)
        finally:
            self._asked.pop(number, None)

    async def stop(self) -> None:
        """End the process: by `Stop`, and by force if it does not listen."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        if self.process.returncode is None:
            self._tell(Stop())
            if self.process.stdin is not None:
                self.process.stdin.close()
            try:
                await asyncio.wait_for(self.process.wait(), 5.0)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        self._socket.close()
        self._folder.cleanup()
