# mypy: ignore-errors
# (Triton's device language has no types that mypy could check; the op in kernels/suffix.py is typed.)
"""Matches of a history's end: one program per slot and block of places; then the votes of the best, one per slot."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK, WARPS = 1024, 4


@triton.jit
def suffix_places_kernel(
    history_ptr, slot_ptr, end_ptr, rank_ptr, L, COLUMNS, DEPTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (B, blocks). L: columns of history; COLUMNS: columns of rank, at most L."""
    b = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(end_ptr + b).to(tl.int32)
    own = history_ptr + tl.load(slot_ptr + b) * L
    alive = j < end
    length = tl.zeros([BLOCK], tl.int32)
    if tl.program_id(1) * BLOCK < end:
        for i in range(DEPTH):
            last = tl.load(own + tl.maximum(end - i, 0))
            token = tl.load(own + j - i, mask=alive & (j >= i), other=-1)
            alive = alive & (token == last)
            length += alive.to(tl.int32)
    rank = tl.where(length > 0, length.to(tl.int64) * COLUMNS + j, -1)
    tl.store(rank_ptr + b * COLUMNS + j, rank, mask=j < COLUMNS)


def launch_suffix_places(history, slot, end, rank, *, depth):
    slots, columns = rank.shape
    suffix_places_kernel[(slots, triton.cdiv(columns, BLOCK))](
        history, slot, end, rank, history.shape[1], columns, DEPTH=depth, BLOCK=BLOCK, num_warps=WARPS
    )


@triton.jit
def suffix_walk_kernel(
    rank_ptr, history_ptr, slot_ptr, end_ptr, limit_ptr, token_ptr, count_ptr, score_ptr, L, COLUMNS,
    C, K, DEPTH, CP: tl.constexpr, MP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Grid (B,). limit: most drafts of each level, then the least probability. Level i: DEPTH - i tokens match.

    CP, MP, KP: places, levels and drafts rounded up to powers of two.
    """
    b = tl.program_id(0)
    c, m = tl.arange(0, CP), tl.arange(0, MP)
    end = tl.load(end_ptr + b).to(tl.int32)
    own = history_ptr + tl.load(slot_ptr + b) * L
    rank = tl.load(rank_ptr + b * C + c, mask=c < C, other=-1)
    found = rank >= 0
    length = tl.where(found, rank // COLUMNS, 0).to(tl.int32)
    at = tl.where(found, rank % COLUMNS, 0).to(tl.int32)
    alive = (length[None, :] >= (DEPTH - m)[:, None]) & (m < DEPTH)[:, None] & found[None, :]
    going = tl.max(alive.to(tl.int32), axis=1) > 0
    limit = tl.load(limit_ptr + m, mask=m < DEPTH, other=0.0)
    min_prob = tl.load(limit_ptr + DEPTH)  # as an argument it would be rounded to float32
    prob = going.to(tl.float64)
    score = tl.zeros([MP], tl.float64)
    count, path = tl.zeros([MP], tl.int32), tl.zeros([MP], tl.int32)
    for k in range(K):
        place = at + 1 + k
        known = found & (place <= end)
        token = tl.load(own + place, mask=known, other=-1).to(tl.int32)
        alive = alive & known[None, :]
        same = (token[:, None] == token[None, :]).to(tl.float32)
        # Whole numbers below 2 ** 11: exact.
        votes = tl.dot(alive.to(tl.float32), same, input_precision="ieee").to(tl.int32)
        best = tl.max(tl.where(alive, votes * CP + (CP - 1 - c)[None, :], -1), axis=1)
        first = CP - 1 - best % CP
        voters = tl.sum(alive.to(tl.int32), axis=1)
        prob = prob * ((tl.maximum(best, 0) // CP).to(tl.float64) / tl.maximum(voters, 1).to(tl.float64))
        going = going & (best >= 0) & (prob >= min_prob) & (k < limit)
        score += tl.where(going, prob, 0.0)
        count += going.to(tl.int32)
        chosen = tl.sum(tl.where(c[None, :] == first[:, None], token[None, :], 0), axis=1)
        alive = alive & (token[None, :] == chosen[:, None])
        # The place whose token was chosen agrees with all drafts before it, so the drafts are what follows it.
        path = tl.where(going, tl.sum(tl.where(c[None, :] == first[:, None], at[None, :], 0), axis=1), path)
    mine = m == tl.argmax(score, axis=0)
    start = tl.sum(tl.where(mine, path, 0), axis=0)
    offered = tl.sum(tl.where(mine, count, 0), axis=0)
    k = tl.arange(0, KP)
    draft = tl.load(own + start + 1 + k, mask=k < offered, other=0)
    tl.store(token_ptr + b * K + k, draft, mask=k < K)
    tl.store(count_ptr + b, offered.to(tl.int64))
    tl.store(score_ptr + b, tl.sum(tl.where(mine, score, 0.0), axis=0))


def launch_suffix_walk(rank, history, slot, end, limit, token, count, score, *, columns):
    slots, places = rank.shape
    drafts, depth = token.shape[1], limit.shape[0] - 1
    # Without fused multiply-adds the sums are the reference's, bit for bit: equal scores stay equal.
    suffix_walk_kernel[(slots,)](
        rank, history, slot, end, limit, token, count, score, history.shape[1], columns, places, drafts,
        depth, CP=max(16, triton.next_power_of_2(places)), MP=max(16, triton.next_power_of_2(depth)),
        KP=triton.next_power_of_2(drafts), num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
