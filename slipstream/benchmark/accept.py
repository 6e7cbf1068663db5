"""`slipstream bench accept`: how many tokens a round gives on real prompts, and what that is worth in speed.

Acceptance length is pooled: tokens of all rounds divided by the number of rounds, the bonus token included. Plain
decoding runs on the same prompts in the same process, prompt by prompt in turns, so that the ratio of speeds holds
even where the machine is noisy. Only the first turn of a conversation is asked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.benchmark.decode import versions
from slipstream.draft.default import with_default_draft
from slipstream.draft.options import TREE_HELP, tree_values
from slipstream.errors import ConfigError, InvalidRequestError
from slipstream.types import SamplingParams, SpecStats

MAX_PROMPTS = 100_000
_clock = time.perf_counter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `slipstream bench accept`."""
    add = parser.add_argument
    add("--prompts", metavar="FILE", required=True, help='JSON lines with "prompt" or "turns", and perhaps "category"')
    add("--model", metavar="M", help="directory, GGUF file or hub id (default: SmolLM2-135M-Instruct)")
    add("--draft", metavar="D", help='"ngram", "suffix", "mtp" or the path of a draft (default: the default model\'s)')
    add("--adaptive", action="store_true", default=None, help="draft only as much as pays; so it is without --draft")
    add("--num-drafts", type=int, metavar="K", help="drafts per round")
    add("--draft-tree", metavar="TOPK,LEVELS,TOTAL", help=TREE_HELP)
    add("--max-prompts", type=int, metavar="N", help="at most N prompts, taken evenly from the file")
    add("--max-tokens", type=int, default=128, metavar="N", help="tokens per answer (default 128)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    add("--seed", type=int, default=0, metavar="S", help="of the request keys; verification stays the unseeded kind")
    add("--batch", type=int, default=1, metavar="N", help="answers side by side (default 1)")
    add("--no-plain", action="store_true", help="leave plain decoding, and so the ratio of speeds, out")
    add("--dtype", choices=("auto", "float32", "float64", "bfloat16"))
    add("--device", choices=("auto", "cpu", "cuda"))
    add("--threads", type=int, metavar="N", help="CPU threads")
    add("--plot", metavar="FILE", help="write acceptance by position and category as a PNG")
    add("--json", action="store_true", help="print JSON instead of a table")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question. category: "all" where the file names none."""

    text: str
    category: str


@dataclass
class Tally:
    """What one category, or all together, came to."""

    prompts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    plain_tokens: int = 0
    plain_seconds: float = 0.0
    spec: SpecStats = field(default_factory=SpecStats)

    def row(self, name: str) -> dict[str, Any]:
        """conditional_acceptance[i]: share of verified drafts i that held, given that all before them held."""
        held, seen = self.spec.accepted_per_position, self.spec.drafted_per_position
        held = held + [0] * (len(seen) - len(held))
        # Draft i is judged only where the i before it held.
        reached = [min(s, before) for s, before in zip(seen, [self.spec.rounds, *held[:-1]], strict=False)]
        speed = self.tokens / self.seconds if self.seconds else 0.0
        plain = self.plain_tokens / self.plain_seconds if self.plain_seconds else None
        return {
            "category": name,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "acceptance_length": round(self.spec.acceptance_length, 4),
            "conditional_acceptance": [round(h / r, 4) if r else None for h, r in zip(held, reached, strict=True)],
            "drafted": self.spec.drafted,
            "accepted": self.spec.accepted,
            "tok_s": round(speed, 2),
            "plain_tok_s": None if plain is None else round(plain, 2),
            "speedup": None if plain is None else round(speed / plain, 3),
        }


def read_prompts(path: Path, limit: int | None) -> list[Prompt]:
    """Prompts of a JSON-lines file; `limit` of them, evenly spread. Raises ConfigError that names the line."""
    if not path.is_file():
        raise ConfigError(f"--prompts {str(path)!r} is not a file")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {str(path)!r} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            text = value["prompt"] if "prompt" in value else value["turns"][0]
            if not isinstance(text, str) or not text:
                raise TypeError
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise ConfigError(f'{path} line {number} needs a text "prompt" or a list "turns"') from None
        found.append(Prompt(text=text, category=str(value.get("category", "all"))))
        if len(found) > MAX_PROMPTS:
            raise ConfigError(f"{path} has more than {MAX_PROMPTS} prompts")
    if not found:
        raise ConfigError(f"{path} holds no prompts")
    if limit is None or limit >= len(found):
        return found
    return [found[i * len(found) // limit] for i in range(limit)]


def run(args: argparse.Namespace) -> int:
    for name, low in (("max_tokens", 1), ("batch", 1)):
        if getattr(args, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least {low}")
    if args.max_prompts is not None and args.max_prompts < 1:
        raise ConfigError(f"--max-prompts {args.max_prompts} must be at least 1")
    prompts = read_prompts(Path(args.prompts), args.max_prompts)
    if args.plot and find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'slipstream[bench]'")
    if args.plot and not Path(args.plot).absolute().parent.is_dir():
        raise ConfigError(f"--plot {args.plot!r}: its folder does not exist")
    options = drafting_options(args)
    rows, left_out = measure(args, prompts, options)
    report = {"versions": versions(), "command": sys.argv[1:], "left_out": left_out, "rows": rows}
    if args.json:
        print(json.dumps(report))
    else:
        print(table(rows))
        if left_out:
            print(f"{left_out} prompts are longer than the context and were left out")
    if args.plot:  # last: what was measured must not be lost with it
        name, drafts = Path(options["draft"]).name, args.draft_tree or args.num_drafts or "default"
        plot(rows, Path(args.plot), f"{name}, {drafts} drafts")
    return 0


def drafting_options(args: argparse.Namespace) -> dict[str, Any]:
    """What of the arguments the drafting engine gets and plain decoding does not."""
    given = {
        "draft": args.draft, "num_drafts": args.num_drafts, "adaptive": args.adaptive,
        "draft_tree": args.draft_tree and tree_values(args.draft_tree),
    }  # fmt: skip
    chosen = {name: value for name, value in given.items() if value is not None}
    options = with_default_draft({"model": args.model, **chosen})
    del options["model"]
    if "draft" not in options:
        raise ConfigError("--draft is missing: no draft comes with the package for this model")
    return options


def measure(
    args: argparse.Namespace, prompts: Sequence[Prompt], drafts: dict[str, Any]
) -> tuple[list[dict[str, Any]], int]:
    """A row per category, then one for all; and how many prompts did not fit."""
    from slipstream.llm import LLM

    common = {k: getattr(args, k) for k in ("dtype", "device", "threads") if getattr(args, k) is not None}
    common["max_slots"] = max(args.batch, 1)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    tallies: dict[str, Tally] = {}
    left_out = 0
    with LLM(args.model, seed=args.seed, **drafts, **common) as drafting:
        plain = None if args.no_plain else LLM(args.model, seed=args.seed, **common)
        try:
            asked = []
            for p in prompts:
                ids = drafting.chat_prompt([{"role": "user", "content": p.text}])
                try:
                    drafting.check(ids, params)
                except InvalidRequestError:
                    left_out += 1
                    continue
                asked.append((p.category, ids))
            for engine in (drafting, plain):
                if engine is not None and asked:
                    engine.generate([asked[0][1]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
            for at in range(0, len(asked), args.batch):
                part = asked[at : at + args.batch]
                _turn(drafting, plain, part, params, tallies)
                if sys.stderr.isatty():
                    print(f"\r{at + len(part)}/{len(asked)} prompts", end="", file=sys.stderr, flush=True)
        finally:
            if plain is not None:
                plain.close()
    rows = [tallies[name].row(name) for name in tallies if name != "all"]
    return [*rows, tallies.get("all", Tally()).row("all")], left_out


def _turn(drafting: Any, plain: Any, part: list[tuple[str, list[int]]], params: Any, tallies: dict[str, Tally]) -> None:
    ids = [i for _, i in part]
    began = _clock()
    outs = drafting.generate(ids, params, use_tqdm=False)
    seconds = _clock() - began
    plain_seconds, plain_tokens = 0.0, [0] * len(part)
    if plain is not None:
        began = _clock()
        plain_tokens = [len(o.outputs[0].token_ids) for o in plain.generate(ids, params, use_tqdm=False)]
        plain_seconds = _clock() - began
    for (category, _), out, told in zip(part, outs, plain_tokens, strict=True):
        for name in {category, "all"}:
            t = tallies.setdefault(name, Tally())
            t.prompts += 1
            t.tokens += len(out.outputs[0].token_ids)
            t.seconds += seconds / len(part)
            t.plain_tokens += told
            t.plain_seconds += plain_seconds / len(part)
            t.spec.counts.update(out.spec.counts)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For people: one line per category, conditional acceptance by position at the end."""
    width = max(len(r["category"]) for r in rows)
    head = f"{'category':<{width}}  prompts  tokens/round    tok/s    plain  speedup  acceptance by position"
    lines = [head]
    for r in rows:
        plain = "-" if r["plain_tok_s"] is None else f"{r['plain_tok_s']:.1f}"
        ratio = "-" if r["speedup"] is None else f"{r['speedup']:.2f}x"
        shares = " ".join("  - " if c is None else f"{c:.2f}" for c in r["conditional_acceptance"])
        lines.append(
            f"{r['category']:<{width}}  {r['prompts']:>7}  {r['acceptance_length']:>12.2f}  {r['tok_s']:>7.1f}  "
            f"{plain:>7}  {ratio:>7}  {shares}"
        )
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Conditional acceptance by position, a line per category."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for r in rows:
        shares = [c for c in r["conditional_acceptance"] if c is not None]
        label = f"{r['category']} ({r['acceptance_length']:.2f})"
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=label, lw=2.5 if r["category"] == "all" else 1)
    axes.set(xlabel="draft", ylabel="accepted, given all before it", ylim=(0, 1), title=title)
    axes.legend(fontsize=7, title="tokens per round")
    figure.savefig(path, dpi=120)
