"""Compiled kernels on a GPU: every op against its torch reference in float64, outputs NaN-poisoned beforehand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slipstream.errors import UnsupportedError
from slipstream.kernels import attention, gemm, norm, rope, sample
from slipstream.kernels.workspace import Workspace
from tests.support.kernel_cases import attention_by_loops, paged_case, relative_error, rope_tables

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LIMIT = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = list(LIMIT)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN (or the largest integer), so an element nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def work() -> tuple[torch.Tensor, torch.Tensor]:
    w = Workspace("cuda")
    return w.partial, w.counters


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def wide(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.cpu().double() if x.is_floating_point() else x.cpu()


SHAPES = [(256, 512), (4096, 4096), (6144, 4096), (2048, 8192), (3072, 2048), (960, 576), (130, 200)]


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 32, 64, 65, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(dtype: torch.dtype, rows: int) -> None:
    limit = LIMIT[dtype]
    for n, k in SHAPES if dtype == torch.bfloat16 else SHAPES[:1] + SHAPES[-2:]:
        x, w = randn(rows, k, dtype=dtype), randn(n, k, dtype=dtype, scale=k**-0.5)
        res, gain, bias = randn(rows, n, dtype=dtype), randn(n, dtype=dtype), randn(n, dtype=dtype)
        sq = torch.rand(64, rows, device="cuda") * k / 32
        ws, no = work(), (torch.empty(0), torch.empty(0))
        X, W = wide(x), wide(w)
        y = gemm.stream_linear(x, w, bias, sq, 1e-5, *ws)
        assert relative_error(y, gemm.stream_linear(X, W, wide(bias), wide(sq), 1e-5, *no)) < limit
        y = gemm.stream_swiglu(x, w, sq, 1e-5, *ws)
        assert relative_error(y, gemm.stream_swiglu(X, W, wide(sq), 1e-5, *no)) < limit
        h, scaled, parts = gemm.stream_residual(x, w, res, gain, *ws)
        H, S, P = gemm.stream_residual(X, W, wide(res), wide(gain), *no)
        assert relative_error(h, H) < limit and relative_error(scaled, S) < limit
        assert relative_error(parts.sum(0), P.sum(0)) < limit
        logits, best, where = gemm.stream_head(x, w, sq, 1e-5, *ws)
        assert relative_error(logits, gemm.stream_head(X, W, wide(sq), 1e-5, *no)[0]) < min(limit, 1e-4)
        assert torch.equal(sample.argmax_finish(best, where, n), logits.argmax(-1))
        assert not ws[1].any()


@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (32, 8, 64), (9, 3, 64)])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_rope_write_fused_and_alone(rows: int, heads: int, kv_heads: int, dim: int, qk_norm: bool) -> None:
    dtype, hidden, page, slots = torch.bfloat16, 1024, 16, 41
    x, w = randn(rows, hidden, dtype=dtype), randn((heads + 2 * kv_heads) * dim, hidden, dtype=dtype, scale=0.03)
    table = torch.zeros(slots, 3, dtype=torch.int32, device="cuda")
    table[1:] = (torch.randperm((slots - 1) * 3, device="cuda") + 1).view(-1, 3)
    slot = torch.randperm(slots, device="cuda")[:rows].int()
    pos = torch.randint(0, 60, (rows,), device="cuda", dtype=torch.int32)  # some lie beyond the table
    cos, sin = (t.cuda() for t in rope_tables(40, dim))
    gains = (randn(dim, dtype=dtype), randn(dim, dtype=dtype)) if qk_norm else (None, None)
    caches = [
        torch.full((slots * 3 + 1, page, kv_heads, dim), float("nan"), device="cuda", dtype=dtype) for _ in "1234"
    ]
    wides = [c.cpu().double() for c in caches[:2]]
    where = (table, slot, pos, pos)
    q = gemm.stream_rope(
        x, w, None, None, 0.0, *caches[:2], cos, sin, *gains, 1e-6, *where, heads, *work()
    )  # fmt: skip
    want = gemm.stream_rope(
        wide(x), wide(w), None, None, 0.0, *wides, cos.cpu(), sin.cpu(), *(wide(g) for g in gains), 1e-6,
        *(t.cpu() for t in where), heads, torch.empty(0), torch.empty(0),
    )  # fmt: skip
    qkv = gemm.stream_linear(x, w, None, None, 0.0, *work())
    alone = rope.rope_kv_write(qkv, *caches[2:], cos, sin, *gains, *where, heads, 1e-6)
    assert relative_error(q, want) < 1e-2 and relative_error(alone, want) < 1e-2
    for i, cache in enumerate(caches):
        ref = wides[i % 2]
        assert torch.equal(cache[1:].isnan().cpu(), ref[1:].isnan()), "exactly the rows' cells are written"
        assert relative_error(cache[1:].nan_to_num(), ref[1:].nan_to_num()) < 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(("page", "dim", "heads"), [(1, 64, 8), (16, 128, 8), (32, 64, 6), (16, 80, 2)])
def test_attention(dtype: torch.dtype, tree: bool, page: int, dim: int, heads: int) -> None:
    for lengths, rows in (([40], [1]), ([700, 3, 131], [8, 1, 4]), ([64] * 20, [2, 1] * 10), ([2100, 1], [1, 3])):
        case = paged_case(lengths, rows, tree=tree, page=page, dim=dim, dtype=dtype)
        q = torch.randn(case.slot.shape[0], heads, dim).to(dtype)
        ws = work()
        cuda = [t if t is None else t.cuda() for t in (case.table, case.slot, case.pos, case.tree)]
        want = attention_by_loops(q, case, dim**-0.5)
        for per_slot in (1, 4):
            got = attention.paged_attention(
                q.cuda(), case.k.cuda(), case.v.cuda(), *cuda, dim**-0.5, *ws, False, per_slot
            )
            assert relative_error(got, want) < LIMIT[dtype]
            assert (got[cuda[1] == 0] == 0).all() and not ws[1].any()


def test_a_row_does_not_see_its_neighbours() -> None:
    """Bit for bit within a bucket: alone, among others, and with NaN in the other rows."""
    dtype = torch.bfloat16
    x, w = randn(16, 4096, dtype=dtype), randn(6144, 4096, dtype=dtype, scale=0.02)
    ws = work()
    full = gemm.stream_linear(x, w, None, None, 0.0, *ws)
    assert torch.equal(gemm.stream_linear(x[:1].contiguous(), w, None, None, 0.0, *ws)[0], full[0])
    x[1:] = float("nan")
    assert torch.equal(gemm.stream_linear(x, w, None, None, 0.0, *ws)[0], full[0])
    case = paged_case([300, 77, 500], [2, 1, 1], page=16, kv_heads=8, dim=128, dtype=dtype)
    q = randn(case.slot.shape[0], 32, 128, dtype=dtype)
    k, v, table, slot, pos = (t.cuda() for t in (case.k, case.v, case.table, case.slot, case.pos))
    many = attention.paged_attention(q, k, v, table, slot, pos, None, 0.1, *ws)
    for r in (1, 2, 4):
        # Seven copies of one row, of which the tile packs some, and sink rows in front.
        pick = torch.tensor([0] + [r] * 7, device="cuda")
        few = attention.paged_attention(q[pick], k, v, table, slot[pick], pos[pick], None, 0.1, *ws)
        assert torch.equal(few[1:], many[r].expand(7, -1, -1))


def test_dependent_launches_equal_ordinary_ones() -> None:
    """A captured chain of three layers with programmatic dependent launch, replayed: the same bits every time."""
    dtype, hidden, inner, heads, kv_heads, dim = torch.bfloat16, 2048, 8192, 32, 8, 64
    layers = [
        [
            randn(*s, dtype=dtype, scale=0.02)
            for s in ((3072, hidden), (hidden, 2048), (2 * inner, hidden), (hidden, inner))
        ]
        for _ in range(3)
    ]
    gain = torch.rand(hidden, device="cuda").to(dtype)
    case = paged_case([399] * 8, [1] * 8, page=32, kv_heads=kv_heads, dim=dim, dtype=dtype)
    k, v, table, slot, pos = (t.cuda() for t in (case.k, case.v, case.table, case.slot, case.pos))
    x = randn(slot.shape[0], hidden, dtype=dtype)
    cos, sin = (t.cuda() for t in rope_tables(512, dim))
    ws = work()

    def step(pdl: bool) -> torch.Tensor:
        h = x
        xg, sq = norm.norm_prepare(h, gain, pdl)
        for qkv, o, gu, down in layers:
            q = gemm.stream_rope(
                xg, qkv, None, sq, 1e-5, k, v, cos, sin, None, None, 0.0, table, slot, pos, pos, heads, *ws, pdl
            )
            a = attention.paged_attention(q, k, v, table, slot, pos, None, dim**-0.5, *ws, pdl)
            h, xg, sq = gemm.stream_residual(a.flatten(1), o, h, gain, *ws, pdl)
            h, xg, sq = gemm.stream_residual(gemm.stream_swiglu(xg, gu, sq, 1e-5, *ws, pdl), down, h, gain, *ws, pdl)
        return h

    want = step(False).clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(True)
    for _ in range(50):
        graph.replay()
        assert torch.equal(got, want)
    assert want.isfinite().all() and not ws[1].any()


def test_norms_and_activation() -> None:
    for dtype in DTYPES:
        for rows, n in ((1, 4096), (33, 576)):
            x, res, gain = randn(rows, n, dtype=dtype), randn(rows, n, dtype=dtype), randn(n, dtype=dtype)
            X, S, G = wide(x), wide(res), wide(gain)
            SQ = torch.rand(5, rows, device="cuda") * n / 5
            pairs = [
                (norm.rms_norm(x, gain, 1e-5), norm.rms_norm(X, G, 1e-5)),
                (norm.silu_mul(x), norm.silu_mul(X)),
                (norm.silu_mul(x, SQ, n, 1e-5), norm.silu_mul(X, wide(SQ), n, 1e-5)),
                *zip(norm.residual_norm(x, res, gain, 1e-5), norm.residual_norm(X, S, G, 1e-5), strict=True),
                *zip(norm.norm_prepare(x, gain), norm.norm_prepare(X, G), strict=True),
                *zip(norm.residual_prepare(x, res, gain), norm.residual_prepare(X, S, G), strict=True),
            ]
            for got, want in pairs:
                assert relative_error(got, want) < LIMIT[dtype]


def test_argmax_breaks_ties_towards_the_lowest() -> None:
    x = torch.randn(16, 128_256, device="cuda")
    x[:, [9000, 100_000]] = 50.0
    assert sample.argmax_rows(x).tolist() == [9000] * 16


def test_what_a_product_cannot_take_is_refused() -> None:
    x, w = randn(129, 64, dtype=torch.bfloat16), randn(128, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="128 rows, not 129"):
        gemm.stream_linear(x, w, None, None, 0.0, *work())
    with pytest.raises(UnsupportedError, match="contiguous"):
        gemm.stream_linear(x[:2, ::2], w[:, :32], None, None, 0.0, *work())
    big = randn(4096, 4096, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="the workspace has"):
        gemm.stream_residual(
            randn(2, 4096, dtype=torch.bfloat16), big, randn(2, 4096, dtype=torch.bfloat16), big[0],
            torch.empty(8, device="cuda"), torch.zeros(8, device="cuda", dtype=torch.int32),
        )  # fmt: skip
