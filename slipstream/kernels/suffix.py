"""Suffix decoding over a slot's own history: which earlier places match its end, and what most of them went on with.

Source: Oliaro et al., "SuffixDecoding" (arXiv 2411.04975). Nothing is kept between frames: the tables are made from
history each time, so a new owner of a slot, a preemption or frames without drafts leave nothing to repair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.draft import match_lengths

OP = "slipstream::"


class SuffixRule(NamedTuple):
    """depth: longest suffix that counts. places: earlier places that vote. factor, offset, min_prob: see `walk`."""

    depth: int
    places: int
    factor: float
    offset: float
    min_prob: float


@torch.library.custom_op(OP + "suffix_places", mutates_args=())
def suffix_places(history_SL: Tensor, slot_B: Tensor, end_B: Tensor, columns: int, depth: int) -> Tensor:
    """Rank [B, columns], int64, of every earlier place: matching tokens * columns + place, -1 where none match.

    Place j matches as many tokens (at most depth) as history[:j + 1] and history[:end + 1] share at their ends.
    """
    history_BL = history_SL[:, :columns][slot_B]
    length_BL = match_lengths(history_BL, end_B, depth)
    column_L = torch.arange(columns, device=history_SL.device)
    return torch.where((length_BL > 0) & (column_L < end_B[:, None]), length_BL * columns + column_L, -1)


@suffix_places.register_fake
def _(history_SL: Tensor, slot_B: Tensor, end_B: Tensor, columns: int, depth: int) -> Tensor:
    return history_SL.new_empty(slot_B.shape[0], columns)


@suffix_places.register_kernel("cuda")
def _(history_SL: Tensor, slot_B: Tensor, end_B: Tensor, columns: int, depth: int) -> Tensor:
    from slipstream.kernels.jit import suffix

    rank_BL = history_SL.new_empty(slot_B.shape[0], columns)
    suffix.launch_suffix_places(history_SL, slot_B, end_B, rank_BL, depth=depth)
    return rank_BL


def suffix_draft(
    history_SL: Tensor, slot_B: Tensor, end_B: Tensor, columns: int, drafts: int, rule: SuffixRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts [B, K] for what follows history[:end + 1], how many are worth offering [B], and their score [B]."""
    rank_BL = suffix_places(history_SL, slot_B, end_B, columns, rule.depth)
    rank_BC = rank_BL.topk(min(rule.places, columns), 1).values
    out: tuple[Tensor, Tensor, Tensor] = suffix_walk(
        rank_BC, history_SL, slot_B, end_B, columns, drafts, rule.depth, rule.factor, rule.offset, rule.min_prob
    )
    return out


@torch.library.custom_op(OP + "suffix_walk", mutates_args=())
def suffix_walk(
    rank_BC: Tensor, history_SL: Tensor, slot_B: Tensor, end_B: Tensor, columns: int, drafts: int, depth: int,
    factor: float, offset: float, min_prob: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`walk` from the places of rank_BC (see `suffix_places`), best first: tokens [B, K], count [B], score [B].

    What a token behind the count is has no meaning.
    """
    found_BC = rank_BC >= 0
    length_BC = torch.where(found_BC, torch.div(rank_BC, columns, rounding_mode="floor"), 0)
    at_BC = torch.where(found_BC, rank_BC % columns, 0)
    offset_K = torch.arange(1, drafts + 1, device=history_SL.device)
    place_BCK = at_BC[:, :, None] + offset_K
    known_BCK = found_BC[:, :, None] & (place_BCK <= end_B[:, None, None])
    next_BCK = history_SL[slot_B[:, None, None], place_BCK.clamp(max=columns - 1)]
    rule = SuffixRule(depth, rank_BC.shape[1], factor, offset, min_prob)
    return walk(length_BC, next_BCK, known_BCK, rule)


@suffix_walk.register_fake
def _(
    rank_BC: Tensor, history_SL: Tensor, slot_B: Tensor, end_B: Tensor, columns: int, drafts: int, depth: int,
    factor: float, offset: float, min_prob: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    slots = slot_B.shape[0]
    score_B = history_SL.new_empty(slots, dtype=torch.float64)
    return history_SL.new_empty(slots, drafts), history_SL.new_empty(slots), score_B


@suffix_walk.register_kernel("cuda")
def _(
    rank_BC: Tensor, history_SL: Tensor, slot_B: Tensor, end_B: Tensor, columns: int, drafts: int, depth: int,
    factor: float, offset: float, min_prob: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from slipstream.kernels.jit import suffix

    slots = slot_B.shape[0]
    token_BK, count_B = history_SL.new_empty(slots, drafts), history_SL.new_empty(slots)
    score_B = history_SL.new_empty(slots, dtype=torch.float64)
    limit_M = draft_limits(depth, factor, offset, drafts, device=history_SL.device)
    limit_M1 = torch.nn.functional.pad(limit_M, (0, 1), value=min_prob)
    suffix.launch_suffix_walk(rank_BC, history_SL, slot_B, end_B, limit_M1, token_BK, count_B, score_B, columns=columns)
    return token_BK, count_B, score_B


def draft_limits(depth: int, factor: float, offset: float, drafts: int, *, device: torch.device) -> Tensor:
    """Most drafts for a match of `depth`, depth - 1, ... 1 tokens [M], float64."""
    level_M = torch.arange(depth, 0, -1, device=device)
    return (level_M.double() * factor + offset).floor().clamp(max=drafts)


def walk(length_BC: Tensor, next_BCK: Tensor, known_BCK: Tensor, rule: SuffixRule) -> tuple[Tensor, Tensor, Tensor]:
    """The best continuation by votes of C places, best ones first: tokens [B, K], count [B], score [B].

    Place c matches length_BC tokens (0: no place) and went on with next_BCK where known_BCK. For every m from 1 to
    depth the places that match at least m tokens vote: each draft is the next token of most of those that agree with
    all drafts before it (of equals, that of the first place), its probability the product of the shares of votes, and
    there are at most factor * m + offset drafts, none below min_prob. The m of the highest score, the sum of
    probabilities, wins; of equals the longest.
    """
    _, places, drafts = next_BCK.shape
    level_M = torch.arange(rule.depth, 0, -1, device=length_BC.device)
    limit_M = draft_limits(rule.depth, rule.factor, rule.offset, drafts, device=length_BC.device)
    first_C = torch.arange(places - 1, -1, -1, device=length_BC.device)
    alive_BMC = length_BC[:, None, :] >= level_M[:, None]
    goes_on_BM = alive_BMC.any(2)
    prob_BM = goes_on_BM.double()
    score_BM, count_BM = torch.zeros_like(prob_BM), torch.zeros_like(goes_on_BM, dtype=torch.int64)
    tokens = []
    for k in range(drafts):
        token_BC = next_BCK[:, :, k]
        alive_BMC = alive_BMC & known_BCK[:, None, :, k]
        same_BCC = token_BC[:, :, None] == token_BC[:, None, :]
        # Whole numbers of at most `places`: exact in any precision of a product.
        votes_BMC = torch.matmul(alive_BMC.float(), same_BCC.float()).to(torch.int64)
        rank_BMC = torch.where(alive_BMC, votes_BMC * places + first_C, -1)
        best_BM, at_BM = rank_BMC.max(2)
        votes_BM = torch.div(best_BM.clamp(min=0), places, rounding_mode="floor")
        prob_BM = prob_BM * (votes_BM / alive_BMC.sum(2).clamp(min=1).double())
        goes_on_BM = goes_on_BM & (best_BM >= 0) & (prob_BM >= rule.min_prob) & (k < limit_M)
        score_BM = score_BM + torch.where(goes_on_BM, prob_BM, 0.0)
        count_BM = count_BM + goes_on_BM
        token_BM = token_BC.gather(1, at_BM)
        tokens.append(token_BM)
        alive_BMC = alive_BMC & (token_BC[:, None, :] == token_BM[:, :, None])
    winner_B1 = score_BM.argmax(1, keepdim=True)
    token_BK = torch.stack([t_BM.gather(1, winner_B1)[:, 0] for t_BM in tokens], 1)
    return token_BK, count_BM.gather(1, winner_B1)[:, 0], score_BM.gather(1, winner_B1)[:, 0]
