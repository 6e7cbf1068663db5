"""`slipstream bench serve`: throughput and latency of a running server under load, see `load`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slipstream import __version__
from slipstream.benchmark.accept import read_prompts
from slipstream.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from slipstream.benchmark.load import Load, Prompt, Sample, Target

MAX_REQUESTS = 100_000
WORDS = (
    "river stone lamp green seven walk under paper north coffee silver window often music garden cold train yellow "
    "seldom bridge letter ocean quick market winter number open carry simple round evening forest table engine"
).split()
"""Of synthetic prompts; most vocabularies have each as one token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `slipstream bench serve`."""
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", metavar="U", help="of the server (default http://127.0.0.1:8000)")
    add("--model", metavar="NAME", help="name of the model in requests (default: the first that the server lists)")
    add("--concurrency", metavar="N,N", help="closed loop: clients that ask again at once; one point for each number")
    add("--rate", metavar="R,R", help="open loop: requests per second, Poisson; one point for each number")
    add("--requests", type=int, default=64, metavar="N", help="requests of each point (default 64)")
    add("--warmup", type=int, default=2, metavar="N", help="requests before the first point, not counted (default 2)")
    add("--prompts", metavar="FILE", help='JSON lines with "prompt" or "turns"; without: synthetic prompts')
    add("--input-len", type=int, default=128, metavar="N", help="words of a synthetic prompt (default 128)")
    add(
        "--token-ids",
        type=int,
        metavar="V",
        help="prompts of random ids below V to /v1/completions, answers as ids too",
    )
    add("--max-tokens", type=int, default=128, metavar="N", help="tokens of an answer (default 128)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    add("--seed", type=int, default=0, metavar="S", help="of synthetic prompts and of arrivals")
    add("--completions", action="store_true", help="ask /v1/completions; the default is the chat route")
    add("--ignore-eos", action="store_true", help="answers of exactly --max-tokens (servers that know ignore_eos)")
    add("--extra", metavar="JSON", help='more fields of every request, such as \'{"speculative": "off"}\'')
    add("--api-key", metavar="KEY", help="sent with every request; or $SLIPSTREAM_API_KEY")
    add("--plot", metavar="FILE", help="write latencies and throughput over the load as a PNG")
    add("--output", metavar="FILE", help="write the report, with every sample, as JSON")
    add("--json", action="store_true", help="print the report as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """0, or 1 when any request failed."""
    loads, prompts = _loads(args), _prompts(args)
    for name in ("plot", "output"):
        path = getattr(args, name)
        if path and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"--{name} {path!r}: its folder does not exist")
    from slipstream.benchmark.load import draft_counts, drive

    target = _target(args)
    rows: list[dict[str, Any]] = []
    kept: list[list[dict[str, Any]]] = []
    if args.warmup:
        asyncio.run(drive(target, loads[0], prompts[: args.warmup], args.seed))
    for at, load in enumerate(loads):
        before = draft_counts(target.url, target.key)
        bar = _Bar(load.name, len(prompts))
        samples, seconds = asyncio.run(drive(target, load, prompts, args.seed + at, bar.advance))
        rows.append(row(load, samples, seconds, _delta(before, draft_counts(target.url, target.key))))
        kept.append([_plain(s) for s in samples])
        if not args.json:
            print(table(rows[-1:], head=at == 0), flush=True)
    report = {
        "versions": {"slipstream": __version__, "python": platform.python_version(), "os": sys.platform},
        "command": [word if word != args.api_key else "***" for word in sys.argv[1:]],
        "model": target.model, "cores": os.cpu_count(), "rows": rows,
    }  # fmt: skip
    if args.json:
        print(json.dumps(report))
    if args.output:
        Path(args.output).write_text(json.dumps({**report, "samples": kept}) + "\n", encoding="utf-8")
    if args.plot:
        plot(rows, kept, Path(args.plot), f"{target.model}, {len(prompts)} requests of {args.max_tokens} tokens")
    failed = [s["error"] for samples in kept for s in samples if s["error"]]
    if failed:
        print(f"slipstream: {len(failed)} requests failed, the first with: {failed[0]}", file=sys.stderr)
    return 1 if failed else 0


def _loads(args: argparse.Namespace) -> list[Load]:
    for name, low, high in (("requests", 1, MAX_REQUESTS), ("warmup", 0, 1000), ("input_len", 1, 1_000_000),
                            ("max_tokens", 1, 2**31 - 1)):  # fmt: skip
        if not low <= getattr(args, name) <= high:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be from {low} to {high}")
    if (args.concurrency is None) == (args.rate is None):
        raise ConfigError("give --concurrency or --rate, one of the two")
    missing = [name for name in ("httpx", *(["matplotlib"] if args.plot else [])) if find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"slipstream bench serve needs {', '.join(missing)}: pip install 'slipstream[bench]'")
    from slipstream.benchmark.load import Load

    name, text = ("--concurrency", args.concurrency) if args.rate is None else ("--rate", args.rate)
    loads = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = -1.0
        if not 0 < value <= 10_000 or (args.rate is None and value != int(value)):
            kind = "whole number" if args.rate is None else "number above 0"
            raise ConfigError(f"{name} {part[:20]!r} must be a {kind}, at most 10000")
        loads.append(Load(concurrency=int(value)) if args.rate is None else Load(rate=value))
    return loads


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    if args.token_ids is not None:
        if args.prompts:
            raise ConfigError("--token-ids makes its own prompts; leave --prompts out")
        if not 2 <= args.token_ids <= 2**31 - 1:
            raise ConfigError(f"--token-ids {args.token_ids} must be from 2 to {2**31 - 1}")
        rng = random.Random(args.seed)
        return [[rng.randrange(args.token_ids) for _ in range(args.input_len)] for _ in range(args.requests)]
    if args.prompts:
        found = [p.text for p in read_prompts(Path(args.prompts), None)]
        return [found[i % len(found)] for i in range(args.requests)]
    rng = random.Random(args.seed)
    return [" ".join(rng.choices(WORDS, k=args.input_len)) for _ in range(args.requests)]


def _target(args: argparse.Namespace) -> Target:
    from slipstream.benchmark.load import Target, look_up

    url = args.url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--url {args.url!r} must be such as http://127.0.0.1:8000")
    fields: dict[str, Any] = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    if args.token_ids is not None:
        fields["return_token_ids"] = True
    if args.ignore_eos:
        fields["ignore_eos"] = True
    if args.extra:
        try:
            extra = json.loads(args.extra)
        except ValueError as error:
            raise ConfigError(f"--extra is not valid JSON: {error}") from None
        if not isinstance(extra, dict):
            raise ConfigError("--extra must be a JSON object")
        fields |= extra
    key = args.api_key or os.environ.get("SLIPSTREAM_API_KEY") or None
    model = args.model or look_up(url, key)
    return Target(
        url=url, model=model, chat=not (args.completions or args.token_ids is not None), fields=fields, key=key
    )


def _delta(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float | None:
    """Tokens per round between two readings of the server's counters."""
    if after is None:
        return None
    first = before or (0.0, 0.0)
    rounds = after[0] - first[0]
    return (after[1] - first[1]) / rounds if rounds > 0 else None


def row(load: Load, samples: Sequence[Sample], seconds: float, tau: float | None = None) -> dict[str, Any]:
    """What one load came to. Times in ms, over the requests that did not fail; tok_s over all of the time.

    tau: tokens per round from the server's counters, used where usage does not tell. None: not known.
    """
    good = [s for s in samples if s.error is None]
    rounds = sum(s.rounds for s in good)
    positions = [sum(each) for each in zip_longest(*(s.accepted_per_position for s in good), fillvalue=0)]
    length = sum(s.round_tokens for s in good) / rounds if rounds else tau
    tokens = sum(s.tokens for s in good)
    return {
        "load": load.name, "concurrency": load.concurrency or None, "rate": load.rate or None,
        "requests": len(samples), "errors": len(samples) - len(good), "seconds": round(seconds, 4),
        "prompt_tokens": sum(s.prompt_tokens for s in good), "output_tokens": tokens,
        "tokens_from_usage": all(s.from_usage for s in good),
        "tok_s": round(tokens / seconds, 2), "req_s": round(len(good) / seconds, 4),
        "ttft_ms": spread([s.ttft for s in good if s.ttft is not None]),
        "tpot_ms": spread([s.tpot for s in good if s.tpot is not None]),
        "e2e_ms": spread([s.e2e for s in good]),
        "acceptance_length": None if length is None else round(length, 4),
        "accepted_per_position": [round(n / rounds, 4) for n in positions],
    }  # fmt: skip


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p95, p99 and most, in milliseconds; None for nothing."""
    import numpy as np

    if not seconds:
        return None
    ms = np.array(seconds) * 1e3
    p50, p95, p99 = np.percentile(ms, (50, 95, 99))
    named = {"mean": ms.mean(), "p50": p50, "p95": p95, "p99": p99, "max": ms.max()}
    return {name: round(float(value), 3) for name, value in named.items()}


def table(rows: Sequence[dict[str, Any]], *, head: bool = True) -> str:
    """For people: a line per load."""
    titles = "  ".join(f"{name + ' p50/p95/p99 ms':>24}" for name in ("TTFT", "TPOT", "E2E"))
    lines = [f"{'load':<18}  {'ok/all':<9}  {'tok/s':>6}  {titles}  {'τ':>4}"] if head else []
    for r in rows:
        cells = [
            "-" if r[k] is None else "/".join(f"{r[k][p]:.1f}" for p in ("p50", "p95", "p99"))
            for k in ("ttft_ms", "tpot_ms", "e2e_ms")
        ]
        tau = "-" if r["acceptance_length"] is None else f"{r['acceptance_length']:.2f}"
        share = f"{r['requests'] - r['errors']}/{r['requests']}"
        lines.append(
            f"{r['load']:<18}  {share:<9}  {r['tok_s']:>6.1f}  {cells[0]:>24}  {cells[1]:>24}  {cells[2]:>24}  {tau:>4}"
        )
    return "\n".join(lines)


def _plain(sample: Sample) -> dict[str, Any]:
    return {
        "ttft": sample.ttft, "tpot": sample.tpot, "e2e": sample.e2e, "tokens": sample.tokens,
        "prompt_tokens": sample.prompt_tokens, "error": sample.error,
    }  # fmt: skip


def plot(rows: Sequence[dict[str, Any]], samples: Sequence[Sequence[dict[str, Any]]], path: Path, title: str) -> None:
    """TTFT and TPOT over the load, throughput over the load, and how e2e times are distributed at each load."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    (ttft, tpot), (speed, e2e) = figure.subplots(2, 2)
    loads = [r["concurrency"] or r["rate"] for r in rows]
    for axes, key, name in ((ttft, "ttft_ms", "time to first token"), (tpot, "tpot_ms", "time per output token")):
        for part in ("p50", "p95", "p99"):
            axes.plot(loads, [(r[key] or {}).get(part, float("nan")) for r in rows], marker="o", label=part)
        axes.set(ylabel=f"{name}, ms", ylim=(0, None))
        axes.legend()
    speed.plot(loads, [r["tok_s"] for r in rows], marker="o")
    speed.set(ylabel="output tokens/s", ylim=(0, None))
    for axes in (ttft, tpot, speed):
        axes.set_xlabel("clients" if rows[0]["concurrency"] else "requests/s")
    for r, each in zip(rows, samples, strict=True):
        times = sorted(s["e2e"] for s in each if s["error"] is None)
        e2e.plot(times, [(i + 1) / len(times) for i in range(len(times))], label=r["load"])
    e2e.set(xlabel="whole answer, s", ylabel="share of requests", ylim=(0, 1))
    e2e.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


class _Bar:
    """A count on stderr while a point runs; silent when it is no terminal."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.done = name, total, 0

    def advance(self) -> None:
        self.done += 1
        if sys.stderr.isatty():
            end = "\n" if self.done == self.total else ""
            print(f"\r{self.name}: {self.done}/{self.total}", end=end, file=sys.stderr, flush=True)
