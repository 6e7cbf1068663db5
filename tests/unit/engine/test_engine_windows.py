"""Window pages under random schedules: every row finds its window, nobody holds more, nothing is lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import EngineConfig
from slipstream.engine.ledger import Ledger
from slipstream.engine.loop import EngineCore
from slipstream.engine.window import WindowPages
from slipstream.errors import ConfigError
from slipstream.types import Request, SamplingParams
from tests.support.engine_scenarios import draw_scenario, run_scenario
from tests.support.fake_device import FakeDevice, expected

VOCAB = 50


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_schedules(data: st.DataObject, run_ahead: int) -> None:
    pick = lambda a, b: data.draw(st.integers(a, b))
    run_scenario(draw_scenario(pick, run_ahead, pick(1, 6), windows=True))


def test_the_schedules_reach_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()

    def counted(name: str) -> None:
        method = getattr(WindowPages, name)

        def call(self: WindowPages, *args: object) -> object:
            before = (len(self._left), len(self._idle))
            out = method(self, *args)
            after = (len(self._left), len(self._idle))
            seen["kept from a prompt"] += name == "adopt" and after[0] < before[0] and after[1] > before[1]
            seen["reclaimed"] += name == "_take" and after != before
            seen["hit cut short"] += name == "usable" and out < len(args[0])  # type: ignore[operator, arg-type]
            return out

        monkeypatch.setattr(WindowPages, name, call)

    for name in ("adopt", "_take", "usable"):
        counted(name)
    for seed in range(200):
        engine, _ = run_scenario(
            draw_scenario(random.Random(seed).randint, (1, 2, 8)[seed % 3], 1 + seed % 4, windows=True)
        )
        seen += engine.metrics.counters
    for case in ("preemptions", "cached_prompt_tokens", "kept from a prompt", "reclaimed", "hit cut short"):
        assert seen[case] >= 8, f"{case}: {seen[case]}"


def _free_by_the_upper_bound(m: pytest.MonkeyPatch) -> None:
    grow = Ledger.grow

    def broken(self: Ledger, seqs: list, rows: list[int], stock: int = 0) -> list:  # type: ignore[type-arg]
        if self.window is not None:
            for s in seqs:
                self.window.slide(s.slot, s.len_ub)
        return grow(self, seqs, rows, stock)

    m.setattr(Ledger, "grow", broken)


def _a_window_too_short(m: pytest.MonkeyPatch) -> None:
    first = WindowPages._first
    m.setattr(WindowPages, "_first", lambda self, position: first(self, position + 1))


def _hits_without_their_window(m: pytest.MonkeyPatch) -> None:
    m.setattr(WindowPages, "usable", lambda self, path: len(path))


def _forget_nothing(m: pytest.MonkeyPatch) -> None:
    m.setattr(WindowPages, "forget", lambda self, node: None)


def _leave_a_page_behind(m: pytest.MonkeyPatch) -> None:
    leave = WindowPages.leave

    def broken(self: WindowPages, slot: int) -> None:
        if len(self._slots[slot].pages) > 1:
            self._slots[slot].pages.pop()
            self._slots[slot].nodes.pop()
        leave(self, slot)

    m.setattr(WindowPages, "leave", broken)


@pytest.mark.parametrize(
    "fault",
    [
        _free_by_the_upper_bound,
        _a_window_too_short,
        _hits_without_their_window,
        _forget_nothing,
        _leave_a_page_behind,
    ],
)
def test_a_planted_fault_is_found(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        for seed in range(400):
            run_scenario(draw_scenario(random.Random(seed).randint, (2, 8, 1)[seed % 3], 1 + seed % 4, windows=True))


def make(**options: int) -> tuple[EngineCore, FakeDevice]:
    values = {"max_slots": 2, "page_size": 32, "num_pages": 520, "max_model_len": 8192, "prefill_chunk": 256,
              "prefill_chunk_busy": 256, "window": 512, "window_pages": 48, "run_ahead": 2, "num_drafts": 3,
              **options}  # fmt: skip
    config = EngineConfig(**values)
    device = FakeDevice(
        num_drafts=config.num_drafts, page_size=config.page_size, run_ahead=config.run_ahead, vocab=VOCAB,
        drafts=lambda key, position: (3, 3), window=config.window, window_quota=config.window_quota,
    )  # fmt: skip
    return EngineCore(config, device), device


def run(engine: EngineCore, request: Request) -> list[int]:
    engine.add(request)
    tokens = []
    while engine.has_work:
        for event in engine.step():
            tokens += event.tokens
    return tokens


def ask(name: str, prompt: tuple[int, ...], more: int = 40) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=None)
    return Request(request_id=name, prompt_token_ids=prompt, params=params, max_len=len(prompt) + more)


def test_a_long_context_holds_window_plus_chunk() -> None:
    """8,192 tokens: at most (window + chunk) / context of what all of them would take."""
    engine, _ = make()
    window = engine.scheduler.ledger.window
    assert window is not None and engine.config.window_quota * 32 == 512 + 256
    prompt = tuple(random.Random(0).randrange(VOCAB) for _ in range(8100))
    request = ask("long", prompt)
    assert run(engine, request) == expected(request, VOCAB)[0]
    assert 0 < window.most * 32 <= 512 + 256
    engine.check_idle()


def test_a_prompt_can_branch_off_before_its_end() -> None:
    """While there is room, what a prompt leaves behind its window stays good for a hit."""
    engine, device = make(window_pages=400)
    rng = random.Random(1)
    system, users = [tuple(rng.randrange(VOCAB) for _ in range(2048))], []
    for i in range(3):
        users.append(ask(str(i), system[0] + tuple(rng.randrange(VOCAB) for _ in range(900 + i))))
        assert run(engine, users[-1]) == expected(users[-1], VOCAB)[0]
    assert [a.start for p in device.plans for a in p.admits] == [0, 2048, 2048]
    engine.check_idle()


def test_without_room_a_hit_ends_where_its_window_is_complete() -> None:
    """A small pool keeps the end of what ran last, so that a conversation goes on, and no more is taken for a hit."""
    engine, device = make(max_slots=1, window_pages=24)
    rng = random.Random(1)
    turn = ask("1", tuple(rng.randrange(VOCAB) for _ in range(3000)))
    answer = run(engine, turn)
    follow = ask("2", (*turn.prompt_token_ids, *answer, 1, 2, 3))
    assert run(engine, follow) == expected(follow, VOCAB)[0]
    other = ask("3", (*turn.prompt_token_ids[:2048], 5, 6, 7))
    assert run(engine, other) == expected(other, VOCAB)[0]
    starts = [a.start for p in device.plans for a in p.admits]
    assert starts[0] == starts[2] == 0 and starts[1] >= 3000
    engine.check_idle()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"window_pages=47 is below the 48 .* 24 for each of max_slots=2"):
        make(window_pages=47)
    with pytest.raises(ConfigError, match="window=-1 must be a whole number from 0"):
        make(window=-1)
