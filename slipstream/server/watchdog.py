"""Says what hangs: stacks of both processes go to the log when the engine, or this process, makes no progress."""

from __future__ import annotations

import asyncio
import faulthandler
import time

from slipstream.errors import EngineDeadError
from slipstream.server import logs
from slipstream.server.engine_client import EngineClient

STDERR = 2
TURN_SECONDS = 1.0
DRAFT_SECONDS = 30.0
"""Between two looks at the draft statistics."""
FEW_ACCEPTED = 0.01
ENOUGH_DRAFTS = 1000


class Watchdog:
    """seconds: without progress for so long, something hangs."""

    def __init__(self, engine: EngineClient, seconds: float) -> None:
        self.engine = engine
        self.seconds = seconds
        self.stalled = False
        self._drafts = (0, 0)
        self._few = False

    async def run(self) -> None:
        """Until cancelled. An event loop that stands still cannot log: a thread writes its stacks to stderr."""
        looked = time.monotonic()
        try:
            while True:
                faulthandler.dump_traceback_later(self.seconds + TURN_SECONDS, repeat=True, file=STDERR)
                await asyncio.sleep(min(TURN_SECONDS, self.seconds / 4))
                try:
                    await self.look()
                    if time.monotonic() - looked > DRAFT_SECONDS and self.engine.dead is None:
                        looked = time.monotonic()
                        spec = (await self.engine.stats())["spec"]
                        self.look_at_drafts(spec["drafted"], spec["accepted"])
                except (EngineDeadError, TimeoutError):
                    pass  # an engine that does not answer is seen by `look`
                except Exception:
                    logs.error("the watchdog failed", trace=True)  # it goes on
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

    def look_at_drafts(self, drafted: int, accepted: int) -> None:
        """Totals since the start. Drafts that hardly ever hold cost time and give nothing: a wrong head, or a wrong
        format of one. Told once, until some are accepted again."""
        new, held = drafted - self._drafts[0], accepted - self._drafts[1]
        if new < ENOUGH_DRAFTS:
            return
        self._drafts = (drafted, accepted)
        few = held < FEW_ACCEPTED * new
        if few and not self._few:
            logs.warning(
                "hardly any drafts are accepted: does the draft belong to the model?", drafted=new, accepted=held
            )
        self._few = few
