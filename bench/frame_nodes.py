"""Kernels and device time of captured decode frames, by name.

    python bench/frame_nodes.py [--layers 2] [--slots 1,32] [--drafts 3] [--vocab 128256] [--names] [--micro]

Captures frames of a small dummy Llama with the n-gram drafter or none, greedy, synthetic or with every sampling
stage, and profiles one replay. A graph with the sampling stages runs once for each kind of request in SAMPLING.
`outside`: kernels that are not the target's layers or head. --names lists them.
--micro: µs of the drafting kernel by history length. One JSON line per case.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slipstream.device.frame import Frame
from slipstream.device.graphs import FrameGraphs, Shape
from slipstream.device.state import SlotState
from slipstream.draft.ngram import NgramDrafter
from slipstream.kernels.draft import ngram_draft
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from slipstream.models.config import parse_hf_config
from slipstream.models.dummy import DummyWeights
from slipstream.models.fused import FusedDecoder
from slipstream.models.registry import model_class
from slipstream.models.weights import WeightBuilder
from slipstream.types import Stages, VerifyMode

TARGET = (
    "stream_gemm", "paged_attention", "residual_norm", "argmax_finish",
    "gemm", "nvjet", "splitK", "rope_kv_write", "silu_mul", "argmax_tiles",
)  # fmt: skip
PAGE, LENGTH = 32, 1024

SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"mode": VerifyMode.GREEDY},
    "seeded": {"mode": VerifyMode.COUPLED, "temperature": 1.0},
    "unseeded": {"mode": VerifyMode.REJECTION, "temperature": 1.0},
    "min-p": {"mode": VerifyMode.REJECTION, "temperature": 0.8, "min_p": 0.05},
    "top-k 40": {"mode": VerifyMode.REJECTION, "temperature": 0.8, "top_k": 40},
    "top-p 0.9": {"mode": VerifyMode.REJECTION, "temperature": 0.8, "top_p": 0.9},
    "top-k 40, top-p 0.9, ban": {
        "mode": VerifyMode.COUPLED, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_len": LENGTH,
    },
}  # fmt: skip
"""What all slots ask for, by name; the rest is off."""


def make_frame(*, layers: int, slots: int, drafts: int, synthetic: float | None, vocab: int = 4096) -> Frame:
    """A frame over slots that all decode with random histories, `drafts` drafts pending in each."""
    device = torch.device("cuda")
    config = parse_hf_config(
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": 512,
            "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
            "intermediate_size": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": LENGTH,
            "tie_word_embeddings": False,
        }
    )  # fmt: skip
    weights = WeightBuilder(DummyWeights(config, seed=0, device=device), device=device, dtype=torch.bfloat16)
    model = model_class(config.architecture)(config, weights)
    pages = LENGTH // PAGE
    kv = KVPages(
        num_layers=layers, num_pages=slots * pages + 1, page_size=PAGE, num_kv_heads=4, head_dim=64,
        dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    state = SlotState(
        max_slots=slots, max_len=LENGTH, pages_per_slot=pages, num_drafts=drafts, chunk_rows=32, device=device
    )
    state.table_SP[1:] = torch.arange(1, slots * pages + 1, device=device).view(slots, pages)
    state.history_SL[1:] = torch.randint(0, 50, state.history_SL[1:].shape, device=device)
    state.committed_S[1:], state.max_len_S[1:], state.active_S[1:] = 400, LENGTH, 1
    state.draft_count_S[1:], state.max_drafts_S[1:] = drafts, drafts
    state.decode_B[:slots] = torch.arange(1, slots + 1, device=device)
    workspace = Workspace(device)
    assert FusedDecoder.fits(model)
    return Frame(
        model=model, kv=kv, state=state, workspace=workspace, fused=FusedDecoder(model, kv, workspace),
        drafter=NgramDrafter(slots=slots, max_drafts=drafts, device=device) if drafts else None, synthetic=synthetic,
    )  # fmt: skip


def kernels_of_replay(frame: Frame, shape: Shape) -> list[tuple[str, float]]:
    """(name, µs) of every kernel, copy or fill of one replay."""
    graphs = FrameGraphs(frame, buckets=(shape.slots,), kinds=[(shape.width, shape.drafts)], len_ub=LENGTH)
    graphs.shapes = [shape]
    graphs.capture()
    plan = graphs.plan_for(shape)
    for _ in range(3):
        graphs.run(plan)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        graphs.run(plan)
        torch.cuda.synchronize()
    events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [(e.name, float(e.device_time)) for e in events]


def ask(state: SlotState, *, mode: float, temperature: float = 0.0, top_k: float = 0, top_p: float = 1.0,
        min_p: float = 0.0, min_len: float = 0) -> None:  # fmt: skip
    """Give every slot these sampling parameters."""
    state.mode_S[1:], state.top_k_S[1:], state.min_len_S[1:] = int(mode), int(top_k), int(min_len)
    state.temperature_S[1:], state.top_p_S[1:], state.min_p_S[1:] = temperature, top_p, min_p
    state.stop_ids_ST[1:, 0], state.key_S[1:] = 3, torch.arange(1, state.key_S.shape[0], device=state.device)


def draft_us(history: int, slots: int) -> float:
    """µs of one drafting launch over histories of that length, graph-captured 20 at a time."""
    frame = make_frame(layers=1, slots=slots, drafts=3, synthetic=None)
    drafter, state = frame.drafter, frame.state
    assert isinstance(drafter, NgramDrafter)
    long = torch.randint(0, 50, (slots + 1, history + 8), device="cuda")
    record = torch.zeros(slots, 10, dtype=torch.int64, device="cuda")
    committed, limit = torch.full_like(state.committed_S, history), torch.full_like(state.max_len_S, 2 * history)

    def step() -> None:
        ngram_draft(
            record, state.decode_B[:slots], state.active_S, committed, limit, state.max_drafts_S, long,
            state.pending_SW, state.draft_count_S, drafter.hits_SN, drafter.tries_SN, drafter.matched_S,
            drafter.cost_W, drafter.min_n, True,
        )  # fmt: skip

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            step()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--slots", default="1,16")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--names", action="store_true")
    parser.add_argument("--micro", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("frame_nodes needs a CUDA device", file=sys.stderr)
        return 2
    for slots in (int(s) for s in args.slots.split(",")):
        for drafts, synthetic, full in ((0, None, False), (args.drafts, None, False), (args.drafts, 2.5, False),
                                        (args.drafts, None, True)):  # fmt: skip
            for name, wants in SAMPLING.items() if full else [("greedy", SAMPLING["greedy"])]:
                frame = make_frame(
                    layers=args.layers, slots=slots, drafts=drafts, synthetic=synthetic, vocab=args.vocab
                )  # fmt: skip
                ask(frame.state, **wants)
                stages = Stages.SAMPLED if full else Stages.GREEDY
                found = kernels_of_replay(frame, Shape(slots, slots * (drafts + 1), drafts + 1, stages, drafts))
                outside = [(n, t) for n, t in found if not any(mark in n for mark in TARGET)]
                line: dict[str, Any] = {
                    "slots": slots, "drafts": drafts, "synthetic": synthetic, "sampled": full, "asks": name,
                    "kernels": len(found), "outside": len(outside),
                    "outside_us": round(sum(t for _, t in outside), 1),
                }  # fmt: skip
                if args.names:
                    line["names"] = dict(Counter(f"{n[:60]} {t:.1f}" for n, t in outside))
                print(json.dumps(line), flush=True)
                del frame
    if args.micro:
        for slots in (1, 32):
            for history in (100, 1000, 8000, 32000):
                us = round(draft_us(history, slots), 2)
                print(json.dumps({"ngram_draft_us": us, "slots": slots, "history": history}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
