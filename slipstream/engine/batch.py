"""Who a decode frame is for: what its plan and its records need of them that only changes when the members do."""

from __future__ import annotations

from typing import Any, NamedTuple

from slipstream.engine.sequence import Sequence
from slipstream.types import VerifyMode


class Flags(NamedTuple):
    """What the sampling parameters of a launch's slots ask of it; see `FramePlan`."""

    sampled: bool
    filtered: bool
    rejection: bool
    coupled: bool
    min_tokens: bool
    penalties: bool
    biases: bool
    custom: bool
    logprobs: bool
    masked: bool

    @staticmethod
    def of(sampling: list[Sequence]) -> Flags:
        draws = [s for s in sampling if not s.request.params.greedy]
        return Flags(
            sampled=bool(draws),
            filtered=any(_filters(s) for s in draws),
            rejection=any(s.request.mode is VerifyMode.REJECTION for s in draws),
            coupled=any(s.request.mode is VerifyMode.COUPLED for s in draws),
            min_tokens=any(s.request.params.min_tokens > 0 for s in sampling),
            penalties=any(s.request.params.penalized for s in sampling),
            biases=any(s.request.params.logit_bias is not None for s in sampling),
            custom=any(s.request.params.logits_processors is not None for s in sampling),
            logprobs=any(s.request.params.logprobs is not None for s in sampling),
            masked=any(s.grammar is not None for s in sampling),
        )

    def asked(self) -> dict[str, Any]:
        """Those that are set, as fields of a plan: few most often, and each costs time in a frame."""
        return {name: True for name, wanted in self._asdict().items() if wanted}


class Batch:
    """The members of a decode frame, in order, and columns of what they have fixed while they own their slots.

    slots: theirs, then `padding` times the sink. drafts: most drafts that a frame of theirs makes. asked: see `Flags`.
    """

    def __init__(self, members: list[Sequence], padding: int, drafts: int) -> None:
        self.members, self.padding, self.drafts = members, padding, drafts
        self.slots = (*(s.slot for s in members), *(0,) * padding)
        self.flags = Flags.of(members)
        self.asked = self.flags.asked()
        self.generations = tuple([s.generation for s in members])
        self.request_ids = [s.key[0] for s in members]
        self.children = [s.key[1] for s in members]
        self.most_tokens = max((s.most_tokens for s in members), default=0)

    def has(self, members: list[Sequence]) -> bool:
        """Whether these are the members, each in the slot that it has now."""
        return members == self.members and [s.generation for s in members] == [*self.generations]


class Queued(NamedTuple):
    """A decode frame that is not collected. left: how many sequences had left their slots when it was planned."""

    launch: int
    width: int
    batch: Batch
    left: int


def _filters(s: Sequence) -> bool:
    p = s.request.params
    return p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0
