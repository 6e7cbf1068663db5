"""Every clinic pair that the proof without a GPU can see, as one program: STEPS steps of each, pair after pair."""

from __future__ import annotations

from bench.clinic import Pair, cases
from bench.clinic.loop import Loop
from slipstream.audit import Program

STEPS = 3


def provable() -> list[Pair]:
    return [case for case in cases() if isinstance(case, Pair) and case.provable]


def build(which: str) -> Program:
    """`which`: before or after, in a tiny loop on a fake GPU."""
    loop = Loop("cuda:0", tiny=True)
    todo = iter([(case, t) for case in provable() for t in range(STEPS)])

    def frame() -> None:
        case, t = next(todo)
        if t == 0:
            loop.reset()
        (case.before if which == "before" else case.after)(loop, t)

    return Program(frame, STEPS * len(provable()))
