"""What grammars cost requests that have none: their TPOT in a mixed load beside that of a load without any.

    python bench/grammar_load.py [--model MODEL] [--clients 8] [--requests 32] [--rounds 6] [--json FILE] [-- --draft X]

One `slipstream serve`, and legs of equal loads that take turns (A B B A ...), so that a drift of the machine is in
both. In A --clients clients ask for plain answers; in B every other one of them asks for JSON by a schema that no
request had before, so that compiling is in it, or for what a regular expression says. All answers have --max-tokens
tokens. Counted are the requests of the clients that are plain in both, --requests of them a leg: from first to last
token over the tokens after the first, the median of a leg; the ratio is the median over the rounds. The legs last as
long as those requests. Prints JSON. Exit code 1 when the ratio is above --most, or a request failed. Server and client
are on one machine: with few cores they take the time from each other, in both legs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.serve_decode import server
from slipstream.benchmark.load import Sample, Target, ask, look_up

TOPICS = ("the river Thames", "winter in the north", "a bridge of stone", "coffee", "the history of paper", "a lamp")


def forms(tag: str) -> Iterator[dict[str, Any]]:
    """Fields of requests with a grammar, each compiled anew. tag: in each, so that no other run has them."""
    for number in itertools.count():
        if number % 2:
            yield {"guided_regex": f"({tag}{number}|[A-Z][a-z ,]{{20,400}}[.] )*"}
        else:
            parts = {"title": {"type": "string", "minLength": 30}, f"{tag}{number}": {"enum": ["yes", "no", "perhaps"]},
                     "text": {"type": "string", "minLength": 4000}}  # fmt: skip
            schema = {"type": "object", "properties": parts, "required": [*parts], "additionalProperties": False}
            yield {"response_format": {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}}


async def leg(target: Target, clients: int, requests: int, tag: str | None) -> tuple[list[Sample], list[Sample]]:
    """Samples of the plain half of the clients, `requests` in all; and of the others, with grammars if tag is given."""
    counted, others = list[Sample](), list[Sample]()
    todo, grammars = iter(range(requests)), forms(tag or "")
    prompts = (f"Tell me all you know about {topic}." for topic in itertools.cycle(TOPICS))
    async with httpx.AsyncClient(timeout=target.timeout, trust_env=False) as http:

        async def plain() -> None:
            for _ in todo:
                counted.append(await ask(http, target, next(prompts)))

        async def other() -> None:
            while True:
                fields = target.fields if tag is None else {**target.fields, **next(grammars)}
                others.append(await ask(http, replace(target, fields=fields), next(prompts)))

        beside = [asyncio.create_task(other()) for _ in range(clients - clients // 2)]
        await asyncio.gather(*(plain() for _ in range(clients // 2)))
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    return counted, others


def row(counted: Sequence[Sample], others: Sequence[Sample], seconds: float) -> dict[str, Any]:
    times = sorted(1e3 * s.tpot for s in counted if s.tpot is not None)
    failed = [s.error for s in (*counted, *others) if s.error]
    tail = times[int(0.99 * (len(times) - 1))] if times else 0.0
    return {
        "tpot_ms": {"p50": round(median(times), 3), "p99": round(tail, 3)} if times else None,
        "counted": len(times), "others": len(others), "others_tokens": sum(s.tokens for s in others),
        "seconds": round(seconds, 2), "errors": failed[:3],
    }  # fmt: skip


def verdict(rounds: Sequence[dict[str, Any]], most: float) -> dict[str, Any]:
    """rounds: {"plain": row, "mixed": row} each. ok: no request failed and the ratio is at most `most`."""
    legs = [r[kind] for r in rounds for kind in ("plain", "mixed")]
    if any(leg["errors"] or leg["tpot_ms"] is None for leg in legs):
        return {"ratio": None, "ratios": [], "ok": False}
    ratios = [round(r["mixed"]["tpot_ms"]["p50"] / r["plain"]["tpot_ms"]["p50"], 4) for r in rounds]
    return {"ratio": round(median(ratios), 4), "ratios": ratios, "ok": median(ratios) <= most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="left out: the server's default")
    parser.add_argument("--clients", type=int, default=8, help="half of them have grammars in every other leg")
    parser.add_argument("--requests", type=int, default=32, help="plain requests of a leg that are counted")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6, help="pairs of legs")
    parser.add_argument("--most", type=float, default=1.03, help="ratio that is still accepted")
    parser.add_argument("--start-seconds", type=float, default=900.0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("engine", nargs="*", help="more options of the server, after --, such as -- --draft ngram")
    args = parser.parse_args()
    if args.clients < 2 or args.rounds < 1 or args.requests < args.clients // 2:
        parser.error("needs two clients, one round, and a request for each plain client")

    words = [*([args.model] if args.model else []), "--max-slots", str(args.clients), *args.engine]
    rounds = list[dict[str, Any]]()
    with server(words, args.start_seconds) as url:
        fields = {"max_tokens": args.max_tokens, "temperature": 0.0, "ignore_eos": True}
        target = Target(url=url, model=look_up(url, None), chat=True, fields=fields)
        asyncio.run(leg(target, args.clients, args.clients // 2, "warm"))
        for number in range(args.rounds):
            legs: dict[str, dict[str, Any]] = {}
            for kind in ("plain", "mixed") if number % 2 == 0 else ("mixed", "plain"):
                began = time.perf_counter()
                tag = f"part{number}" if kind == "mixed" else None
                counted, others = asyncio.run(leg(target, args.clients, args.requests, tag))
                legs[kind] = row(counted, others, time.perf_counter() - began)
            rounds.append(legs)
            print(json.dumps({"round": number, **legs}), file=sys.stderr, flush=True)
    report = {
        "command": sys.argv[1:], "cores": os.cpu_count(), "model": target.model, "most": args.most,
        **verdict(rounds, args.most), "rounds": rounds,
    }  # fmt: skip
    print(json.dumps(report))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.exit(not report["ok"])


if __name__ == "__main__":
    main()
