"""The choice of drafts per frame on a simulated clock: near the best fixed one, whatever batch and acceptance."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from bench import host_frame
from slipstream.engine.adaptive import LONGEST_WAIT, LOOK, MEMORY, Acceptance, Adaptive, _Launch
from slipstream.engine.collect import TIMED_ONE_IN
from slipstream.errors import ConfigError

Clock = Callable[[int, int, int], float]
"""(slots, rows per slot, drafts made) -> milliseconds of a frame"""


def gpu(slots: int, width: int, drafts: int) -> float:
    """Flat while weights are streamed, rising once the rows fill the machine; a pass of the draft per draft."""
    rows = slots * width
    return 1.0 + 0.001 * rows + 0.009 * max(0, rows - 64) + (0.05 + 0.0005 * slots) * drafts


def cpu(slots: int, width: int, drafts: int) -> float:
    """Nearly free up to four rows, then a cliff."""
    rows = slots * width
    return 20.0 + 1.2 * (min(rows, 4) - 1) + 9.0 * max(0, rows - 4) + 0.8 * drafts


H200 = {
    1: (0.863, 0.899, 0.910), 4: (0.892, 0.944, 0.994), 16: (0.985, 1.061, 1.250), 64: (1.376, 1.530, 1.815),
}  # fmt: skip
"""Milliseconds of a frame of Llama-3.2-1B by slots, with 0, 1 and 3 drafts, where sequences have about 220 tokens."""


def h200(slots: int, width: int, drafts: int) -> float:
    at = (0, 1, 1, 2)
    return (H200[slots][at[width - 1]] + H200[slots][at[drafts]]) / 2


PROFILED = (gpu, h200)


def conditional(mean: float, drafts: int = 3) -> float:
    """p with 1 + p + ... + p^drafts = mean."""
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**i for i in range(drafts + 1)) < mean else (low, p)
    return low


class Machine:
    """Frames of a batch with a given acceptance; results come `run_ahead` launches late."""

    def __init__(
        self, clock: Clock, modes: tuple[int, ...], slots: int, run_ahead: int, seed: int = 0, reading: float = 0.0,
        **known: Any,
    ) -> None:  # fmt: skip
        """reading: milliseconds that each frame takes for its sequences' lengths; at start-up they were short."""
        self.clock, self.modes, self.slots, self.run_ahead = clock, modes, slots, run_ahead
        self.rng = random.Random(seed)
        self.profiled, self.reading = clock in PROFILED, reading
        costs = None
        if self.profiled:
            costs = {(slots, w, k): clock(slots, w, k) / 1e3 for k in modes for w in {1, *(m + 1 for m in modes)}}
        self.adaptive = Adaptive(modes, run_ahead=run_ahead, costs=costs, **known)
        self.launches = 0
        self.tokens = self.spent = 0.0
        self.in_flight: deque[tuple[int, list[int], float]] = deque()
        self.chosen: list[int] = []

    def frames(self, n: int, p: float, noise: float = 0.0) -> float:
        """Tokens per millisecond of n frames at acceptance p of each draft after the one before it."""
        tokens = spent = 0.0
        for _ in range(n):
            if len(self.in_flight) >= self.run_ahead:
                self.adaptive.collected(*self.in_flight.popleft())
            k = self.adaptive.choose(self.slots)
            # Records that the row count comes from are run_ahead launches old, so are the drafts it may count on.
            known = min(self.chosen[-self.run_ahead - 1 : -1], default=k) if self.run_ahead > 1 else k
            made = self.chosen[-1] if self.chosen else 0
            verified = min(k, made, known)
            rounds = []
            for _ in range(self.slots):
                accepted = 0
                while accepted < verified and self.rng.random() < p:
                    accepted += 1
                rounds.append(accepted)
            seconds = (self.clock(self.slots, verified + 1, k) + self.reading) * (1 + noise * abs(self.rng.gauss(0, 1)))
            self.adaptive.launched(self.launches, self.slots, verified + 1, k, alone=True)
            timed = not self.profiled or self.launches % TIMED_ONE_IN == 0
            self.in_flight.append((self.launches, rounds, timed * seconds / 1e3))
            self.launches += 1
            self.chosen.append(k)
            tokens += sum(rounds) + self.slots
            spent += seconds
        self.tokens, self.spent = self.tokens + tokens, self.spent + spent
        return tokens / spent

    def fixed(self, p: float, k: int) -> float:
        return self.slots * sum(p**i for i in range(k + 1)) / (self.clock(self.slots, k + 1, k) + self.reading)

    def best(self, p: float) -> float:
        return max(self.fixed(p, k) for k in self.modes)


@pytest.mark.parametrize("slots", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(
    ("clock", "modes", "run_ahead"), [(gpu, (0, 1, 3), 2), (cpu, (0, 1, 2, 3), 1)], ids=["gpu", "cpu"]
)
def test_within_three_per_cent_of_the_best_fixed_number(
    clock: Clock, modes: tuple[int, ...], run_ahead: int, slots: int
) -> None:
    for mean in (1.0, 1.3, 1.6, 2.0, 2.5, 3.0, 3.5, 4.0):
        machine, p = Machine(clock, modes, slots, run_ahead, seed=slots), conditional(mean)
        machine.frames(300, p)
        got = machine.frames(3000 if slots < 16 else 1000, p)
        assert got > 0.97 * machine.best(p), (mean, got / machine.best(p), machine.adaptive.mode)


@pytest.mark.parametrize("slots", H200)
@pytest.mark.parametrize("reading", [0.0, 3.0])
def test_the_times_of_an_h200(slots: int, reading: float) -> None:
    """Near the best at once and nearer later, mean of some engines, where sequences are long too: 3 ms more than at
    start-up in each frame leave modes less apart, so that acceptance near 1 is enough to draft."""
    for mean in (1.0, 1.06, 1.1, 1.6, 2.5, 4.0):
        first = later = 0.0
        for seed in range(4):
            machine, p = Machine(h200, (0, 1, 3), slots, 2, seed, reading=reading), conditional(mean)
            first += machine.frames(250, p) / machine.best(p) / 4
            later += machine.frames(600, p) / machine.best(p) / 4
        # 250 rounds of one slot are a small sample.
        assert first > 0.955 and later > (0.97 if slots > 1 else 0.96), (mean, first, later)


@pytest.mark.parametrize("slots", [1, 4, 16, 64])
def test_text_that_begins_to_suit_the_draft_is_seen_soon(slots: int) -> None:
    """The first 600 frames after a long time without, mean of engines that look at different moments."""
    share = 0.0
    for seed in range(8):
        machine = Machine(gpu, (0, 1, 3), slots, 2, seed)
        machine.frames(1300 + 113 * seed, conditional(1.01))
        share += machine.frames(600, conditional(3.5)) / machine.best(conditional(3.5)) / 8
    assert share > 0.85, share


def test_an_engine_tells_what_captured_frames_took(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = host_frame.build(2, 3, 2, adaptive=True)
    adaptive = engine.scheduler.adaptive
    assert adaptive is not None and adaptive.costs is not None
    monkeypatch.setattr(engine.metrics, "span", lambda result, arrived: (arrived - 4_000_000, arrived))
    profiled = adaptive._seconds(2, 3)
    assert profiled is not None and profiled < 2e-3
    for _ in range(150):
        engine.step()
    assert adaptive._seconds(2, 3) == pytest.approx(4e-3, rel=0.02)


def test_frames_that_were_held_up_do_not_turn_it() -> None:
    """Late by turns, or a standstill of seconds."""
    machine = Machine(h200, (0, 1, 3), 16, 2)
    machine.frames(300, conditional(1.2), noise=0.5)
    usual = machine.adaptive.mode
    machine.adaptive._exceed(_Launch(0, (16, usual), 1e-3, True, True), 5.0)
    assert machine.adaptive._seconds(16, usual) < 3e-3
    before = len(machine.chosen)
    machine.frames(600, conditional(1.2))
    assert sum(k != usual for k in machine.chosen[before:]) < 30


def test_it_follows_a_change_of_acceptance_and_does_not_flutter() -> None:
    machine = Machine(gpu, (0, 1, 3), slots=4, run_ahead=2)
    machine.frames(500, conditional(1.01))
    assert machine.adaptive.mode == 0
    machine.frames(LONGEST_WAIT + 300, conditional(3.5))
    assert machine.adaptive.mode == 3
    for mean, most in ((1.01, 0.06), (3.5, 0.02)):
        machine.frames(LONGEST_WAIT + 300, conditional(mean))
        before = len(machine.chosen)
        machine.frames(1500, conditional(mean))
        chosen = machine.chosen[before:]
        usual = max(machine.modes, key=chosen.count)
        assert sum(k != usual for k in chosen) <= most * len(chosen)
        assert sum(a != b for a, b in pairwise(chosen)) < 24


def test_off_is_seldom_left_and_ever_less_often() -> None:
    machine = Machine(gpu, (0, 1, 3), slots=64, run_ahead=2)
    machine.frames(200, 0.0)
    assert machine.adaptive.mode == 0
    first, then = machine.chosen[:200], len(machine.chosen)
    machine.frames(4 * LONGEST_WAIT, 0.0)
    assert 0 < sum(k > 0 for k in machine.chosen[then:]) <= 8 * (LOOK + 3)
    assert first[-1] == 0


def test_noisy_times_do_not_mislead_it() -> None:
    for mean in (1.0, 2.0, 3.5):
        machine, p = Machine(cpu, (0, 1, 2, 3), 1, 1, seed=5), conditional(mean)
        machine.frames(300, p, noise=0.3)
        right = sorted(machine.modes, key=lambda k, p=p: -machine.fixed(p, k))
        machine.frames(2000, p, noise=0.3)
        assert machine.fixed(p, machine.adaptive.mode) > 0.97 * machine.fixed(p, right[0])


def small(slots: int, width: int, drafts: int) -> float:
    """SmolLM2 with its EAGLE-3 head on two threads."""
    return 17.0 + (0, 2.3, 3.9, 5.8)[width - 1] + 1.1 * drafts


@pytest.mark.parametrize("pace", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("p", [0.0, 0.15, 0.25, 0.4, 0.6, 0.8])
def test_what_is_known_beforehand_keeps_the_first_answer_near_the_best(p: float, pace: float) -> None:
    """256 tokens, mean of 40 answers of engines that have just started; the table comes from a machine of another pace,
    and the text may suit the draft less, or better, than what its acceptance was found on."""
    guess = {(1, k): small(1, k + 1, k) / 1e3 / pace for k in range(4)}
    shares = []
    for seed in range(40):
        machine = Machine(small, (0, 1, 2, 3), 1, 1, seed, guess=guess, expected=(0.5, 0.45, 0.45))
        while machine.tokens < 256:
            machine.frames(1, p)
        shares.append(machine.tokens / machine.spent * small(1, 1, 0))
    assert sum(shares) / len(shares) > max(0.97, 0.965 * machine.best(p) * small(1, 1, 0)), shares


def test_a_trained_draft_follows_from_text_to_text() -> None:
    """Answers of 256 tokens, texts by turns, mean of 20 engines: each near what the best number of drafts gives it."""
    texts = (0.45, 0.8, 0.45, 0.8)
    guess = {(1, k): small(1, k + 1, k) / 1e3 for k in range(4)}
    shares = [0.0] * len(texts)
    for seed in range(20):
        machine = Machine(small, (0, 1, 2, 3), 1, 1, seed, guess=guess, expected=(0.67, 0.69, 0.7))
        for i, p in enumerate(texts):
            tokens, spent = machine.tokens, machine.spent
            while machine.tokens < tokens + 256:
                machine.frames(1, p)
            shares[i] += (machine.tokens - tokens) / (machine.spent - spent) / machine.best(p) / 20
    assert min(shares) > 0.95, shares


def test_without_a_table_or_an_acceptance_it_begins_with_none() -> None:
    machine = Machine(small, (0, 1, 2, 3), 1, 1)
    machine.frames(1, 0.5)
    assert machine.chosen == [0]
    machine = Machine(
        small, (0, 1, 2, 3), 1, 1, guess={(1, k): small(1, k + 1, k) / 1e3 for k in range(4)}, expected=(0.7,)
    )
    machine.frames(1, 0.5)
    assert machine.chosen == [3]


def test_results_of_the_same_records_are_the_same() -> None:
    one, two = (Machine(gpu, (0, 1, 3), 8, 2, seed=1) for _ in range(2))
    one.frames(400, 0.6)
    two.frames(400, 0.6)
    assert one.chosen == two.chosen


def test_expected_tokens_follow_the_formula() -> None:
    acceptance = Acceptance(3)
    assert acceptance.tokens() == pytest.approx([1, 1.7, 1.7 + 0.49, 1.7 + 0.49 + 0.343])
    # Of 200 rounds 100 accept nothing, 60 one draft, 40 all three; a draft not offered counts as one that failed.
    acceptance.learn([0] * 100 + [1] * 60 + [3] * 40, 3)
    assert acceptance.tries == [200, 100, 40] and acceptance.hits == [100, 40, 40]
    a = (101.4 / 202, (40 + 2 * 101.4 / 202) / 102)
    assert acceptance.tokens()[:3] == pytest.approx([1, 1 + a[0], 1 + a[0] + a[0] * a[1]])
    for _ in range(50):
        acceptance.learn([1] * 64, 1)
    assert acceptance.tokens()[1] > 1.98 and acceptance.tries[0] <= MEMORY + 64 and acceptance.tries[1:] == [100, 40]


def test_rounds_of_unsettled_launches_do_not_count() -> None:
    adaptive = Adaptive((0, 3), run_ahead=2, costs={(4, 1, 0): 1.0, (4, 4, 3): 1.2})
    for seq in range(6):
        adaptive.launched(seq, 4, 4, 3, alone=True)
    for seq in range(6):
        adaptive.collected(seq, [3] * 4, 0.0)
    assert adaptive.acceptance.tries == pytest.approx([12.0] * 3, rel=0.02), (
        "the first three came from other modes' drafts"
    )


def test_a_table_without_a_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 slots that makes 3 drafts"):
        Adaptive((0, 1, 3), run_ahead=2, costs={(4, 1, 0): 1.0, (4, 2, 1): 1.1})
