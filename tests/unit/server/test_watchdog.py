"""The watchdog's own eyes: stalls are told once, and drafts that are never accepted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

for extra in ("zmq", "msgspec", "prometheus_client"):
    pytest.importorskip(extra)

from slipstream.server import logs
from slipstream.server.watchdog import Watchdog


class Engine:
    dead: str | None = None
    waits = 0.0
    since_progress = 0.0

    def stalled(self, seconds: float) -> bool:
        return self.waits > seconds

    def request_ids(self) -> list[str]:
        return ["a"]

    async def stacks(self) -> str:
        return "where it is"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, dict[str, Any]]]:
    said: list[tuple[str, str, dict[str, Any]]] = []
    for level in ("info", "warning", "error"):
        monkeypatch.setattr(logs, level, lambda event, level=level, **fields: said.append((level, event, fields)))
    return said


def test_a_stall_is_told_once_and_so_is_its_end(told: list[Any]) -> None:
    engine = Engine()
    watchdog = Watchdog(engine, 10.0)  # type: ignore[arg-type]
    for waits in (0.0, 9.0, 11.0, 20.0, 0.0, 0.0, 11.0):
        engine.waits = waits
        asyncio.run(watchdog.look())
    assert [level for level, _, _ in told] == ["error", "info", "error"]
    assert told[0][2]["engine_stacks"] == "where it is" and told[0][2]["request_ids"] == ["a"]
    engine.dead = "gone"
    asyncio.run(watchdog.look())
    assert len(told) == 3, "its death is told elsewhere"


def test_drafts_that_are_never_accepted_are_reported_once(told: list[Any]) -> None:
    watchdog = Watchdog(Engine(), 10.0)  # type: ignore[arg-type]
    for drafted, accepted in ((0, 0), (900, 0), (1500, 2), (4000, 5), (9000, 5), (11_000, 900), (13_000, 900)):
        watchdog.look_at_drafts(drafted, accepted)
    assert [(level, fields["drafted"], fields["accepted"]) for level, _, fields in told] == [
        ("warning", 1500, 2), ("warning", 2000, 0),
    ]  # fmt: skip
    watchdog.look_at_drafts(13_000, 900)  # drafting is off
    assert len(told) == 2
