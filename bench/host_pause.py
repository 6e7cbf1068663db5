"""How much of a pause of the host thread reaches the device: steady decode with 20 ms of sleep every 50 frames.

    python bench/host_pause.py --model bench/configs/llama-3.1-8b --load-format dummy --dtype bfloat16 --run-ahead 8

Prints one JSON line: frames per second without and with the pauses, interleaved, and their ratio.
"""

from __future__ import annotations

import json
import statistics
import time
from argparse import Namespace

import torch

from slipstream.benchmark.audit_target import parser, steady_decode

FRAMES, EVERY, PAUSE_S, ROUNDS = 150, 50, 0.020, 3


def run(step: object, frames: int, pause: float) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for i in range(frames):
        if pause and i % EVERY == EVERY // 2:
            time.sleep(pause)
        step()  # type: ignore[operator]
    return frames / (time.perf_counter() - began)


def main() -> None:
    p = parser()
    p.set_defaults(run_ahead=8)
    options: Namespace = p.parse_args()
    options.frames = FRAMES * ROUNDS * 2
    with steady_decode(options) as llm:
        step = llm._engine.step
        plain, paused = [], []
        for _ in range(ROUNDS):
            plain.append(run(step, FRAMES, 0.0))
            paused.append(run(step, FRAMES, PAUSE_S))
    a, b = statistics.median(plain), statistics.median(paused)
    print(json.dumps({"frames_per_s": round(a, 2), "with_pauses": round(b, 2), "ratio": round(b / a, 4),
                      "batch": options.batch, "run_ahead": options.run_ahead, "model": options.model,
                      "torch": torch.__version__, "device": torch.cuda.get_device_name()}))  # fmt: skip


if __name__ == "__main__":
    main()
