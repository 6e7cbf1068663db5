"""Runs the server: socket, engine process, HTTP, and the three ways to end: drained, interrupted, engine dead."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from slipstream.errors import ConfigError
from slipstream.server.app import Server, build_app
from slipstream.server.engine_client import EngineClient

EXIT_ENGINE_DEAD = 70
DEAD_SECONDS = 5.0
"""After the engine's death the server answers this long: errors reach the clients, /health says 503."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How to serve. port 0: the system chooses. max_queue: answers that may wait beyond those that run.

    drain_seconds: how long SIGTERM waits for answers in flight. watchdog_seconds: without a collected launch for this
    long while requests are there, /health says 503.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_queue: int = 256
    drain_seconds: float = 30.0
    watchdog_seconds: float = 60.0


class _Uvicorn(uvicorn.Server):
    """Signals are ours: SIGTERM must end in exit code 0 when everything is drained."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(config: ServeConfig, engine_options: dict[str, Any]) -> int:
    """Serve until a signal or the engine's death; the exit code. Raises ConfigError for what cannot start."""
    return asyncio.run(_serve(config, engine_options))


async def _serve(config: ServeConfig, engine_options: dict[str, Any]) -> int:
    listener = _bind(config.host, config.port)
    with contextlib.closing(listener):
        engine = await EngineClient.start(engine_options, max_queue=config.max_queue)
        try:
            return await _run(config, engine, listener)
        finally:
            await engine.stop()


async def _run(config: ServeConfig, engine: EngineClient, listener: socket.socket) -> int:
    server = Server(engine, name=config.name, watchdog=config.watchdog_seconds)
    http = _Uvicorn(uvicorn.Config(
        build_app(server, config.api_keys), http="h11", ws="none", lifespan="off", access_log=False,
        log_level="warning", timeout_graceful_shutdown=max(1, round(config.drain_seconds)),
        h11_max_incomplete_event_size=16 << 10, server_header=False,
    ))  # fmt: skip

    def end() -> None:
        if server.draining:
            http.force_exit = True  # a second signal does not wait
        server.draining = http.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    watch = asyncio.create_task(_end_with_engine(engine, http))
    for note in engine.ready.notes:
        print(f"slipstream: {note}", file=sys.stderr)
    host = f"[{config.host}]" if ":" in config.host else config.host
    print(f"serving {config.name} at http://{host}:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    try:
        await http.serve([listener])
    finally:
        watch.cancel()
    return EXIT_ENGINE_DEAD if engine.dead is not None else 0


async def _end_with_engine(engine: EngineClient, http: _Uvicorn) -> None:
    await engine.died.wait()
    print(f"slipstream: error: {engine.dead}", file=sys.stderr, flush=True)
    await asyncio.sleep(DEAD_SECONDS)
    http.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {error.strerror}") from None
    return made
