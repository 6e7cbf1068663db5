"""Host time of the allocators of a steady decode step: each kind alone, and what counting pages costs.

    python bench/allocators.py --slots 64,1024 [--json FILE]

Every slot gets `--tokens` tokens a step, as one that accepts its drafts does, and as many pages ahead as the scheduler
stocks; a step extends the slots that are short, as `Ledger.grow` does. Prints one JSON line per number of slots,
microseconds per step (mean): `count` is the one page count that all allocators of a step share, `full`, `window`
(sliding and extending) and `follower` (a pool that follows, such as host-offloaded pages) are the others.
`recounted`: what counting once more in each of the three would add.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from slipstream.config import STOCK_PAGES, EngineConfig
from slipstream.engine.pages import PagePool, pages_for, pages_for_extension
from slipstream.engine.window import WindowPages

PAGE, CONTEXT, WINDOW = 32, 4096, 512


def measure(slots: int, tokens: int, steps: int) -> dict[str, Any]:
    pages = slots * (CONTEXT // PAGE + 8)
    config = EngineConfig(
        max_slots=slots, page_size=PAGE, num_pages=pages, max_model_len=CONTEXT, prefill_chunk=256, run_ahead=2,
        num_drafts=tokens - 1, window=WINDOW, window_pages=pages,
    )  # fmt: skip
    full, follower, window = PagePool(pages, PAGE), PagePool(pages, PAGE), WindowPages(config)
    ids = list(range(1, slots + 1))
    length = {s: 128 + s % PAGE for s in ids}
    covered = {s: pages_for(length[s], PAGE) * PAGE for s in ids}
    for s in ids:
        for pool in (full, follower):
            pool.open(s, (), CONTEXT)
            pool.extend([s], [0], [covered[s]])
        window.enter(s, ())
        window.extend([s], [0], [covered[s]])
    spent = dict.fromkeys(("count", "full", "window", "follower"), 0)

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = perf_counter_ns()
        out = call()
        spent[name] += perf_counter_ns() - began
        return out

    extended = 0
    for _ in range(steps):
        short = [s for s in ids if length[s] + 3 * tokens > covered[s]]
        if short:
            extended += 1
            old = [covered[s] for s in short]
            new = [pages_for(length[s] + 3 * tokens + STOCK_PAGES * PAGE, PAGE) * PAGE for s in short]
            n = timed("count", lambda o=old, w=new: pages_for_extension(o, w, PAGE))
            timed("full", lambda s=short, o=old, w=new, n=n: full.extend(s, o, w, n))
            timed("follower", lambda s=short, o=old, w=new, n=n: follower.extend(s, o, w, n))

            def slide_and_extend(s: list[int] = short, o: list[int] = old, w: list[int] = new, n: int = n) -> None:
                for slot in s:
                    window.slide(slot, length[slot])
                window.extend(s, o, w, n)

            timed("window", slide_and_extend)
            window.news()
            covered.update(zip(short, new, strict=True))
        for s in ids:
            length[s] += tokens
    us = {name: round(ns / 1e3 / steps, 2) for name, ns in spent.items()}
    return {
        "slots": slots, "tokens": tokens, "steps": steps, "steps_that_extend": extended, **us,
        "recounted": round(3 * us["count"], 2),
    }  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--slots", default="64,1024")
    p.add_argument("--tokens", type=int, default=3)
    p.add_argument("--steps", type=int, default=600)
    p.add_argument("--json", type=Path)
    options = p.parse_args()
    rows = [measure(int(n), options.tokens, options.steps) for n in options.slots.split(",")]
    for row in rows:
        print(json.dumps(row), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": platform.processor(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
