"""ms per decode step of a captured layer stack with random weights: our kernels beside cuBLAS and the floor.

    python bench/kernels_gpu.py [--models 8b,1b] [--rows 1,8,32] [--context 400] [--out FILE]

One step: all layers (norm + qkv + rope + KV write, attention, o + residual, norm + gate-up + SiLU, down + residual),
head and argmax, in one CUDA graph, each layer with its own weights. `cublas` is the same step with torch.mm and
our small kernels around it. floor_ms: weight bytes over the best read rate measured in the same run.
One JSON line per case.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slipstream.kernels import attention, gemm, norm, rope, sample
from slipstream.kernels.workspace import Workspace

SHAPES: dict[str, dict[str, int]] = {
    "8b": {"hidden": 4096, "inner": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "dim": 128, "vocab": 128256},
    "1b": {"hidden": 2048, "inner": 8192, "layers": 16, "heads": 32, "kv_heads": 8, "dim": 64, "vocab": 128256},
}
BF16, EPS, PAGE = torch.bfloat16, 1e-5, 32


def graph_ms(step: Callable[[], Any], repeats: int = 31) -> float:
    """Median time of a replay in ms."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    # All replays are queued before the first is read, as run-ahead does it: the host's launch time is not in them.
    events = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in events]
    return sorted(times)[repeats // 2]


class Stack:
    """Random weights and caches of one model shape."""

    def __init__(self, shape: dict[str, int], context: int) -> None:
        s = self.shape = shape
        h, dim = s["hidden"], s["dim"]
        qkv = ((s["heads"] + 2 * s["kv_heads"]) * dim, h)
        sizes = [qkv, (h, s["heads"] * dim), (2 * s["inner"], h), (h, s["inner"])]
        self.layers = [[self._random(*size) for size in sizes] for _ in range(s["layers"])]
        self.head = self._random(s["vocab"], h)
        self.gains = [torch.rand(h, device="cuda").add_(0.5).to(BF16) for _ in range(2 * s["layers"] + 1)]
        self.weight_bytes = 2 * (self.head.numel() + sum(w.numel() for layer in self.layers for w in layer))
        pages = -(-context // PAGE)
        self.table = torch.zeros(65, pages, dtype=torch.int32, device="cuda")
        self.table[1:] = (torch.randperm(64 * pages, device="cuda") + 1).view(64, pages)
        cache = (64 * pages + 1, PAGE, s["kv_heads"], dim)
        self.caches = [[torch.randn(cache, device="cuda").to(BF16) for _ in "kv"] for _ in range(s["layers"])]
        angle = torch.arange(context, device="cuda")[:, None] * 5e5 ** (-torch.arange(0, dim, 2, device="cuda") / dim)
        self.cos, self.sin = angle.cos(), angle.sin()
        work = Workspace("cuda")
        self.ws = (work.partial, work.counters)

    @staticmethod
    def _random(n: int, k: int) -> Tensor:
        return torch.empty(n, k, device="cuda", dtype=BF16).normal_(0, k**-0.5)

    def streamed(self, x: Tensor, slot: Tensor, pos: Tensor, pdl: bool) -> tuple[Tensor, Tensor]:
        s, ws, gains = self.shape, self.ws, iter(self.gains)
        h = x
        xg, sq = norm.norm_prepare(h, next(gains), pdl)
        for (qkv, o, gate_up, down), (k, v) in zip(self.layers, self.caches, strict=True):
            where = (self.table, slot, pos, pos, s["heads"])
            q = gemm.stream_rope(
                xg, qkv, None, sq, EPS, k, v, self.cos, self.sin, None, None, EPS, *where, *ws, pdl
            )  # fmt: skip
            a = attention.paged_attention(q, k, v, self.table, slot, pos, None, s["dim"] ** -0.5, *ws, pdl)
            h, xg, sq = gemm.stream_residual(a.flatten(1), o, h, next(gains), *ws, pdl)
            act = gemm.stream_swiglu(xg, gate_up, sq, EPS, *ws, pdl)
            h, xg, sq = gemm.stream_residual(act, down, h, next(gains), *ws, pdl)
        logits, best, ids = gemm.stream_head(xg, self.head, sq, EPS, *ws, True, pdl)
        return logits, sample.argmax_finish(best, ids, s["vocab"], pdl)

    def cublas(self, x: Tensor, slot: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        s, ws, gains = self.shape, self.ws, iter(self.gains)
        h, y = x, norm.rms_norm(x, next(gains), EPS)
        for (qkv, o, gate_up, down), (k, v) in zip(self.layers, self.caches, strict=True):
            q = rope.rope_kv_write(
                torch.mm(y, qkv.T), k, v, self.cos, self.sin, None, None, self.table, slot, pos, pos, s["heads"], EPS
            )
            a = attention.paged_attention(q, k, v, self.table, slot, pos, None, s["dim"] ** -0.5, *ws)
            h, y = norm.residual_norm(torch.mm(a.flatten(1), o.T), h, next(gains), EPS)
            h, y = norm.residual_norm(torch.mm(norm.silu_mul(torch.mm(y, gate_up.T)), down.T), h, next(gains), EPS)
        logits = torch.mm(y, self.head.T)
        return logits, sample.argmax_rows(logits)


def read_tb_s() -> float:
    """Best pure-read rate: a Triton sum over 4 GiB."""
    import triton
    import triton.language as tl

    @triton.jit
    def read(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        total = tl.zeros([BLOCK], tl.int32)
        for i in tl.range(tl.program_id(0) * BLOCK * 2, n, tl.num_programs(0) * BLOCK * 2):
            for u in tl.static_range(2):
                total += tl.load(x_ptr + i + u * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_first")
        tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))

    n = 1 << 30
    x = torch.randint(0, 1 << 30, (n,), device="cuda", dtype=torch.int32)
    out = torch.empty(8192, device="cuda", dtype=torch.int32)
    programs = torch.cuda.get_device_properties(0).multi_processor_count

    def rate(waves: int) -> float:
        return 4 * n / graph_ms(lambda: read[(programs * waves,)](x, out, n, BLOCK=4096, num_warps=8), 9) / 1e9

    return max(rate(waves) for waves in (3, 4, 6))


def measure(stack: Stack, name: str, rows: int, context: int, rate: float) -> dict[str, Any]:
    """One case: the step by our kernels (with and without dependent launch) and by cuBLAS."""
    x = torch.randn(rows, SHAPES[name]["hidden"], device="cuda").to(BF16)
    slot = torch.arange(1, rows + 1, device="cuda", dtype=torch.int32)
    pos = torch.full((rows,), context - 1, device="cuda", dtype=torch.int32)
    eager = stack.streamed(x, slot, pos, False)[0]
    other = stack.cublas(x, slot, pos)[0].float()
    floor = stack.weight_bytes / rate / 1e9
    ours = graph_ms(lambda: stack.streamed(x, slot, pos, True))
    case: dict[str, Any] = {
        "model": name,
        "rows": rows,
        "ours_ms": ours,
        "ours_no_pdl_ms": graph_ms(lambda: stack.streamed(x, slot, pos, False)),
        "cublas_ms": graph_ms(lambda: stack.cublas(x, slot, pos)),
        "floor_ms": floor,
        "share_of_floor": floor / ours,
        "pdl_bit_equal": torch.equal(stack.streamed(x, slot, pos, True)[0], eager),
        "logits_vs_cublas": float((eager - other).norm() / other.norm()),
    }
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in case.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b,1b")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rate = read_tb_s()
    cases = []
    for name in args.models.split(","):
        stack = Stack(SHAPES[name], args.context)
        for rows in (int(r) for r in args.rows.split(",")):
            cases.append(measure(stack, name, rows, args.context, rate))
            print(json.dumps(cases[-1]), flush=True)
        del stack
        torch.cuda.empty_cache()
    if args.out:
        import triton

        record = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python", *sys.argv]),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "context": args.context,
            "read_tb_s": round(rate, 3),
            "cases": cases,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
