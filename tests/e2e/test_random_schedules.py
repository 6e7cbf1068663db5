"""Random lives of requests on the real device: arrive, finish, stop, abort, be preempted, at random times.

Every output is the plain continuation or a prefix of it, and no slot or page is lost. Float64, so "the" plain
continuation is exact.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import LLM, SamplingParams
from slipstream.models import load_model
from tests.support.kit import VOCAB, tiny_model_dir
from tests.support.reference import DenseReference, planted_oracle

CONTEXT = 48
SLOTS = 4


@dataclass(frozen=True)
class Plan:
    """One request: when it comes, what it asks, and what its user does to it."""

    arrives: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None
    filtered: bool
    n: int
    abort_at: int | None
    stop_after: int | None

    def params(self, stop: tuple[str, ...] = ()) -> SamplingParams:
        law: dict[str, Any] = {"temperature": 0.0} if self.seed is None else {"temperature": 0.9, "seed": self.seed}
        if self.filtered:
            law |= {"top_k": 30, "top_p": 0.95}
        return SamplingParams(max_tokens=self.max_tokens, n=self.n, ignore_eos=True, stop=stop, **law)


@dataclass
class Seen:
    """tokens, text and end of one child, by child."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    reason: dict[int, str] = field(default_factory=dict)
    aborted: bool = False


# Two families of prompts, so that the prefix cache has hits at any page size.
SHARED = tuple(random.Random(0).randrange(VOCAB) for _ in range(20))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    head = SHARED[: draw(st.sampled_from([0, 0, 7, 16, 20]))]
    tail = tuple(draw(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=6)))
    max_tokens = draw(st.integers(1, min(20, CONTEXT - len(head) - len(tail))))
    seed = draw(st.sampled_from([None, None, 1, 2]))
    return Plan(
        arrives=draw(st.integers(0, 25)), prompt=head + tail, max_tokens=max_tokens, seed=seed,
        filtered=seed is not None and draw(st.booleans()), n=draw(st.sampled_from([1, 1, 1, 2])),
        abort_at=draw(st.sampled_from([None, None, None, 1, 3, 8])),
        stop_after=draw(st.sampled_from([None, None, 1, 5, 9])),
    )  # fmt: skip


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    page = draw(st.sampled_from([1, 2, 5, 16]))
    one = -(-(CONTEXT + 4) // page)
    return {
        "draft": draw(st.sampled_from(["none", "ngram", "oracle"])),
        "run_ahead": draw(st.sampled_from([1, 2, 8])),
        "page_size": page,
        "num_pages": one + draw(st.integers(0, one)),
        "prefill_chunk": draw(st.sampled_from([1, 4, 13, 256])),
        "max_slots": draw(st.integers(1, SLOTS)),
        "prefix_cache": draw(st.booleans()),
        **draw(st.sampled_from([{}, {"slot_buckets": (1, 2, 4), "row_tiers": (1, 2, 4)}])),
    }


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny") / "m", seed=3)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> DenseReference:
    return DenseReference(load_model(model_dir, dtype="float64").model)


def build(model_dir: Path, reference: DenseReference, engine: dict[str, Any]) -> LLM:
    options = dict(engine)
    kind = options.pop("draft")
    if kind == "ngram":
        options |= {"draft": "ngram", "draft_options": {"min_n": 1, "gate": False}}
    elif kind == "oracle":
        known = lambda r: reference.continuation(r.prompt_token_ids, r.params, r.child)
        options |= {"draft": planted_oracle(known, vocab=VOCAB, seed=engine["page_size"])}
    return LLM(model=str(model_dir), dtype="float64", max_model_len=CONTEXT, **options)


def live(llm: LLM, todo: list[tuple[Plan, tuple[str, ...]]]) -> tuple[list[Seen], int]:
    """Play the plans; returns what each user saw, and the number of preemptions."""
    seen = [Seen() for _ in todo]
    names: dict[int, str] = {}
    index: dict[str, int] = {}
    open_ids: set[int] = set()
    for turn in range(5_000):
        for i, (plan, stop) in enumerate(todo):
            if i not in names and plan.arrives <= turn:
                names[i] = llm._submit(*llm._prepare(list(plan.prompt), plan.params(stop)))
                index[names[i]] = i
                open_ids.add(i)
            elif i in open_ids and plan.abort_at is not None and turn >= plan.arrives + plan.abort_at:
                llm._live.pop(names[i])
                llm._engine.abort(names[i])
                seen[i].aborted = True
                open_ids.discard(i)
        before = {name: llm._live[name].output for name in (names[i] for i in open_ids)}
        for chunk in llm._step():
            if chunk.output is not None:
                open_ids.discard(index[chunk.output.request_id])
        for name, output in before.items():
            for o in output.outputs:
                seen[index[name]].tokens[o.index] = list(o.token_ids)
                if o.finish_reason is not None:
                    seen[index[name]].reason[o.index] = o.finish_reason
        if not open_ids and len(names) == len(todo):
            return seen, llm._engine.metrics.snapshot()["counters"].get("preemptions", 0)
    raise AssertionError(f"still waiting for {sorted(open_ids)}")


def word_of(llm: LLM, token: int) -> str:
    return llm.tokenizer.decode([token]).strip()


def check_schedule(model_dir: Path, reference: DenseReference, engine: dict[str, Any], todo: list[Plan]) -> int:
    llm = build(model_dir, reference, engine)
    stops = []
    for plan in todo:
        known = reference.continuation(plan.prompt, plan.params())
        # "w7 " with its space: a word, not the beginning of "w70". It is found one token later.
        stops.append((word_of(llm, known[plan.stop_after]) + " ",) if (plan.stop_after or 99) < len(known) else ())
    seen, preemptions = live(llm, list(zip(todo, stops, strict=True)))
    for plan, stop, got in zip(todo, stops, seen, strict=True):
        for child in range(plan.n):
            want = reference.continuation(plan.prompt, plan.params(), child)
            tokens = got.tokens.get(child, [])
            assert tokens == want[: len(tokens)]
            if got.aborted:
                continue
            cut = first_cut(llm, want, stop)
            assert tokens == want[:cut]
            # A stop string that the last allowed token completes ends the request as "stop", too.
            assert got.reason[child] == ("length" if cut is None else "stop")
    llm.check_idle()
    return int(preemptions)


def first_cut(llm: LLM, tokens: list[int], stop: tuple[str, ...]) -> int | None:
    """Fewest tokens whose text contains the stop string; None when it does not occur."""
    for n in range(1, len(tokens) + 1):
        if stop and stop[0] in llm.tokenizer.decode(tokens[:n]):
            return n
    return None


@given(engine=engines(), todo=st.lists(plans(), min_size=1, max_size=7))
@settings(max_examples=40)
def test_outputs_and_pools(
    model_dir: Path, reference: DenseReference, engine: dict[str, Any], todo: list[Plan]
) -> None:
    check_schedule(model_dir, reference, engine, todo)


@pytest.mark.soak
@given(engine=engines(), todo=st.lists(plans(), min_size=1, max_size=12))
@settings(max_examples=1500, derandomize=False)
def test_outputs_and_pools_for_long(
    model_dir: Path, reference: DenseReference, engine: dict[str, Any], todo: list[Plan]
) -> None:
    check_schedule(model_dir, reference, engine, todo)


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
@pytest.mark.parametrize("draft", ["none", "ngram", "oracle"])
def test_under_pressure(model_dir: Path, reference: DenseReference, draft: str, run_ahead: int) -> None:
    """A pool for little more than one sequence: preemptions are certain, so the schedules above mean something."""
    rng = random.Random(run_ahead)
    todo = [
        Plan(arrives=i, prompt=SHARED[:10] + (3 + i, rng.randrange(VOCAB)), max_tokens=30, seed=(None, 5)[i % 2],
             filtered=False, n=1, abort_at=9 if i == 2 else None, stop_after=12 if i == 3 else None)
        for i in range(6)
    ]  # fmt: skip
    engine = {"draft": draft, "run_ahead": run_ahead, "page_size": 4, "num_pages": 17, "prefill_chunk": 8,
              "max_slots": SLOTS, "prefix_cache": True}  # fmt: skip
    assert check_schedule(model_dir, reference, engine, todo) > 0
