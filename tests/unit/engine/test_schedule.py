"""The budget of a frame: which survivals it may read, what it costs, how it fills a tier."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import EngineConfig
from slipstream.engine.budget import CostTable, Schedule, best_budget
from slipstream.engine.loop import EngineCore
from slipstream.errors import ConfigError
from slipstream.types import RECORD_COLUMNS, SURVIVAL_ONE, FrameResult, Request, SamplingParams
from tests.support.fake_device import FakeDevice

ONE = SURVIVAL_ONE


def units(*chances: float) -> list[int]:
    return [int(c * ONE) for c in chances]


def config(**options: Any) -> EngineConfig:
    flat = tuple((s, s * t, 1.0) for s in (1, 2, 4) for t in (1, 2, 4))
    return EngineConfig(
        **{"num_drafts": 3, "max_slots": 4, "confidence_schedule": True, "row_seconds": flat, **options}
    )


def test_all_budgets_are_looked_at() -> None:
    """Against every K by the definition, on tables with steps, gaps, equal gains and hopeless drafts."""
    rng = random.Random(0)
    for _ in range(300):
        requests, drafts = rng.randrange(1, 5), rng.randrange(1, 5)
        survival = [sorted((rng.choice((0.0, 0.25, 0.5, rng.random())) for _ in range(drafts)), reverse=True)
                    for _ in range(requests)]  # fmt: skip
        rows = sorted(rng.sample(range(1, 24), rng.randrange(1, 8)))
        table = CostTable(rows=tuple(rows), frames_per_second=tuple(rng.uniform(1, 20) for _ in rows))
        gains = sorted((a for row in survival for a in row if a > 0), reverse=True)
        values = [(requests + sum(gains[:k])) * table.at(requests + k) for k in range(len(gains) + 1)]
        budget, theta = best_budget(survival, table)
        assert theta == pytest.approx(max(values), rel=1e-12)
        assert values[budget] == pytest.approx(max(values), rel=1e-12)
        assert all(values[k] < max(values) * (1 - 1e-12) for k in range(budget))


def test_flat_costs_verify_every_draft() -> None:
    """Low load: the frame is one of fixed length, however little its drafts are trusted."""
    least = [1, 1, 1]
    for tiers, rows in (((), 16), ((1, 2, 4), 16), ((1, 4), 16)):
        schedule = Schedule(config(row_tiers=tiers))
        assert schedule.choose([least] * 4, [3] * 4) == (12, rows, 4)
        assert schedule.choose([None] * 4, [3] * 4) == (12, rows, 4)


def test_rows_fill_the_tier_and_never_exceed_it() -> None:
    steep = tuple((s, s * t, 1.0 * t) for s in (1, 2, 4) for t in (1, 2, 4))
    schedule = Schedule(config(row_tiers=(1, 2, 4), slot_buckets=(1, 2, 4), row_seconds=steep))
    sure, unsure = units(0.99, 0.98, 0.97), units(0.2, 0.1, 0.01)
    assert schedule.choose([sure] * 2, [3] * 2) == (0, 2, 4)  # a second row costs as much as a whole frame
    mild = tuple((s, s * t, 1.0 + 0.3 * t) for s in (1, 2, 4) for t in (1, 2, 4))
    schedule = Schedule(config(row_tiers=(1, 2, 4), slot_buckets=(1, 2, 4), row_seconds=mild))
    # Two drafts fit into the middle tier: both of the sure slot's, none of the other's.
    assert schedule.choose([sure, unsure], [3, 3]) == (2, 4, 4)
    assert schedule.choose([sure] * 2, [3] * 2)[:2] == (6, 8)
    # What padding leaves free is the tier's, too.
    assert schedule.choose([unsure] * 3, [3] * 3) == (1, 4, 4)
    assert schedule.choose([[0, 0, 0]] * 3, [0] * 3) == (0, 4, 4)


def test_exact_rows() -> None:
    seconds = ((1, 1, 1.0), (1, 2, 1.01), (1, 4, 3.0), (4, 4, 1.0), (4, 16, 1.0))
    schedule = Schedule(config(row_seconds=seconds))
    assert schedule.table(1).at(3) == pytest.approx(1 / 2.005)
    assert schedule.choose([units(0.9, 0.8, 0.7)], [3]) == (1, 2, 2)
    assert schedule.choose([units(0.9, 0.8, 0.7)] * 2, [3] * 2) == (6, 8, 4)  # the table of four slots holds two
    assert schedule.choose([units(0.9, 0.8, 0.7), None], [3, 1]) == (4, 6, 4)
    padded = Schedule(config(row_seconds=seconds, slot_buckets=(4,)))
    assert padded.choose([units(0.9, 0.8, 0.7)], [3]) == (3, 7, 4)


def test_without_times_there_is_no_schedule() -> None:
    with pytest.raises(ConfigError, match="row_seconds"):
        Schedule(config(row_seconds=()))


class Told(FakeDevice):
    """What each plan's rows were."""

    def rows(self) -> list[int]:
        return [p.rows for p in self.plans if p.decode]


def run(engine_config: EngineConfig, survivals: Any, tokens: int = 30) -> Told:
    device = Told(
        num_drafts=3, page_size=32, run_ahead=engine_config.run_ahead, vocab=50, drafts=lambda key, position: (3, 0),
        survivals=survivals, schedule=Schedule(engine_config),
    )  # fmt: skip
    engine = EngineCore(engine_config, device)
    params = SamplingParams(temperature=0, max_tokens=tokens)
    engine.add(Request(request_id="a", prompt_token_ids=(1, 2), params=params, key=1, max_len=2 + tokens))
    while engine.has_work:
        engine.step()
    return device


@pytest.mark.parametrize("run_ahead", [1, 2, 4])
def test_a_frames_rows_do_not_know_its_own_drafts(run_ahead: int) -> None:
    """One draft set of another confidence moves the rows of later frames, never those of the frame that judges it."""
    steep = tuple((s, s * t, 1.0 + 0.3 * t) for s in (1, 2, 4) for t in (1, 2, 4))
    how = config(run_ahead=run_ahead, row_seconds=steep)
    sure, unsure = units(0.9)[0], units(0.1)[0]
    plain = run(how, lambda key, position, j: sure)
    odd = run(how, lambda key, position, j: unsure if position == 13 else sure)
    # Every draft is wrong, so a frame emits one token: frame 10 leaves the drafts at position 13, frame 11 judges them.
    differ = [n for n, (a, b) in enumerate(zip(plain.rows(), odd.rows(), strict=True)) if a != b]
    assert differ == [max(12, 10 + run_ahead)]


@pytest.mark.parametrize("run_ahead", [1, 2, 4])
@pytest.mark.parametrize("late", [True, False])
def test_rows_do_not_know_how_many_drafts_a_confidence_has_left(run_ahead: int, late: bool) -> None:
    """A drafter that cuts its drafts where it is unsure: one count moves later frames only. The control: counts of
    drafters that do not look at them are used at once."""
    how = EngineConfig(
        num_drafts=3, max_slots=2, run_ahead=run_ahead, row_tiers=(1, 2, 4), slot_buckets=(2,), late_counts=late
    )
    rows = []
    for odd in (3, 0):
        device = Told(
            num_drafts=3, page_size=32, run_ahead=run_ahead, vocab=50,
            drafts=lambda key, position, odd=odd: (odd if position == 13 else 3, 0),
        )  # fmt: skip
        engine = EngineCore(how, device)
        params = SamplingParams(temperature=0, max_tokens=30)
        engine.add(Request(request_id="a", prompt_token_ids=(1, 2), params=params, key=1, max_len=32))
        while engine.has_work:
            engine.step()
        rows.append(device.rows())
    differ = [n for n, (a, b) in enumerate(zip(*rows, strict=True)) if a != b]
    assert differ == [max(12 if late else 11, 10 + run_ahead)]


def test_records_of_another_generation_say_nothing() -> None:
    how = config()
    device = Told(num_drafts=3, page_size=32, run_ahead=1, vocab=50, drafts=lambda key, position: (3, 0),
                  survivals=lambda key, position, j: 5, schedule=Schedule(how))  # fmt: skip
    engine = EngineCore(how, device)
    params = SamplingParams(temperature=0, max_tokens=30)
    engine.add(Request(request_id="a", prompt_token_ids=(1, 2), params=params, max_len=32))
    for _ in range(3):
        engine.step()
    seq = next(iter(engine.scheduler.running.values()))
    known = (seq.survival, seq.fresh, seq.wanted)
    assert known[1] == (4, [5, 5, 5])
    stranger = [seq.generation - 1, 0, 0, 0, 0, 3, *units(0.9, 0.9, 0.9), *(7,) * 4]
    engine.collector.take(FrameResult(-1, (seq.slot,), [stranger], 1), 0)
    assert (seq.survival, seq.fresh, seq.wanted) == known
    assert len(stranger) == RECORD_COLUMNS + 3 + 4


def test_golden_budgets_and_lengths_through_the_engine(golden_dir: Path) -> None:
    """The recorded cases in the engine's whole units, by its schedule and by the frame's own op."""
    import torch

    from slipstream.kernels.schedule import allot

    cases = json.loads((golden_dir / "dspark_schedule" / "expected.json").read_text())["cases"]
    seen = 0
    for case in cases:
        own, table = case["survival"], case["table"]
        wide = CostTable(rows=tuple(table["batch_tokens"]), frames_per_second=tuple(table["steps_per_sec"]))
        history = [units(*row) for row in case.get("history_survival", own)]
        budget, _ = best_budget(history, wide, ONE)
        assert budget == case["lagged_budget" if "history_survival" in case else "budget"], case["name"]
        requests, drafts = len(own), len(own[0])
        unit_SK = torch.tensor([[0] * drafts, *(units(*row) for row in own)])
        count_S = torch.tensor([0, *(drafts,) * requests])
        active_S, slot_B = (count_S > 0).long(), torch.arange(1, requests + 1)
        allot(active_S, count_S, unit_SK, slot_B, requests + budget, drafts + 1)
        lengths = case["lagged_lengths" if "history_survival" in case else "lengths"]
        assert count_S[1:].tolist() == lengths, case["name"]
        seen += budget > 0
    assert seen > 10
