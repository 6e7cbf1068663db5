"""The torch references against definitions written out by hand, and the ops' schemas and fakes."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels import attention, gemm, norm, prefill, registry, rope, sample
from slipstream.kernels.workspace import Workspace
from tests.support.kernel_cases import attention_by_loops, paged_case, relative_error, rope_tables

R, K, N = 3, 96, 160


def ws() -> tuple[torch.Tensor, torch.Tensor]:
    w = Workspace("cpu", floats=1, counters=1)
    return w.partial, w.counters


def test_registry_names_exactly_the_defined_ops() -> None:
    registry.load()
    defined = {n for n in dir(torch.ops.slipstream) if hasattr(getattr(torch.ops.slipstream, n), "default")}
    assert set(registry.KERNELS) <= defined
    for name in registry.KERNELS:
        op = getattr(torch.ops.slipstream, name).default
        for key in ("CUDA", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key), (name, key)


def test_streaming_rms_norm_is_rms_norm() -> None:
    x, w = torch.randn(R, K, dtype=torch.float64), torch.randn(N, K, dtype=torch.float64)
    gain = torch.rand(K, dtype=torch.float64)
    scaled, sq = norm.norm_prepare(x, gain)
    want = norm.rms_norm(x, gain, 1e-5) @ w.T
    assert relative_error(gemm.stream_linear(scaled, w, None, sq, 1e-5, *ws()), want) < 1e-13
    gate, up = want.chunk(2, -1)
    got = gemm.stream_swiglu(scaled, w, sq, 1e-5, *ws())
    assert relative_error(got, gate * torch.sigmoid(gate) * up) < 1e-13
    assert relative_error(norm.silu_mul(want), gate * torch.sigmoid(gate) * up) < 1e-13
    assert relative_error(norm.silu_mul(scaled @ w.T, sq, K, 1e-5), gate * torch.sigmoid(gate) * up) < 1e-13


def test_residual_product_hands_the_next_norm_its_sums() -> None:
    x, w, res = torch.randn(R, K).double(), torch.randn(N, K).double(), torch.randn(R, N).double()
    gain = torch.rand(N).double()
    h, scaled, sq = gemm.stream_residual(x, w, res, gain, *ws())
    assert relative_error(h, res + x @ w.T) < 1e-13
    assert relative_error(scaled, h * gain) < 1e-13
    assert relative_error(sq.sum(0), (h * h).sum(1)) < 1e-13
    for got, want in zip(norm.residual_prepare(x @ w.T, res, gain), (h, scaled, sq.sum(0, keepdim=True)), strict=True):
        assert relative_error(got, want) < 1e-13
    both, normed = norm.residual_norm(x @ w.T, res, gain, 1e-5)
    assert relative_error(both, h) < 1e-13
    assert relative_error(normed, scaled * torch.rsqrt(sq.sum(0) / N + 1e-5)[:, None]) < 1e-13


def test_head_argmax_takes_the_lowest_of_equals() -> None:
    w = torch.randn(N, K)
    w[[7, 90, 150]] = w[7] * 9
    x = w[7].repeat(R, 1)
    logits, best, where = gemm.stream_head(x, w, None, 0.0, *ws())
    assert sample.argmax_finish(best, where, N).tolist() == [7] * R
    assert sample.argmax_rows(logits).tolist() == [7] * R


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("page", [1, 4])
def test_paged_attention_is_its_definition(tree: bool, page: int, window: int) -> None:
    case = paged_case([9, 20, 1], [3, 1, 4], tree=tree, page=page, window=window)
    q = torch.randn(case.slot.shape[0], 6, 16)
    got = attention.paged_attention(
        q, case.k, case.v, case.table, case.slot, case.pos, case.tree, 0.25, *ws(), low_R=case.low
    )
    assert relative_error(got, attention_by_loops(q, case, 0.25)) < 1e-6
    assert (got[case.slot == 0] == 0).all()


@pytest.mark.parametrize("window", [0, 1, 6])
def test_prefill_attention_is_its_definition(window: int) -> None:
    case = paged_case([9, 20, 1, 0], [3, 1, 4, 12], window=window)
    q = torch.randn(case.slot.shape[0], 6, 16)
    tiles = prefill.prefill_tiles(case.slot, 4, 5)
    got = prefill.prefill_attention(q, case.k, case.v, case.table, case.slot, case.pos, tiles, 0.25, 0, window)
    assert relative_error(got, attention_by_loops(q, case, 0.25)) < 1e-6
    assert (got[case.slot == 0] == 0).all()


@pytest.mark.parametrize("per_tile", [1, 4, 32])
def test_tiles_cover_every_row_once(per_tile: int) -> None:
    slots = torch.tensor([3] * 9 + [1] * 1 + [2] * 4 + [7] * 18 + [0] * 8)
    tiles = prefill.prefill_tiles(slots, per_tile, 8)
    assert tiles.shape == (-(-40 // per_tile) + 8,), "a number of shapes only"
    starts = [t for t in tiles.tolist() if t < 40]
    assert tiles.tolist() == starts + [40] * (len(tiles) - len(starts)) and starts == sorted(set(starts))
    covered = [r for t in starts for r in range(t, min(t + per_tile, 40)) if len(set(slots[t : r + 1].tolist())) == 1]
    assert covered == list(range(40))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_rope_write_goes_to_the_rows_cells_and_the_sink(qk_norm: bool) -> None:
    heads, kv_heads, dim, page = 6, 2, 16, 4
    case = paged_case([9, 20, 1], [3, 1, 4], page=page)
    k, v = torch.full_like(case.k, float("nan")), torch.full_like(case.v, float("nan"))
    cos, sin = rope_tables(12, dim)
    rows = case.slot.shape[0]
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim)
    gains = (torch.rand(dim), torch.rand(dim)) if qk_norm else (None, None)
    pos = case.pos.clone()
    pos[1] = 10_000  # beyond the table: to the sink
    q = rope.rope_kv_write(qkv, k, v, cos, sin, *gains, case.table, case.slot, case.pos, pos, heads, 1e-6)
    written = 0
    for r in range(rows):
        s, p = int(case.slot[r]), int(pos[r])
        angle = min(int(case.pos[r]), 11)
        x = qkv[r].view(-1, dim)
        for h in range(heads + kv_heads):
            y = x[h]
            if qk_norm:
                y = y / (y.square().mean() + 1e-6).sqrt() * gains[0 if h < heads else 1]
            z = torch.complex(y[: dim // 2], y[dim // 2 :]) * torch.complex(cos[angle], sin[angle])
            want = torch.cat([z.real, z.imag])
            if h < heads:
                assert torch.allclose(q[r, h], want, atol=1e-5)
            elif s and p < case.table.shape[1] * page:
                assert torch.allclose(k[case.table[s, p // page], p % page, h - heads], want, atol=1e-5)
                assert torch.equal(v[case.table[s, p // page], p % page, h - heads], x[h + kv_heads])
                written += 1
    assert written == 7 * kv_heads
    assert int((~k[1:].isnan()).all(-1).sum()) == written, "nothing else is written outside the sink"


def test_rope_write_norms_the_product_and_adds_the_bias() -> None:
    heads, kv_heads, dim = 4, 2, 16
    case = paged_case([9, 20, 1], [3, 1, 4])
    rows, columns = case.slot.shape[0], (heads + 2 * kv_heads) * dim
    x, w, bias, gain = torch.randn(rows, K), torch.randn(columns, K), torch.randn(columns), torch.rand(K)
    scaled, sq = norm.norm_prepare(x, gain)
    caches = [torch.zeros_like(case.k) for _ in range(4)]
    args = (*rope_tables(12, dim), None, None, case.table, case.slot, case.pos, case.pos, heads, 1e-6)
    got = rope.rope_kv_write(scaled @ w.T, *caches[:2], *args, bias, sq, K, 1e-5)
    want = rope.rope_kv_write(norm.rms_norm(x, gain, 1e-5) @ w.T + bias, *caches[2:], *args)
    for a, b in zip((got, *caches[:2]), (want, *caches[2:]), strict=True):
        assert relative_error(a, b) < 1e-5


def test_fakes_agree_with_the_references() -> None:
    from torch.library import opcheck

    x, w = torch.randn(R, 64), torch.randn(128, 64)
    sq, gain = torch.rand(4, R), torch.rand(128)
    checks = ("test_schema", "test_faketensor")
    ops = torch.ops.slipstream
    opcheck(ops.stream_linear.default, (x, w, None, sq, 1e-5, *ws()), test_utils=checks)
    opcheck(ops.stream_swiglu.default, (x, w, sq, 1e-5, *ws()), test_utils=checks)
    opcheck(ops.stream_residual.default, (x, w, torch.randn(R, 128), gain, *ws()), test_utils=checks)
    opcheck(ops.stream_head.default, (x, w, sq, 1e-5, *ws()), test_utils=checks)
    opcheck(ops.rms_norm.default, (x, torch.rand(64), 1e-5), test_utils=checks)
    opcheck(ops.residual_norm.default, (x, x.clone(), torch.rand(64), 1e-5), test_utils=checks)
    opcheck(ops.norm_prepare.default, (x, torch.rand(64)), test_utils=checks)
    opcheck(ops.residual_prepare.default, (x, x.clone(), torch.rand(64)), test_utils=checks)
    opcheck(ops.silu_mul.default, (x,), test_utils=checks)
    opcheck(ops.silu_mul.default, (x, sq, 64, 1e-5), test_utils=checks)
    base, chosen = torch.randn(R, 2, 128), torch.zeros(R, 2).long()
    opcheck(ops.markov_head.default, (x, w, base, 1, *ws()), test_utils=checks)
    best, where = torch.randn(2, R), torch.zeros(2, R, dtype=torch.int32)
    opcheck(ops.markov_next.default, (best, where, w, chosen, 1), test_utils=checks)
    opcheck(ops.argmax_rows.default, (x,), test_utils=checks)
    index = torch.tensor([1, 0, 2])[:R]
    opcheck(ops.feature_rows.default, (index, index, index.clone(), torch.zeros(3, 5).long()), test_utils=checks)
    norms = (torch.rand(64), torch.rand(64), 1e-5)
    opcheck(ops.join_norms.default, (torch.zeros(R).long(), torch.randn(4, 64), x, *norms), test_utils=checks)
    case = paged_case([5, 7], [1, 2])
    rows = case.slot.shape[0]
    q = torch.randn(rows, 4, 16)
    opcheck(
        ops.paged_attention.default,
        (q, case.k, case.v, case.table, case.slot, case.pos, None, 0.25, *ws()),
        test_utils=checks,
    )
    cos, sin = rope_tables(32, 16)
    k, v = torch.zeros_like(case.k), torch.zeros_like(case.v)
    slots = torch.tensor([1, 2])
    opcheck(
        ops.block_rows.default, (slots, slots + 2, torch.zeros(3, 9).long(), case.table, 4, 7, 3), test_utils=checks
    )
    kv, cache, gain = torch.randn(rows, 2 * 2 * 2 * 16), torch.zeros(2, 2, *case.k.shape), torch.rand(2, 16)
    opcheck(
        ops.context_write.default, (kv, cache, cos, sin, gain, case.table, case.slot, case.pos, 1e-6),
        test_utils=checks,
    )  # fmt: skip
    where = (case.table, case.slot, case.pos, case.pos)
    opcheck(
        ops.rope_kv_write.default,
        (torch.randn(rows, 8 * 16), k, v, cos, sin, None, None, *where, 4, 1e-5),
        test_utils=checks,
    )
    opcheck(
        ops.stream_rope.default,
        (torch.randn(rows, 64), w, None, None, 0.0, k, v, cos, sin, None, None, 1e-5, *where, 4, *ws()),
        test_utils=checks,
    )
