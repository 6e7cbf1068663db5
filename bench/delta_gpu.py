"""The delta rule's kernels on a GPU at the shape of a model, against the time their states take to pass by.

    python bench/delta_gpu.py [--model bench/configs/qwen3.5-9b] [--slots 1,8,32,64] [--drafts 3] [--prompts]

Decode rows: the model's recurrent layers one after another, each with states of its own, in a captured graph; for each
number of slots, plain and with drafts of which all were accepted, at every cut of the kernel; `chained_us`: the same as
dependent launches. `floor_us` is one read and one write of the slots' states at the best read rate of the same run,
`gb_s` those bytes in `us`. `error`: of a cut's outputs and states against the reference in float64, which ends the run
above LIMIT. Prompt rows (--prompts): 128, 512, 2,048 of one slot. One JSON line per case; the last line names the
fastest cut of each.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.kernels_gpu import graph_ms, read_tb_s
from slipstream.kernels.delta import DeltaWeights, delta_rows, delta_tiles
from slipstream.kernels.jit import delta as jit
from slipstream.kernels.tuning import DeltaConfig
from slipstream.memory.states import DeltaMemory
from slipstream.models.config import ModelConfig, read_hf_config
from slipstream.models.delta_net import state_shape
from tests.support.delta_cases import Case, delta_case, prompt_rows

CUTS = [
    DeltaConfig(columns=columns, warps=warps, registers=registers)
    for columns, warps, registers in (
        (64, 4, None), (64, 4, 128), (64, 4, 96), (64, 2, None), (32, 4, None), (32, 4, 96), (32, 4, 80), (32, 2, 128),
        (32, 1, None), (16, 4, None), (16, 1, 144), (128, 4, None),
    )
] + [DeltaConfig(columns=64, registers=128, by_slot=False)]  # fmt: skip
PROMPT_CUTS = [(block, warps) for block in (16, 32, 64) for warps in (2, 4, 8)]
LIMIT = {"out": 6e-3, "state": 2e-5}
"""Outputs are rounded to bf16."""


def copy_tb_s() -> float:
    """Bytes read and written per time by a copy of 2 GiB: what a kernel that does both can hope for."""
    x, y = (torch.empty(1 << 29, dtype=torch.int32, device="cuda") for _ in range(2))
    return 2 * x.nbytes / graph_ms(lambda: y.copy_(x), 9) / 1e9


def case(config: ModelConfig, slots: int, rows: int, drafts: int) -> Case:
    d = config.delta
    assert d is not None
    made = delta_case(
        [rows] * slots, lengths=[100] * slots, lacks=[rows - 1] * slots, heads=d.value_heads, key_heads=d.key_heads,
        dk=d.key_dim, dv=d.value_dim, taps=d.conv, replays=drafts, padding=0, interval=4096,
    )  # fmt: skip
    return made.to("cuda", torch.bfloat16)


def launch(c: Case, memory: DeltaMemory, out: Tensor, cut: DeltaConfig, pdl: bool) -> None:
    jit.launch_delta_rows(
        c.x_RX, *memory[:4], memory.absorbed_S, memory.saved_SC, *c.weights[:3], c.committed_S, c.slot_B, c.rows_B,
        c.row_of_BW, out, key_heads=c.weights.key_heads, key_dim=c.weights.key_dim, interval=memory.interval,
        early=memory.early, config=cut, pdl=pdl,
    )  # fmt: skip


def outputs(c: Case) -> Tensor:
    return c.x_RX.new_empty(c.x_RX.shape[0], *c.memory.state_SNKV.shape[1::2])


def decode_us(c: Case, layers: list[DeltaMemory], cut: DeltaConfig, pdl: bool) -> float:
    """µs of a launch, of one for each layer in a row: no cache holds all of their states."""
    out = outputs(c)

    def frame() -> None:
        for memory in layers:
            launch(c, memory, out, cut, pdl)

    return graph_ms(frame, 15) * 1000 / len(layers)


def in_float64(c: Case) -> tuple[Tensor, Tensor]:
    """What the rows' outputs are, and the states behind them."""
    m = c.memory
    wide = DeltaMemory(*(x.double() for x in m[:4]), *m[4:])
    weights = DeltaWeights(*(x.double() for x in c.weights[:3]), *c.weights[3:])
    out = delta_rows(c.x_RX.double(), wide, weights, c.committed_S, c.slot_B, c.rows_B, c.owner_R, c.row_of_BW)
    return out, wide.state_SNKV


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def check(c: Case, want: tuple[Tensor, Tensor], cut: DeltaConfig) -> dict[str, float]:
    mine, out = c.clone(), outputs(c).fill_(float("nan"))
    launch(mine, mine.memory, out, cut, torch.cuda.is_available())
    errors = {
        "out": relative(out.double(), want[0]),
        "state": relative(mine.memory.state_SNKV[1:].double(), want[1][1:]),
    }
    for name, error in errors.items():
        if not error < LIMIT[name]:
            raise SystemExit(f"{cut}: {name} differs from float64 by {error:.1e}, more than {LIMIT[name]:.0e}")
    return {name: float(f"{error:.1e}") for name, error in errors.items()}


def prompt_us(config: ModelConfig, rows: int, block: int, warps: int) -> float:
    c = case(config, 1, 1, 3)
    x_RX, slot_R, pos_R = prompt_rows(case(config, 1, 1, 3).to("cpu", torch.float32), [(1, 0, rows)], padding=0)
    x_RX, slot_R, pos_R = x_RX.bfloat16().cuda(), slot_R.cuda(), pos_R.cuda()
    m, tile = c.memory, delta_tiles(slot_R, pos_R, jit.TILE, 2)
    out = torch.empty(rows, *m.state_SNKV.shape[1::2], device="cuda").bfloat16()

    def once() -> None:
        jit.launch_delta_prompt(
            x_RX, *m[:4], m.saved_SC, *c.weights[:3], slot_R, pos_R, tile, out, key_heads=c.weights.key_heads,
            key_dim=c.weights.key_dim, interval=0, early=0, value_block=block, warps=warps,
        )  # fmt: skip

    return graph_ms(once, 9) * 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("bench/configs/qwen3.5-9b"))
    parser.add_argument("--slots", default="1,8,32,64")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--prompts", action="store_true", help="prompt rows too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("delta_gpu needs a CUDA device", file=sys.stderr)
        return 2
    config = read_hf_config(args.model)
    shape = state_shape(config)
    if shape is None:
        print(f"{args.model} has no recurrent layers", file=sys.stderr)
        return 2
    layer_bytes = shape.heads * shape.key_dim * shape.value_dim * 4
    rate, copies, cases = read_tb_s(), copy_tb_s(), list[dict[str, Any]]()

    def report(**line: Any) -> None:
        cases.append(line)
        print(json.dumps(line), flush=True)

    with torch.inference_mode():
        for slots in (int(n) for n in args.slots.split(",")):
            moved = 2 * layer_bytes * slots
            floor, chosen = moved / rate / 1e6, DeltaConfig()
            for rows in sorted({1, 1 + args.drafts}):
                c = case(config, slots, rows, args.drafts)
                want, m = in_float64(c), c.memory
                layers = [
                    m._replace(state_SNKV=m.state_SNKV.clone(), recent_SMX=m.recent_SMX.clone())
                    for _ in range(shape.layers)
                ]
                for cut in [*CUTS, *(x for x in [chosen] if x not in CUTS)]:
                    error = check(c, want, cut)
                    us, chained = decode_us(c, layers, cut, False), decode_us(c, layers, cut, True)
                    report(
                        kernel="delta_rows", slots=slots, rows=rows, columns=cut.columns, warps=cut.warps,
                        registers=cut.registers, by_slot=cut.by_slot, us=round(us, 2), chained_us=round(chained, 2),
                        floor_us=round(floor, 2), share=round(floor / us, 3), gb_s=round(moved / us / 1e3),
                        chosen=cut == chosen, error=error,
                    )  # fmt: skip
                del c, m, want, layers
        for rows in (128, 512, 2048) if args.prompts else ():
            for block, warps in PROMPT_CUTS:
                us = prompt_us(config, rows, block, warps)
                report(kernel="delta_prompt", slots=1, rows=rows, columns=block, warps=warps, us=round(us, 2))
    best: dict[str, dict[str, Any]] = {}
    for line in cases:
        key = f"{line['kernel']} {line['slots']}x{line['rows']}"
        best[key] = min(best.get(key, line), line, key=lambda x: x.get("chained_us", x["us"]))
    print(json.dumps({"read_tb_s": round(rate, 3), "copy_tb_s": round(copies, 3), "best": best}))
    if args.out:
        found = {"read_tb_s": rate, "copy_tb_s": copies, "gpu": torch.cuda.get_device_name(), "cases": cases}
        args.out.write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
