# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the ops in kernels/norm.py are typed.)
"""Residual + RMSNorm and SiLU * mul."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tlx


@triton.jit(do_not_specialize=["R"])
def residual_norm_kernel(
    x_ptr, res_ptr, gain_ptr, sum_ptr, out_ptr, sq_ptr, R, H, eps,
    HB: tl.constexpr, RESIDUAL: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R,): one row. SCALE: normalise; else write x * gain and the row's sum of squares."""
    row = tl.program_id(0)
    i = tl.arange(0, HB)
    ok = i < H
    gain = tl.load(gain_ptr + i, mask=ok, other=0.0).to(tl.float32)
    if PDL:
        # This kernel opens a chain of dependent launches: it lets the next one start only after its own wait, so
        # that everything written before the chain (slots, positions, page tables) is complete for all of them.
        tlx.gdc_wait()
        tlx.gdc_launch_dependents()
    at = row.to(tl.int64) * H + i
    h = tl.load(x_ptr + at, mask=ok, other=0.0)
    if RESIDUAL:
        h = (h.to(tl.float32) + tl.load(res_ptr + at, mask=ok, other=0.0).to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, h, mask=ok)
    f = h.to(tl.float32)
    squares = tl.sum(f * f, axis=0)
    if SCALE:
        f = f * tl.rsqrt(squares / H + eps)
    else:
        tl.store(sq_ptr + row, squares)
    tl.store(out_ptr + at, (f * gain).to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def row_rstd(sq_ptr, row, R, width, eps, TILES: tl.constexpr, PAD: tl.constexpr):
    """The second half of a row's RMSNorm over `width` values: 1 / rms from the tiles' shares [TILES, R]."""
    t = tl.arange(0, PAD)
    return tl.rsqrt(tl.sum(tl.load(sq_ptr + t * R + row, mask=t < TILES, other=0.0), axis=0) / width + eps)


@triton.jit(do_not_specialize=["R"])
def silu_mul_kernel(
    x_ptr, sq_ptr, out_ptr, R, I, width, eps,
    BLOCK: tl.constexpr, SQ_TILES: tl.constexpr, SQ_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, cdiv(I, BLOCK)); x is [R, 2 * I], gate then up."""
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < I
    if PDL:
        tlx.gdc_launch_dependents()
        tlx.gdc_wait()
    at = row.to(tl.int64) * (2 * I) + i
    gate = tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + at + I, mask=ok, other=0.0).to(tl.float32)
    if SQ_TILES > 0:
        rstd = row_rstd(sq_ptr, row, R, width, eps, SQ_TILES, SQ_PAD)
        gate = gate * rstd
        up = up * rstd
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row.to(tl.int64) * I + i, out.to(out_ptr.dtype.element_ty), mask=ok)


def launch_residual_norm(x, res, gain, total, out, squares, *, eps, pdl):
    """Launch; `squares` given: out is x * gain and squares the rows' sums of squares, else out is normalised."""
    rows, hidden = x.shape
    residual_norm_kernel[(rows,)](
        x, res, gain, total, out, squares, rows, hidden, eps,
        HB=triton.next_power_of_2(hidden), RESIDUAL=res is not None, SCALE=squares is None, PDL=pdl,
        num_warps=8 if hidden >= 2048 else 4, launch_pdl=pdl,
    )  # fmt: skip


def launch_silu_mul(x, out, *, sq=None, width=1, eps=0.0, pdl=False):
    rows, inner = out.shape
    tiles = 0 if sq is None else sq.shape[0]
    silu_mul_kernel[(rows, triton.cdiv(inner, 1024))](
        x, sq, out, rows, inner, width, eps, BLOCK=1024, SQ_TILES=tiles,
        SQ_PAD=triton.next_power_of_2(max(tiles, 1)), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
