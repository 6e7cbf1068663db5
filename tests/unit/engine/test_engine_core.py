"""EngineCore on the fake device: the contract that callers rely on, case by case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import slipstream.engine.loop as loop
from slipstream.config import EngineConfig
from slipstream.engine.loop import EngineCore
from slipstream.engine.radix import RadixCache
from slipstream.engine.scheduler import STOCK_PAGES
from slipstream.errors import EngineDeadError, InvalidRequestError
from slipstream.types import FrameResult, Request, SamplingParams, TokenEvent
from tests.support.fake_device import FakeDevice, expected

VOCAB = 97


def make(ready: int = 3, right: int = 2, **options: Any) -> tuple[EngineCore, FakeDevice]:
    values = {"max_slots": 4, "page_size": 4, "num_pages": 64, "max_model_len": 40, "num_drafts": 3, **options}
    config = EngineConfig(**values)
    device = FakeDevice(
        num_drafts=config.num_drafts,
        page_size=config.page_size,
        run_ahead=config.run_ahead,
        vocab=VOCAB,
        drafts=lambda key, position: (ready, right),
    )
    return EngineCore(config, device), device


def ask(request_id: str = "a", prompt: tuple[int, ...] = (1, 2, 3), max_len: int = 20, **fields: Any) -> Request:
    params = fields.pop("params", SamplingParams(temperature=0.0, max_tokens=None))
    return Request(request_id=request_id, prompt_token_ids=prompt, params=params, max_len=max_len, **fields)


def run(engine: EngineCore) -> list[TokenEvent]:
    events = []
    while engine.has_work:
        events += engine.step()
    return events


def text(events: list[TokenEvent], request_id: str = "a") -> list[int]:
    return [t for e in events if e.request_id == request_id for t in e.tokens]


def test_loop_file_is_short() -> None:
    assert len(Path(loop.__file__).read_text().splitlines()) < 150


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
def test_plain_run(run_ahead: int) -> None:
    engine, device = make(run_ahead=run_ahead)
    engine.add(ask())
    events = run(engine)
    assert (text(events), events[-1].finish_reason) == expected(ask(), VOCAB)
    assert [e.drafted for e in events[:2]] == [None, 3]
    assert [e.accepted for e in events[:2]] == [0, 2]
    first = device.plans[0]
    assert first.admits[0].pages == (1, 2) and first.prefill_first_page == (1,)
    assert all(p.first_page == (1,) for p in device.plans if p.decode), "a lone request is one ascending run"
    engine.check_idle()


def test_run_ahead_is_low_while_requests_wait_and_returns() -> None:
    """One slot: with eight launches queued its end would be seen eight frames late."""
    engine, _ = make(ready=0, run_ahead=8, max_slots=1)
    engine.add(ask("a", max_len=40))
    events = [e for _ in range(10) for e in engine.step()]
    assert engine._in_flight == 7, "the eighth was collected in the same step"
    engine.add(ask("b", max_len=40))
    depths = []
    while engine.scheduler.waiting:
        events += engine.step()
        depths.append(engine._in_flight)
    assert depths[:6] == [6, 5, 4, 3, 2, 1] and max(depths[6:]) <= 2, "nothing new beyond two"
    events += [e for _ in range(10) for e in engine.step()]
    assert engine._in_flight == 7, "and back"
    events += run(engine)
    assert [text(events, r) for r in "ab"] == [expected(ask(r, max_len=40), VOCAB)[0] for r in "ab"]
    engine.check_idle()


def test_chunks_are_padded_to_tiers_and_end_few_prompts() -> None:
    engine, device = make(prefill_chunk=16, prefill_chunk_busy=16, prefill_tiers=(4, 16), prefill_prompts=2)
    for i in range(4):
        engine.add(ask(f"r{i}", prompt=(1, 2 + i)))
    run(engine)
    chunks = [p for p in device.plans if p.prefill]
    assert [len(p.prefill) for p in chunks] == [2, 2], "two prompts in a chunk, one chunk in a launch"
    assert all(p.prefill_rows == 4 and p.prefill_prompts == 2 for p in chunks)
    engine.add(ask("long", prompt=tuple(range(9))))
    run(engine)
    assert device.plans[-1].prefill_rows == 0
    assert [p.prefill_rows for p in device.plans if p.prefill][2:] == [16]
    engine.check_idle()


def test_results_are_withheld_for_run_ahead_frames() -> None:
    engine, device = make(run_ahead=3)
    engine.add(ask())
    assert engine.step() == [] and engine.step() == []
    assert [len(p.decode) for p in device.plans] == [0, 1], "decode is planned before the prefill's record is seen"
    assert engine.step()[0].drafted is None
    assert len(device.queue) == 2


def test_no_frame_is_queued_for_a_sequence_that_must_have_ended() -> None:
    engine, device = make(run_ahead=8, num_drafts=0)
    engine.add(ask(max_len=5))
    assert len(text(run(engine))) == 2
    assert sum(bool(p.decode) for p in device.plans) == 1


def test_rows_follow_the_records() -> None:
    engine, device = make(ready=1, right=0)
    engine.add(ask(max_len=10))
    run(engine)
    assert [(p.rows, p.width) for p in device.plans if p.decode][:2] == [(2, 2), (2, 2)]
    engine, device = make(ready=0, run_ahead=2)
    engine.add(ask(max_len=10))
    run(engine)
    rows = [p.rows for p in device.plans if p.decode]
    assert rows[0] == 4 and set(rows[1:]) == {1}, "all drafts are assumed until a record says otherwise"


def test_row_tiers_and_slot_buckets() -> None:
    engine, device = make(ready=2, slot_buckets=(2, 4), row_tiers=(1, 2, 4))
    engine.add(ask("a", max_len=16))
    engine.add(ask("b", max_len=16))
    engine.add(ask("c", max_len=16))
    run(engine)
    decode = [p for p in device.plans if p.decode]
    assert {(len(p.decode), p.rows, p.width) for p in decode} <= {(4, 16, 4), (2, 8, 4), (2, 4, 2)}
    assert decode[0].decode == (1, 2, 3, 0) and decode[0].first_page[3] == -1


def test_prompts_are_chunked_and_packed() -> None:
    engine, device = make(prefill_chunk=8, prefill_chunk_busy=3)
    engine.add(ask("a", (1, 2, 3)))
    engine.add(ask("b", tuple(range(10))))
    run(engine)
    spans = [[(s.slot, s.start, s.length, s.last) for s in p.prefill] for p in device.plans if p.prefill]
    assert spans == [[(1, 0, 3, True), (2, 0, 5, False)], [(2, 5, 3, False)], [(2, 8, 2, True)]]


def test_a_prefix_is_reused_and_never_the_last_token() -> None:
    engine, device = make()
    prompt = tuple(range(8))
    engine.add(ask("a", prompt, max_len=9))
    run(engine)
    engine.add(ask("b", prompt, max_len=9))
    engine.add(ask("c", (*prompt, 9), max_len=10))
    engine.add(ask("d", prompt, max_len=9, salt="other"))
    run(engine)
    assert [p.start for plan in device.plans for p in plan.admits] == [0, 4, 8, 0]
    engine.check_idle()


def test_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    engine, device = make(num_pages=11, prefix_cache=False)
    for name, n in (("a", 20), ("b", 30), ("c", 2)):
        engine.add(ask(name, tuple(range(n)), max_len=n + 8))
    run(engine)
    order = [a.request.request_id for p in device.plans for a in p.admits]
    assert list(dict.fromkeys(order)) == ["a", "b", "c"]


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
def test_preemption_sends_the_youngest_away_and_loses_nothing(run_ahead: int) -> None:
    engine, device = make(num_pages=12, run_ahead=run_ahead)
    for name in "abc":
        engine.add(ask(name, (1, 2, ord(name)), max_len=40, key=ord(name)))
    events = run(engine)
    assert engine.metrics.counters["preemptions"] > 0
    generations = {a.generation: a.request.request_id for p in device.plans for a in p.admits}
    assert next(generations[p.drops[0].generation] for p in device.plans if p.drops) == "c"
    for name in "abc":
        assert text(events, name) == expected(ask(name, (1, 2, ord(name)), max_len=40, key=ord(name)), VOCAB)[0]
    engine.check_idle()


def _one_alone() -> None:
    engine, _ = make(page_size=1, num_pages=13, max_model_len=12, num_drafts=0)
    engine.add(ask("a", (1, 2, 3, 4), max_len=6))
    engine.add(ask("b", (1, 2, 3, 4, 5), max_len=12))
    events = []
    for _ in range(60):
        events += engine.step()
    assert len(text(events, "b")) == 7
    engine.check_idle()


def test_one_sequence_alone_always_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two read the same prompt at once. The one that stays must not lock the other's copies as well as its own."""
    _one_alone()
    insert = RadixCache.insert

    def locks_foreign(self: RadixCache, *args: Any, stop_at_foreign: bool = False) -> Any:
        return insert(self, *args)

    monkeypatch.setattr(RadixCache, "insert", locks_foreign)
    with pytest.raises(AssertionError):
        _one_alone()


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
def test_a_cut_ends_the_request_and_the_cache_stops_there(run_ahead: int) -> None:
    engine, device = make(run_ahead=run_ahead, page_size=1, num_pages=200)
    engine.add(ask(needs_ack=True, max_len=40))
    engine.add(ask("b", (9, 9), max_len=40))
    tokens: list[int] = []
    while len(tokens) < 5:
        tokens += text(engine.step())
    engine.cut("a", 0, 5)
    after = [e for e in run(engine) if e.request_id == "a"]
    assert [(e.tokens, e.finish_reason) for e in after] == [((), "stop")]
    assert [d.slot for p in device.plans for d in p.drops] == [1]
    known = (1, 2, 3, *tokens)
    cached = engine.scheduler.ledger.radix.match(known)[1]
    assert len(cached) == 3 + 5 - (len(tokens) == 5), "prompt and 5 tokens, the last one has no KV yet"
    engine.check_idle()


def test_a_cut_after_the_device_finish_gives_no_second_end() -> None:
    engine, _ = make(page_size=1)
    engine.add(ask(needs_ack=True, max_len=6))
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
        if events and not events[-1].finish_reason:
            engine.ack("a", 0, len(text(events)))
    assert events[-1].finish_reason == "length" and not engine.idle, "kept until the text side has answered"
    assert engine.stats("a") is not None
    engine.cut("a", 0, 2)
    assert run(engine) == [] and engine.idle
    assert len(engine.scheduler.ledger.radix.pages()) == 5
    engine.check_idle()


def test_tokens_enter_the_cache_only_once_acknowledged() -> None:
    engine, _ = make(page_size=1)
    engine.add(ask(needs_ack=True, max_len=8))
    events = run(engine)
    radix = engine.scheduler.ledger.radix
    assert len(text(events)) == 5 and radix.num_pages == 3, "the prompt only"
    engine.ack("a", 0, 5)
    assert engine.step() == []
    assert radix.num_pages == 7 and engine.idle


def test_abort_one_child_or_all_waiting_or_running() -> None:
    engine, _ = make(max_slots=2, run_ahead=2)
    for child in range(3):
        engine.add(ask(child=child, max_len=40))
    engine.step()
    engine.abort("a", 1)
    assert [(e.child, e.finish_reason) for e in engine.step()] == [(1, "abort")]
    engine.abort("a", error="tokenizer failed")
    ends = [(e.child, e.finish_reason, e.error) for e in engine.step()]
    assert ends == [(0, "error", "tokenizer failed"), (2, "error", "tokenizer failed")]
    engine.abort("a")
    engine.abort("nobody")
    engine.ack("nobody", 0, 3)
    assert run(engine) == []
    engine.check_idle()


def test_statistics_live_until_the_next_step() -> None:
    engine, _ = make()
    engine.add(ask(max_len=12))
    events: list[TokenEvent] = []
    while not (events and events[-1].finish_reason):
        events += engine.step()
    stats = engine.stats("a")
    assert stats is not None and stats.rounds == len(events) - 1
    assert stats.emitted == len(text(events)) - 1 and stats.accepted <= stats.drafted
    engine.step()
    assert engine.stats("a") is None


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask(prompt=()), ("0 tokens",)),
        (ask(prompt=(1,) * 40, max_len=40), ("40", "39")),
        (ask(max_len=41), ("41", "40")),
        (ask(max_len=3), ("max_len=3", "3 prompt")),
        (ask(prompt=(1, -5)), ("-5",)),
        (ask(num_drafts=4), ("num_drafts=4", "3")),
        (ask(num_drafts=-1), ("num_drafts=-1",)),
        (ask(stop_ids=tuple(range(17))), ("17", "16")),
        (ask("held"), ("held",)),
    ],
)
def test_bad_requests_name_value_and_limit(request_: Request, words: tuple[str, ...]) -> None:
    engine, _ = make()
    engine.add(ask("held"))
    with pytest.raises(InvalidRequestError) as error:
        engine.add(request_)
    assert all(w in str(error.value) for w in words)
    assert text(run(engine), "held") == expected(ask("held"), VOCAB)[0]
    engine.check_idle()


def test_the_queue_is_bounded() -> None:
    engine, _ = make(max_waiting=2)
    engine.add(ask("a"))
    engine.add(ask("b"))
    with pytest.raises(InvalidRequestError, match=r"2 requests are waiting.*max_waiting=2"):
        engine.add(ask("c"))
    run(engine)
    engine.add(ask("c"))


def test_after_a_device_fault_the_engine_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, device = make()
    engine.add(ask())

    def fault() -> FrameResult:
        raise RuntimeError("lost")

    monkeypatch.setattr(device, "collect", fault)
    with pytest.raises(RuntimeError, match="lost"):
        engine.step()
    with pytest.raises(EngineDeadError, match="lost"):
        engine.step()


def test_snapshot() -> None:
    engine, _ = make()
    assert engine.metrics.snapshot()["window"] == 0
    engine.add(ask(max_len=12))
    events = run(engine)
    shot = engine.metrics.snapshot()
    assert shot["counters"]["output_tokens"] == len(text(events)) == 9
    assert shot["counters"]["launches"] == shot["window"] == len(events)
    assert shot["spec"]["rounds"] == shot["counters"]["frames"] == len(events) - 1
    assert shot["launch"]["emitted"]["mean"] == pytest.approx(9 / len(events), abs=1e-3)
    assert shot["launch"]["host_us"]["p50"] > 0


@pytest.mark.parametrize(("num_pages", "stocked"), [(4 * 31, True), (40, False)])
def test_slots_are_stocked_together_while_pages_are_plenty(num_pages: int, stocked: bool) -> None:
    """Prompts of different lengths come to the end of a page in different frames; few launches carry pages."""
    engine, device = make(num_drafts=0, max_model_len=120, num_pages=num_pages)
    if stocked:  # pages of the prefix cache are room as well
        for i in range(5):
            engine.add(ask(f"before{i}", prompt=(50 + i,), max_len=118))
            run(engine)
        assert engine.scheduler.ledger.pool.num_free < 8, "the cache holds nearly all"
        device.plans[:] = [p._replace(pages=()) for p in device.plans]
    for i in range(4):
        engine.add(ask(f"r{i}", prompt=tuple(range(3 + i)), max_len=35))
    events = run(engine)
    for i in range(4):
        request = ask(f"r{i}", prompt=tuple(range(3 + i)), max_len=35)
        assert text(events, f"r{i}") == expected(request, VOCAB)[0]
    appends = [[len(p.pages) for p in plan.pages] for plan in device.plans if plan.pages]
    if stocked:
        assert len(appends) <= 3 and max(appends[0]) > STOCK_PAGES, appends
    else:
        assert len(appends) > 15 and all(n == 1 for plan in appends for n in plan), "page by page"
    engine.check_idle()


def test_urgent_requests_are_admitted_first_and_preempted_last() -> None:
    engine, device = make(max_slots=1)
    for name, priority in (("first", 0), ("late", 5), ("usual", 0), ("urgent", -3), ("too", -3)):
        engine.add(ask(name, priority=priority))
    run(engine)
    order = [admit.request.request_id for plan in device.plans for admit in plan.admits]
    assert order == ["urgent", "too", "first", "usual", "late"]

    engine, device = make(num_pages=13, max_slots=2)
    events = []
    for name, priority in (("b", 7), ("a", 1)):  # by age alone a would have to go
        engine.add(ask(name, prompt=(ord(name), 2, 3), max_len=40, priority=priority))
        events += engine.step()
    events += run(engine)
    dropped = {drop.generation for plan in device.plans for drop in plan.drops}
    victims = [a.request.request_id for plan in device.plans for a in plan.admits if a.generation in dropped]
    assert set(victims) == {"b"}
    for name in "ab":
        want = expected(ask(name, prompt=(ord(name), 2, 3), max_len=40), VOCAB)
        assert text(events, name) == want[0]
    engine.check_idle()


def test_a_large_frame_lets_more_prompt_rows_in() -> None:
    """64 prompts at once: the last waits for a few frames, not for one per prompt."""
    waited = {}
    for share in (0, 2):
        engine, device = make(
            max_slots=64, num_pages=1024, num_drafts=0, prefill_chunk=64, prefill_chunk_busy=8, prefill_busy_share=share
        )
        for i in range(64):
            engine.add(ask(f"r{i}", prompt=(i, 2, 3, 4, 5, 6, 7, 8), max_len=40))
        first: dict[str, int] = {}
        frames = 0
        while engine.has_work:
            frames += 1
            for event in engine.step():
                first.setdefault(event.request_id, frames)
        waited[share] = max(first.values())
        for plan in device.plans:
            rows = sum(span.length for span in plan.prefill)
            assert rows <= (64 if not plan.decode else max(8, share * plan.rows))
    assert waited[0] > 50 and waited[2] < 15, waited
