"""Grammars without text: what may come next is a function of the output so far, and masks come when a test says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.errors import RequestFailedError
from slipstream.structured import MaskRows, RoundMasks
from slipstream.types import Request


def allowed_after(request: Request, outputs: Sequence[int], vocab: int) -> list[int]:
    """Some two thirds of the vocabulary; no stop ids before min_tokens, unless nothing else is left."""
    said = hashlib.blake2b(repr(list(outputs)).encode(), digest_size=64).digest()
    allowed = [t for t in range(vocab) if said[t % 64] % 3] or [0]
    ban = request.stop_ids if len(outputs) < request.params.min_tokens else ()
    return [t for t in allowed if t not in ban] or allowed


def allowed_by(row: MaskRows, vocab: int) -> list[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return [t for t in range(vocab) if bits[t]]


@dataclass
class FakeMasks:
    """ready(): whether the masks are there, asked at each poll. fails_at: outputs at which it gives up."""

    request: Request
    vocab: int
    ready: Callable[[], bool]
    fails_at: int | None = None
    asked: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def ask(self, outputs: Sequence[int], drafts: Sequence[int], parents: Sequence[int], most: int = 0) -> None:
        assert self.asked is None, "asked twice"
        assert list(parents) == list(range(len(drafts)))
        self.asked = tuple(outputs), tuple(drafts)

    def poll(self) -> RoundMasks | None:
        if self.asked is None or not self.ready():
            return None
        (outputs, drafts), self.asked = self.asked, None
        if self.fails_at is not None and len(outputs) >= self.fails_at:
            raise RequestFailedError("the grammar failed")
        rows = np.zeros((1 + len(drafts), -(-self.vocab // 32)), dtype=np.int32)
        for i, row in enumerate(rows):
            bits = np.zeros(32 * len(row), dtype=np.uint8)
            bits[allowed_after(self.request, (*outputs, *drafts[:i]), self.vocab)] = 1
            row[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return RoundMasks(rows)


@dataclass
class FakeGrammars:
    """ready(request): asked at each poll. fails_at: by request id."""

    vocab: int
    ready: Callable[[Request], bool] = lambda request: True
    fails_at: dict[str, int] = field(default_factory=dict)
    waits: int = 0

    def open(self, request: Request) -> FakeMasks:
        return FakeMasks(request, self.vocab, lambda: self.ready(request), self.fails_at.get(request.request_id))

    def wait(self, seconds: float) -> None:
        self.waits += 1
