# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the ops in kernels/gemm.py are typed.)
"""Weight-streaming product for few rows: out[R, N] = f(x[R, K]) @ w[N, K]^T.

The weights are the first operand of the matrix instruction (64 weight rows by RB activation rows), so the
K-reduction of an output element runs in the same order for every R of one SPLIT.
K is split over SPLIT programs per tile; the last one to arrive adds the partial sums in a fixed order.
Under programmatic dependent launch a program may read its first weights (`hold`) before it waits for its
predecessor, so that the memory works while that one ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra import cuda as tlx

from slipstream.kernels.jit.gemm_parts import (
    HEAD,
    RESIDUAL,
    ROPE,
    SILU,
    STORE,
    rope_cells,
    store_head,
    store_residual,
    store_rope,
    sum_squares,
)
from slipstream.kernels.tuning import rows_bucket

__all__ = ["HEAD", "RESIDUAL", "ROPE", "SILU", "STORE", "Rope", "launch_stream_gemm"]

_SILU = tl.constexpr(SILU)
_RESIDUAL = tl.constexpr(RESIDUAL)
_HEAD = tl.constexpr(HEAD)
_ROPE = tl.constexpr(ROPE)


@triton.jit
def _tile(w_ptr, w_desc, row, rows, first_k, k, limit, K, EVEN: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        return w_desc.load([row, first_k])
    ptrs = w_ptr + rows[:, None].to(tl.int64) * K + k[None, :]
    if EVEN:
        return tl.load(ptrs, eviction_policy="evict_first")
    return tl.load(ptrs, mask=(rows[:, None] < limit) & (k[None, :] < K), other=0.0, eviction_policy="evict_first")


@triton.jit
def _finish(
    a, b, tile, n, r, pos, cell, out_ptr, res_ptr, gain_ptr, scaled_ptr, sq_in_ptr, sq_out_ptr, bias_ptr, best_ptr,
    where_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_gain_ptr, k_gain_ptr, R, N, K, pair, eps, qk_eps,
    BN: tl.constexpr, RB: tl.constexpr, EPI: tl.constexpr, NORM: tl.constexpr, SQ_TILES: tl.constexpr,
    SQ_PAD: tl.constexpr, BIAS: tl.constexpr, STORE_OUT: tl.constexpr, HEADS: tl.constexpr, KH: tl.constexpr,
    D: tl.constexpr, QK_NORM: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    """Epilogue of one complete tile; a, b are [BN, RB] float32."""
    two: tl.constexpr = EPI == _SILU or EPI == _ROPE
    if NORM:
        rstd = tl.rsqrt(sum_squares(sq_in_ptr, r, R, SQ_TILES, SQ_PAD) / K + eps)
        a = a * rstd[None, :]
        if two:
            b = b * rstd[None, :]
    if BIAS:
        a = a + tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if two:
            b = b + tl.load(bias_ptr + n + pair, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if EPI == _RESIDUAL:
        store_residual(a, tile, n, r, out_ptr, res_ptr, gain_ptr, scaled_ptr, sq_out_ptr, R, N)
    elif EPI == _HEAD:
        if BASE:
            kept = (n[:, None] < N) & (r[None, :] < R)
            a = a + tl.load(res_ptr + r[None, :].to(tl.int64) * pair * N + n[:, None], mask=kept, other=0.0)
        store_head(a, tile, n, r, out_ptr, best_ptr, where_ptr, R, N, STORE_OUT)
    elif EPI == _ROPE:
        store_rope(a, b, n, r, out_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, pos, cell, q_gain_ptr, k_gain_ptr, R, N, qk_eps,
                   HEADS, KH, D, BN, RB, QK_NORM)  # fmt: skip
    else:
        if EPI == _SILU:
            a = a / (1.0 + tl.exp(-a)) * b
        inside = (n[:, None] < N) & (r[None, :] < R)
        tl.store(out_ptr + r[None, :].to(tl.int64) * N + n[:, None], a.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R", "table_width"])
def stream_gemm_kernel(
    x_ptr, w_ptr, w_desc, out_ptr, res_ptr, gain_ptr, scaled_ptr, sq_in_ptr, sq_out_ptr, bias_ptr, best_ptr,
    where_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_gain_ptr, k_gain_ptr, table_ptr, slot_ptr, rope_pos_ptr, kv_pos_ptr,
    ws_ptr, cnt_ptr,
    R, N, K, pair, eps, qk_eps, table_width, page_size, rope_len,
    BN: tl.constexpr, BK: tl.constexpr, RB: tl.constexpr, SPLIT: tl.constexpr, EPI: tl.constexpr,
    NORM: tl.constexpr, SQ_TILES: tl.constexpr, SQ_PAD: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    STORE_OUT: tl.constexpr, HEADS: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, QK_NORM: tl.constexpr,
    TMA: tl.constexpr, PDL: tl.constexpr, HOLD: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    """Grid: tiles * SPLIT. A tile is BN rows n of w, for SILU and ROPE also rows n + pair. N: rows n may reach.

    BASE: a HEAD's sums are added to row r * pair of res [.., N].
    """
    two: tl.constexpr = EPI == _SILU or EPI == _ROPE
    pid = tl.program_id(0)
    tile = pid // SPLIT
    part = pid % SPLIT
    n = tile * BN + tl.arange(0, BN)
    if EPI == _ROPE:
        half: tl.constexpr = D // 2
        n = n // half * D + n % half  # the first halves of the heads; pair is D / 2
    r = tl.arange(0, RB)
    kk = tl.arange(0, BK)
    blocks = tl.cdiv(K, BK)
    lo = part * blocks // SPLIT
    hi = (part + 1) * blocks // SPLIT
    w2_ptr = w_ptr
    if two:
        w2_ptr = w_ptr + pair.to(tl.int64) * K
    if PDL:
        tlx.gdc_launch_dependents()
    if HOLD:
        # The first weights go to registers before the wait: the memory works while the predecessor ends.
        held_a = _tile(w_ptr, w_desc, tile * BN, n, lo * BK, lo * BK + kk, N, K, EVEN, False)
        if two:
            held_b = _tile(w2_ptr, w_desc, tile * BN, n, lo * BK, lo * BK + kk, N, K, EVEN, False)
    if PDL:
        tlx.gdc_wait()
    cell = tl.zeros([RB], tl.int64)
    pos = cell
    if EPI == _ROPE:
        # Dependent reads, so they start early; sums of squares and angles are cheaper to read at the end (measured).
        cell, pos = rope_cells(table_ptr, slot_ptr, kv_pos_ptr, rope_pos_ptr, r, R, table_width, page_size, rope_len)
    a = tl.zeros([BN, RB], tl.float32)
    b = tl.zeros([BN, RB], tl.float32)
    if HOLD:
        keep = r[None, :] < R
        if not EVEN:
            keep = keep & ((lo * BK + kk)[:, None] < K)
        x = tl.load(x_ptr + r[None, :].to(tl.int64) * K + (lo * BK + kk)[:, None], mask=keep, other=0.0)
        a = tl.dot(held_a, x, a, input_precision="ieee")
        if two:
            b = tl.dot(held_b, x, b, input_precision="ieee")
        lo += 1
    for block in tl.range(lo, hi):
        k = block * BK + kk
        keep = r[None, :] < R
        if not EVEN:
            keep = keep & (k[:, None] < K)
        x = tl.load(x_ptr + r[None, :].to(tl.int64) * K + k[:, None], mask=keep, other=0.0)
        a = tl.dot(_tile(w_ptr, w_desc, tile * BN, n, block * BK, k, N, K, EVEN, TMA), x, a, input_precision="ieee")
        if two:
            up = _tile(w2_ptr, w_desc, pair + tile * BN, n, block * BK, k, N, K, EVEN, TMA)
            b = tl.dot(up, x, b, input_precision="ieee")
    if SPLIT == 1:
        _finish(a, b, tile, n, r, pos, cell, out_ptr, res_ptr, gain_ptr, scaled_ptr, sq_in_ptr, sq_out_ptr, bias_ptr,
                best_ptr, where_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_gain_ptr, k_gain_ptr, R, N, K, pair, eps, qk_eps,
                BN, RB, EPI, NORM, SQ_TILES, SQ_PAD, BIAS, STORE_OUT, HEADS, KH, D, QK_NORM, BASE)  # fmt: skip
    else:
        planes: tl.constexpr = 2 if two else 1
        place = r[None, :] * BN + tl.arange(0, BN)[:, None]
        kept = (r[None, :] < R) & (place >= 0)
        mine = ws_ptr + (tile * SPLIT + part) * (planes * RB * BN)
        tl.store(mine + place, a, mask=kept)
        if two:
            tl.store(mine + RB * BN + place, b, mask=kept)
        # All threads' stores must precede the one thread's release.
        tl.debug_barrier()
        ticket = tl.atomic_add(cnt_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if ticket == SPLIT - 1:
            a = tl.zeros([BN, RB], tl.float32)
            b = tl.zeros([BN, RB], tl.float32)
            first = ws_ptr + tile * SPLIT * (planes * RB * BN)
            for s in tl.static_range(SPLIT):
                theirs = first + s * (planes * RB * BN)
                a += tl.load(theirs + place, mask=kept, other=0.0, cache_modifier=".cg")
                if two:
                    b += tl.load(theirs + RB * BN + place, mask=kept, other=0.0, cache_modifier=".cg")
            _finish(a, b, tile, n, r, pos, cell, out_ptr, res_ptr, gain_ptr, scaled_ptr, sq_in_ptr, sq_out_ptr,
                    bias_ptr, best_ptr, where_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_gain_ptr, k_gain_ptr,
                    R, N, K, pair, eps, qk_eps,
                    BN, RB, EPI, NORM, SQ_TILES, SQ_PAD, BIAS, STORE_OUT, HEADS, KH, D, QK_NORM, BASE)  # fmt: skip
            tl.store(cnt_ptr + tile, 0)  # ready for the next launch


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Arguments of the ROPE epilogue; shapes in kernels/gemm.py."""

    k: object
    v: object
    cos: object
    sin: object
    q_gain: object
    k_gain: object
    table: object
    slot: object
    rope_pos: object
    kv_pos: object
    heads: int
    eps: float


def launch_stream_gemm(
    x, w, out, *, epi, config, pair=0, res=None, gain=None, scaled=None, sq_in=None, sq_out=None, bias=None,
    best=None, where=None, ws=None, counters=None, eps=0.0, store_out=True, rope=None, pdl=False,
):  # fmt: skip
    """Launch; tensors are contiguous, see kernels/gemm.py for their shapes."""
    rows, k = x.shape
    c = config
    n = pair if epi == SILU else w.shape[0]
    tiles = triton.cdiv(n // 2 if epi == ROPE else n, c.bn)
    if epi == ROPE:
        pair = rope.k.shape[3] // 2
        assert not c.tma and (rope.q_gain is None or c.bn % pair == 0), "whole heads per tile for qk-norm"
    even = (n // 2 if epi == ROPE else n) % c.bn == 0 and k % c.bk == 0
    assert triton.cdiv(k, c.bk) >= c.split, "each split program needs a step"
    sq_tiles = 1 if sq_in is None else sq_in.shape[0]
    w_desc = w
    if c.tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        assert even, "the bulk copy engine is used for whole tiles only"
        w_desc = TensorDescriptor.from_tensor(w, [c.bn, c.bk])
    o = rope
    kv = (None,) * 10 if o is None else (
        o.k, o.v, o.cos, o.sin, o.q_gain, o.k_gain, o.table, o.slot, o.rope_pos, o.kv_pos
    )  # fmt: skip
    stream_gemm_kernel[(tiles * c.split,)](
        x, w, w_desc, out, res, gain, scaled, sq_in, sq_out, bias, best, where, *kv, ws, counters,
        rows, n, k, pair, eps, 0.0 if o is None else o.eps, 0 if o is None else o.table.shape[1],
        1 if o is None else o.k.shape[1], 1 if o is None else o.cos.shape[0],
        BN=c.bn, BK=c.bk, RB=rows_bucket(rows), SPLIT=c.split, EPI=epi, NORM=sq_in is not None, SQ_TILES=sq_tiles,
        SQ_PAD=triton.next_power_of_2(sq_tiles), BIAS=bias is not None, EVEN=even, STORE_OUT=store_out,
        HEADS=0 if o is None else o.heads, KH=1 if o is None else o.k.shape[2], D=2 if o is None else o.k.shape[3],
        QK_NORM=o is not None and o.q_gain is not None, BASE=epi == HEAD and res is not None,
        TMA=c.tma, PDL=pdl, HOLD=c.hold, num_warps=c.warps, num_stages=c.stages, launch_pdl=pdl,
    )  # fmt: skip
