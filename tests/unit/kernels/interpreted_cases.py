"""The Triton kernels on the CPU, in Triton's interpreter (float32 and float16), against the references.

Collected by test_kernels_interpreted.py only, in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from slipstream.kernels import attention as ops_attention
from slipstream.kernels import block as ops_block
from slipstream.kernels import eagle as ops_eagle
from slipstream.kernels import gemm as ops_gemm
from slipstream.kernels import norm as ops_norm
from slipstream.kernels import prefill as ops_prefill
from slipstream.kernels import rope as ops_rope
from slipstream.kernels import sample as ops_sample
from slipstream.kernels.jit import attention, block, eagle, gemm, norm, prefill, rope, sample
from slipstream.kernels.prefill import prefill_tiles
from slipstream.kernels.tuning import AttentionConfig, GemmConfig, PrefillConfig
from slipstream.kernels.workspace import Workspace
from tests.support.kernel_cases import paged_case, relative_error, rope_tables

NAN = float("nan")
R, K, N = 3, 96, 160
LIMIT = {torch.float32: 1e-5, torch.float16: 3e-3}


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, NAN, dtype=dtype)


def workspace() -> Workspace:
    w = Workspace("cpu", floats=100_000, counters=64)
    w.partial.fill_(NAN)
    return w


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("split", "hold", "bk"), [(1, False, 32), (3, False, 32), (2, True, 32), (1, True, 64)])
def test_stream_gemm(dtype: torch.dtype, split: int, hold: bool, bk: int) -> None:
    x, w = torch.randn(R, K).to(dtype), (torch.randn(N, K) / 8).to(dtype)
    sq, res, gain = torch.rand(5, R) * K / 5, torch.randn(R, N).to(dtype), torch.rand(N).to(dtype)
    bias = torch.randn(N).to(dtype)
    c, work = GemmConfig(bn=32, bk=bk, split=split, hold=hold), workspace()
    kw = {"config": c, "ws": work.partial, "counters": work.counters}
    ws = (work.partial, work.counters)
    limit = LIMIT[dtype]
    out = poison(R, N, dtype=dtype)
    gemm.launch_stream_gemm(x, w, out, epi=gemm.STORE, sq_in=sq, bias=bias, eps=1e-5, **kw)
    assert relative_error(out, ops_gemm.stream_linear(x, w, bias, sq, 1e-5, *ws)) < limit
    half = poison(R, N // 2, dtype=dtype)
    gemm.launch_stream_gemm(x, w, half, epi=gemm.SILU, pair=N // 2, sq_in=sq, eps=1e-5, **kw)
    assert relative_error(half, ops_gemm.stream_swiglu(x, w, sq, 1e-5, *ws)) < limit
    scaled, parts = poison(R, N, dtype=dtype), poison(N // 32, R)
    gemm.launch_stream_gemm(
        x, w, out, epi=gemm.RESIDUAL, res=res, gain=gain, scaled=scaled, sq_out=parts, **kw
    )  # fmt: skip
    want = ops_gemm.stream_residual(x, w, res, gain, *ws)
    for got, ref in zip((out, scaled, parts.sum(0)), (want[0], want[1], want[2].sum(0)), strict=True):
        assert relative_error(got, ref) < limit
    logits, best, where = poison(R, N), poison(N // 32, R), torch.full((N // 32, R), -9, dtype=torch.int32)
    gemm.launch_stream_gemm(x, w, logits, epi=gemm.HEAD, best=best, where=where, **kw)
    token = torch.full((R,), -9)
    sample.launch_argmax_finish(best, where, token, vocab=N, pdl=False)
    assert torch.equal(token, logits.argmax(-1))
    assert not work.counters.any(), "counters are ready for the next launch"


@pytest.mark.parametrize("n", [150, 33])
def test_stream_gemm_ragged_edges(n: int) -> None:
    x, w, c, work = torch.randn(R, 72), torch.randn(n, 72), GemmConfig(bn=32, bk=32, split=2), workspace()
    out = poison(R, n)
    gemm.launch_stream_gemm(x, w, out, epi=gemm.STORE, config=c, ws=work.partial, counters=work.counters)
    assert relative_error(out, x @ w.T) < 1e-5


def test_stream_gemm_with_more_rows_than_one_tile_of_64() -> None:
    rows = 70
    x, w, work = torch.randn(rows, 64), torch.randn(64, 64) / 8, workspace()
    sq, c = torch.rand(3, rows) * 20, GemmConfig(bn=32, bk=32, split=2)
    out = poison(rows, 32)
    gemm.launch_stream_gemm(
        x, w, out, epi=gemm.SILU, config=c, pair=32, sq_in=sq, eps=1e-5, ws=work.partial, counters=work.counters
    )
    assert relative_error(out, ops_gemm.stream_swiglu(x, w, sq, 1e-5, work.partial, work.counters)) < 1e-5


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_rope_kv_write(qk_norm: bool, fused: bool) -> None:
    heads, kv_heads, dim = 6, 2, 16
    case = paged_case([9, 20, 1], [3, 1, 4])
    rows = case.slot.shape[0]
    cos, sin = rope_tables(12, dim)
    gains = (torch.rand(dim), torch.rand(dim)) if qk_norm else (None, None)
    x, w = torch.randn(rows, 64), torch.randn((heads + 2 * kv_heads) * dim, 64)
    qkv = x @ w.T
    caches = [torch.full_like(case.k, NAN) for _ in range(4)]
    pos = case.pos.clone()
    pos[1] = 10_000
    where = (case.table, case.slot, case.pos, pos)
    q = poison(rows, heads, dim)
    if fused:
        work = workspace()
        gemm.launch_stream_gemm(
            x, w, q, epi=gemm.ROPE, config=GemmConfig(bn=16, bk=32, split=2), ws=work.partial, counters=work.counters,
            rope=gemm.Rope(k=caches[0], v=caches[1], cos=cos, sin=sin, q_gain=gains[0], k_gain=gains[1],
                           table=case.table, slot=case.slot, rope_pos=case.pos, kv_pos=pos, heads=heads, eps=1e-6),
        )  # fmt: skip
    else:
        rope.launch_rope_kv_write(qkv, q, *caches[:2], cos, sin, *gains, *where, heads=heads, eps=1e-6)
    want = ops_rope.rope_kv_write(qkv, *caches[2:], cos, sin, *gains, *where, heads, 1e-6)
    assert relative_error(q, want) < 1e-5
    for got, ref in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(got[1:].isnan(), ref[1:].isnan())
        assert relative_error(got[1:].nan_to_num(), ref[1:].nan_to_num()) < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 16), (9, 3, 12)])
def test_rope_behind_a_library_product(heads: int, kv_heads: int, dim: int) -> None:
    """The product's norm and bias come first: rows scaled by 1 / rms, then the bias."""
    case = paged_case([9, 20, 1], [3, 1, 4], kv_heads=kv_heads, dim=dim)
    rows, columns = case.slot.shape[0], (heads + 2 * kv_heads) * dim
    cos, sin = rope_tables(12, dim)
    qkv, bias, sq = torch.randn(rows, columns), torch.randn(columns), torch.rand(3, rows) * 20
    caches = [torch.full_like(case.k, NAN) for _ in range(4)]
    args = (cos, sin, torch.rand(dim), torch.rand(dim), case.table, case.slot, case.pos, case.pos)
    q = poison(rows, heads, dim)
    rope.launch_rope_kv_write(
        qkv, q, *caches[:2], *args, heads=heads, eps=1e-6, bias=bias, sq=sq, width=64, norm_eps=1e-5
    )
    want = ops_rope.rope_kv_write(qkv, *caches[2:], *args, heads, 1e-6, bias, sq, 64, 1e-5)
    assert relative_error(q, want) < 1e-5
    for got, ref in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(got[1:].isnan(), ref[1:].isnan())
        assert relative_error(got[1:].nan_to_num(), ref[1:].nan_to_num()) < 1e-5


@pytest.mark.parametrize(("tree", "first_cell"), [(False, 0), (True, 0), (False, 1)])
@pytest.mark.parametrize(
    ("splits", "block", "per_slot", "queries"), [(1, 16, 1, 16), (3, 4, 3, 16), (8, 4, 8, 32), (8, 4, 1, 16)]
)
def test_paged_attention(tree: bool, first_cell: int, splits: int, block: int, per_slot: int, queries: int) -> None:
    case = paged_case([9, 20, 1], [5, 1, 2], tree=tree)
    if first_cell:  # the cells before it are never written
        case.k[case.table[1:, 0].long(), 0] = case.v[case.table[1:, 0].long(), 0] = NAN
    rows, work = case.slot.shape[0], workspace()
    q, out = torch.randn(rows, 6, 16), poison(rows, 6, 16)
    args = (case.table, case.slot, case.pos, case.tree)
    attention.launch_paged_attention(
        q, case.k, case.v, out, *args, work.partial, work.counters, scale=0.25,
        config=AttentionConfig(splits=splits, block=block, queries=queries), per_slot=per_slot, first_cell=first_cell,
    )  # fmt: skip
    want = ops_attention.paged_attention(
        q, case.k, case.v, *args, 0.25, work.partial, work.counters, first_cell=first_cell
    )
    assert relative_error(out, want) < 1e-5 and not out.isnan().any()
    assert (out[case.slot == 0] == 0).all()
    assert not work.counters.any()


@triton.jit
def opens_kernel(slot_ptr, out_ptr, ROWS: tl.constexpr):
    first = tl.program_id(0)
    tl.store(out_ptr + first, attention._opens(slot_ptr, first, tl.load(slot_ptr + first), ROWS).to(tl.int32))


@pytest.mark.parametrize("tile", [1, 2, 4])
def test_tiles_open_from_a_slots_first_row(tile: int) -> None:
    """Wherever that stands, so that rows that fit into a tile never share two."""
    counts = [(3, 1), (1, 4), (7, 2), (2, 37), (4, 16), (5, 17), (0, 5)]
    slot_R = torch.cat([torch.full((n,), slot) for slot, n in counts])
    want = torch.cat([torch.arange(n) % tile == 0 for _, n in counts])
    got = torch.full_like(slot_R, -1, dtype=torch.int32)
    opens_kernel[(len(slot_R),)](slot_R, got, tile)
    assert got.tolist() == want.int().tolist()


def test_paged_attention_of_more_rows_than_are_looked_back_at_once() -> None:
    case = paged_case([9, 50, 1], [3, 37, 2])
    work = workspace()
    q, out = torch.randn(case.slot.shape[0], 6, 16), poison(case.slot.shape[0], 6, 16)
    args = (case.table, case.slot, case.pos, case.tree)
    attention.launch_paged_attention(
        q, case.k, case.v, out, *args, work.partial, work.counters, scale=0.25,
        config=AttentionConfig(splits=1, block=16), per_slot=37,
    )  # fmt: skip
    want = ops_attention.paged_attention(q, case.k, case.v, *args, 0.25, work.partial, work.counters)
    assert relative_error(out, want) < 1e-5 and not out.isnan().any()


@pytest.mark.parametrize(
    ("window", "tree", "splits", "block"), [(1, False, 1, 16), (5, False, 3, 4), (12, False, 8, 4), (6, True, 8, 4)]
)
def test_paged_attention_with_a_window(window: int, tree: bool, splits: int, block: int) -> None:
    """Rows with windows of their own in one tile; what none of them sees is NaN."""
    case = paged_case([9, 40, 1], [5, 1, 2], tree=tree, window=window)
    work = workspace()
    q, out = torch.randn(case.slot.shape[0], 6, 16), poison(case.slot.shape[0], 6, 16)
    args = (case.table, case.slot, case.pos, case.tree)
    attention.launch_paged_attention(
        q, case.k, case.v, out, *args, work.partial, work.counters, scale=0.25, low=case.low,
        config=AttentionConfig(splits=splits, block=block),
    )  # fmt: skip
    want = ops_attention.paged_attention(q, case.k, case.v, *args, 0.25, work.partial, work.counters, low_R=case.low)
    assert relative_error(out, want) < 1e-5 and not out.isnan().any()
    assert (out[case.slot == 0] == 0).all() and not work.counters.any()


@pytest.mark.parametrize(("window", "queries", "block"), [(1, 16, 16), (5, 16, 4), (14, 64, 8)])
def test_prefill_attention_with_a_window(window: int, queries: int, block: int) -> None:
    case = paged_case([9, 40, 1, 0], [11, 1, 2, 33], window=window)
    rows, per_tile = case.slot.shape[0], queries // 4
    q, out = torch.randn(rows, 6, 16), poison(rows, 6, 16)
    tiles = prefill_tiles(case.slot, per_tile, rows)
    prefill.launch_prefill_attention(
        q, case.k, case.v, out, case.table, case.slot, case.pos, tiles, scale=0.25, rows_per_tile=per_tile,
        config=PrefillConfig(queries=queries, block=block), window=window,
    )  # fmt: skip
    want = ops_prefill.prefill_attention(q, case.k, case.v, case.table, case.slot, case.pos, tiles, 0.25, window=window)
    assert relative_error(out, want) < 1e-5 and not out.isnan().any()


@pytest.mark.parametrize(("queries", "block"), [(16, 16), (16, 4), (32, 8), (64, 32)])
@pytest.mark.parametrize("heads", [6, 2])
@pytest.mark.parametrize("first_cell", [0, 1])
def test_prefill_attention(queries: int, block: int, heads: int, first_cell: int) -> None:
    """Several slots in a chunk, prefix hits, a slot of one row, sink rows before, between and behind; NaN elsewhere."""
    case = paged_case([9, 20, 1, first_cell], [11, 1, 2, 33])
    if first_cell:  # the cells before it are never written
        case.k[case.table[1:, 0].long(), 0] = case.v[case.table[1:, 0].long(), 0] = NAN
    rows, group = case.slot.shape[0], 1 << (heads // 2 - 1).bit_length()
    q, out, per_tile = torch.randn(rows, heads, 16), poison(rows, heads, 16), max(1, queries // group)
    tiles = prefill_tiles(case.slot, per_tile, rows)
    prefill.launch_prefill_attention(
        q, case.k, case.v, out, case.table, case.slot, case.pos, tiles, scale=0.25, rows_per_tile=per_tile,
        config=PrefillConfig(queries=queries, block=block), first_cell=first_cell,
    )  # fmt: skip
    want = ops_prefill.prefill_attention(q, case.k, case.v, case.table, case.slot, case.pos, tiles, 0.25, first_cell)
    assert relative_error(out, want) < 1e-5 and not out.isnan().any()
    assert (out[case.slot == 0] == 0).all()


def test_a_prompt_row_has_the_same_result_in_any_chunk() -> None:
    """Cut after cut of one prompt, and beside another slot: a row's result is a function of its position.

    Bit for bit on a GPU (tests/gpu); here the products are numpy's, which differ by a row's place in its tile.
    """
    case = paged_case([0, 5], [40, 7])
    q, tile_rows = torch.randn(case.slot.shape[0], 6, 16), 4

    def run(at: list[int]) -> torch.Tensor:
        index = torch.tensor(at)
        slot, out = case.slot[index], poison(len(at), 6, 16)
        prefill.launch_prefill_attention(
            q[index], case.k, case.v, out, case.table, slot, case.pos[index], prefill_tiles(slot, tile_rows, 3),
            scale=0.25, rows_per_tile=tile_rows, config=PrefillConfig(queries=16, block=8),
        )  # fmt: skip
        return out

    whole = run(list(range(1, 41)))
    for cut in (1, 3, 4, 17, 39):
        parts = torch.cat([run(list(range(1, 1 + cut))), run(list(range(1 + cut, 41)))])
        assert relative_error(parts, whole) < 1e-6
    assert relative_error(run([*range(42, 49), *range(1, 41)])[7:], whole) < 1e-6


def test_norms_and_activation() -> None:
    x, res, gain = torch.randn(R, 80), torch.randn(R, 80), torch.rand(80)
    h, out, sq = poison(R, 80), poison(R, 80), poison(1, R)
    norm.launch_residual_norm(x, res, gain, h, out, None, eps=1e-5, pdl=False)
    for got, ref in zip((h, out), ops_norm.residual_norm(x, res, gain, 1e-5), strict=True):
        assert relative_error(got, ref) < 1e-6
    norm.launch_residual_norm(x, None, gain, None, out, sq, eps=0.0, pdl=False)
    for got, ref in zip((out, sq), ops_norm.norm_prepare(x, gain), strict=True):
        assert relative_error(got, ref) < 1e-6
    half = poison(R, 40)
    norm.launch_silu_mul(x, half)
    assert relative_error(half, ops_norm.silu_mul(x)) < 1e-6
    shares = torch.rand(3, R) * 20
    norm.launch_silu_mul(x, half, sq=shares, width=64, eps=1e-5)
    assert relative_error(half, ops_norm.silu_mul(x, shares, 64, 1e-5)) < 1e-6
    norm.launch_residual_norm(x, res, gain, h, out, sq, eps=0.0, pdl=False)
    for got, ref in zip((h, out, sq), ops_norm.residual_prepare(x, res, gain), strict=True):
        assert relative_error(got, ref) < 1e-6


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows of NaN
def test_argmax_breaks_ties_towards_the_lowest() -> None:
    x = torch.randn(R, 9000)
    x[:, [8000, 5000, 4500]] = 99.0
    best, where, out = poison(3, R), torch.full((3, R), -9, dtype=torch.int32), torch.full((R,), -9)
    sample.launch_argmax_tiles(x, best, where, pdl=False)
    sample.launch_argmax_finish(best, where, out, vocab=9000, pdl=False)
    assert out.tolist() == [4500] * R
    x[0], x[1], x[2, 8999] = float("nan"), float("-inf"), float("inf")
    for none in (-1, 0):
        sample.launch_argmax_tiles(x, best, where, pdl=False)
        sample.launch_argmax_finish(best, where, out, vocab=9000, pdl=False, none=none)
        assert out.tolist() == [none] * 3 + [4500] * (R - 3)
        assert torch.equal(out, ops_sample.argmax_rows(x, False, none))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_eagle_rows_and_norms(dtype: torch.dtype) -> None:
    slot, pos = torch.tensor([3, 3, 0, 1, 2, 2]), torch.tensor([5, 6, 0, 9, 0, 7])
    committed, history = torch.tensor([0, 10, 1, 6]), torch.randint(0, 90, (4, 12))
    got = [torch.full((6,), -1) for _ in range(3)]
    eagle.launch_feature_rows(slot, pos, committed, history, *got)
    want = ops_eagle.feature_rows(slot, pos, committed, history)
    assert want[0].tolist() == [3, 0, 0, 1, 2, 0] and want[1].tolist() == [6, 0, 0, 10, 1, 0]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    table, x = torch.randn(90, 40).to(dtype), torch.randn(6, 40).to(dtype)
    gains = torch.rand(2, 40).to(dtype)
    joined, normed = poison(6, 80, dtype=dtype), poison(6, 40, dtype=dtype)
    eagle.launch_join_norms(want[2], table, x, gains[0], gains[1], joined, normed, eps=1e-5)
    for one, two in zip((joined, normed), ops_eagle.join_norms(want[2], table, x, *gains, 1e-5), strict=True):
        assert relative_error(one, two) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_block_rows_and_context(dtype: torch.dtype) -> None:
    heads, dim, layers, page = 3, 12, 2, 4
    case = paged_case([9, 20, 1], [3, 1, 4], page=page)
    slot, committed = torch.tensor([2, 0, 1, 3]), torch.tensor([20, 0, 9, 1])
    table = case.table.clone()
    table[3, 1:] = 0  # the third slot's block goes beyond its page
    history = torch.randint(0, 90, (4, 30))
    where = (slot, committed, history, table)
    got = [torch.full((n,), -9) for n in (20, 20, 20, 20, 4)]
    block.launch_block_rows(*where, *got, page_size=page, mask_token=77)
    want = ops_block.block_rows(*where, page, 77, 5)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert want[3].view(4, 5)[:, 0].tolist() == [24, 0, 13, 3] and want[0].view(4, 5)[0, 1] == 77

    rows, wide = case.slot.shape[0], layers * 2 * heads * dim
    kv, sq, bias = torch.randn(rows, wide).to(dtype), torch.rand(3, rows) * 20, torch.randn(wide).to(dtype)
    gain, (cos, sin) = torch.rand(layers, dim).to(dtype), rope_tables(18, dim)
    pos = case.pos.clone()
    pos[1] = 10_000  # beyond the table: to the sink
    for extra in ({}, {"bias": bias}, {"bias": bias, "sq": sq, "width": 40, "norm_eps": 1e-5}):
        ours, theirs = (poison(layers, 2, int(case.table.max()) + 1, page, heads, dim, dtype=dtype) for _ in range(2))
        at = (cos, sin, gain, case.table, case.slot, pos)
        block.launch_context_write(kv, ours, *at, eps=1e-6, **extra)
        ops_block.context_write(kv, theirs, *at, 1e-6, extra.get("bias"), extra.get("sq"), 40, 1e-5)
        # Several rows share the sink's cell; which of them is last there is open.
        assert torch.equal(ours[:, :, 1:].isnan(), theirs[:, :, 1:].isnan())
        assert not theirs[:, :, 1:].isnan().all()
        kept = ~theirs[:, :, 1:].isnan()
        assert relative_error(ours[:, :, 1:][kept], theirs[:, :, 1:][kept]) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rank", "vocab", "split"), [(24, 150, 1), (64, 160, 2)])
def test_markov_chain(dtype: torch.dtype, rank: int, vocab: int, split: int) -> None:
    """Each step adds a bias to one row of every slot's base logits, and reads the row of the token that won."""
    drafts = 4
    w1, w2 = torch.randn(vocab, rank).to(dtype), (torch.randn(vocab, rank) / 4).to(dtype)
    base, work = torch.randn(R, drafts, vocab), workspace()
    base[1, 2, 7] = base[1, 2, 140] = 1e4
    w2[140] = w2[7]  # a tie, in tiles far apart: the lowest id
    tokens = torch.full((R, drafts), -9)
    x, c = w1[:R].clone(), GemmConfig(bn=32, bk=32, split=split)
    for step in range(drafts):
        tiles = -(-vocab // 32)
        logits, best, where = poison(R, vocab), poison(tiles, R), torch.full((tiles, R), -9, dtype=torch.int32)
        gemm.launch_stream_gemm(
            x, w2, logits, epi=gemm.HEAD, config=c, res=base[:, step], pair=drafts, best=best, where=where,
            ws=work.partial, counters=work.counters,
        )  # fmt: skip
        want = ops_gemm.markov_head(x, w2, base, step, work.partial, work.counters)[0]
        assert relative_error(logits, want) < LIMIT[dtype]
        out = poison(R, rank, dtype=dtype)
        block.launch_markov_next(best, where, w1, tokens, out, step=step)
        reference = tokens.clone()
        assert torch.equal(out, ops_block.markov_next(best, where, w1, reference, step))
        assert torch.equal(reference, tokens) and torch.equal(tokens[:, step], logits.argmax(1))
        x = out
    assert tokens[1, 2] == 7 and not work.counters.any()
