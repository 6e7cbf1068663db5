"""Cuts of the weight-streaming products, timed as a decode frame runs them: cold weights, dependent launches.

    python bench/tune_stream.py [--models 8b,1b] [--rows 32,128,64] [--seconds 95] [--jobs 14] [--all]

For each product of a layer and the head: the cut in kernels/tuning.py, candidates beside it, and the library's product
with the kernel that follows it (`PassConfig`). Each is captured over enough different weights that none is in the
L2 cache. Compiling is most of the time, so other processes do it ahead. Prints one JSON line per product and row
count, then lines to paste into `_MEASURED` for what gains 2 % or more, and the predicted ms of a pass.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slipstream.kernels.norm import norm_prepare, residual_prepare, silu_mul
from slipstream.kernels.rope import rope_kv_write
from slipstream.kernels.sample import argmax_rows
from slipstream.kernels.tuning import Epilogue, GemmConfig, gemm_config, rows_bucket

SHAPES = {
    "8b": {"hidden": 4096, "inner": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "dim": 128, "vocab": 128256},
    "1b": {"hidden": 2048, "inner": 8192, "layers": 16, "heads": 32, "kv_heads": 8, "dim": 64, "vocab": 128256},
    "q3-8b": {"hidden": 4096, "inner": 12288, "layers": 36, "heads": 32, "kv_heads": 8, "dim": 128, "vocab": 151936},
    "q3.5-9b": {"hidden": 4096, "inner": 12288, "layers": 32, "heads": 16, "kv_heads": 4, "dim": 256, "vocab": 248320},
}
MIXED = {"q3.5-9b": {"in": (12352, 24), "qkv": (10240, 8)}}
"""Products into recurrent and gated layers: outputs, layers. Nothing is rotated or kept inside them."""
BF16, EPS, PAGE, PAGES = torch.bfloat16, 1e-5, 32, 16
COLD_BYTES = 250 << 20  # several times the L2
MULTIPROCESSORS, SHARED_BYTES = 132, 220 << 10


@dataclass(frozen=True, kw_only=True)
class Product:
    """One of a model's five products. n, k: the weight; outputs: as `gemm_config` counts them."""

    model: str
    name: str
    epilogue: Epilogue
    n: int
    k: int

    @property
    def outputs(self) -> int:
        return self.n // 2 if self.epilogue is Epilogue.SILU else self.n

    @property
    def planes(self) -> int:
        return 2 if self.epilogue in (Epilogue.SILU, Epilogue.ROPE) else 1

    @property
    def per_pass(self) -> int:
        if self.epilogue is Epilogue.STORE:
            return MIXED[self.model][self.name][1]
        return 1 if self.epilogue is Epilogue.HEAD else SHAPES[self.model]["layers"]

    def weights(self) -> list[Tensor]:
        """Enough that a rotation over them leaves nothing in the L2."""
        count = -(-COLD_BYTES // (2 * self.n * self.k))
        return [torch.empty(self.n, self.k, device="cuda", dtype=BF16).normal_(0, self.k**-0.5) for _ in range(count)]


def products(model: str) -> list[Product]:
    s = SHAPES[model]
    h, inner, qkv = s["hidden"], s["inner"], (s["heads"] + 2 * s["kv_heads"]) * s["dim"]
    into = [Product(model=model, name=name, epilogue=Epilogue.STORE, n=n, k=h)
            for name, (n, _) in MIXED.get(model, {}).items()]  # fmt: skip
    return [
        *(into or [Product(model=model, name="qkv", epilogue=Epilogue.ROPE, n=qkv, k=h)]),
        Product(model=model, name="o", epilogue=Epilogue.RESIDUAL, n=h, k=s["heads"] * s["dim"]),
        Product(model=model, name="gate_up", epilogue=Epilogue.SILU, n=2 * inner, k=h),
        Product(model=model, name="down", epilogue=Epilogue.RESIDUAL, n=h, k=inner),
        Product(model=model, name="head", epilogue=Epilogue.HEAD, n=s["vocab"], k=h),
    ]


def candidates(product: Product, rows: int) -> list[GemmConfig]:
    """The cut in use, then others: tile, programs per multiprocessor (by stages) and programs per tile."""
    bucket = rows_bucket(rows)
    used = gemm_config(product.epilogue, product.outputs, product.k, rows)
    found = [used]
    if product.epilogue is not Epilogue.ROPE:
        found.append(replace(used, tma=not used.tma, hold=False))
    found.append(replace(used, hold=not used.hold, tma=False))
    splits_k = product.epilogue in (Epilogue.ROPE, Epilogue.RESIDUAL)
    for bn, bk in ((64, 64), (64, 128), (128, 64)):
        if product.n // product.planes % bn or product.k % bk:
            continue
        tiles = product.n // product.planes // bn
        warps = 8 if bn * product.planes * bucket > 64 * 128 else 4
        stage = (bn * product.planes + bucket) * bk * 2
        for resident in (2, 1):
            stages = min(6, SHARED_BYTES // resident // stage)
            if stages < 3:
                continue
            for waves in (1, 2, 3) if splits_k else (1,):
                split = max(1, min(8, waves * MULTIPROCESSORS // tiles)) if splits_k else 1
                if -(-product.k // bk) < 2 * split:
                    continue
                hold = splits_k and bucket <= 64
                found.append(GemmConfig(bn=bn, bk=bk, split=split, warps=warps, stages=stages, hold=hold,
                                        tma=product.epilogue is Epilogue.HEAD))  # fmt: skip
    return list(dict.fromkeys(found + narrow(product, bucket)))


def narrow(product: Product, bucket: int) -> list[GemmConfig]:
    """Tiles of 32 weight rows, three or four programs per multiprocessor: their waves are fuller where wider tiles
    leave a part of the multiprocessors with one program less."""
    tiles, found = product.n // product.planes // 32, []
    if product.epilogue is Epilogue.HEAD or bucket > 64 or tiles * 32 * product.planes != product.n:
        return found
    for bk in (64, 128):
        for resident in (3, 4):
            stages = min(6, SHARED_BYTES // resident // ((32 * product.planes + bucket) * bk * 2))
            split = max(1, resident * MULTIPROCESSORS // tiles)
            if stages < 3 or product.k // bk < 2 * split:
                continue
            found += [GemmConfig(bn=32, bk=bk, split=split, warps=warps, stages=stages, hold=hold)
                      for warps in (2, 4) for hold in (False, True)]  # fmt: skip
    return found


class Bench:
    """Inputs of one product at one row count; `streamed` and `library` give a launch over a weight."""

    def __init__(self, product: Product, rows: int) -> None:
        s = SHAPES[product.model]
        self.product, self.rows, h = product, rows, s["hidden"]
        cuda: dict[str, Any] = {"device": "cuda"}
        self.x = torch.randn(rows, product.k, **cuda).to(BF16)
        self.res, self.gain = torch.randn(rows, h, **cuda).to(BF16), torch.rand(h, **cuda).to(BF16)
        self.sq = torch.rand(64, rows, **cuda) * product.k / 64
        slots = 32
        per_slot = -(-rows // slots)
        self.slot = torch.arange(rows, **cuda) // per_slot + 1
        self.pos = 400 + torch.arange(rows, **cuda) % per_slot
        self.table = torch.arange(slots * PAGES + PAGES, **cuda).view(-1, PAGES) % (slots * PAGES) + 1
        cache = (slots * PAGES + 1, PAGE, s["kv_heads"], s["dim"])
        rope = product.epilogue is Epilogue.ROPE
        self.kv = [torch.zeros(cache if rope else (1, 1, 1, 1), dtype=BF16, **cuda) for _ in "kv"]
        self.cos = torch.rand(512, s["dim"] // 2, **cuda)
        self.partial = torch.empty(16 << 20, **cuda)
        self.counters = torch.zeros(1 << 15, dtype=torch.int32, **cuda)
        columns = s["heads"] * s["dim"] if rope else product.outputs
        wide = product.epilogue is Epilogue.HEAD
        self.out = torch.empty(rows, columns, dtype=torch.float32 if wide else BF16, **cuda)
        self.heads = s["heads"]

    def streamed(self, config: GemmConfig, pdl: bool = True) -> Callable[[Tensor], None]:
        from slipstream.kernels.jit import gemm

        p, kw = self.product, {}
        tiles = -(-p.n // config.bn)
        if p.epilogue is Epilogue.RESIDUAL:
            shares = torch.empty(tiles, self.rows, device="cuda")
            kw = {"res": self.res, "gain": self.gain, "scaled": torch.empty_like(self.out), "sq_out": shares}
        elif p.epilogue is Epilogue.HEAD:
            best = torch.empty(tiles, self.rows, device="cuda")
            kw = {"best": best, "where": best.to(torch.int32), "store_out": False, "sq_in": self.sq}
        elif p.epilogue is Epilogue.SILU:
            kw = {"pair": p.outputs, "sq_in": self.sq}
        elif p.epilogue is Epilogue.STORE:
            kw = {"sq_in": self.sq}
        else:
            rope = gemm.Rope(
                k=self.kv[0], v=self.kv[1], cos=self.cos, sin=self.cos, q_gain=None, k_gain=None, table=self.table,
                slot=self.slot, rope_pos=self.pos, kv_pos=self.pos, heads=self.heads, eps=EPS,
            )  # fmt: skip
            kw = {"rope": rope, "sq_in": self.sq}
        return lambda w: gemm.launch_stream_gemm(
            self.x, w, self.out, epi=int(p.epilogue), config=config, eps=EPS, ws=self.partial, counters=self.counters,
            pdl=pdl, **kw,
        )  # fmt: skip

    def library(self, pdl: bool) -> Callable[[Tensor], Any]:
        """The product and the kernel behind it, as the fused pass launches them."""
        p, x = self.product, self.x
        if p.epilogue is Epilogue.RESIDUAL:
            return lambda w: residual_prepare(F.linear(x, w), self.res, self.gain, pdl)
        if p.epilogue is Epilogue.SILU:
            return lambda w: silu_mul(F.linear(x, w), self.sq, p.k, EPS, pdl)
        if p.epilogue is Epilogue.HEAD:
            return lambda w: argmax_rows(torch.mm(x, w.T, out_dtype=torch.float32), pdl)
        if p.epilogue is Epilogue.STORE:
            return lambda w: F.linear(x, w)
        return lambda w: rope_kv_write(
            F.linear(x, w), *self.kv, self.cos, self.cos, None, None, self.table, self.slot, self.pos, self.pos,
            self.heads, EPS, None, self.sq, p.k, EPS, pdl,
        )  # fmt: skip

    def us(self, launch: Callable[[Tensor], Any], weights: list[Tensor]) -> float:
        """µs of a launch, the best of several replays of a graph that rotates over the weights."""
        turns = max(1, -(-8 // len(weights)))
        launch(weights[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            norm_prepare(self.res, self.gain, True)  # opens the chain of dependent launches
            for _ in range(turns):
                for w in weights:
                    launch(w)
        times = []
        for _ in range(6):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times[1:]) * 1e3 / (turns * len(weights))


def compile_one(product: Product, rows: int, config: GemmConfig) -> str:
    """In a helper process: compile into the disk cache by launching once. The error's first line, or nothing."""
    try:
        Bench(product, rows).streamed(config)(torch.zeros(product.n, product.k, device="cuda", dtype=BF16))
        torch.cuda.synchronize()
    except Exception as error:  # a cut that does not fit the GPU is an answer
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


Jobs = dict[tuple[Product, int, GemmConfig], "Future[str]"]


def finished(jobs: Jobs, wanted: list[tuple[Product, int, GemmConfig]], until: float) -> Iterator[GemmConfig]:
    """Those of `wanted` that compiled, as they come."""
    config_of = {jobs[w]: w[2] for w in wanted}
    for done in as_completed(config_of, timeout=max(0.1, until - time.monotonic())):
        if not done.result():
            yield config_of[done]


def line(config: GemmConfig) -> str:
    """The configuration as source text, defaults left out."""
    given = (f"{f.name}={getattr(config, f.name)}" for f in fields(config) if getattr(config, f.name) != f.default)
    return f"GemmConfig({', '.join(given)})"


def measure(
    product: Product, rows: int, jobs: Jobs, configs: list[GemmConfig], weights: list[Tensor], until: float
) -> dict[str, Any]:
    bench, times = Bench(product, rows), {}
    with torch.inference_mode():
        library = {pdl: bench.us(bench.library(pdl), weights) for pdl in (False, True)}
        want = None
        try:
            for config in finished(jobs, [(product, rows, c) for c in configs], until):
                launch = bench.streamed(config)
                if product.epilogue is not Epilogue.HEAD:  # the head keeps no logits here
                    bench.out.fill_(float("nan"))
                    launch(weights[0])
                    want = bench.out.clone() if want is None else want
                    error = float((bench.out.float() - want.float()).norm() / want.float().norm())
                    assert error < 1e-2, f"{product} {config}: {error}"
                times[config] = bench.us(launch, weights)
        except TimeoutError:
            print(f"# out of time at {product.model} {product.name} {rows}", file=sys.stderr)
    used = configs[0]
    best = min(times, key=lambda c: times[c], default=used)
    floor = 2 * product.n * product.k / 4.2e6
    ranked = sorted(times.items(), key=lambda item: item[1])
    return {
        "model": product.model, "product": product.name, "rows": rows, "floor_us": round(floor, 1),
        "library_us": round(library[False], 1), "library_pdl_us": round(library[True], 1),
        "used_us": round(times.get(used, float("nan")), 1), "best_us": round(times.get(best, float("nan")), 1),
        "used": line(used), "best": line(best), "tried": len(times),
        "ranking": [f"{t:.1f} {line(c)}" for c, t in ranked],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b,1b")
    parser.add_argument("--rows", default="32,128,64")
    parser.add_argument("--seconds", type=float, default=95, help="stop then, with what is measured")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--all", action="store_true", help="the whole ranking of each product")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("tune_stream needs a CUDA device", file=sys.stderr)
        return 2
    until = time.monotonic() + args.seconds
    cases = [(p, int(r)) for m in args.models.split(",") for r in args.rows.split(",") for p in products(m)]
    configs = {case: candidates(*case) for case in cases}
    found = []
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs: Jobs = {(p, r, c): pool.submit(compile_one, p, r, c) for (p, r), cs in configs.items() for c in cs}
        for product, rows in cases:
            weights = product.weights()
            case = measure(product, rows, jobs, configs[product, rows], weights, until)
            found.append((product, case))
            ranking = case.pop("ranking")
            print(json.dumps({**case, "ranking": ranking} if args.all else {**case, "next": ranking[1:3]}), flush=True)
            del weights
            torch.cuda.empty_cache()
        pool.shutdown(cancel_futures=True)
    print("# for _MEASURED in slipstream/kernels/tuning.py:")
    for product, case in found:
        if case["best_us"] < 0.98 * case["used_us"]:
            at = f"(Epilogue.{product.epilogue.name}, {product.outputs}, {product.k})"
            print(f"#   {at}: {{{rows_bucket(case['rows'])}: {case['best']}}},")
    for model in args.models.split(","):
        for rows in (int(r) for r in args.rows.split(",")):
            mine = [(p, c) for p, c in found if p.model == model and c["rows"] == rows]
            total = {
                key: round(sum(p.per_pass * c[key] for p, c in mine) / 1e3, 3)
                for key in ("floor_us", "used_us", "best_us", "library_us", "library_pdl_us")
            }
            print(json.dumps({"model": model, "rows": rows, "products_ms": total}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
