"""Adaptive drafting on a GPU: batch x acceptance, the mode that it chooses against every fixed one.

    python bench/adaptive_sweep.py [--model DIR] [--batch 1,4,16,64] [--acceptance 1,1.6,2.5,4] [--context 768]

The shape of Llama-3.2-1B unless --model names a folder with a config.json, dummy weights, drafts that are always
offered, synthetic acceptance (mean tokens of a round whose drafts are all verified; it is part of a captured frame, so
there is one engine for each). In a cell every number of drafts is fixed in turn, then chosen twice: by a controller
that has seen nothing (*learning*), and by the same one over fresh requests (*steady*). Each is timed for so many frames
whose sequences have the same mean length, --context: a frame gets dearer with every token that it reads, and 64
sequences that are 900 tokens longer take a fifth more time whatever is chosen. Tokens count by the law of the synthetic
acceptance at what each round verified, since 250 rounds of one slot leave 2 to 3 % to luck; `counted` has them as they
came. A JSON line per cell; the last one has the lowest shares of the best fixed number's tokens per second. The exit
code is 1 if the lowest steady one is below --least.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
DRAFTS, LEAD = 3, 32
"""Drafts of a round at most; untimed frames, about."""


class Law:
    """Tokens of a round by the number of drafts that it verified, under a synthetic acceptance."""

    def __init__(self, mean: float) -> None:
        whole = math.floor(mean)
        self.tokens = [(whole + 1 - mean) * min(whole, k + 1) + (mean - whole) * min(whole + 1, k + 1)
                       for k in range(DRAFTS + 1)]  # fmt: skip


class Timed(NamedTuple):
    """Tokens per second by the law and as counted, mean length of the sequences, frames by number of drafts."""

    rate: float
    counted: float
    context: float
    frames: dict[int, int]


@contextlib.contextmanager
def requests(llm: Any, batch: int, prompt: int, tokens: int) -> Iterator[None]:
    """`batch` greedy requests of so many prompt and output tokens, past their prompts; aborted at the end."""
    from slipstream.types import SamplingParams

    rng, vocab = random.Random(batch), llm.model_config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [[rng.randrange(3, vocab) for _ in range(prompt)] for _ in range(batch)]
    ids = [llm._submit(*llm._prepare(p, params)) for p in prompts]
    try:
        live = [llm._live[i].output.outputs[0] for i in ids]
        while not all(answer.token_ids for answer in live):
            llm._step()
        yield
    finally:
        for request_id in ids:
            llm.abort(request_id)


def mean_length(llm: Any) -> float:
    return statistics.fmean(s.length for s in llm._engine.scheduler.running.values())


def timed(
    llm: Any, law: Law, batch: int, frames: int, context: int, per_frame: float, controller: Any | None = None
) -> Timed:
    """So many turns whose sequences have about that mean length, where a frame brings each so many tokens.

    controller: what chooses from the first timed turn on; None: what does already."""
    step, start = llm._engine.step, context - frames * per_frame / 2
    prompt = max(1, round(start - LEAD * per_frame))
    room = llm._built.engine_config.max_model_len - prompt
    with requests(llm, batch, prompt, room):
        while mean_length(llm) < start:
            step()
        if controller is not None:
            llm._engine.scheduler.adaptive = controller
        first, before = mean_length(llm), Counter(llm._engine.metrics.frames_by_drafts)
        tokens, counted, began = 0.0, 0, time.perf_counter()
        for _ in range(frames):
            for event in step():
                counted += len(event.tokens)
                tokens += law.tokens[event.drafted]
        took = time.perf_counter() - began
        made = Counter(llm._engine.metrics.frames_by_drafts) - before
        return Timed(tokens / took, counted / took, (first + mean_length(llm)) / 2, dict(sorted(made.items())))


def measure(llm: Any, acceptance: float, batch: int, frames: int, context: int) -> dict[str, Any]:
    """One cell: each fixed mode, then the choice while it learns and after."""
    from slipstream.engine.adaptive import Adaptive

    class Fixed(Adaptive):
        def choose(self, slots: int) -> int:
            return self.mode

    scheduler, config, law = llm._engine.scheduler, llm._built.engine_config, Law(acceptance)
    found: dict[str, Timed] = {}
    for mode in config.draft_modes:
        scheduler.adaptive = Fixed.of(config)
        scheduler.adaptive.mode = mode
        found[str(mode)] = timed(llm, law, batch, frames, context, law.tokens[mode])
    name, best = max(found.items(), key=lambda item: item[1].rate)
    for chosen in ("learning", "steady"):
        fresh = Adaptive.of(config) if chosen == "learning" else None
        found[chosen] = timed(llm, law, batch, frames, context, law.tokens[int(name)], fresh)
    return {
        "acceptance": acceptance, "batch": batch, "mode": scheduler.adaptive.mode,
        "tok_s": {k: round(t.rate, 1) for k, t in found.items()},
        "counted": {k: round(t.counted, 1) for k, t in found.items()},
        "context": {k: round(t.context) for k, t in found.items()},
        "frames": {k: found[k].frames for k in ("learning", "steady")},
        "share_learning": round(found["learning"].rate / best.rate, 4),
        "share_steady": round(found["steady"].rate / best.rate, 4),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Adaptive drafting against every fixed number of drafts, on a GPU.")
    parser.add_argument("--model", metavar="DIR")
    parser.add_argument("--batch", default="1,4,16,64")
    parser.add_argument("--acceptance", default="1,1.6,2.5,4")
    parser.add_argument("--frames", type=int, default=250)
    parser.add_argument("--context", type=int, default=768, help="mean length of the sequences while frames are timed")
    parser.add_argument("--least", type=float, default=0.97)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    least = (args.frames // 2 + LEAD) * (DRAFTS + 1)
    if args.context <= least:
        parser.error(f"--context {args.context} must be above {least}, or sequences would begin below nothing")
    from slipstream.benchmark.audit_cells import weights_once
    from slipstream.draft.oracle import OracleDrafter
    from slipstream.llm import LLM

    batches = sorted(int(b) for b in args.batch.split(","))
    length = args.context + (args.frames + 2 * LEAD) * (DRAFTS + 1)
    lowest = {"learning": 1.0, "steady": 1.0}
    with tempfile.TemporaryDirectory() as folder, weights_once():
        if args.model is None:
            (Path(folder) / "config.json").write_text(json.dumps(LLAMA_1B))
        for acceptance in (float(a) for a in args.acceptance.split(",")):
            with LLM(
                args.model or folder, load_format="dummy", device=args.device, num_drafts=DRAFTS, adaptive=True,
                draft=lambda **kw: OracleDrafter(lambda request: [7] * length, **kw), synthetic_acceptance=acceptance,
                max_slots=batches[-1], slot_buckets=tuple(batches), max_model_len=length,
                num_pages=batches[-1] * -(-(length + 8) // 32),
            ) as llm:  # fmt: skip
                for batch in batches:
                    line = measure(llm, acceptance, batch, args.frames, args.context)
                    lowest = {k: min(share, line[f"share_{k}"]) for k, share in lowest.items()}
                    print(json.dumps(line), flush=True)
    print(json.dumps({"lowest": lowest, "least": args.least}))
    return int(lowest["steady"] < args.least)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
