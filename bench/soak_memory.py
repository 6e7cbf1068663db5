"""Memory over 2,000 requests: device bytes return to the same value, the host process stops growing.

    python bench/soak_memory.py [--model bench/configs/llama-3.2-1b] [--requests 2000] [--json FILE]

Short requests of mixed lengths, greedy, seeded and sampled in one batch, every eighth aborted after some tokens, all
through one engine. At rest after every 200 requests it notes the bytes that tensors hold (allocated) and that the
allocator holds (reserved) on the device, and the resident set of this process. The first block warms everything up.
Exit code 1 when device bytes differ from the first note, or the host grew by 2 % or more since.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slipstream.types import SamplingParams

MODEL = "bench/configs/llama-3.2-1b"
BLOCK = 200
"""Requests between two notes; the first note is the base of all comparisons."""
HOST_GROWTH = 0.02
ABORT_EVERY = 8


def resident_bytes() -> int:
    """Resident set of this process (VmRSS). Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmRSS")


def device_bytes() -> dict[str, int]:
    """What tensors and the allocator hold on the GPU; zeros on a machine without one."""
    import torch

    if not torch.cuda.is_available():
        return {"allocated": 0, "reserved": 0}
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}


def params_of(i: int, rng: random.Random) -> SamplingParams:
    """Greedy, seeded and unseeded sampling in turn, 1 to 24 tokens."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": i},
        {"temperature": 0.9, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.0, "top_k": 40},
    )
    return SamplingParams(max_tokens=rng.randint(1, 24), ignore_eos=True, **kinds[i % len(kinds)])


def run_block(llm: Any, first: int, count: int) -> int:
    """Requests first .. first + count through the engine, all submitted at once; returns how many were aborted."""
    victims: list[str] = []
    for i in range(first, first + count):
        rng = random.Random(i)  # the same requests in every run
        prompt = [rng.randrange(llm.model_config.vocab_size) for _ in range(rng.randint(1, 96))]
        request_id = llm._submit(*llm._prepare(prompt, params_of(i, rng)))
        if i % ABORT_EVERY == 0:
            victims.append(request_id)
    turns, aborted = 0, 0
    while llm._live:
        llm._step()
        turns += 1
        if victims and turns % 2 == 0:  # some wait, some decode, some have ended by then
            victim = victims.pop(0)
            aborted += victim in llm._live
            llm.abort(victim)
    llm.check_idle()
    return aborted


def soak(llm: Any, requests: int) -> dict[str, Any]:
    """Run everything and judge it: see `verdict`."""
    notes: list[dict[str, int]] = []
    aborted, began = 0, time.perf_counter()
    for first in range(0, requests, BLOCK):
        aborted += run_block(llm, first, min(BLOCK, requests - first))
        gc.collect()
        notes.append({"requests": min(first + BLOCK, requests), **device_bytes(), "host": resident_bytes()})
    return {"requests": requests, "aborted": aborted, "seconds": round(time.perf_counter() - began, 2), "notes": notes,
            **verdict(notes)}  # fmt: skip


def verdict(notes: list[dict[str, int]]) -> dict[str, Any]:
    """device_same: allocated and reserved bytes of every note equal the first note's. host_growth: of the last note."""
    base = notes[0]
    growth = notes[-1]["host"] / base["host"] - 1.0
    same = all(n[k] == base[k] for n in notes for k in ("allocated", "reserved"))
    return {"device_same": same, "host_growth": round(growth, 5), "ok": same and growth < HOST_GROWTH}


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=MODEL, metavar="DIR")
    p.add_argument("--requests", type=int, default=2000)
    p.add_argument("--slots", type=int, default=32)
    p.add_argument("--draft", default="ngram", help='"ngram" (default) or "none"')
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    p.add_argument("--json", metavar="FILE", help="write the result here, in the style of bench/results")
    given = p.parse_args(argv)
    if given.requests < 2 * BLOCK:
        p.error(f"--requests {given.requests} must be at least {2 * BLOCK}: the first {BLOCK} are the base")

    import torch

    from slipstream.llm import LLM

    with LLM(
        model=given.model, load_format="dummy", device=given.device, draft=given.draft, max_slots=given.slots,
        slot_buckets=(given.slots,), max_model_len=128,
    ) as llm:  # fmt: skip
        result = soak(llm, given.requests)
        facts = {
            "date": datetime.date.today().isoformat(),
            "command": "python bench/soak_memory.py " + " ".join(argv if argv is not None else sys.argv[1:]),
            "model": given.model, "draft": given.draft, "slots": given.slots, "device": llm.resolved["device"],
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }  # fmt: skip
    print(json.dumps({k: v for k, v in result.items() if k != "notes"}))
    if given.json:
        Path(given.json).write_text(json.dumps({**facts, **result}, indent=1) + "\n")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
