"""Adaptive drafting on a GPU: batch x acceptance, the mode that it chooses against every fixed one.

    python bench/adaptive_sweep.py [--model DIR] [--batch 1,4,16,64] [--acceptance 1,1.6,2.5,4] [--least 0.97]

The shape of Llama-3.2-1B unless --model names a folder with a config.json, dummy weights, drafts that are always
offered, synthetic acceptance (mean tokens of a round whose drafts are all verified; it is part of a captured frame, so
there is one engine for each). A cell's requests never end: its frames are run with the number of drafts fixed, then
chosen, the first ones untimed. A JSON line per cell with the tokens per second of each, and the chosen one's share of
the best fixed one; the last line has the lowest share, and the exit code is 1 if that is below --least.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
DRAFTS, PROMPT = 3, 64


@contextlib.contextmanager
def cell(llm: Any, batch: int, tokens: int) -> Iterator[None]:
    """`batch` greedy requests of `tokens` output tokens, past their prompts; aborted at the end."""
    from slipstream.types import SamplingParams

    rng, vocab = random.Random(batch), llm.model_config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [[rng.randrange(3, vocab) for _ in range(PROMPT)] for _ in range(batch)]
    ids = [llm._submit(*llm._prepare(prompt, params)) for prompt in prompts]
    try:
        live = [llm._live[i].output.outputs[0] for i in ids]
        while not all(answer.token_ids for answer in live):
            llm._step()
        yield
    finally:
        for request_id in ids:
            llm.abort(request_id)


def rate(llm: Any, frames: int) -> float:
    """Tokens per second of so many turns."""
    step, emitted, began = llm._engine.step, 0, time.perf_counter()
    for _ in range(frames):
        emitted += sum(len(event.tokens) for event in step())
    return emitted / (time.perf_counter() - began)


def measure(llm: Any, batch: int, frames: int) -> dict[str, Any]:
    """One cell: each fixed mode, then the choice, which learns during the untimed frames."""
    from slipstream.engine.adaptive import Adaptive

    class Fixed(Adaptive):
        def choose(self, slots: int) -> int:
            return self.mode

    scheduler, config = llm._engine.scheduler, llm._built.engine_config
    rates: dict[str, float] = {}
    for mode in [*config.draft_modes, None]:
        scheduler.adaptive = Adaptive.of(config) if mode is None else Fixed.of(config)
        if mode is not None:
            scheduler.adaptive.mode = mode
        with cell(llm, batch, (2 * frames + 64) * (DRAFTS + 1)):
            rate(llm, frames if mode is None else 32)
            rates["chosen" if mode is None else str(mode)] = rate(llm, frames)
    best = max(r for name, r in rates.items() if name != "chosen")
    return {
        "batch": batch, "mode": scheduler.adaptive.mode, "tok_s": {name: round(r, 1) for name, r in rates.items()},
        "share_of_best": round(rates["chosen"] / best, 4),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Adaptive drafting against every fixed number of drafts, on a GPU.")
    parser.add_argument("--model", metavar="DIR")
    parser.add_argument("--batch", default="1,4,16,64")
    parser.add_argument("--acceptance", default="1,1.6,2.5,4")
    parser.add_argument("--frames", type=int, default=250)
    parser.add_argument("--least", type=float, default=0.97)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    from slipstream.benchmark.audit_cells import weights_once
    from slipstream.draft.oracle import OracleDrafter
    from slipstream.llm import LLM

    batches = sorted(int(b) for b in args.batch.split(","))
    length = PROMPT + (2 * args.frames + 128) * (DRAFTS + 1)
    lowest = 1.0
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
                    line = {"acceptance": acceptance, **measure(llm, batch, args.frames)}
                    lowest = min(lowest, line["share_of_best"])
                    print(json.dumps(line), flush=True)
    print(json.dumps({"lowest_share": lowest, "least": args.least}))
    return int(lowest < args.least)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
