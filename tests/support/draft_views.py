"""Parts of a `DraftView` for drafters that do not look at them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.draft.protocol import DraftView, TargetRows
from slipstream.sampling.slot_params import SlotLaws, SlotParams
from tests.support.sample_cases import Case


def no_rows(zero_B: Tensor) -> TargetRows:
    """One row per slot, all padding."""
    return TargetRows(
        slot_R=zero_B, pos_R=zero_B, token_R=zero_B, owner_R=zero_B, slot_B=zero_B, rows_B=zero_B,
        row_of_BW=zero_B[:, None],
    )  # fmt: skip


def sampled_view(case: Case, slot_B: Tensor, *, filtered: bool, kernels: bool) -> DraftView:
    """The end of a sampled frame of all modes over the case's slots; kernels: choices go through `laws`."""
    s, state = case.sampling, case.state
    laws = SlotLaws(
        params=SlotParams(mode=s.mode, key=state.key, child=state.child, temperature=s.temperature, top_k=s.top_k,
                          top_p=s.top_p, min_p=s.min_p),
        stop_ids_ST=state.stop_ids, min_len_S=s.min_len, q_SKV=case.q,
    )  # fmt: skip
    at = laws.params.take(slot_B)
    real = {name: getattr(at, name).to(torch.float32) for name in ("temperature", "top_p", "min_p")}
    params = SlotParams(mode=at.mode, key=at.key, child=at.child, top_k=at.top_k, **real)
    zero_B = torch.zeros_like(slot_B)
    none: dict[str, Any] = {"params": None, "laws": laws} if kernels else {"params": params, "laws": None}
    return DraftView(
        slot_B=slot_B, committed_B=state.committed[slot_B], drafted_B=zero_B, accepted_B=zero_B, emitted_B=zero_B,
        rows=no_rows(zero_B), history_SL=state.history, committed_S=state.committed, table_SP=zero_B[:, None],
        len_ub=0, first_page=(), drafts=0, sampled=True, filtered=filtered, rejection=True, coupled=True, **none,
    )  # fmt: skip
