"""The whole server in the test's own process: engine in one thread, HTTP and text in another, no ports, no start-up."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import zmq
import zmq.asyncio

from slipstream.build import build
from slipstream.config import LLMConfig
from slipstream.server.app import Server, build_app
from slipstream.server.engine_client import EngineClient
from slipstream.server.engine_process import EngineProcess, ready
from slipstream.server.messages import Stop, encode
from tests.support.server import until


class InProcessServer:
    """`LLM`'s options; use it as a context manager."""

    def __init__(self, **options: Any) -> None:
        self._built = build(LLMConfig.from_options(**options))
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-")
        self._endpoint = f"ipc://{Path(self._folder.name) / 'engine'}"
        self._context = zmq.Context()
        self._loop = asyncio.new_event_loop()
        self.fault: BaseException | None = None

    def __enter__(self) -> InProcessServer:
        self._http_thread = threading.Thread(target=self._loop.run_forever)
        self._http_thread.start()
        self._do(self._start()).result(60)
        self._engine_thread = threading.Thread(target=self._run_engine)
        self._engine_thread.start()
        return self

    def _run_engine(self) -> None:
        socket = self._context.socket(zmq.PAIR)
        socket.connect(self._endpoint)
        try:
            EngineProcess(self._built, socket).run()
        except BaseException as fault:
            self.fault = fault
        finally:
            socket.close()

    async def _start(self) -> None:
        self._socket = zmq.asyncio.Context(self._context).socket(zmq.PAIR)
        self._socket.bind(self._endpoint)
        engine = EngineClient(None, self._socket, None, max_queue=256)  # type: ignore[arg-type]
        engine.know(ready(self._built))
        self._engine = engine
        self._reading = asyncio.create_task(engine._read())
        app = build_app(Server(engine, name="tiny", watchdog=60.0), [])
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tiny", timeout=120)

    def _do(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def post(self, path: str, body: dict[str, Any]) -> Future[httpx.Response]:
        """Begin a request; several run at once."""
        return self._do(self._client.post(path, json=body))

    def check_idle(self) -> None:
        """Nothing runs: no slot and no page is held by anybody."""
        assert self.fault is None, self.fault
        state = until(lambda: (state := self._do(self._engine.stats(check=True)).result(60))["idle"] and state)
        assert "leak" not in state, state
        pools = state["pools"]
        assert pools["slots_free"] == pools["slots"]
        assert pools["pages_free"] + pools["pages_cached"] == pools["pages"]

    async def _stop(self) -> None:
        self._socket.send(encode(Stop()))
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._client.aclose()

    def __exit__(self, *_: object) -> None:
        self._do(self._stop()).result(60)
        self._engine_thread.join(60)
        self._do(self._close()).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._http_thread.join(60)
        self._loop.close()
        self._context.term()
        self._folder.cleanup()

    async def _close(self) -> None:
        self._socket.close()
