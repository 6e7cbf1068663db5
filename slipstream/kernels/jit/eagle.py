# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the ops in kernels/eagle.py are typed.)
"""An EAGLE-3 head's rows, and its embedding beside its features, both normed."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tlx


@triton.jit(do_not_specialize=["R"])
def feature_rows_kernel(
    slot_ptr, pos_ptr, committed_ptr, history_ptr, out_slot_ptr, out_cell_ptr, out_token_ptr, R, L, BLOCK: tl.constexpr
):
    """Grid (cdiv(R, BLOCK),)."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = r < R
    slot = tl.load(slot_ptr + r, mask=ok, other=0)
    pos = tl.load(pos_ptr + r, mask=ok, other=0)
    kept = (slot > 0) & (pos < tl.load(committed_ptr + slot, mask=ok, other=0))
    slot = tl.where(kept, slot, 0)
    cell = tl.where(kept, pos + 1, 0)
    tl.store(out_slot_ptr + r, slot, mask=ok)
    tl.store(out_cell_ptr + r, cell, mask=ok)
    tl.store(out_token_ptr + r, tl.load(history_ptr + slot * L + cell, mask=ok, other=0), mask=ok)


@triton.jit
def join_norms_kernel(
    token_ptr, embed_ptr, x_ptr, embed_gain_ptr, gain_ptr, joined_ptr, normed_ptr, H, eps,
    HB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, 2): program (r, 0) norms the row's embedding, (r, 1) its features."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, HB)
    ok = i < H
    if PDL:
        # Opens a chain of dependent launches: see residual_norm_kernel.
        tlx.gdc_wait()
        tlx.gdc_launch_dependents()
    if tl.program_id(1) == 0:
        at = tl.load(token_ptr + row).to(tl.int64) * H + i
        e = tl.load(embed_ptr + at, mask=ok, other=0.0).to(tl.float32)
        gain = tl.load(embed_gain_ptr + i, mask=ok, other=0.0).to(tl.float32)
        e = e * tl.rsqrt(tl.sum(e * e, axis=0) / H + eps) * gain
        tl.store(joined_ptr + row * (2 * H) + i, e.to(joined_ptr.dtype.element_ty), mask=ok)
    else:
        x = tl.load(x_ptr + row * H + i, mask=ok, other=0.0).to(tl.float32)
        gain = tl.load(gain_ptr + i, mask=ok, other=0.0).to(tl.float32)
        x = (x * tl.rsqrt(tl.sum(x * x, axis=0) / H + eps) * gain).to(joined_ptr.dtype.element_ty)
        tl.store(joined_ptr + row * (2 * H) + H + i, x, mask=ok)
        tl.store(normed_ptr + row * H + i, x, mask=ok)


def launch_feature_rows(slot, pos, committed, history, out_slot, out_cell, out_token):
    rows = slot.shape[0]
    feature_rows_kernel[(triton.cdiv(rows, 128),)](
        slot, pos, committed, history, out_slot, out_cell, out_token, rows, history.shape[1], BLOCK=128, num_warps=4
    )


def launch_join_norms(token, embed, x, embed_gain, gain, joined, normed, *, eps, pdl=False):
    rows, hidden = x.shape
    join_norms_kernel[(rows, 2)](
        token, embed, x, embed_gain, gain, joined, normed, hidden, eps, HB=triton.next_power_of_2(hidden), PDL=pdl,
        num_warps=8 if hidden >= 2048 else 4, launch_pdl=pdl,
    )  # fmt: skip
