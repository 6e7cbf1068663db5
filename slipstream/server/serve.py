"""Runs the server: socket, engine process, HTTP, and the three ways to end: drained, interrupted, engine dead."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from slipstream.errors import ConfigError
from slipstream.server import logs
from slipstream.server.app import Server, build_app
from slipstream.server.engine_client import EngineClient
from slipstream.server.formats import PLAIN, Formats
from slipstream.server.watchdog import Watchdog

EXIT_ENGINE_DEAD = 70
ADMIN_HOST = "127.0.0.1"
MAX_HEADER_BYTES = 16 << 10
KEEP_ALIVE_SECONDS = 30
DEAD_SECONDS = 5.0
"""After the engine's death the server answers this long: errors reach the clients, /health says 503."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How to serve. port 0: the system chooses. max_queue: answers that may wait beyond those that run.

    drain_seconds: how long SIGTERM waits for answers in flight. watchdog_seconds: without a collected launch for this
    long while requests are there, /health says 503 and the stacks are logged. admin_port: /metrics, /stats,
    /server_info and the page move there, to 127.0.0.1; 0: the system chooses. log_format: one of `logs.FORMATS`.
    formats: how the model writes tool calls and reasoning.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_queue: int = 256
    drain_seconds: float = 30.0
    watchdog_seconds: float = 60.0
    admin_port: int | None = None
    log_format: str = "auto"
    formats: Formats = PLAIN


class _Uvicorn(uvicorn.Server):
    """Signals are ours: SIGTERM must end in exit code 0 when everything is drained."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(config: ServeConfig, engine_options: dict[str, Any]) -> int:
    """Serve until a signal or the engine's death; the exit code. Raises ConfigError for what cannot start."""
    return asyncio.run(_serve(config, engine_options))


async def _serve(config: ServeConfig, engine_options: dict[str, Any]) -> int:
    log_format = logs.set_up(config.log_format)
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(_bind(config.host, "--port", config.port))]
        if config.admin_port is not None:
            listeners.append(stack.enter_context(_bind(ADMIN_HOST, "--admin-port", config.admin_port)))
        engine = await EngineClient.start(engine_options, max_queue=config.max_queue, log_format=log_format)
        try:
            return await _run(config, engine, listeners)
        finally:
            await engine.stop()


async def _run(config: ServeConfig, engine: EngineClient, listeners: list[socket.socket]) -> int:
    server = Server(engine, name=config.name, watchdog=config.watchdog_seconds, formats=config.formats)
    apps = [build_app(server, config.api_keys, admin=len(listeners) == 1 or at == 1) for at in range(len(listeners))]
    servers = [
        _Uvicorn(uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", access_log=False, log_config=None,
            timeout_graceful_shutdown=max(1, round(config.drain_seconds)), timeout_keep_alive=KEEP_ALIVE_SECONDS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES, server_header=False,
        ))
        for app in apps
    ]  # fmt: skip

    def end() -> None:
        logs.info("shutting down: what runs is finished first" if not server.draining else "shutting down at once")
        for http in servers:
            http.force_exit = server.draining  # a second signal does not wait
            http.should_exit = True
        server.draining = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    watches = [
        asyncio.create_task(_end_with_engine(engine, servers)),
        asyncio.create_task(Watchdog(engine, config.watchdog_seconds).run()),
    ]
    # Tables of measured seconds are long; /server_info has them.
    logs.info("configuration", **{k: v for k, v in engine.ready.resolved.items() if not k.endswith("_seconds")})
    for note in engine.ready.notes:
        logs.info(note)
    for at in listeners:
        at.listen(1024)  # who reads "serving" may connect at once
    host = f"[{config.host}]" if ":" in config.host else config.host
    if len(listeners) > 1:
        logs.info(f"metrics and page at http://{ADMIN_HOST}:{listeners[1].getsockname()[1]}")
    logs.info(f"serving {config.name} at http://{host}:{listeners[0].getsockname()[1]}")
    try:
        await asyncio.gather(*(http.serve([at]) for http, at in zip(servers, listeners, strict=True)))
    finally:
        for watch in watches:
            watch.cancel()
    return EXIT_ENGINE_DEAD if engine.dead is not None else 0


async def _end_with_engine(engine: EngineClient, servers: Sequence[_Uvicorn]) -> None:
    await engine.died.wait()
    logs.error(str(engine.dead))
    await asyncio.sleep(DEAD_SECONDS)
    for http in servers:
        http.should_exit = True


def _bind(host: str, option: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By name of its protocol, else asyncio leaves Nagle's delay on: 40 ms before the first token of a kept connection.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise ConfigError(f"cannot listen on {host}, {option} {port}: {error.strerror}") from None
    return made
