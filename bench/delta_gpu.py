"""The delta rule's kernels on a GPU at the shape of a model, against the time their states take to pass by.

    python bench/delta_gpu.py [--model bench/configs/qwen3.5-9b] [--slots 1,8,32,64] [--drafts 3] [--out FILE]

Decode rows: one layer, for each number of slots, with and without drafts, at every cut of the kernel; `floor_us` is one
read and one write of the slots' states at the best read rate of the same run. Prompt rows: 128, 512, 2,048 of one slot.
One JSON line per case; the last line names the fastest cut of each case.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.kernels_gpu import graph_ms, read_tb_s
from slipstream.kernels.delta import delta_tiles
from slipstream.kernels.jit import delta as jit
from slipstream.models.config import ModelConfig, read_hf_config
from slipstream.models.delta_net import state_shape
from tests.support.delta_cases import Case, delta_case, prompt_rows

CUTS = [(block, warps) for block in (16, 32, 64, 128) for warps in (2, 4, 8)]


def case(config: ModelConfig, slots: int, rows: int, drafts: int) -> Case:
    d = config.delta
    assert d is not None
    made = delta_case(
        [rows] * slots, lengths=[100] * slots, lacks=[rows - 1] * slots, heads=d.value_heads, key_heads=d.key_heads,
        dk=d.key_dim, dv=d.value_dim, taps=d.conv, replays=drafts, padding=0,
    )  # fmt: skip
    return made.to("cuda", torch.bfloat16)


def decode_us(c: Case, block: int, warps: int) -> float:
    """µs of a launch, of ten in a row over the same states: of many slots no cache holds them."""
    m, out = c.memory, torch.empty(c.x_RX.shape[0], *c.memory.state_SNKV.shape[1::2], device="cuda").bfloat16()

    def ten() -> None:
        for _ in range(10):
            jit.launch_delta_rows(
                c.x_RX, *m[:4], m.absorbed_S, m.saved_SC, *c.weights[:3], c.committed_S, c.slot_B, c.rows_B,
                c.row_of_BW, out, key_heads=c.weights.key_heads, key_dim=c.weights.key_dim, interval=0, early=0,
                value_block=block, warps=warps,
            )  # fmt: skip

    return graph_ms(ten, 9) * 100


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
    rate, cases = read_tb_s(), list[dict[str, Any]]()

    def report(**line: Any) -> None:
        cases.append(line)
        print(json.dumps(line), flush=True)

    with torch.inference_mode():
        for slots in (int(n) for n in args.slots.split(",")):
            floor = 2 * layer_bytes * slots / rate / 1e6
            for rows in sorted({1, 1 + args.drafts}):
                c = case(config, slots, rows, args.drafts)
                for block, warps in CUTS:
                    us = decode_us(c, block, warps)
                    report(
                        kernel="delta_rows", slots=slots, rows=rows, block=block, warps=warps, us=round(us, 2),
                        floor_us=round(floor, 2), share=round(floor / us, 3),
                    )  # fmt: skip
        for rows in (128, 512, 2048):
            for block, warps in [cut for cut in CUTS if cut[0] < 128]:
                us = prompt_us(config, rows, block, warps)
                report(kernel="delta_prompt", slots=1, rows=rows, block=block, warps=warps, us=round(us, 2))
    best: dict[str, dict[str, Any]] = {}
    for line in cases:
        key = f"{line['kernel']} {line['slots']}x{line['rows']}"
        best[key] = min(best.get(key, line), line, key=lambda x: x["us"])
    print(json.dumps({"read_tb_s": round(rate, 3), "best": best}))
    if args.out:
        args.out.write_text(json.dumps({"read_tb_s": rate, "gpu": torch.cuda.get_device_name(), "cases": cases}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
