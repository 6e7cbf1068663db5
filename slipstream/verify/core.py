"""One verification for all modes: slots of a batch are told apart by `torch.where`, never by a branch."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.types import VerifyMode
from slipstream.verify import block as block_rule
from slipstream.verify import coupled as coupled_rule
from slipstream.verify import greedy
from slipstream.verify import rejection as rejection_rule
from slipstream.verify.rejection import Pick
from slipstream.verify.rows import DenseQ, Verdict, VerifyRows
from slipstream.verify.synthetic import synthetic_accepted


def verify(
    logits_RV: Tensor,
    rows: VerifyRows,
    *,
    sampled: bool,
    coupled: bool,
    rejection: bool,
    synthetic: float | None = None,
    u_BK: Tensor | None = None,
    pick: Pick | None = None,
    target_R: Tensor | None = None,
    block: bool = False,
) -> Verdict:
    """Judge the drafts of a round and choose each slot's own token. W = 1 is plain sampling.

    logits_RV: processed logits, float32 or float64, masked tokens -inf; not changed.
    sampled / coupled / rejection: promises of the host; False says that no slot needs that work.
    synthetic: mean acceptance length that replaces the decision how many drafts are accepted.
    u_BK (float64 [B, W - 1]), pick: replace the coins and the closing draw of rejection slots, for
    enumeration tests.

    block: rejection slots with a dense q use block verification instead of the chain rule.
    target_R: the rows' argmax, int64 [R], where the caller has it; without sampled rows the logits are then not read.

    A slot's verdict depends on its own rows only, bit for bit. A row without a finite logit accepts no draft and gives
    NO_TOKEN.
    """
    if target_R is None:
        target_R = greedy.target_tokens(logits_RV)
    is_rejection_B = rows.mode_B == VerifyMode.REJECTION
    # The only [R, V] probabilities of the frame, shared by both sampled modes.
    p_RV = torch.softmax(logits_RV, dim=-1) if sampled and (coupled or rejection) else logits_RV

    width_W = torch.arange(rows.row_of_BW.shape[1], device=logits_RV.device)
    target_BW = target_R[rows.row_of_BW]
    if sampled and coupled:
        coupled_BW = coupled_rule.target_tokens(p_RV, rows)[rows.row_of_BW]
        is_coupled_B1 = (rows.mode_B == VerifyMode.COUPLED).unsqueeze(1)
        target_BW = torch.where(is_coupled_B1 & (target_BW >= 0), coupled_BW, target_BW)

    tests = None
    if block and sampled and rejection and isinstance(rows.q, DenseQ) and target_BW.shape[1] > 1:
        tests = block_rule.block_tests(p_RV, rows)
    accepted_B = _accepted(p_RV, rows, target_BW, is_rejection_B, sampled and rejection, u_BK, synthetic, tests)
    last_B = target_BW.gather(1, accepted_B.unsqueeze(1)).squeeze(1)
    if sampled and rejection:
        if tests is not None:
            weights_BV = block_rule.closing_weights(p_RV, rows, tests, accepted_B)
        else:
            weights_BV = rejection_rule.closing_weights(p_RV, rows, accepted_B)
        drawn_B = (pick or rejection_rule.race_pick(rows))(weights_BV, accepted_B)
        last_B = torch.where(is_rejection_B & (last_B >= 0), drawn_B, last_B)

    n_emitted_B = torch.where(rows.rows_B > 0, accepted_B + 1, 0)
    accepted_B1 = accepted_B.unsqueeze(1)
    draft_BW = torch.nn.functional.pad(rows.draft_BK[:, : width_W.shape[0] - 1], (0, 1))
    tokens_BW = torch.where(width_W < accepted_B1, draft_BW, last_B.unsqueeze(1))
    tokens_BW = torch.where(width_W < n_emitted_B.unsqueeze(1), tokens_BW, 0)
    return Verdict(accepted_B=accepted_B, tokens_BW=tokens_BW, n_emitted_B=n_emitted_B)


def _accepted(
    p_RV: Tensor,
    rows: VerifyRows,
    target_BW: Tensor,
    is_rejection_B: Tensor,
    rejection: bool,
    u_BK: Tensor | None,
    synthetic: float | None,
    tests: block_rule.BlockTests | None,
) -> Tensor:
    """Accepted drafts, int64 [B]; 0 for inactive slots."""
    if synthetic is not None:
        return synthetic_accepted(rows, synthetic)
    drafts = target_BW.shape[1] - 1
    if drafts == 0:
        return torch.zeros_like(rows.rows_B)
    ok_BK = greedy.matches(target_BW, rows.draft_BK)
    coins_BK = None
    if rejection:
        coins_BK = rejection_rule.coins(rows) if u_BK is None else u_BK
    if coins_BK is not None and tests is None:
        ok_BK = torch.where(is_rejection_B.unsqueeze(1), rejection_rule.accepts(p_RV, rows, coins_BK), ok_BK)
    verified_BK = torch.arange(drafts, device=ok_BK.device) < (rows.rows_B - 1).unsqueeze(1)
    accepted_B = rejection_rule.accepted_prefix(ok_BK & verified_BK)
    if coins_BK is None or tests is None:
        return accepted_B
    return torch.where(is_rejection_B, block_rule.block_accepted(tests, coins_BK), accepted_B)
