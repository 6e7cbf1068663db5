"""Says what hangs: stacks of both processes go to the log when the engine, or this process, makes no progress."""

from __future__ import annotations

import asyncio
import faulthandler

from slipstream.server import logs
from slipstream.server.engine_client import EngineClient

STDERR = 2
TURN_SECONDS = 1.0


class Watchdog:
    """seconds: without progress for so long, something hangs."""

    def __init__(self, engine: EngineClient, seconds: float) -> None:
        self.engine = engine
        self.seconds = seconds
        self.stalled = False

    async def run(self) -> None:
        """Until cancelled. An event loop that stands still cannot log: a thread writes its stacks to stderr."""
        try:
            while True:
                faulthandler.dump_traceback_later(self.seconds + TURN_SECONDS, repeat=True, file=STDERR)
                await asyncio.sleep(min(TURN_SECONDS, self.seconds / 4))
                await self.look()
        finally:
            faulthandler.cancel_dump_traceback_later()

    async def look(self) -> None:
        """Log the beginning and the end of a stall, once each."""
        now = self.engine.dead is None and self.engine.stalled(self.seconds)
        if now and not self.stalled:
            self.stalled = True
            logs.error(
                "the engine makes no progress", seconds=round(self.engine.since_progress, 1),
                request_ids=self.engine.request_ids()[:20], engine_stacks=await self.engine.stacks(),
            )  # fmt: skip
        elif self.stalled and not now:
            self.stalled = False
            if self.engine.dead is None:
                logs.info("the engine makes progress again")
