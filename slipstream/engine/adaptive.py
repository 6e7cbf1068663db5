"""How many drafts the next frame makes: none, or one of a few numbers, whichever gives the most tokens per second.

A frame of *mode* k makes and verifies at most k drafts per slot; mode 0 has no drafting stage. Expected tokens come
from collected records: with a_i the share of rounds that accepted draft i of those that accepted all before it (a draft
that was not offered counts as one that failed), mode k emits 1 + a_1 + a_1 a_2 + ... + a_1...a_k tokens per slot.
Seconds come from start-up, where captured frames were timed over short sequences, or from the frames themselves where
the device reports how long they took (a CPU). A captured frame reads its sequences once, however many rows a slot has:
what frames take above the seconds of start-up counts for all modes alike. A draft that says what acceptance it was
found to have, and seconds of a lone slot's frames from start-up, let the first frames of a CPU begin with what they
promise, instead of trying every mode. What is chosen depends on collected records and the times of collected frames
only, so a draft's fate never depends on what comes after it: the output's law, and every greedy or seeded token, are
those of plain decoding.

What is not in use is looked at again now and then: the next larger mode, since acceptance there is not seen from
here, and where seconds are measured the next smaller one too. A look that changes nothing doubles the time to the
next one, until looks cost next to nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError

MEMORY = 256.0
"""Rounds that an estimate of acceptance remembers."""
PRIOR, PRIOR_WEIGHT = 0.7, 2.0
"""Acceptance of the first draft before anything is known; later ones start from the one before them."""
EXPECTED_WEIGHT, SHORT_MEMORY, UNSEEN_MEMORY = 4.0, 32.0, 64.0
"""Rounds that the acceptance a draft was found to have counts for. With it, rounds of a slot an estimate remembers,
since every text has its own; and those after which what was seen at later positions than the ones in use is old."""
FADE = 0.5
"""What is left of the weight of estimates that a mode has not seen, when it is tried again."""
HOLD = 8
"""Frames between two decisions."""
MARGIN = 0.01
"""A mode has to be better by that much to replace the current one."""
LOOK, LOOK_NEW, FIRST_WAIT, LONGEST_WAIT = 4, 2, 64, 1024
"""Settled frames of one look at another mode, and at one that was never timed; frames to the first look, and the most
between two."""
LOOK_SHARE = 0.0025
"""What looks may cost once they are as seldom as they get: of the tokens per second."""
WELL_TIMED = 16
"""Frames after which a mode's time is known well enough to tell the machine's pace, which all modes share."""
MEASURED_SHARE, DRIFT_SHARE, PACE_SHARE = 0.1, 0.02, 0.2
"""Weight of a new time in the mean of a mode's, before and after that, and in the pace."""

ABOVE_SHARE = 0.1
"""Weight of a new time in the mean of what captured frames take over their profiled times."""

Costs = Mapping[tuple[int, int, int], float]
"""Seconds of a decode frame by (padded slots, rows per slot, drafts made)."""


class _Launch(NamedTuple):
    """settled: the launches that its drafts and row counts came from had its mode too."""

    seq: int
    key: tuple[int, int]
    seconds: float
    settled: bool
    alone: bool


class Acceptance:
    """a_i by position, from rounds of all slots; decayed counts. expected: a_i of earlier measurements, if any."""

    def __init__(self, most: int, expected: Sequence[float] = ()) -> None:
        self.hits = [0.0] * most
        self.tries = [0.0] * most
        self.before: list[float | None] = [None] * most
        """What was known when it was faded: better than a guess from the draft before."""
        self.known = bool(expected)
        self.expected = [expected[min(i, len(expected) - 1)] for i in range(most)] if expected else [None] * most

    def learn(self, accepted: Sequence[int], allowed: int) -> None:
        """Accepted drafts of rounds whose frames could have verified `allowed` of them."""
        reached = len(accepted)
        memory = min(MEMORY, SHORT_MEMORY * reached) if self.known else MEMORY
        for i in range(allowed, len(self.expected) if self.known else 0):
            keep = max(0.0, 1.0 - reached / UNSEEN_MEMORY)
            self.tries[i], self.hits[i] = self.tries[i] * keep, self.hits[i] * keep
        for i in range(allowed):
            if not reached:
                return
            held = reached - accepted.count(i)
            keep = max(0.0, 1.0 - reached / memory)
            self.tries[i] = self.tries[i] * keep + reached
            self.hits[i] = self.hits[i] * keep + held
            reached = held

    def fade(self, first: int, keep: bool) -> None:
        """Trust what is known of drafts from `first` on less: it is old. keep: still more than nothing."""
        old = self._estimates() if keep else [None] * len(self.tries)
        self.before[first:] = old[first:]
        for i in range(first, len(self.tries)):
            self.tries[i] *= FADE
            self.hits[i] *= FADE

    def tokens(self) -> list[float]:
        """[k]: expected tokens of a slot in a frame of mode k."""
        out, reach = [1.0], 1.0
        for a in self._estimates():
            reach *= a
            out.append(out[-1] + reach)
        return out

    def _estimates(self) -> list[float]:
        out, a, off = list[float](), PRIOR, 0.0
        for hits, tries, expected, before in zip(self.hits, self.tries, self.expected, self.before, strict=True):
            # Text that suits the draft at one position suits it at the next.
            prior, weight = a if before is None else min(a, before), PRIOR_WEIGHT
            if expected is not None:
                prior, weight = min(1.0, max(0.0, expected + off)), EXPECTED_WEIGHT
            a = (hits + prior * weight) / (tries + weight)
            off = 0.0 if expected is None else a - expected
            out.append(a)
        return out


class Adaptive:
    """Chooses a mode per launch; one per engine. All methods are called in the order of launches and results."""

    def __init__(
        self,
        modes: Sequence[int],
        *,
        run_ahead: int,
        costs: Costs | None = None,
        guess: Mapping[tuple[int, int], float] | None = None,
        expected: Sequence[float] = (),
    ) -> None:
        """modes: numbers of drafts to choose from, 0 among them. costs: of captured frames; None: times come with
        results, and guess has some from before, by (slots, drafts), of which their ratios count. expected: the draft's
        acceptance by position. Raises ConfigError when a mode's frame has no time."""
        self.modes = tuple(sorted(set(modes)))
        assert self.modes[0] == 0 and len(self.modes) > 1, f"modes {self.modes}"
        self.costs = costs
        self._full: dict[tuple[int, int], float] = {}  # profiled seconds when every slot verifies all drafts
        for (slots, width, k), seconds in sorted((costs or {}).items(), reverse=True):
            if width > k:
                self._full[slots, k] = seconds
        for slots in sorted({slots for slots, _, _ in costs or {}}):
            for k in self.modes:
                if (slots, k) not in self._full:
                    raise ConfigError(f"adaptive: no time of a frame of {slots} slots that makes {k} drafts")
        self.acceptance = Acceptance(self.modes[-1], expected)
        self.mode = 0 if costs is None else self.modes[-1]
        self._lag = run_ahead + 1
        self._shown = self.mode  # the mode of the last launch
        self._same = 0  # launches in a row that had it
        self._load = dict.fromkeys(self.modes, 1.0)
        self._above: dict[int, tuple[float, int]] = {}  # by slots: seconds over the profiled ones, frames in that mean
        # Seconds at pace 1, and how many frames they are the mean of.
        self._measured = {key: (seconds, WELL_TIMED) for key, seconds in (guess or {}).items()}
        self._pace = 0.0  # not known yet
        self._bucket = 0
        self._look: int | None = None
        self._left = self._hold = 0
        self._wait = self._until_look = FIRST_WAIT
        self._smaller = False
        self._launches: deque[_Launch] = deque()

    @classmethod
    def of(cls, config: EngineConfig) -> Adaptive:
        timed = {(slots, rows, drafts): seconds for slots, rows, drafts, seconds in config.frame_seconds}
        guess = {(slots, drafts): seconds for slots, drafts, seconds in config.mode_seconds}
        return cls(
            config.draft_modes, run_ahead=config.run_ahead, costs=timed or None, guess=guess,
            expected=config.draft_acceptance,
        )  # fmt: skip

    # -- per launch ----------------------------------------------------------------------------

    def choose(self, slots: int) -> int:
        """Mode of the next decode frame, of so many slots (padded ones, where frames are captured)."""
        bucket = slots if self.costs is not None else 1 << (slots - 1).bit_length()
        self._hold -= 1
        if bucket != self._bucket:
            self._bucket, self._look, self._hold = bucket, None, 0
        if self._look is not None:
            self._left -= 1
            if self._left > 0:
                return self._look
            self._look, self._hold = None, 0
        if self._hold <= 0:
            self._decide()
        self._until_look -= 1
        if self._look is None and self._until_look <= 0:
            self._start_look(self._other())
        return self.mode if self._look is None else self._look

    def launched(self, seq: int, slots: int, width: int, mode: int, *, alone: bool) -> None:
        """Launch `seq` has a decode frame of that shape; alone: nothing else."""
        self._same = self._same + 1 if mode == self._shown else 1
        self._shown = mode
        seconds, bucket = 0.0, slots
        if self.costs is not None:
            seconds = self.costs.get((slots, width, mode), 0.0)
        else:
            bucket = 1 << (slots - 1).bit_length()
        self._launches.append(_Launch(seq, (bucket, mode), seconds, self._same > self._lag, alone))

    def collected(self, seq: int, accepted: Sequence[int], seconds: float) -> None:
        """The result of launch `seq`: accepted drafts of its rounds, and what it took, 0: not known."""
        if not self._launches or self._launches[0].seq != seq:
            return
        launch = self._launches.popleft()
        if not launch.settled:
            return
        mode = launch.key[1]
        if mode:
            self.acceptance.learn(accepted, mode)
        if self.costs is not None:
            if launch.seconds > 0:
                self._load[mode] += MEASURED_SHARE * (launch.seconds / self._full[launch.key] - self._load[mode])
                if seconds > 0 and launch.alone:
                    self._exceed(launch, seconds)
        elif seconds > 0 and launch.alone:
            self._time(launch.key, seconds)

    def _exceed(self, launch: _Launch, seconds: float) -> None:
        """A captured frame took so long, as the host saw it: what one is late by, the next one lacks."""
        slots = launch.key[0]
        above, frames = self._above.get(slots, (0.0, 0))
        known = launch.seconds + max(0.0, above)
        off = min(seconds, 2 * known) - launch.seconds - above
        self._above[slots] = above + max(ABOVE_SHARE, 1 / (frames + 1)) * off, frames + 1

    def _time(self, key: tuple[int, int], seconds: float) -> None:
        """A frame of a mode took so long: the mode, or the machine, which then takes longer over all of them."""
        if not self._pace:
            self._pace = seconds / self._measured[key][0] if key in self._measured else 1.0
        known, frames = self._measured.get(key, (seconds / self._pace, 0))
        # A frame that something else on the machine held up says little about its mode.
        off = min(seconds / (known * self._pace), 2.0) - 1
        share = DRIFT_SHARE if frames >= WELL_TIMED else max(MEASURED_SHARE, 1 / (frames + 1))
        self._measured[key] = known * (1 + share * off), frames + 1
        if frames >= WELL_TIMED:
            self._pace *= 1 + PACE_SHARE * off

    # -- the decision --------------------------------------------------------------------------

    def rates(self, slots: int) -> dict[int, float]:
        """Expected tokens per second and slot of each mode whose time is known, for so many slots."""
        tokens = self.acceptance.tokens()
        seconds = {k: self._seconds(slots, k) for k in self.modes}
        return {k: tokens[k] / s for k, s in seconds.items() if s is not None}

    def _seconds(self, slots: int, mode: int) -> float | None:
        if self.costs is None:
            known = self._measured.get((slots, mode))
            return None if known is None else known[0] * (self._pace or 1.0)
        return self._full[slots, mode] * self._load[mode] + max(0.0, self._above.get(slots, (0.0, 0))[0])

    def _decide(self) -> None:
        self._hold = HOLD
        rates = self.rates(self._bucket)
        new = self._worth_timing(rates)
        if new is not None:
            self._look, self._left = new, LOOK_NEW + self._lag
            return
        best = max(rates, key=rates.__getitem__)
        if best != self.mode and rates[best] > rates.get(self.mode, 0.0) * (1 + MARGIN):
            self.mode = best
            self._wait = self._until_look = FIRST_WAIT

    def _worth_timing(self, rates: Mapping[int, float]) -> int | None:
        """The smallest mode without a time, unless it could not win if it took no longer than the one below it."""
        new = next((k for k in self.modes if k not in rates), None)
        if not new:
            return new
        below = self.modes[self.modes.index(new) - 1]
        tokens = self.acceptance.tokens()
        return new if tokens[new] / tokens[below] * rates[below] > max(rates.values()) else None

    def _other(self) -> int | None:
        """The mode to look at: the next larger, or, where seconds are measured, in turn the next smaller."""
        at = self.modes.index(self.mode)
        larger = self.modes[at + 1] if at + 1 < len(self.modes) else None
        smaller = self.modes[at - 1] if at and self.costs is None else None
        self._smaller = not self._smaller
        return smaller if smaller is not None and (self._smaller or larger is None) else larger

    def _start_look(self, mode: int | None) -> None:
        self._wait = min(2 * self._wait, self._longest_wait(mode))
        self._until_look = self._wait
        if mode is None:
            return
        if mode > self.mode:
            self.acceptance.fade(self.mode, keep=self._bucket > 1)
        self._look, self._left = mode, LOOK + self._lag

    def _longest_wait(self, mode: int | None) -> int:
        """Frames after which another look at a mode costs no more than its share, by what is known of it.

        A lone slot's look is so few rounds that it tells little: by hopeful guesses it tries often enough. What a
        smaller mode would accept is known."""
        rates = self.rates(self._bucket)
        if mode is None or mode < self.mode or mode not in rates or self._bucket == 1:
            return LONGEST_WAIT
        loses = max(0.0, 1 - rates[mode] / rates[self.mode])
        return min(LONGEST_WAIT, max(FIRST_WAIT, round((LOOK + self._lag) * loses / LOOK_SHARE)))
