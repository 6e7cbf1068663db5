"""Random schedules for the host engine: admit, finish, stop, cut, abort and preempt on a strict fake device."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slipstream.config import EngineConfig
from slipstream.engine.budget import Schedule
from slipstream.engine.loop import EngineCore
from slipstream.engine.radix import Node
from slipstream.structured import StructuredOutputsParams
from slipstream.types import SURVIVAL_ONE, Request, SamplingParams
from tests.support.fake_device import FakeDevice, digest, expected
from tests.support.fake_grammar import FakeGrammars

Pick = Callable[[int, int], int]
"""pick(low, high): a whole number, both ends included; drawn by hypothesis or by a seeded generator."""

_SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.1},
)


_GRAMMAR = StructuredOutputsParams(regex="what fake_grammar says")


@dataclass
class Client:
    """A request and what its user does: cut at `cut_at` tokens, abort at step `abort_at`, acknowledge late."""

    request: Request
    arrives: int
    cut_at: int | None = None
    abort_at: int | None = None
    lag: int = 0
    tokens: list[int] = field(default_factory=list)
    acked: int = 0
    reason: str | None = None
    cut: bool = False


@dataclass
class Scenario:
    config: EngineConfig
    vocab: int
    script: int
    clients: list[Client]


def draw_scenario(pick: Pick, run_ahead: int, page_size: int, *, windows: bool = False) -> Scenario:
    k, context = pick(0, 4), pick(2, 40)
    slots, short = pick(1, 4), pick(0, 3) > 0
    one = -(-(context + k + 1) // page_size)
    window = pick(1, 12) if windows else 0
    values: dict[str, Any] = {
        "max_slots": slots,
        "page_size": page_size,
        "num_pages": one + pick(0, 3 * one),
        "max_model_len": context,
        "run_ahead": run_ahead,
        "num_drafts": k,
        "prefill_chunk": pick(1, 24),
        "prefill_chunk_busy": pick(1, 8),
        "prefill_busy_share": context % 3,
        "prefix_cache": pick(0, 3) > 0,
        "slot_buckets": ((1, 2, 4), (2, 4), ())[pick(0, 2)],
        "rereads": (context + 1) % 2,
        "row_tiers": ((1, 2, 4, 8), ())[pick(0, 1)],
        **_choice(pick, k, slots),
        "window": window,
        "window_pages": 2**20,
    }
    values["window_pages"] = EngineConfig(**values).window_need + (pick(0, 3) if windows else 0)
    config = EngineConfig(**values)
    vocab = pick(2, 16)
    stem = [pick(0, vocab - 1) for _ in range(context)]
    clients = []
    for i in range(pick(1, 7)):
        n = pick(1, context - 1)
        n = pick(1, 1 + n // 4) if short else n
        own = pick(0, n) if pick(0, 2) else 0
        prompt = (*stem[: n - own], *(pick(0, vocab - 1) for _ in range(own)))
        max_len = pick(pick(n + 1, context), context)
        params = SamplingParams(
            max_tokens=None, min_tokens=pick(0, 3) * pick(0, 1), **_SAMPLING[pick(0, 3)],  # type: ignore[arg-type]
            structured_outputs=_GRAMMAR if (sum(prompt) + i) % 4 == 0 else None,
        )  # fmt: skip
        needs_ack = pick(0, 1) == 1
        request = Request(
            request_id=f"r{i // 2}",
            child=i % 2,
            prompt_token_ids=prompt,
            params=params,
            key=pick(0, 3),
            stop_ids=tuple(range(pick(0, 1))),
            max_len=max_len,
            num_drafts=(None, pick(0, k))[pick(0, 1)],
            needs_ack=needs_ack,
            salt=("", "tenant")[pick(0, 3) == 0],
        )
        client = Client(request, arrives=pick(0, 12) * pick(0, 1), lag=pick(0, 2) * pick(0, 1))
        ending = pick(0, 4)
        if ending == 1 and needs_ack:
            client.cut_at = pick(1, 12)
        elif ending == 2:
            client.abort_at = client.arrives + pick(0, 12)
        clients.append(client)
    return Scenario(config, vocab, pick(0, 10_000), clients)


def _choice(pick: Pick, k: int, slots: int) -> dict[str, object]:
    """How the drafts of a frame are chosen: a fixed number, a cost model's, or by confidence with any costs."""
    chosen = pick(0, 5) if k else 0
    if chosen < 4:
        return {"adaptive": chosen in (1, 2)}
    seconds = [
        (s, s * t, 1e-3 * (pick(1, 9) + t * pick(0, 3))) for s in (1, 2, 4, 8) if s <= 2 * slots for t in (1, 2, 4, 8)
    ]
    return {"confidence_schedule": True, "row_seconds": tuple(seconds)}


def run_scenario(s: Scenario) -> tuple[EngineCore, FakeDevice]:
    """Run it to its end; every step checks the pools, the end checks outputs, finish events and cached KV."""
    device = FakeDevice(
        num_drafts=s.config.num_drafts,
        page_size=s.config.page_size,
        run_ahead=s.config.run_ahead,
        rereads=s.config.rereads,
        adaptive=s.config.adaptive,
        window=s.config.window,
        window_quota=s.config.window_quota,
        schedule=Schedule(s.config) if s.config.confidence_schedule else None,
        survivals=lambda key, position, j: 1 + digest(s.script, 1000 * key + position + 77 * j) % (SURVIVAL_ONE - 1),
        vocab=s.vocab,
        drafts=lambda key, position: _script(s.script, key, position),
    )
    polls = itertools.count()
    grammars = FakeGrammars(s.vocab, ready=lambda request: digest(s.script, next(polls)) % 3 == 0)
    engine = EngineCore(s.config, device, grammars)
    by_key = {(c.request.request_id, c.request.child): c for c in s.clients}
    answers: deque[tuple[int, Client, int]] = deque()
    work = sum(c.request.max_len for c in s.clients)
    step = 0
    while step <= 12 or engine.has_work or answers:
        assert step < 200 + 40 * work, "no progress"
        for c in s.clients:
            if c.arrives == step:
                engine.add(c.request)
            if c.abort_at == step:
                engine.abort(c.request.request_id, c.request.child)
        for event in engine.step():
            c = by_key[event.request_id, event.child]
            assert c.reason is None, "an event after the final one"
            assert event.accepted <= min(len(event.tokens), event.drafted or 0)
            if not c.cut:  # frames that were in flight at the cut may still bring tokens
                c.tokens += event.tokens
                c.acked = c.acked if c.request.needs_ack else len(c.tokens)
                answers.append((step + c.lag, c, len(c.tokens)))
                if c.cut_at is not None and len(c.tokens) >= c.cut_at:
                    c.cut, c.tokens = True, c.tokens[: c.cut_at]
            c.reason = event.finish_reason
        for due, c, upto in list(answers):
            if due <= step:
                answers.remove((due, c, upto))
                if c.cut and upto >= (c.cut_at or 0):
                    c.acked = c.cut_at or 0
                    engine.cut(c.request.request_id, c.request.child, c.cut_at or 0)
                elif c.request.needs_ack:
                    c.acked = upto
                    engine.ack(c.request.request_id, c.request.child, upto)
        engine.scheduler.check()
        _check_cache(engine, device, s.clients)
        step += 1
    engine.check_idle()
    assert engine.idle
    for c in s.clients:
        _check_output(c, s.vocab)
    return engine, device


def _script(seed: int, key: int, position: int) -> tuple[int, int]:
    h = digest(seed, 1000 * key + position)
    return h % 5, (h >> 8) % 5


def _check_output(c: Client, vocab: int) -> None:
    tokens, reason = expected(c.request, vocab)
    if c.cut:
        assert c.tokens == tokens[: c.cut_at] and c.reason in ("stop", "length", "abort")
    elif c.reason == "abort":
        assert c.abort_at is not None and c.tokens == tokens[: len(c.tokens)]
    else:
        assert (c.tokens, c.reason) == (tokens, reason)


def _check_cache(engine: EngineCore, device: FakeDevice, clients: list[Client]) -> None:
    """Every cached page holds the KV of its path, and the path was returned to some user of that tenant."""
    for salt, root in engine.scheduler.ledger.radix._roots.items():
        known = [(*c.request.prompt_token_ids, *c.tokens[: c.acked]) for c in clients if c.request.salt == salt]
        stack: list[tuple[Node, tuple[int, ...], int]] = [(n, (), 0) for n in root.children.values()]
        while stack:
            node, path, history = stack.pop()
            path += node.key
            for i, token in enumerate(node.key):
                history = digest(history, token)
                assert device.kv[node.page][i] == history, f"cached page {node.page} holds other tokens' KV"
                if node.window:
                    assert device.window_kv[node.window][i] == history, "a cached window page holds other tokens' KV"
            assert any(path == k[: len(path)] for k in known), "the cache has tokens that nobody was given"
            stack.extend((n, path, history) for n in node.children.values())
