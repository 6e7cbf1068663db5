"""Grammars in the host engine, on the fake device: who waits for masks, who does not, what a fault ends."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from slipstream.config import EngineConfig
from slipstream.engine.loop import EngineCore
from slipstream.errors import InvalidRequestError
from slipstream.structured import StructuredOutputsParams
from slipstream.types import Request, SamplingParams, TokenEvent
from tests.support.fake_device import FakeDevice, expected
from tests.support.fake_grammar import FakeGrammars

VOCAB = 97
GRAMMAR = StructuredOutputsParams(regex="what fake_grammar says")


def make(grammars: FakeGrammars | None, **options: Any) -> tuple[EngineCore, FakeDevice]:
    values = {"max_slots": 4, "page_size": 4, "num_pages": 64, "max_model_len": 60, "num_drafts": 3, **options}
    config = EngineConfig(**values)
    device = FakeDevice(
        num_drafts=config.num_drafts, page_size=config.page_size, run_ahead=config.run_ahead, vocab=VOCAB,
        drafts=lambda key, position: (3, position % 4),
    )  # fmt: skip
    return EngineCore(config, device, grammars), device


def ask(request_id: str, *, grammar: bool, max_len: int = 40, **fields: Any) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=None, structured_outputs=GRAMMAR if grammar else None)
    return Request(request_id=request_id, prompt_token_ids=(1, 2, 3), params=params, max_len=max_len, **fields)


def run(engine: EngineCore, until: str | None = None) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    for _ in range(500):
        if not engine.has_work:
            return events
        events += engine.step()
        if any(e.request_id == until and e.finish_reason for e in events):
            return events
    raise AssertionError("no end")


def text(events: list[TokenEvent], request_id: str) -> tuple[list[int], str | None]:
    own = [e for e in events if e.request_id == request_id]
    return [t for e in own for t in e.tokens], own[-1].finish_reason if own else None


def frames_of(device: FakeDevice, slot: int) -> list[int]:
    return [p.seq for p in device.plans if slot in p.decode]


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
def test_output_is_that_of_the_grammar(run_ahead: int) -> None:
    engine, device = make(FakeGrammars(VOCAB), run_ahead=run_ahead)
    for name, grammar in (("a", True), ("b", False), ("c", True)):
        engine.add(ask(name, grammar=grammar))
    events = run(engine)
    for name, grammar in (("a", True), ("b", False), ("c", True)):
        assert text(events, name) == expected(ask(name, grammar=grammar), VOCAB)
    assert engine.metrics.spec.accepted > 0
    assert all(not p.masks for p in device.plans if p.decode == (2,)), "launches without a grammar carry no masks"
    engine.check_idle()


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
def test_others_do_not_wait_for_masks(run_ahead: int) -> None:
    """A grammar slot runs, then its masks stay away: the others take as many launches as without it, all in a row."""
    alone, plain = make(None, run_ahead=run_ahead)
    for name in ("b", "c"):
        alone.add(ask(name, grammar=False))
    run(alone)
    held = False
    grammars = FakeGrammars(VOCAB, ready=lambda request: not held)
    engine, device = make(grammars, run_ahead=run_ahead)
    engine.add(ask("a", grammar=True))
    events = []
    while len(text(events, "a")[0]) < 3:
        events += engine.step()
    held, before = True, len(device.plans)
    for name in ("b", "c"):
        engine.add(ask(name, grammar=False))
    while {"b", "c"} - {e.request_id for e in events if e.finish_reason}:
        events += engine.step()
    mine = frames_of(device, 1)
    late = [seq for seq in mine if seq >= before + run_ahead]
    assert not late, "the slot ran without masks"
    theirs = [p.seq for p in device.plans if set(p.decode) & {2, 3}]
    assert theirs == list(range(theirs[0], theirs[-1] + 1)), "some launch was left out"
    assert len(theirs) == len([p for p in plain.plans if p.decode])
    assert grammars.waits == 0, "the loop stood still while others could run"
    held = False
    events += run(engine)
    for name in ("a", "b", "c"):
        assert text(events, name) == expected(ask(name, grammar=name == "a"), VOCAB)
    engine.check_idle()


def test_a_grammar_that_is_being_compiled_holds_nobody_up() -> None:
    """It came first, and is not in the queue; when it is ready it has its place by arrival again."""
    ready = False
    engine, device = make(FakeGrammars(VOCAB, ready=lambda request: ready), max_slots=1)
    engine.add(ask("a", grammar=True))
    engine.add(ask("b", grammar=False))
    engine.add(ask("c", grammar=False))
    events = run(engine, until="b")
    assert text(events, "b") == expected(ask("b", grammar=False), VOCAB)
    ready = True
    events += run(engine)
    first = {p.admits[0].request.request_id: p.seq for p in device.plans if p.admits}
    assert sorted(first, key=first.__getitem__)[0] == "b"
    assert text(events, "a") == expected(ask("a", grammar=True), VOCAB)
    engine.check_idle()


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
def test_under_load_nobody_waits_for_slow_grammars(run_ahead: int) -> None:
    """Clients come and go while each mask of three others takes a random number of steps, the first, compiling, many:
    from its first frame to its last a request without a grammar is in every launch, and in no more than it is alone."""
    rng = random.Random(run_ahead)
    away: dict[str, int] = {}

    def ready(request: Request) -> bool:
        name = request.request_id
        if name not in away:
            away[name] = rng.randrange(10, 60)
        away[name] -= 1
        if away[name] >= 0:
            return False
        away[name] = rng.randrange(0, 12)
        return True

    options: dict[str, Any] = {"run_ahead": run_ahead, "max_slots": 8, "num_pages": 256}
    frames_alone = {}
    for length in (12, 25, 40):
        engine, device = make(None, **options)
        engine.add(ask("alone", grammar=False, max_len=length))
        run(engine)
        frames_alone[length] = len(frames_of(device, 1))
    grammars = FakeGrammars(VOCAB, ready=ready)
    engine, device = make(grammars, **options)
    for i in range(3):
        engine.add(ask(f"g{i}", grammar=True, max_len=60))
    lengths = {f"r{i}": (12, 25, 40)[i % 3] for i in range(24)}
    coming = iter(lengths)
    ended: set[str] = set()
    waited = 0
    while len(ended) < len(lengths):
        if len(device.plans) % 3 == 0 and (name := next(coming, None)):
            engine.add(ask(name, grammar=False, max_len=lengths[name]))
        ended |= {e.request_id for e in engine.step() if e.finish_reason and e.request_id in lengths}
        running = any(s.grammar is None for s in engine.scheduler.running.values())
        waited += grammars.waits if running else 0
        grammars.waits = 0
    assert waited == 0, "the loop stood still while somebody could run"
    run(engine)
    engine.check_idle()
    of: dict[str, list[int]] = {}
    owner: dict[int, str] = {}
    for plan in device.plans:
        owner.update({admit.slot: admit.request.request_id for admit in plan.admits})
        for slot in plan.decode:
            if slot:
                of.setdefault(owner[slot], []).append(plan.seq)
    for name, length in lengths.items():
        assert of[name] == [*range(of[name][0], of[name][-1] + 1)], f"{name} was left out of a launch"
        assert len(of[name]) <= frames_alone[length], name
    assert any(b - a > 1 for i in range(3) for a, b in pairwise(of[f"g{i}"])), "the grammars were not slow"


def test_the_step_waits_when_nothing_else_can_run() -> None:
    polls = iter([False] * 5 + [True] * 1000)
    grammars = FakeGrammars(VOCAB, ready=lambda request: next(polls))
    engine, _ = make(grammars)
    engine.add(ask("a", grammar=True))
    assert text(run(engine), "a") == expected(ask("a", grammar=True), VOCAB)
    assert grammars.waits >= 4


@pytest.mark.parametrize("at", [0, 1, 7])
@pytest.mark.parametrize("run_ahead", [1, 2, 8])
def test_a_fault_of_a_grammar_ends_its_request_alone(at: int, run_ahead: int) -> None:
    """S38: others, slots and pages are untouched; what came before stays."""
    engine, _ = make(FakeGrammars(VOCAB, fails_at={"a": at}), run_ahead=run_ahead)
    for name, grammar in (("a", True), ("b", False), ("c", True)):
        engine.add(ask(name, grammar=grammar))
    events = run(engine)
    tokens, reason = text(events, "a")
    assert reason == "error" and at <= len(tokens) < len(expected(ask("a", grammar=True), VOCAB)[0])
    assert tokens == expected(ask("a", grammar=True), VOCAB)[0][: len(tokens)]
    assert [e.error for e in events if e.finish_reason == "error"] == ["the grammar failed"]
    for name, grammar in (("b", False), ("c", True)):
        assert text(events, name) == expected(ask(name, grammar=grammar), VOCAB)
    engine.check_idle()


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_an_abort_while_masks_are_away(tokens: int) -> None:
    held = False
    engine, _ = make(FakeGrammars(VOCAB, ready=lambda request: not held or request.request_id == "b"))
    engine.add(ask("a", grammar=True))
    events: list[TokenEvent] = []
    while len(text(events, "a")[0]) < tokens:
        events += engine.step()
    held = True
    engine.add(ask("b", grammar=True))
    events += engine.step()
    engine.abort("a")
    events += run(engine)
    assert text(events, "a")[1] == "abort"
    assert text(events, "b") == expected(ask("b", grammar=True), VOCAB)
    engine.check_idle()


def test_without_grammars_it_is_refused() -> None:
    engine, _ = make(None)
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        engine.add(ask("a", grammar=True))
    assert engine.idle
