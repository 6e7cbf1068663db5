# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the ops in kernels/delta_ops.py are typed.)
"""The gated delta rule: a decode frame's rows behind their slots' states, and prompts tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tlx

from slipstream.kernels.tuning import DeltaConfig

TILE = 16
"""Prompt rows of a tile."""


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _mixed(
    x_ptr, recent_ptr, conv_ptr, channel, ok, pos, base, x_stride, M, X: tl.constexpr, T: tl.constexpr,
    CHANNEL: tl.constexpr, TAP: tl.constexpr,
):  # fmt: skip
    """silu of the convolution at `pos` of some channels: inputs before `base` are in recent, the others are rows of x.

    x_ptr: the row of position `base`. Inputs before the sequence are 0.
    """
    mixed = tl.zeros(channel.shape, tl.float32)
    for t in tl.static_range(T):
        at = pos - (T - 1) + t
        old = tl.load(recent_ptr + (at % M) * X + channel, mask=ok & (at >= 0) & (at < base), other=0.0)
        new = tl.load(x_ptr + (at - base) * x_stride + channel, mask=ok & (at >= base), other=0.0)
        tap = tl.load(conv_ptr + channel * CHANNEL + t * TAP, mask=ok, other=0.0)
        mixed += (old.to(tl.float32) + new.to(tl.float32)) * tap
    return mixed * tl.sigmoid(mixed)


@triton.jit
def _input(x_ptr, recent_ptr, column, ok, pos, base, x_stride, M, X: tl.constexpr):
    """The numbers of the input at `pos` in some columns."""
    old = tl.load(recent_ptr + (pos % M) * X + column, mask=ok & (pos >= 0) & (pos < base), other=0.0)
    new = tl.load(x_ptr + (pos - base) * x_stride + column, mask=ok & (pos >= base), other=0.0)
    return old + new


@triton.jit
def _row(x_row, ring, pos, base, x_stride, M: tl.constexpr, X: tl.constexpr):
    """Where the input at `pos` lies."""
    return tl.where(pos < base, ring + (pos % M) * X, x_row + (pos - base) * x_stride)


@triton.jit
def _past(
    x_row, ring, conv_ptr, channel, ok, pos, base, x_stride, M: tl.constexpr, X: tl.constexpr, T: tl.constexpr,
    CHANNEL: tl.constexpr, TAP: tl.constexpr,
):  # fmt: skip
    """What the inputs before `pos` add to the convolution there."""
    total = tl.zeros(channel.shape, tl.float32)
    for t in tl.static_range(T - 1):
        at = pos - (T - 1) + t
        raw = tl.load(_row(x_row, ring, at, base, x_stride, M, X) + channel, mask=ok & (at >= 0), other=0.0)
        total += raw.to(tl.float32) * tl.load(conv_ptr + channel * CHANNEL + t * TAP, mask=ok, other=0.0)
    return total


@triton.jit
def _mix(past, row, conv_ptr, channel, ok, T: tl.constexpr, CHANNEL: tl.constexpr, TAP: tl.constexpr):
    """silu of the convolution whose newest input is `row`."""
    tap = tl.load(conv_ptr + channel * CHANNEL + (T - 1) * TAP, mask=ok, other=0.0)
    mixed = past + tl.load(row + channel, mask=ok, other=0.0).to(tl.float32) * tap
    return mixed * tl.sigmoid(mixed)


@triton.jit
def _add_pair(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["B", "R", "row_of_stride", "places"])
def delta_rows_kernel(
    x_ptr, state_ptr, recent_ptr, saved_ptr, saved_in_ptr, absorbed_ptr, places_ptr, conv_ptr, decay_ptr, dt_ptr,
    committed_ptr, slot_ptr, rows_ptr, row_of_ptr, out_ptr,
    B, R, x_stride, row_of_stride, places, interval, early,
    N: tl.constexpr, KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, X: tl.constexpr, T: tl.constexpr,
    M: tl.constexpr, CHANNEL: tl.constexpr, TAP: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    SLICE: tl.constexpr, SCALE: tl.constexpr, SAVES: tl.constexpr, BY_SLOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BV columns of a head's state in registers. SLICE: columns of x that it keeps. Grid (cdiv(DV, BV) * N, B), so that
    programs that start together read a slot's states from end to end; not BY_SLOT: (B, cdiv(DV, BV) * N).

    Most of the time goes by until the state is there, so it is asked for first. Within a chain of dependent launches
    nobody else writes states, the inputs kept beside them, slots or row counts: none of them waits for the launch
    before. Keys and queries are normed behind the sums that they go into, which need not wait for the norms then.
    """
    parts: tl.constexpr = tl.cdiv(DV, BV)
    b, rank = (tl.program_id(1), tl.program_id(0)) if BY_SLOT else (tl.program_id(0), tl.program_id(1))
    n, part = rank // parts % N, rank % parts  # % N: bounds that save the compiler 64-bit sums for each element
    if PDL:
        tlx.gdc_launch_dependents()
    slot = tl.load(slot_ptr + b)
    rows = tl.load(rows_ptr + b)
    first = tl.load(row_of_ptr + b * row_of_stride)
    i, own = tl.arange(0, KP), tl.arange(0, BV)
    j = part * BV + own
    i_ok, j_ok = (i < DK) | (DK == KP), (j < DV) | (DV % BV == 0)  # told apart when compiled
    inside = i_ok[:, None] & j_ok[None, :]
    cell = i[:, None] * DV + own[None, :]
    home = state_ptr + (slot * N + n) * (DK * DV) + part * BV + cell
    state = tl.load(home, mask=inside, other=0.0)
    tl.debug_barrier()  # or the compiler asks for it behind what waits for `base`
    live = rows > 0
    base = tl.load(committed_ptr + slot).to(tl.int32)
    absorbed = tl.load(absorbed_ptr + slot).to(tl.int32)
    key = n // (N // KEYS)
    q_at, k_at, v_at = key * DK + i, (KEYS + key) * DK + i, 2 * KEYS * DK + n * DV + j
    x_row, ring = x_ptr + first * x_stride, recent_ptr + slot * M * X
    decay, dt = tl.load(decay_ptr + n), tl.load(dt_ptr + n)
    mine = tl.where(live, rows, 0).to(tl.int32)
    steps = tl.where(live, base + mine - absorbed, 0)
    # The inputs before the first step's are never rows of this frame.
    past_q = _past(x_row, ring, conv_ptr, q_at, i_ok & live, absorbed, base, x_stride, M, X, T, CHANNEL, TAP)
    past_k = _past(x_row, ring, conv_ptr, k_at, i_ok & live, absorbed, base, x_stride, M, X, T, CHANNEL, TAP)
    past_v = _past(x_row, ring, conv_ptr, v_at, j_ok & live, absorbed, base, x_stride, M, X, T, CHANNEL, TAP)
    column = (n * parts + part) * SLICE + tl.arange(0, SLICE)
    kept = column < X
    if PDL:
        tlx.gdc_wait()
    for step in range(steps):
        pos = absorbed + step
        row = _row(x_row, ring, pos, base, x_stride, M, X)
        q = _mix(past_q, row, conv_ptr, q_at, i_ok, T, CHANNEL, TAP)
        k = _mix(past_k, row, conv_ptr, k_at, i_ok, T, CHANNEL, TAP)
        v = _mix(past_v, row, conv_ptr, v_at, j_ok, T, CHANNEL, TAP)
        gate = row + (2 * KEYS * DK + N * DV + n)
        a, beta = tl.load(gate).to(tl.float32), tl.sigmoid(tl.load(gate + N).to(tl.float32))
        if step + 1 < steps:
            past_q = _past(x_row, ring, conv_ptr, q_at, i_ok, pos + 1, base, x_stride, M, X, T, CHANNEL, TAP)
            past_k = _past(x_row, ring, conv_ptr, k_at, i_ok, pos + 1, base, x_stride, M, X, T, CHANNEL, TAP)
            past_v = _past(x_row, ring, conv_ptr, v_at, j_ok, pos + 1, base, x_stride, M, X, T, CHANNEL, TAP)
        fade = tl.exp(decay * _softplus(a + dt))
        q_q, k_k = tl.reduce((q * q, k * k), 0, _add_pair)
        k_norm = tl.rsqrt(k_k + 1e-6)
        change = (v - tl.sum(state * k[:, None], 0) * (fade * k_norm)) * (beta * k_norm)
        state = state * fade + k[:, None] * change[None, :]
        if pos >= base:
            out = tl.sum(state * q[:, None], 0) * (tl.rsqrt(q_q + 1e-6) * SCALE)
            to = out_ptr + (first + pos - base) * (N * DV) + n * DV + j
            tl.store(to, out.to(out_ptr.dtype.element_ty), mask=j_ok)
        if pos == base:
            bonus = tl.load(row + column, mask=kept)
            tl.store(home, state, mask=inside, cache_modifier=".cs")
            tl.store(ring + (base % M) * X + column, bonus, mask=kept)
        if SAVES:
            count = pos + 1 + early
            if (pos <= base) & (count % interval == 0):
                saved = tl.load(places_ptr + slot * places + tl.minimum(count // interval, places - 1))
                to = saved_ptr + (saved * N + n) * (DK * DV) + part * BV + cell
                tl.store(to, state, mask=inside, cache_modifier=".cs")
                for h in range(T - 1):
                    at = pos - (T - 2) + h
                    was = _row(x_row, ring, at, base, x_stride, M, X)
                    raw = tl.load(was + column, mask=kept & (at >= 0), other=0.0)
                    tl.store(saved_in_ptr + (saved * (T - 1) + h) * X + column, raw, mask=kept)
    # Positions from base on: other places of the ring than those that are read.
    for depth in range(1, mine):
        raw = tl.load(x_row + depth * x_stride + column, mask=kept)
        tl.store(ring + ((base + depth) % M) * X + column, raw, mask=kept)
    if b == B - 1:
        # The cells of a slot without rows name some row, so where the rows end is counted.
        end, every = 0, tl.arange(0, 128)
        for at in range(0, B, 128):
            end += tl.sum(tl.load(rows_ptr + at + every, mask=at + every < B, other=0), 0).to(tl.int32)
        for row in range(end, R):
            tl.store(out_ptr + row * (N * DV) + n * DV + j, tl.zeros([BV], out_ptr.dtype.element_ty), mask=j_ok)


@triton.jit(do_not_specialize=["B"])
def absorb_kernel(absorbed_ptr, committed_ptr, slot_ptr, rows_ptr, B, BLOCK: tl.constexpr):
    """Grid (cdiv(B, BLOCK),)."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = b < B
    slot = tl.load(slot_ptr + b, mask=ok, other=0)
    live = ok & (tl.load(rows_ptr + b, mask=ok, other=0) > 0)
    tl.store(absorbed_ptr + slot, tl.load(committed_ptr + slot, mask=live, other=0) + 1, mask=live)


@triton.jit
def _inverse(low, L: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + low)^-1 of a strictly lower triangular matrix [L, L]: (1 - low)(1 + low^2)(1 + low^4)(1 + low^8), and a step
    of Newton's against what rounding left, as powers of an all-ones matrix grow."""
    i = tl.arange(0, L)
    one = (i[:, None] == i[None, :]).to(tl.float32)
    inverse, power = one - low, low
    for _ in tl.static_range(3):
        power = tl.dot(power, power, input_precision=PRECISION)
        inverse = inverse + tl.dot(inverse, power, input_precision=PRECISION)
    left = 2.0 * one - (inverse + tl.dot(low, inverse, input_precision=PRECISION))
    return tl.dot(inverse, left, input_precision=PRECISION)


@triton.jit(do_not_specialize=["tiles"])
def delta_prepare_kernel(
    x_ptr, recent_ptr, conv_ptr, decay_ptr, dt_ptr, slot_ptr, pos_ptr, tile_ptr, q_ptr, k_ptr, v_ptr, gate_ptr, mat_ptr,
    tiles, x_stride, M,
    N: tl.constexpr, KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, X: tl.constexpr, T: tl.constexpr,
    CHANNEL: tl.constexpr, TAP: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, L: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, N): what of a tile does not need the state before it. Its queries, keys and values; of each token
    its decay since the tile began, and its beta; the inverse of the tile's system, and what queries see of its keys."""
    t, n = tl.program_id(0), tl.program_id(1)
    rows = tl.load(tile_ptr + 2 * tiles + t)
    if rows > 0:
        first, run = tl.load(tile_ptr + t), tl.load(tile_ptr + tiles + t)
        slot, start = tl.load(slot_ptr + first), tl.load(pos_ptr + first)
        ring = recent_ptr + slot * M * X
        base = start - (first - run)  # inputs before the run's first row are in recent
        x_row = x_ptr + run * x_stride
        i, j, r = tl.arange(0, KP), tl.arange(0, VP), tl.arange(0, L)
        live = r < rows
        keys_ok, values_ok = live[:, None] & (i < DK)[None, :], live[:, None] & (j < DV)[None, :]
        pos, same = start + r, r[:, None] * 0
        key = n // (N // KEYS)
        q_at, k_at, v_at = key * DK + i, (KEYS + key) * DK + i, 2 * KEYS * DK + n * DV + j
        q = _mixed(
            x_row, ring, conv_ptr, q_at[None, :] + same, keys_ok, pos[:, None], base, x_stride, M, X, T, CHANNEL, TAP
        )
        k = _mixed(
            x_row, ring, conv_ptr, k_at[None, :] + same, keys_ok, pos[:, None], base, x_stride, M, X, T, CHANNEL, TAP
        )
        q = q * (tl.rsqrt(tl.sum(q * q, 1) + 1e-6) * SCALE)[:, None]
        k = k * tl.rsqrt(tl.sum(k * k, 1) + 1e-6)[:, None]
        if n % (N // KEYS) == 0:
            to = ((first + r)[:, None] * KEYS + key) * DK + i[None, :]
            tl.store(q_ptr + to, q, mask=keys_ok)
            tl.store(k_ptr + to, k, mask=keys_ok)
        v = _mixed(
            x_row, ring, conv_ptr, v_at[None, :] + same, values_ok, pos[:, None], base, x_stride, M, X, T, CHANNEL, TAP
        )
        tl.store(v_ptr + ((first + r)[:, None] * N + n) * DV + j[None, :], v, mask=values_ok)
        gate = x_row + (pos - base) * x_stride + 2 * KEYS * DK + N * DV + n
        a = tl.load(gate, mask=live, other=0.0).to(tl.float32)
        beta = tl.sigmoid(tl.load(gate + N, mask=live, other=0.0).to(tl.float32))
        g = tl.where(live, tl.load(decay_ptr + n) * _softplus(a + tl.load(dt_ptr + n)), 0.0)
        total = tl.cumsum(g, 0)
        to = gate_ptr + ((first + r) * N + n) * 2
        tl.store(to, total, mask=live)
        tl.store(to + 1, beta, mask=live)
        between = tl.exp(tl.where(r[:, None] >= r[None, :], total[:, None] - total[None, :], 0.0))
        k_k = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * tl.where(live, beta, 0.0)[:, None]
        inverse = _inverse(tl.where(r[:, None] > r[None, :], k_k, 0.0), L, PRECISION)
        q_k = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
        to = mat_ptr + (t * N + n) * (2 * L * L) + r[:, None] * L + r[None, :]
        tl.store(to, inverse)
        tl.store(to + L * L, tl.where(r[:, None] >= r[None, :], q_k, 0.0))


@triton.jit(do_not_specialize=["tiles"])
def delta_prompt_kernel(
    x_ptr, state_ptr, recent_ptr, saved_ptr, saved_in_ptr, places_ptr, slot_ptr, pos_ptr, tile_ptr, q_ptr, k_ptr, v_ptr,
    gate_ptr, mat_ptr, out_ptr,
    tiles, x_stride, M, places, interval, early,
    N: tl.constexpr, KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, X: tl.constexpr, T: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, SLICE: tl.constexpr, SAVES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (N, cdiv(DV, BV)): a program goes over all tiles in order; a run of rows of one slot is one sequence."""
    n, part = tl.program_id(0), tl.program_id(1)
    i, j, r = tl.arange(0, KP), part * BV + tl.arange(0, BV), tl.arange(0, L)
    i_ok, j_ok = i < DK, j < DV
    key = n // (N // KEYS)
    inside = i_ok[:, None] & j_ok[None, :]
    place = n * (DK * DV) + i[:, None] * DV + j[None, :]
    column = (n * tl.num_programs(1) + part) * SLICE + tl.arange(0, SLICE)
    kept = column < X
    state = tl.zeros([KP, BV], tl.float32)
    for t in range(tiles):
        rows = tl.load(tile_ptr + 2 * tiles + t)
        if rows > 0:
            first, run = tl.load(tile_ptr + t), tl.load(tile_ptr + tiles + t)
            slot, start = tl.load(slot_ptr + first), tl.load(pos_ptr + first)
            home = state_ptr + slot * (N * DK * DV) + place
            if first == run:  # what a slot's last owner left is nothing to a sequence that begins
                state = tl.load(home, mask=inside & (start > 0), other=0.0)
            live = r < rows
            at = ((first + r)[:, None] * KEYS + key) * DK + i[None, :]
            k = tl.load(k_ptr + at, mask=live[:, None] & i_ok[None, :], other=0.0)
            values_at = ((first + r)[:, None] * N + n) * DV + j[None, :]
            values_ok = live[:, None] & j_ok[None, :]
            v = tl.load(v_ptr + values_at, mask=values_ok, other=0.0)
            gate = gate_ptr + ((first + r) * N + n) * 2
            total = tl.load(gate, mask=live, other=0.0)
            beta = tl.load(gate + 1, mask=live, other=0.0)
            whole = tl.load(gate_ptr + ((first + rows - 1) * N + n) * 2)
            mat = mat_ptr + (t * N + n) * (2 * L * L) + r[:, None] * L + r[None, :]
            from_start = tl.exp(total)[:, None]
            told = tl.dot(k * from_start, state, input_precision=PRECISION)
            written = tl.dot(tl.load(mat), beta[:, None] * (v - told), input_precision=PRECISION)
            q = tl.load(q_ptr + at, mask=live[:, None] & i_ok[None, :], other=0.0)
            out = tl.dot(q * from_start, state, input_precision=PRECISION)
            out += tl.dot(tl.load(mat + L * L), written, input_precision=PRECISION)
            tl.store(out_ptr + values_at, out.to(out_ptr.dtype.element_ty), mask=values_ok)
            k_end = k * tl.where(live, tl.exp(whole - total), 0.0)[:, None]
            state = state * tl.exp(whole) + tl.dot(tl.trans(k_end), written, input_precision=PRECISION)
            follows = t + 1 < tiles
            more = tl.load(tile_ptr + 2 * tiles + t + 1, mask=follows, other=0) > 0
            same_run = tl.load(tile_ptr + tiles + t + 1, mask=follows, other=-1) == run
            if (more & same_run) == 0:
                tl.store(home, state, mask=inside)
            if SAVES:
                end = start + rows
                if (end + early) % interval == 0:
                    saved = tl.load(places_ptr + slot * places + tl.minimum((end + early) // interval, places - 1))
                    tl.store(saved_ptr + saved * (N * DK * DV) + place, state, mask=inside)
                    base = start - (first - run)
                    ring = recent_ptr + slot * M * X
                    for h in range(T - 1):
                        raw = _input(
                            x_ptr + run * x_stride, ring, column, kept, end - (T - 1) + h, base, x_stride, M, X
                        )
                        tl.store(saved_in_ptr + (saved * (T - 1) + h) * X + column, raw, mask=kept)


@triton.jit(do_not_specialize=["R"])
def keep_recent_kernel(
    x_ptr, recent_ptr, slot_ptr, pos_ptr, R, x_stride, M, X: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (R, cdiv(X, BLOCK)): the last H rows of each slot. After the prompt's kernel, which reads older ones."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    after = tl.load(slot_ptr + row + H, mask=row + H < R, other=0)
    if (slot > 0) & (after != slot):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        raw = tl.load(x_ptr + tl.cast(row, tl.int64) * x_stride + column, mask=column < X)
        to = recent_ptr + (slot * M + tl.load(pos_ptr + row) % M) * X + column
        tl.store(to, raw, mask=column < X)


def _sizes(x, recent, state, key_heads, key_dim, value_block):
    _, heads, dk, dv = state.shape
    assert dk == key_dim and x.stride(1) == 1
    parts = triton.cdiv(dv, value_block)
    return {
        "N": heads, "KEYS": key_heads, "DK": dk, "DV": dv, "X": recent.shape[2],
        "KP": max(16, triton.next_power_of_2(dk)), "BV": value_block,
        "SLICE": triton.next_power_of_2(triton.cdiv(recent.shape[2], heads * parts)), "SCALE": dk**-0.5,
    }, (heads, parts)  # fmt: skip


def launch_delta_rows(
    x, state, recent, saved, saved_in, absorbed, places, conv, decay, dt, committed, slot, rows, row_of, out, *,
    key_heads, key_dim, interval, early, config=None, pdl=False,
):  # fmt: skip
    c = config or DeltaConfig()
    sizes, (heads, parts) = _sizes(x, recent, state, key_heads, key_dim, c.columns)
    grid = (heads * parts, slot.shape[0])
    delta_rows_kernel[grid if c.by_slot else grid[::-1]](
        x, state, recent, saved, saved_in, absorbed, places, conv, decay, dt, committed, slot, rows, row_of, out,
        slot.shape[0], x.shape[0], x.stride(0), row_of.stride(0), places.shape[1], max(1, interval), early,
        T=conv.shape[1], M=recent.shape[1], CHANNEL=conv.stride(0), TAP=conv.stride(1), SAVES=interval > 0,
        BY_SLOT=c.by_slot, PDL=pdl, num_warps=c.warps, maxnreg=c.registers, launch_pdl=pdl, **sizes,
    )  # fmt: skip


def launch_absorb(absorbed, committed, slot, rows):
    slots = slot.shape[0]
    absorb_kernel[(triton.cdiv(slots, 128),)](absorbed, committed, slot, rows, slots, BLOCK=128, num_warps=4)


def launch_delta_prompt(
    x, state, recent, saved, saved_in, places, conv, decay, dt, slot, pos, tile, out, *, key_heads, key_dim, interval,
    early, precision="tf32x3", value_block=32, warps=4,
):  # fmt: skip
    sizes, grid = _sizes(x, recent, state, key_heads, key_dim, value_block)
    rows, columns, taps, tiles = x.shape[0], recent.shape[2], conv.shape[1], tile.shape[1]
    heads, dv = state.shape[1], state.shape[3]
    q, k = (state.new_empty(rows, key_heads, key_dim) for _ in "qk")
    v, gate = state.new_empty(rows, heads, dv), state.new_empty(rows, heads, 2)
    mat = state.new_empty(tiles, heads, 2, TILE, TILE)
    parts = (q, k, v, gate, mat)
    own = {name: sizes[name] for name in ("N", "KEYS", "DK", "DV", "X", "KP", "SCALE")}
    delta_prepare_kernel[(tiles, heads)](
        x, recent, conv, decay, dt, slot, pos, tile, *parts, tiles, x.stride(0), recent.shape[1], T=taps, L=TILE,
        CHANNEL=conv.stride(0), TAP=conv.stride(1), VP=max(16, triton.next_power_of_2(dv)), PRECISION=precision,
        num_warps=4, **own,
    )  # fmt: skip
    sizes.pop("SCALE")
    delta_prompt_kernel[grid](
        x, state, recent, saved, saved_in, places, slot, pos, tile, *parts, out, tiles, x.stride(0), recent.shape[1],
        places.shape[1], max(1, interval), early, T=taps, L=TILE, SAVES=interval > 0, PRECISION=precision,
        num_warps=warps, **sizes,
    )  # fmt: skip
    keep_recent_kernel[(rows, triton.cdiv(columns, 1024))](
        x, recent, slot, pos, rows, x.stride(0), recent.shape[1], X=columns, H=taps - 1, BLOCK=1024, num_warps=4
    )
