"""N-gram drafting for every slot of a frame in one launch: gate, match, drafts, limits.

Source: Saxena, "Prompt Lookup Decoding" (2023). The functions here are the definition; `draft/ngram.py` uses them
where there is no GPU. Slot state is int64, S slots (slot 0 is the sink); see device/state.py for the fields.
"""

from __future__ import annotations

import torch
from torch import Tensor

OP = "slipstream::"

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.5, 1.0
MEMORY, FORGET = 0.9, 0.995
"""Weight of older rounds when a slot's acceptance is updated; per-frame return to the prior."""


def match_lengths(history_BL: Tensor, end_B: Tensor, max_n: int) -> Tensor:
    """Length [B, L] (at most max_n) of the longest common suffix of history[:j+1] and history[:end+1]."""
    alive_BL = history_BL == history_BL.gather(1, end_B[:, None])
    length_BL = alive_BL.to(torch.int64)
    for i in range(1, max_n):
        if i >= history_BL.shape[1]:
            break
        token_B1 = history_BL.gather(1, (end_B - i).clamp(min=0)[:, None])
        same_BL = (history_BL == token_B1) & (end_B >= i)[:, None]
        alive_BL = torch.cat([torch.zeros_like(alive_BL[:, :i]), alive_BL[:, i:] & same_BL[:, :-i]], 1)
        length_BL = length_BL + alive_BL
    return length_BL


def lookup(history_BL: Tensor, end_B: Tensor, min_n: int, max_n: int, offset_K: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts [B, K], and the length [B] (min_n..max_n, 0 without one) of the match that they continue.

    It is the longest suffix of history[:end + 1] that ends earlier, too, and the latest of those. offset_K: 0..K-1.
    """
    length_BL = match_lengths(history_BL, end_B, max_n)
    columns = history_BL.shape[1]
    column_L = torch.arange(columns, device=history_BL.device)
    usable_BL = (length_BL >= min_n) & (column_L < end_B[:, None])
    best_B = torch.where(usable_BL, length_BL * columns + column_L, -1).amax(1)
    found_B = best_B >= 0
    at_B = torch.where(found_B, best_B % columns, 0)
    matched_B = torch.where(found_B, torch.div(best_B, columns, rounding_mode="floor"), 0)
    # A match close to the end repeats with its period.
    period_B = (end_B - at_B).clamp(min=1)
    source_BK = at_B[:, None] + 1 + offset_K % period_B[:, None]
    return history_BL.gather(1, source_BK.clamp(max=columns - 1)), matched_B


def learn(
    hits_SN: Tensor, tries_SN: Tensor, matched_S: Tensor, slot_B: Tensor, drafted_B: Tensor, accepted_B: Tensor
) -> None:
    """Count a round's accepted and judged drafts under the length of the match that they came from."""
    matched_B = matched_S[slot_B]
    hits_BN, tries_BN = hits_SN[slot_B] * FORGET, tries_SN[slot_B] * FORGET
    one_BN = torch.zeros_like(hits_BN).scatter_(1, matched_B[:, None], 1.0)
    judged_B = torch.minimum(accepted_B + 1, drafted_B)
    keep_BN = 1 - one_BN * (1 - MEMORY) * (judged_B > 0)[:, None]
    hits_SN[slot_B] = hits_BN * keep_BN + one_BN * accepted_B[:, None]
    tries_SN[slot_B] = tries_BN * keep_BN + one_BN * judged_B[:, None]


def paying(hits_B: Tensor, tries_B: Tensor, power_W: Tensor, cost_W: Tensor) -> Tensor:
    """Number of drafts [B] with the most tokens per time: 1 + a + ... + a^j over the cost of j + 1 rows."""
    accept_B = (hits_B + PRIOR_ACCEPTANCE * PRIOR_WEIGHT) / (tries_B + PRIOR_WEIGHT)
    return ((accept_B[:, None] ** power_W).cumsum(1) / cost_W).argmax(1)


def offered(count_B: Tensor, live_B: Tensor, committed_B: Tensor, max_len_B: Tensor, max_drafts_B: Tensor) -> Tensor:
    """Never more than the slot asked for, nor than fit before max_len (the bonus row fills one place)."""
    fits_B = (max_len_B - committed_B - 2).clamp(min=0)
    return torch.where(live_B, torch.minimum(torch.minimum(count_B, max_drafts_B), fits_B), 0)


def offer(
    token_BK: Tensor, count_B: Tensor, record_BC: Tensor, slot_B: Tensor, active_S: Tensor, committed_S: Tensor,
    max_len_S: Tensor, max_drafts_S: Tensor, pending_SW: Tensor, draft_count_S: Tensor,
) -> None:  # fmt: skip
    """Write a round's drafts to slot state, and how many of them the next frame may verify to state and record.

    count_B: how many the drafter offers; a slot that has ended gets none.
    """
    live_B, end_B = active_S[slot_B] > 0, committed_S[slot_B]
    count_B = offered(count_B, live_B, end_B, max_len_S[slot_B], max_drafts_S[slot_B])
    pending_SW[slot_B, 1 : 1 + token_BK.shape[1]] = token_BK
    draft_count_S[slot_B] = count_B
    record_BC[:, 5] = count_B


@torch.library.custom_op(OP + "offer_drafts", mutates_args=("record_BC", "pending_SW", "draft_count_S"))
def offer_drafts(
    token_BK: Tensor, count_B: Tensor, record_BC: Tensor, slot_B: Tensor, active_S: Tensor, committed_S: Tensor,
    max_len_S: Tensor, max_drafts_S: Tensor, pending_SW: Tensor, draft_count_S: Tensor,
) -> None:  # fmt: skip
    """`offer` in one launch."""
    offer(
        token_BK, count_B, record_BC, slot_B, active_S, committed_S, max_len_S, max_drafts_S, pending_SW, draft_count_S
    )


@torch.library.custom_op(
    OP + "ngram_draft",
    mutates_args=("record_BC", "pending_SW", "draft_count_S", "hits_SN", "tries_SN", "matched_S"),
)
def ngram_draft(
    record_BC: Tensor, slot_B: Tensor, active_S: Tensor, committed_S: Tensor, max_len_S: Tensor, max_drafts_S: Tensor,
    history_SL: Tensor, pending_SW: Tensor, draft_count_S: Tensor, hits_SN: Tensor, tries_SN: Tensor,
    matched_S: Tensor, cost_W: Tensor, min_n: int, gate: bool,
) -> None:  # fmt: skip
    """Learn from the round in record_BC (kernels/frame.py), then offer the next drafts of every active slot.

    Writes pending[:, 1:], draft_count and the record's next drafts; of a slot that is not active the count (0) only
    means something. hits, tries [S, max_n + 1], float32: accepted and judged drafts by match length; matched_S: the
    length that the pending drafts came from. cost_W: relative time of a frame with 1, 2, ... K + 1 rows per slot.
    gate=False offers K drafts at every match and learns nothing.
    """
    offset_K = torch.arange(cost_W.shape[0] - 1, device=slot_B.device)
    live_B = active_S[slot_B] > 0
    own_B, end_B = torch.where(live_B, slot_B, 0), torch.where(live_B, committed_S[slot_B], 0)
    if gate:
        learn(hits_SN, tries_SN, matched_S, own_B, record_BC[:, 3], record_BC[:, 2])
    token_BK, matched_B = lookup(history_SL[own_B], end_B, min_n, hits_SN.shape[1] - 1, offset_K)
    count_B = torch.full_like(slot_B, offset_K.shape[0])
    if gate:
        matched_S[own_B] = matched_B
        power_W = torch.arange(cost_W.shape[0], dtype=torch.float32, device=slot_B.device)
        count_B = paying(hits_SN[own_B, matched_B], tries_SN[own_B, matched_B], power_W, cost_W)
    count_B = torch.where(matched_B > 0, count_B, 0)
    count_B = offered(count_B, live_B, end_B, max_len_S[slot_B], max_drafts_S[slot_B])
    pending_SW[slot_B, 1 : 1 + offset_K.shape[0]] = token_BK
    draft_count_S[slot_B] = count_B
    record_BC[:, 5] = count_B


@offer_drafts.register_fake
def _(
    token_BK: Tensor, count_B: Tensor, record_BC: Tensor, slot_B: Tensor, active_S: Tensor, committed_S: Tensor,
    max_len_S: Tensor, max_drafts_S: Tensor, pending_SW: Tensor, draft_count_S: Tensor,
) -> None:  # fmt: skip
    return None


@ngram_draft.register_fake
def _(
    record_BC: Tensor, slot_B: Tensor, active_S: Tensor, committed_S: Tensor, max_len_S: Tensor, max_drafts_S: Tensor,
    history_SL: Tensor, pending_SW: Tensor, draft_count_S: Tensor, hits_SN: Tensor, tries_SN: Tensor,
    matched_S: Tensor, cost_W: Tensor, min_n: int, gate: bool,
) -> None:  # fmt: skip
    return None


@offer_drafts.register_kernel("cuda")
def _(
    token_BK: Tensor, count_B: Tensor, record_BC: Tensor, slot_B: Tensor, active_S: Tensor, committed_S: Tensor,
    max_len_S: Tensor, max_drafts_S: Tensor, pending_SW: Tensor, draft_count_S: Tensor,
) -> None:  # fmt: skip
    from slipstream.kernels.jit import draft

    draft.launch_offer(
        token_BK.contiguous(), count_B.contiguous(), record_BC, slot_B, active_S, committed_S, max_len_S,
        max_drafts_S, pending_SW, draft_count_S,
    )  # fmt: skip


@ngram_draft.register_kernel("cuda")
def _(
    record_BC: Tensor, slot_B: Tensor, active_S: Tensor, committed_S: Tensor, max_len_S: Tensor, max_drafts_S: Tensor,
    history_SL: Tensor, pending_SW: Tensor, draft_count_S: Tensor, hits_SN: Tensor, tries_SN: Tensor,
    matched_S: Tensor, cost_W: Tensor, min_n: int, gate: bool,
) -> None:  # fmt: skip
    from slipstream.kernels.jit import draft

    draft.launch_ngram_draft(
        record_BC, slot_B, active_S, committed_S, max_len_S, max_drafts_S, history_SL, pending_SW, draft_count_S,
        hits_SN, tries_SN, matched_S, cost_W, min_n=min_n, gate=gate,
    )  # fmt: skip
