"""What the two processes say to each other: msgspec structs as MessagePack, typed on both ends. Nothing is pickled."""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.answers import Limits
from slipstream.types import Request, TokenEvent


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# -- up: from the HTTP process to the engine's ------------------------------------------------------------------


class Add(_Message, frozen=True):
    """Queue a request: child 0 of params.n; the engine makes the others, and their noise key."""

    request: Request


class Ack(_Message, frozen=True):
    request_id: str
    child: int
    upto: int


class Cut(_Message, frozen=True):
    request_id: str
    child: int
    upto: int


class Abort(_Message, frozen=True):
    request_id: str


class Ask(_Message, frozen=True):
    """Statistics, please. check: with the invariant of the pools checked; timeline: with so many of the last launches.

    Answered by `Stats` of the same number.
    """

    number: int
    check: bool = False
    timeline: int = 0


class Stop(_Message, frozen=True):
    """End the process; nothing is running any more."""


# -- down -------------------------------------------------------------------------------------------------------


class Ready(_Message, frozen=True):
    """tokenizer: file or folder; None when the model has none. max_slots: requests that run at once."""

    limits: Limits
    tokenizer: str | None
    generation_config: dict[str, Any]
    resolved: dict[str, Any]
    notes: list[str]
    max_slots: int


class Refused(_Message, frozen=True):
    """The user's options cannot work; the process ends."""

    error: str


class Events(_Message, frozen=True):
    events: list[TokenEvent]


class Progress(_Message, frozen=True):
    """Launches are being collected, though none brought tokens (a long prompt)."""


class Rejected(_Message, frozen=True):
    """A request that the engine did not take."""

    request_id: str
    error: str


class Stats(_Message, frozen=True):
    number: int
    data: dict[str, Any]


class Fault(_Message, frozen=True):
    """The engine cannot go on; the process ends."""

    error: str


Up = Add | Ack | Cut | Abort | Ask | Stop
Down = Ready | Refused | Events | Progress | Rejected | Stats | Fault

encode = msgspec.msgpack.Encoder().encode
decode_up = msgspec.msgpack.Decoder(Up).decode
decode_down = msgspec.msgpack.Decoder(Down).decode
