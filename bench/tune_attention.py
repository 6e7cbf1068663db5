"""Cuts of paged attention, timed as a decode frame runs it: cold keys, dependent launches.

    python bench/tune_attention.py [--shapes 8b,1b,256] [--frames 1x1,8x4,8x4r,32x1] [--context 400] [--seconds 90]

A frame is slots x rows of each; r: ragged, as n-gram drafts leave it, some slots with all of their rows, some with half
of them, some with one, and padding behind. Contexts are ragged, from a third of --context to five thirds. For each
shape and frame: the cut in kernels/tuning.py, and others; each is captured over enough layers that no keys are in the
L2 cache, and compared with the cut in use. Other processes compile ahead. One JSON line per shape and frame: floor_us
is one read of its keys and values at 4.2 TB/s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slipstream.kernels.norm import norm_prepare
from slipstream.kernels.tuning import AttentionConfig, attention_config

SHAPES = {"8b": (32, 8, 128), "1b": (32, 8, 64), "256": (16, 4, 256)}
"""Query heads, KV heads, head size."""
PAGE, COLD_BYTES, BF16 = 32, 250 << 20, torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Frame:
    shape: str
    slots: int
    rows: int
    context: int
    ragged: bool = False

    def __str__(self) -> str:
        return f"{self.slots}x{self.rows}" + "r" * self.ragged

    def slot_R(self) -> Tensor:
        """Slot of each row, on the CPU."""
        all_R = torch.arange(self.slots * self.rows) // self.rows + 1
        if not self.ragged:
            return all_R
        most = torch.tensor([self.rows, 1, -(-self.rows // 2)])[torch.arange(self.slots) % 3]
        packed = torch.arange(1, self.slots + 1).repeat_interleave(most)
        return torch.nn.functional.pad(packed, (0, len(all_R) - len(packed)))

    def configs(self) -> list[AttentionConfig]:
        """The cut in use first."""
        dim = SHAPES[self.shape][2]
        splits = (4, 8, 16) if self.slots <= 4 else (2, 4, 8) if self.slots <= 16 else (1, 2, 4)
        cuts = [(b, w) for b, w in product((32, 64, 128), (2, 4, 8)) if 2048 <= b * dim // w <= 4096]
        kept = [(b, w, n) for (b, w), n in product(cuts, (2, 5, 7)) if b * dim * 4 * (n // 2) <= 120 << 10]
        tiles = (16, 32) if self.rows > 16 // (SHAPES[self.shape][0] // SHAPES[self.shape][1]) else (16,)
        made = [
            AttentionConfig(splits=s, block=b, warps=w, stages=n, queries=q)
            for s, (b, w, n), q in product(splits, kept, tiles)
        ]
        return list(dict.fromkeys([attention_config(self.slots * self.rows, dim, self.rows), *made]))


class Bench:
    def __init__(self, frame: Frame) -> None:
        heads, kv_heads, dim = SHAPES[frame.shape]
        random, rows = torch.Generator().manual_seed(frame.slots), frame.slots * frame.rows
        share = torch.rand(frame.slots, generator=random) if frame.slots > 1 else torch.tensor([0.5])
        length_S = (frame.context * (1 / 3 + share * 4 / 3)).long()
        width = int(-(-(length_S.max() + frame.rows) // PAGE))
        pages = frame.slots * width + 1
        self.table = torch.zeros(frame.slots + 1, width, dtype=torch.int64)
        self.table[1:] = (torch.randperm(pages - 1, generator=random) + 1).view(frame.slots, width)
        self.slot = frame.slot_R()
        first_R = (self.slot[:, None] == self.slot).int().argmax(1)  # of the same slot
        self.pos = length_S[self.slot - 1] + torch.arange(rows) - first_R
        self.table, self.slot, self.pos = self.table.cuda(), self.slot.cuda(), self.pos.cuda()
        self.bytes = int(length_S.sum()) * kv_heads * dim * 4
        layers = max(4, -(-COLD_BYTES // self.bytes)) if rows > 1 else 64
        self.kv = [
            torch.randn(2, pages, PAGE, kv_heads, dim, device="cuda", dtype=BF16) for _ in range(min(layers, 64))
        ]
        self.q = torch.randn(rows, heads, dim, device="cuda", dtype=BF16)
        self.out, self.frame = torch.empty_like(self.q), frame
        self.partial = torch.empty(16 << 20, device="cuda")
        self.counters = torch.zeros(1 << 15, dtype=torch.int32, device="cuda")
        self.gain = torch.ones(64, device="cuda", dtype=BF16)
        self.some = torch.ones(1, 64, device="cuda", dtype=BF16)

    def launch(self, config: AttentionConfig, kv: Tensor) -> None:
        from slipstream.kernels.jit import attention

        attention.launch_paged_attention(
            self.q, kv[0], kv[1], self.out, self.table, self.slot, self.pos, None, self.partial, self.counters,
            scale=SHAPES[self.frame.shape][2] ** -0.5, config=config, per_slot=self.frame.rows, pdl=True,
        )  # fmt: skip

    def us(self, config: AttentionConfig) -> float:
        """µs of a launch, the best of several replays of a graph over all layers."""
        self.launch(config, self.kv[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            norm_prepare(self.some, self.gain, True)  # opens the chain of dependent launches
            for kv in self.kv:
                self.launch(config, kv)
        times = []
        for _ in range(6):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times[1:]) * 1e3 / len(self.kv)


def compile_all(frame: Frame, configs: list[AttentionConfig]) -> list[AttentionConfig]:
    """In a helper process: compiles into the disk cache by launching; those that work."""
    bench, works = Bench(frame), []
    for config in configs:
        try:
            bench.launch(config, bench.kv[0])
            torch.cuda.synchronize()
            works.append(config)
        except Exception as error:  # a cut that does not fit the GPU is an answer
            print(f"# {config}: {str(error).splitlines()[0]}", file=sys.stderr)
    return works


def measure(frame: Frame, configs: list[AttentionConfig]) -> dict[str, Any]:
    bench = Bench(frame)
    used = attention_config(frame.slots * frame.rows, SHAPES[frame.shape][2], frame.rows)
    bench.launch(used, bench.kv[0])
    want, times = bench.out.float(), {}
    for config in configs:
        bench.out.fill_(float("nan"))
        bench.launch(config, bench.kv[0])
        error = float((bench.out.float() - want).norm() / want.norm())
        assert error < 1e-2, f"{frame} {config}: {error}"
        times[config] = bench.us(config)
    ranked = sorted(times.items(), key=lambda item: item[1])
    show = [
        f"{t:.1f} splits={c.splits} block={c.block} warps={c.warps} stages={c.stages} queries={c.queries}"
        for c, t in ranked
    ]
    return {
        "shape": frame.shape, "frame": str(frame), "context": frame.context,
        "floor_us": round(bench.bytes / 4.2e6, 1), "used_us": round(times.get(used, float("nan")), 1),
        "best": show[:8], "tried": len(times),
        "per_splits": {c.splits: s for (c, _), s in zip(reversed(ranked), reversed(show), strict=True)},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8b,1b,256")
    parser.add_argument("--frames", default="1x1,8x1,8x4,8x4r,32x1,32x4")
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--jobs", type=int, default=14)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("tune_attention needs a CUDA device", file=sys.stderr)
        return 2
    until = time.monotonic() + args.seconds
    sizes = [(*map(int, f.rstrip("r").split("x")), f.endswith("r")) for f in args.frames.split(",")]
    frames = [
        Frame(shape=s, slots=a, rows=b, context=args.context, ragged=r)
        for s in args.shapes.split(",") for a, b, r in sizes
    ]  # fmt: skip
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {f: [pool.submit(compile_all, f, f.configs()[i::6]) for i in range(6)] for f in frames}
        for frame in frames:
            works = []
            try:
                for done in as_completed(jobs[frame], timeout=max(0.1, until - time.monotonic())):
                    works += done.result()
            except TimeoutError:
                print(f"# out of time at {frame}", file=sys.stderr)
            if works:
                print(json.dumps(measure(frame, works)), flush=True)
            torch.cuda.empty_cache()
        pool.shutdown(cancel_futures=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
