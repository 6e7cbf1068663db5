"""The engine's process: `python -m slipstream.server.engine_process ENDPOINT STACKS FORMAT`.

The options come as one line of JSON on stdin; SIGUSR1 appends the stacks of all threads to the file STACKS.

It blocks on its socket only when there is nothing to run. It ends with `Stop`, on a device fault, or when its standard
input closes: then the process that started it is gone.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import msgspec
import zmq

from slipstream.build import Built, build
from slipstream.config import LLMConfig
from slipstream.engine.loop import EngineCore
from slipstream.errors import InvalidRequestError, SlipstreamError
from slipstream.sampling.rng import request_key
from slipstream.server import logs
from slipstream.server.messages import (
    Abort,
    Ack,
    Add,
    Ask,
    Cut,
    Down,
    Events,
    Fault,
    Progress,
    Ready,
    Refused,
    Rejected,
    Stats,
    Stop,
    decode_up,
    encode,
)
from slipstream.types import Request

EXIT_REFUSED = 2
EXIT_FAULT = 70
PROGRESS_SECONDS = 0.5
"""Without tokens to send, this often the other side hears that launches are being collected."""


class EngineProcess:
    """One engine behind one socket."""

    def __init__(self, built: Built, socket: Any) -> None:
        self.built = built
        self.core = EngineCore(built.engine_config, built.device, built.grammars)
        self._socket = socket
        self._sent = time.monotonic()
        self._launches = 0

    def run(self) -> None:
        """Until `Stop`. A device fault is raised as it is."""
        core, socket = self.core, self._socket
        while True:
            if not core.has_work:
                socket.poll()
            while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                message = decode_up(socket.recv())
                if isinstance(message, Stop):
                    return
                self._apply(message)
            if core.has_work:
                self._turn()

    def _turn(self) -> None:
        events = self.core.step()
        if events:
            self._send(Events(events))
            return
        launches = self.core.metrics.counters["launches"]
        if launches != self._launches and time.monotonic() - self._sent > PROGRESS_SECONDS:
            self._launches = launches
            self._send(Progress())

    def _apply(self, message: Add | Ack | Cut | Abort | Ask) -> None:
        core = self.core
        match message:
            case Add(request):
                self._add(request)
            case Ack(request_id, child, upto):
                core.ack(request_id, child, upto)
            case Cut(request_id, child, upto):
                core.cut(request_id, child, upto)
            case Abort(request_id):
                core.abort(request_id)
            case Ask(number, check, timeline):
                data = self.stats(check=check)
                if timeline:
                    data["timeline"] = core.metrics.timeline(timeline)
                self._send(Stats(number, data))

    def _add(self, request: Request) -> None:
        key = request_key(request.params.seed)
        try:
            for child in range(request.params.n):
                self.core.add(replace(request, child=child, key=key))
        except InvalidRequestError as error:
            self.core.abort(request.request_id)  # its first children may be in already
            self._send(Rejected(request.request_id, str(error)))

    def stats(self, *, check: bool) -> dict[str, Any]:
        """Counters, queue, pools. check: assert that free + cached + held = total, in every pool."""
        core, ledger = self.core, self.core.scheduler.ledger
        data = {
            **core.metrics.snapshot(launches=check),
            "round_tokens": core.metrics.spec.emitted,
            "running": len(core.scheduler.running),
            "waiting": len(core.scheduler.waiting),
            "idle": core.idle,
            "pools": {
                "slots": core.config.max_slots,
                "slots_free": len(ledger.free_slots),
                "pages": core.config.num_pages,
                "pages_free": ledger.pool.num_free,
                "pages_cached": ledger.radix.num_pages,
                "window": None if ledger.window is None else ledger.window.report(),
                "states": None if ledger.saved is None else ledger.saved.report(),
            },
        }
        if check:
            try:
                core.scheduler.check()
            except AssertionError as error:
                data["leak"] = str(error) or "the pools do not add up"
        return data

    def _send(self, message: Down) -> None:
        self._socket.send(encode(message))
        self._sent = time.monotonic()


def main(argv: list[str]) -> int:
    # A terminal's Ctrl-C, or a supervisor's signal to the whole group, is for the other process: it says `Stop`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logs.set_up(argv[2])
    faulthandler.enable()
    show_stacks_on_signal(argv[1])
    options = msgspec.json.decode(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)  # the queue of requests is bounded by the other side
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(argv[0])
    try:
        return _run(options, socket)
    finally:
        socket.close()
        context.term()


def ready(built: Built) -> Ready:
    source = built.tokenizer_source
    return Ready(
        limits=built.limits, tokenizer=None if source is None else str(source), notes=built.notes,
        generation_config=dict(built.generation_config), resolved=built.resolved,
        max_slots=built.engine_config.max_slots,
    )  # fmt: skip


def show_stacks_on_signal(path: str) -> None:
    """SIGUSR1 appends the stacks of all threads to the file, wherever they are."""
    faulthandler.register(signal.SIGUSR1, file=os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))


def _run(options: dict[str, Any], socket: Any) -> int:
    try:
        # Prompts with embeddings are taken offline only.
        built = build(LLMConfig.from_options(**{"prompt_embeds": False, **options}))
    except SlipstreamError as error:
        socket.send(encode(Refused(str(error))))
        return EXIT_REFUSED
    socket.send(encode(ready(built)))
    try:
        EngineProcess(built, socket).run()
    except Exception as fault:
        logs.error("a fault ends the engine", trace=True)
        socket.send(encode(Fault(type(fault).__name__)))
        return EXIT_FAULT
    return 0


def _end_with_parent() -> None:
    # Not through sys.stdin: this thread would hold its lock while the interpreter ends, which then aborts.
    while os.read(sys.stdin.fileno(), 1 << 16):
        pass
    os._exit(EXIT_FAULT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
