"""Our kernels on a GPU: a target's whole pass in its variants, and every kernel of the registry beside torch.

    python bench/kernels_gpu.py [--models 8b,1b] [--rows 1x1,8x1,8x4,32x1,32x4,32x8] [--context 400] [--out FILE]

A pass (rows as slots x rows per slot) is `FusedDecoder` on random weights in one CUDA graph: `fused`, as the engine
runs it; `streamed`, all products ours (up to 128 rows); `library`, all products the library's, `library_pdl` with
dependent launches behind them; `plain`, the model's own forward. floor_ms: weight bytes over the best read rate of
the same run. A kernel is timed alone, captured several times in a row; `torch_us` is its reference as torch
operations in a graph, for products the library's product. One JSON line per case; exit 2 if a kernel has no case.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slipstream.attention.kernel import KernelAttention
from slipstream.attention.paged import cache_slots
from slipstream.kernels import registry
from slipstream.kernels.tuning import MAX_STREAM_ROWS, PassConfig
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from slipstream.models.config import parse_hf_config
from slipstream.models.decoder import Decoder
from slipstream.models.dummy import DummyWeights
from slipstream.models.fused import FusedDecoder
from slipstream.models.registry import model_class
from slipstream.models.weights import WeightBuilder
from slipstream.types import VerifyMode

SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64,
    },
}  # fmt: skip
VOCAB, BF16, EPS, PAGE = 128256, torch.bfloat16, 1e-5, 32
ALL_LIBRARY = {"rope": 0, "residual": 0, "silu": 0, "head": 0}
ALL_STREAMED = dict.fromkeys(ALL_LIBRARY, MAX_STREAM_ROWS)


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


class Rows:
    """`slots` x `per_slot` decode rows behind `context` cached tokens, pages in random order."""

    def __init__(self, slots: int, per_slot: int, context: int) -> None:
        pages = -(-(context + per_slot) // PAGE)
        self.per_slot, self.count = per_slot, slots * per_slot
        self.table_SP = torch.zeros(slots + 1, pages, dtype=torch.int64, device="cuda")
        self.table_SP[1:] = (torch.randperm(slots * pages, device="cuda") + 1).view(slots, pages)
        self.num_pages = slots * pages
        self.slot_R = torch.arange(self.count, device="cuda") // per_slot + 1
        self.pos_R = context + torch.arange(self.count, device="cuda") % per_slot
        self.token_R = torch.randint(0, VOCAB, (self.count,), device="cuda")


def build(name: str) -> Decoder:
    values = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "rms_norm_eps": EPS,
        "rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False, **SHAPES[name],
    }  # fmt: skip
    config, device = parse_hf_config(values), torch.device("cuda")
    weights = WeightBuilder(DummyWeights(config, seed=0, device=device), device=device, dtype=BF16)
    model = model_class(config.architecture)(config, weights)
    assert isinstance(model, Decoder)
    return model


def pass_case(model: Decoder, rows: Rows, rate: float) -> dict[str, Any]:
    c = model.config
    kv = KVPages(
        num_layers=c.num_layers, num_pages=rows.num_pages, page_size=PAGE, num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim, dtype=BF16, device=torch.device("cuda"),
    )  # fmt: skip
    kv.data.normal_()
    workspace = Workspace("cuda")
    where = (rows.slot_R, rows.pos_R, rows.table_SP)

    def fused(config: PassConfig) -> Callable[[], Tensor]:
        decoder = FusedDecoder(model, kv, workspace, pdl=True, config=config)
        return lambda: decoder.run(rows.token_R, *where, logits=True, width=rows.per_slot).logits_RV

    def plain() -> Tensor:
        attention = KernelAttention(
            kv, table_SP=rows.table_SP, slot_R=rows.slot_R, pos_R=rows.pos_R,
            cache_slot_R=cache_slots(rows.table_SP, rows.slot_R, rows.pos_R, PAGE), workspace=workspace,
        )  # fmt: skip
        return model.logits(model.forward(rows.token_R, rows.pos_R, attention)[0])

    variants: dict[str, Callable[[], Tensor]] = {
        "fused": fused(PassConfig()),
        "library": fused(PassConfig(**ALL_LIBRARY)),
        "library_pdl": fused(PassConfig(**ALL_LIBRARY, library_pdl=True)),
        "plain": plain,
    }
    if 64 < rows.count <= MAX_STREAM_ROWS:
        variants["streamed"] = fused(PassConfig(**ALL_STREAMED))
        # Products with few outputs split K, which the library does worst: ours there, the library's elsewhere.
        variants["mixed"] = fused(PassConfig(rope=0, silu=0, head=0, residual=MAX_STREAM_ROWS, library_pdl=True))
    reference = plain()
    times = {f"{name}_ms": round(graph_ms(step), 4) for name, step in variants.items()}
    errors = {
        name: float((step() - reference).norm() / reference.norm())
        for name, step in variants.items()
        if name != "plain"
    }
    floor = model.weight_bytes() / rate / 1e9
    return {
        "slots": rows.count // rows.per_slot, "per_slot": rows.per_slot, **times, "floor_ms": round(floor, 4),
        "share_of_floor": round(floor / times["fused_ms"], 4), "largest_error": round(max(errors.values()), 5),
    }  # fmt: skip


Case = tuple[str, Callable[[], Any], Callable[[], Any]]
"""Op, a launch of it, and its baseline."""


def request_cases(rows: Rows) -> Iterator[Case]:
    """What only some requests ask for; here every slot does."""
    from slipstream.kernels import adjust, grammar, logprobs
    from slipstream.logprobs import TOKEN_COLUMNS
    from tests.support.frame_kernel_cases import random_state

    slots, width = rows.count // rows.per_slot, rows.per_slot
    state = random_state(slots, max(1, width - 1), vocab=VOCAB, columns=1024).copy("cuda")
    logits = torch.randn(rows.count, VOCAB, device="cuda")
    cell_R = state.committed[rows.slot_R] + torch.arange(rows.count, device="cuda") % width
    tally_SV = torch.randint(0, 3, (slots + 1, VOCAB), dtype=torch.int32, device="cuda")
    some = torch.full((slots + 1,), 0.5, dtype=torch.float64, device="cuda")
    penalties = (some, some, some)
    count = torch.full_like(state.key, 300)
    ids = torch.arange(300, device="cuda").repeat(slots + 1, 1) * 17
    at = (rows.slot_R, cell_R, state.committed, state.pending, None, tally_SV)
    adjusted = (logits, *at, *penalties, count, ids, ids.double() * 1e-4, True, True)
    yield "adjust_rows", lambda: adjust.adjust_rows(*adjusted), lambda: adjust.adjust_rows._init_fn(*adjusted)
    words = torch.full((slots + 1, width, -(-VOCAB // 32)), -0x55555556, dtype=torch.int32, device="cuda")
    masked = (logits, rows.slot_R, cell_R, state.committed, torch.ones_like(state.committed), words)
    yield "mask_rows", lambda: grammar.mask_rows(*masked), lambda: grammar.mask_rows._init_fn(*masked)
    slot_B = torch.arange(1, slots + 1, device="cuda")
    known = (tally_SV, slot_B, *penalties, state.history, state.committed // 2, state.committed)
    yield "recount_slots", lambda: adjust.recount_slots(*known), lambda: adjust.recount_slots._init_fn(*known)
    record = torch.ones(slots, 6 + width, dtype=torch.int64, device="cuda")
    said = (tally_SV, slot_B, *penalties, record, 6)
    yield "count_tokens", lambda: adjust.count_tokens(*said), lambda: adjust.count_tokens._init_fn(*said)
    table = torch.zeros(rows.count, TOKEN_COLUMNS, dtype=torch.int64, device="cuda")
    row_R = torch.arange(rows.count, device="cuda")
    asked = (table, 0, logits, row_R, row_R, torch.full_like(row_R, 6))
    op = logprobs.token_logprobs
    yield "token_logprobs", lambda: op(*asked), lambda: op._init_fn(*asked)


def kernel_cases(rows: Rows, shape: dict[str, int]) -> Iterator[Case]:
    """Every op of the registry once, on `shape` and the rows."""
    from slipstream.kernels import attention, draft, frame, gemm, norm, prefill, rope, sample, schedule
    from tests.support.frame_kernel_cases import draft_memory, random_state, survival_case

    h, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    kv_heads, dim, r = shape["num_key_value_heads"], shape["head_dim"], rows.count
    rand = lambda *size: torch.randn(*size, device="cuda").to(BF16)
    weight = lambda n, k: rand(n, k) * k**-0.5
    work = Workspace("cuda")
    ws, scale = (work.partial, work.counters), dim**-0.5
    x_RH, x_RI, qkv = rand(r, h), rand(r, inner), rand(r, (heads + 2 * kv_heads) * dim)
    wide_RI, q_RND, gain, sq = rand(r, 2 * inner), rand(r, heads, dim), rand(h), torch.rand(64, r, device="cuda")
    k, v = (rand(rows.num_pages + 1, PAGE, kv_heads, dim) for _ in "kv")
    cos = torch.rand(4096, dim // 2, device="cuda")
    at = (rows.table_SP, rows.slot_R, rows.pos_R)

    def plain(op: Any, *args: Any) -> Case:
        """The op, and the torch reference that stands beside it."""
        return op._name, lambda: op(*args), lambda: op._init_fn(*args)

    w = weight(qkv.shape[1], h)
    yield "stream_linear", lambda: gemm.stream_linear(x_RH, w, None, sq, EPS, *ws), lambda: F.linear(x_RH, w)
    yield (
        "stream_rope",
        lambda: gemm.stream_rope(x_RH, w, None, sq, EPS, k, v, cos, cos, None, None, EPS, *at, rows.pos_R, heads, *ws),
        lambda: F.linear(x_RH, w),
    )
    w_2IH, w_HI, w_VH = weight(2 * inner, h), weight(h, inner), weight(VOCAB, h)
    yield "stream_swiglu", lambda: gemm.stream_swiglu(x_RH, w_2IH, sq, EPS, *ws), lambda: F.linear(x_RH, w_2IH)
    yield "stream_residual", lambda: gemm.stream_residual(x_RI, w_HI, x_RH, gain, *ws), lambda: F.linear(x_RI, w_HI)
    yield "stream_head", lambda: gemm.stream_head(x_RH, w_VH, sq, EPS, *ws, False), lambda: F.linear(x_RH, w_VH)
    yield plain(attention.paged_attention, q_RND, k, v, *at, None, scale, *ws, False, rows.per_slot)
    yield plain(rope.rope_kv_write, qkv, k, v, cos, cos, None, None, *at, rows.pos_R, heads, EPS, None, sq, h, EPS)
    per_tile = prefill.rows_per_tile(r, heads // kv_heads, dim, 2)
    tile_T = prefill.prefill_tiles(rows.slot_R, per_tile, rows.table_SP.shape[0])
    yield (
        "prefill_attention",
        lambda: prefill.prefill_attention(q_RND, k, v, *at, tile_T, scale),
        lambda: attention.paged_attention._init_fn(q_RND, k, v, *at, None, scale, *ws),
    )
    normed, added = lambda: F.rms_norm(x_RH, (h,), gain, EPS), lambda: F.rms_norm(x_RH + x_RH, (h,), gain, EPS)
    yield "rms_norm", lambda: norm.rms_norm(x_RH, gain, EPS), normed
    yield "norm_prepare", lambda: norm.norm_prepare(x_RH, gain), normed
    yield "residual_norm", lambda: norm.residual_norm(x_RH, x_RH, gain, EPS), added
    yield "residual_prepare", lambda: norm.residual_prepare(x_RH, x_RH, gain), added
    yield plain(norm.silu_mul, wide_RI, sq, h, EPS)
    logits = torch.randn(r, VOCAB, device="cuda")
    yield plain(sample.argmax_rows, logits)
    best = torch.randn(1002, r, device="cuda")
    yield plain(
        sample.argmax_finish, best, torch.randint(0, VOCAB, best.shape, device="cuda", dtype=torch.int32), VOCAB
    )
    slots = r // rows.per_slot
    drafts = max(1, rows.per_slot - 1)
    width = drafts + 1
    state = random_state(slots, drafts, vocab=50, columns=1024).copy("cuda")
    slot_B = torch.arange(1, slots + 1, device="cuda")
    row_of_BW = torch.arange(slots * width, device="cuda").view(slots, width)
    target_R = torch.randint(0, 50, (slots * width,), device="cuda")
    # A sampled frame with top-p, by rejection; the rows stand at the slots' committed lengths.
    some = torch.ones(slots + 1, dtype=torch.float64, device="cuda")
    none, mode = torch.zeros_like(state.key), torch.full_like(state.key, int(VerifyMode.REJECTION))
    place_R = state.committed[rows.slot_R] + torch.arange(r, device="cuda") % rows.per_slot
    chosen = (rows.slot_R, place_R, some, none, some * 0.9, some * 0, state.stop_ids, none, True)
    yield plain(sample.row_threshold, logits, *chosen)
    found = sample.row_threshold(logits, *chosen)
    law = (mode, state.key, state.child, state.committed, state.pending, None)
    yield plain(sample.race_rows, logits, *found, rows.slot_R, place_R, some, *law)
    target, residual, p = sample.race_rows(logits, *found, rows.slot_R, place_R, some, *law)
    yield plain(
        frame.pack_rows, state.active, state.committed, state.draft_count, state.pending, slot_B, slots * width, width
    )
    token_BW = target_R[row_of_BW]
    zero_B = torch.zeros_like(slot_B)  # nothing is emitted, so the state is the same at every launch
    yield plain(frame.close_round, token_BW, zero_B, zero_B, zero_B, slot_B, *state.fields)
    yield plain(
        frame.close_greedy, target_R, row_of_BW, zero_B, slot_B, *state.fields, state.key, state.child, None
    )  # fmt: skip
    yield plain(
        frame.close_sampled, target, residual, p, row_of_BW % r, zero_B, slot_B, *state.fields, mode, state.key,
        state.child, None, None,
    )  # fmt: skip
    memory, cost = [t.cuda() for t in draft_memory(slots, 5)], torch.linspace(1.0, 1.2, width, device="cuda")
    record = torch.zeros(slots, frame.RECORD_COLUMNS + width, dtype=torch.int64, device="cuda")
    yield plain(
        draft.ngram_draft, record, slot_B, state.active, state.committed, state.max_len, state.max_drafts,
        state.history, state.pending, state.draft_count, *memory, cost, 2, True,
    )  # fmt: skip
    ends = (state.active, state.committed, state.max_len, state.max_drafts, state.pending, state.draft_count)
    token_BK, wish_B = torch.randint(0, 50, (slots, drafts), device="cuda"), torch.full_like(slot_B, drafts)
    yield plain(draft.offer_drafts, token_BK, wish_B, record, slot_B, *ends)
    survival, sure = survival_case(slots, drafts).cuda(), torch.randn(slots, drafts, device="cuda")
    yield plain(schedule.offer_scheduled, token_BK, wish_B, sure, record, slot_B, *ends, survival)
    # Half of the drafts fit; what is left of them fits at every later launch, too, in the same time.
    yield plain(
        schedule.allot_drafts, state.active, state.draft_count, survival, slot_B, slots + slots * drafts // 2, width
    )


def hybrid_cases(rows: Rows) -> Iterator[Case]:
    """The ops of hybrid layers, at Qwen3.5-9B's shape."""
    from slipstream.kernels import delta, delta_ops, gated
    from tests.support.delta_cases import delta_case, prompt_rows

    slots, width, r = rows.count // rows.per_slot, rows.per_slot, rows.count
    made = delta_case(
        [width] * slots, lengths=[100] * slots, lacks=[width - 1] * slots, heads=32, key_heads=16, dk=128, dv=128,
        replays=max(1, width - 1), padding=0,
    )  # fmt: skip
    c = made.to("cuda", BF16)
    where = (c.committed_S, c.slot_B, c.rows_B, c.owner_R, c.row_of_BW)
    x_RX, slot_R, pos_R = (t.cuda() for t in prompt_rows(made, [(1, 0, 512)], padding=0))
    m, tile = c.memory, delta.delta_tiles(slot_R, pos_R, delta_ops.PROMPT_TILE, slots + 1)
    of_rows = (*c.memory, *c.weights, *where)
    absorb = (m.absorbed_S.clone(), c.committed_S, c.slot_B, c.rows_B)
    prompt = (x_RX.to(BF16), *m[:4], m.saved_SC, 0, 0, *c.weights, slot_R, pos_R, tile)
    spans = [(1, 0, 512)]
    reference = lambda: delta.delta_rows(c.x_RX, c.memory, c.weights, *where)
    yield "delta_rows", lambda: delta_ops.delta_rows(c.x_RX, *of_rows), reference
    yield "delta_absorb", lambda: delta_ops.delta_absorb(*absorb), lambda: delta.absorbed_rows(*absorb)
    yield (
        "delta_prompt",
        lambda: delta_ops.delta_prompt(*prompt),
        lambda: delta.delta_spans(prompt[0], m, c.weights, spans),
    )
    rand = lambda *size: torch.randn(*size, device="cuda").to(BF16)
    o, p, gain = rand(r, 32, 128), rand(r, 12352), rand(128)
    norm = (o, p[:, 8256:], gain, EPS)
    yield "gated_norm", lambda: gated.gated_norm(*norm), lambda: gated.gated_norm._init_fn(*norm)
    q, qkv, wide = rand(r, 16, 256), rand(r, 10240), torch.rand(256, device="cuda")
    k, v = (rand(rows.num_pages + 1, PAGE, 4, 256) for _ in "kv")
    cos = torch.rand(4096, 32, device="cuda")
    rope = (qkv, k, v, cos, cos, wide, wide, rows.table_SP, rows.slot_R, rows.pos_R, rows.pos_R, 16, EPS, True)
    yield "gated_rope_write", lambda: gated.gated_rope_write(*rope), lambda: gated.gated_rope_write._init_fn(*rope)
    yield "gate_mul", lambda: gated.gate_mul(q, qkv), lambda: gated.gate_mul._init_fn(q, qkv)


def block_cases(rows: Rows) -> Iterator[Case]:
    """What a block drafter has besides, at Qwen3-8B's shape: five layers, a Markov head of rank 256."""
    from slipstream.kernels import block, gemm

    slots, width, vocab, rank, layers, heads, dim = rows.count // rows.per_slot, rows.per_slot, 151936, 256, 5, 8, 128
    rand = lambda *size: torch.randn(*size, device="cuda").to(BF16)
    work = Workspace("cuda")
    x, w1, w2, base = (
        rand(slots, rank),
        rand(vocab, rank),
        rand(vocab, rank),
        torch.randn(slots, 2, vocab, device="cuda"),
    )
    tokens = torch.zeros(slots, 2, dtype=torch.int64, device="cuda")
    step = (x, w2, base, 1, work.partial, work.counters)
    greedy = lambda: gemm.markov_head(*step, False)
    yield "markov_head", greedy, lambda: (base[:, 1] + F.linear(x, w2)).argmax(1)
    _, best, where = greedy()
    chosen = (best, where, w1, tokens, 1)
    yield "markov_next", lambda: block.markov_next(*chosen), lambda: block.markov_next._init_fn(*chosen)
    slot_B = torch.arange(1, slots + 1, device="cuda")
    history = torch.zeros(slots + 1, 4096, dtype=torch.int64, device="cuda")
    of_block = (slot_B, slot_B * 3, history, rows.table_SP, PAGE, 0, width)
    yield "block_rows", lambda: block.block_rows(*of_block), lambda: block.block_rows._init_fn(*of_block)
    cache, cos = rand(layers, 2, rows.num_pages + 1, PAGE, heads, dim), torch.rand(4096, dim // 2, device="cuda")
    kv, gain, sq = (
        rand(rows.count, layers * 2 * heads * dim),
        rand(layers, dim),
        torch.rand(1, rows.count, device="cuda"),
    )
    given = (kv, cache, cos, cos, gain, rows.table_SP, rows.slot_R, rows.pos_R, EPS, None, sq, 4096, EPS)
    yield "context_write", lambda: block.context_write(*given), lambda: block.context_write._init_fn(*given)


def kernel_us(launch: Callable[[], Any]) -> float:
    """µs of one of 10 launches in a row; its data may be in the cache, which is so in a frame but for weights."""

    def ten() -> None:
        for _ in range(10):
            launch()

    return graph_ms(ten, 9) * 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b")
    parser.add_argument("--rows", default="1x1,8x1,8x4,32x1,32x4,32x8", help="slots x rows per slot, of the passes")
    parser.add_argument("--kernel-rows", default="32x4")
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernels_gpu needs a CUDA device", file=sys.stderr)
        return 2
    shapes_of = lambda text: [tuple(int(n) for n in part.split("x")) for part in text.split(",")]
    rate, cases, seen = read_tb_s(), [], set()

    def report(case: dict[str, Any]) -> None:
        cases.append(case)
        print(json.dumps(case), flush=True)

    with torch.inference_mode():
        for name in args.models.split(","):
            model = build(name)
            for slots, per_slot in shapes_of(args.rows):
                report({"pass": name, **pass_case(model, Rows(slots, per_slot, args.context), rate)})
            del model
            torch.cuda.empty_cache()
            for slots, per_slot in shapes_of(args.kernel_rows):
                at = Rows(slots, per_slot, args.context)
                for op, ours, baseline in itertools.chain(
                    kernel_cases(at, SHAPES[name]), request_cases(at), hybrid_cases(at), block_cases(at)
                ):
                    seen.add(op)
                    times = {"us": round(kernel_us(ours), 2), "torch_us": round(kernel_us(baseline), 2)}
                    report({"kernel": op, "model": name, "slots": slots, "per_slot": per_slot, **times})
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
    missing = sorted(set(registry.KERNELS) - seen)
    if missing:
        print(f"no case for {', '.join(missing)}", file=sys.stderr)
    return 2 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
