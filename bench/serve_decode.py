"""What HTTP costs: the server's throughput and TPOT beside those of the engine alone, at the same batch sizes.

    python bench/serve_decode.py [--model bench/configs/llama-3.1-8b] [--concurrency 1,8,32,64] [--json FILE]

First `slipstream bench decode` (engine only, no text side), then `slipstream serve` with the same options and
`slipstream bench serve` against it: for each concurrency c, c clients that begin together, each with a prompt of
random ids and --output-len tokens. TPOT is the median over the clients, from their first token to their last, so that
prompts that are read at the same time are in it for the first clients only. Server, client and engine are processes
of one machine: on few cores they take the time from each other. Exit code 1 when a ratio is above --most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]


def run_json(words: list[str]) -> list[dict[str, Any]]:
    """Lines of JSON that a slipstream command prints."""
    command = [sys.executable, "-m", "slipstream", *words]
    done = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with code {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@contextlib.contextmanager
def server(words: list[str], start_seconds: float) -> Iterator[str]:
    """A running server's address."""
    command = [sys.executable, "-m", "slipstream", "serve", *words, "--port", "0", "--log-format", "json"]
    process = subprocess.Popen(command, cwd=REPO, stderr=subprocess.PIPE, text=True)
    found, ready = list[str](), threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if match := re.search(r'serving .* at (http://[^\s"]+)', line):
                found.append(match[1])
                ready.set()
            elif '"level": "info"' not in line:
                sys.stderr.write(line)
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        ready.wait(start_seconds)
        if not found:
            sys.exit("the server did not start")
        yield found[0]
    finally:
        process.terminate()
        process.wait(60)
        reader.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bench/configs/llama-3.1-8b")
    parser.add_argument("--concurrency", default="1,8,32,64")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each point; the median counts")
    parser.add_argument("--most", type=float, default=1.03, help="ratio of TPOT that is still accepted")
    parser.add_argument("--start-seconds", type=float, default=900.0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("engine", nargs="*", help="more options of both, after --, such as -- --draft ngram")
    args = parser.parse_args()

    sizes = [int(part) for part in args.concurrency.split(",")]
    config = json.loads((REPO / args.model / "config.json").read_text())
    shared = ["--model", args.model, "--load-format", "dummy", *args.engine]
    decode = run_json(
        ["bench", "decode", *shared, "--batch", args.concurrency, "--prompt-len", str(args.prompt_len),
         "--output-len", str(args.output_len), "--repeats", str(args.repeats), "--no-trace", "--json"]
    )  # fmt: skip
    alone = {line["batch"]: line for line in decode}
    context = str(args.prompt_len + args.output_len + 64)
    rows = []
    with server([*shared, "--max-slots", str(max(sizes)), "--max-model-len", context], args.start_seconds) as url:
        for size in sizes:
            load = [
                "bench", "serve", "--url", url, "--token-ids", str(config["vocab_size"]), "--ignore-eos",
                "--concurrency", str(size), "--requests", str(size), "--input-len", str(args.prompt_len),
                "--max-tokens", str(args.output_len), "--json",
            ]  # fmt: skip
            runs = [run_json([*load, "--seed", str(seed)])[0]["rows"][0] for seed in range(args.repeats)]
            runs.sort(key=lambda run: run["tpot_ms"]["p50"])
            middle = runs[len(runs) // 2]
            engine = alone[size]
            rows.append({
                "concurrency": size, "engine_tpot_ms": engine["tpot_ms"], "server_tpot_ms": middle["tpot_ms"]["p50"],
                "ratio": round(middle["tpot_ms"]["p50"] / engine["tpot_ms"], 4), "engine_tok_s": engine["tok_s"],
                "server_tok_s": middle["tok_s"], "ttft_ms": middle["ttft_ms"], "errors": middle["errors"],
                "acceptance_length": middle["acceptance_length"],
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    report = {"command": sys.argv[1:], "cores": os.cpu_count(), "engine": decode, "rows": rows}
    if args.json:
        with tempfile.NamedTemporaryFile("w", dir=Path(args.json).absolute().parent, delete=False) as part:
            part.write(json.dumps(report, indent=1) + "\n")
        Path(part.name).replace(args.json)
    sys.exit(any(row["ratio"] > args.most or row["errors"] for row in rows))


if __name__ == "__main__":
    main()
