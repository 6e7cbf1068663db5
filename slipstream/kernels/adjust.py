"""Logits of a frame's rows as their requests want them, before temperature and filters, and the tallies behind that.

One launch adjusts all rows: each reads its slot's penalties and biases, and leaves at once where there are none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.sampling.penalties import (
    add_biases,
    count,
    penalize,
    penalized_slots,
    recount,
    row_tallies,
)

OP = "slipstream::"


@torch.library.custom_op(OP + "adjust_rows", mutates_args=())
def adjust_rows(
    logits_RV: Tensor, slot_R: Tensor, cell_R: Tensor, committed_S: Tensor, pending_SW: Tensor, seen_SW: Tensor | None,
    tally_SV: Tensor, repetition_S: Tensor, presence_S: Tensor, frequency_S: Tensor, bias_count_S: Tensor,
    bias_id_SN: Tensor, bias_value_SN: Tensor, penalties: bool, biases: bool,
) -> Tensor:  # fmt: skip
    """New logits [R, V]: penalties over the row's tally (`sampling.penalties.row_tallies`), then biases.

    cell_R - committed: a row's place in its round. repetition, presence, frequency, bias_value: float64. penalties,
    biases: False promises that no row has any.
    """
    out_RV = logits_RV
    if penalties:
        tally_RV = row_tallies(tally_SV, slot_R, cell_R - committed_S[slot_R], pending_SW, seen_SW)
        out_RV = penalize(out_RV, tally_RV, *(t[slot_R] for t in (repetition_S, presence_S, frequency_S)))
    if out_RV is logits_RV:
        out_RV = logits_RV.clone()
    if biases:
        out_RV = add_biases(out_RV, *(t[slot_R] for t in (bias_count_S, bias_id_SN, bias_value_SN)))
    return out_RV


@torch.library.custom_op(OP + "recount_slots", mutates_args=("tally_SV",))
def recount_slots(
    tally_SV: Tensor, slot_B: Tensor, repetition_S: Tensor, presence_S: Tensor, frequency_S: Tensor,
    history_SL: Tensor, prompt_len_S: Tensor, committed_S: Tensor,
) -> None:  # fmt: skip
    """The tallies of slots whose prompts have been read, from nothing: `sampling.penalties.recount`."""
    counts_S = penalized_slots(repetition_S, presence_S, frequency_S)
    recount(tally_SV, slot_B, counts_S, history_SL, prompt_len_S, committed_S)


@torch.library.custom_op(OP + "count_tokens", mutates_args=("tally_SV",))
def count_tokens(
    tally_SV: Tensor, slot_B: Tensor, repetition_S: Tensor, presence_S: Tensor, frequency_S: Tensor,
    record_BC: Tensor, first: int,
) -> None:  # fmt: skip
    """Every token that a round has committed into its slot's tally: `sampling.penalties.count`.

    record_BC: the frame's record, emitted counts in column 1, tokens from column `first` on.
    """
    counts_S = penalized_slots(repetition_S, presence_S, frequency_S)
    count(tally_SV, slot_B, counts_S, record_BC[:, first:], record_BC[:, 1])


@adjust_rows.register_fake
def _(
    logits_RV: Tensor, slot_R: Tensor, cell_R: Tensor, committed_S: Tensor, pending_SW: Tensor, seen_SW: Tensor | None,
    tally_SV: Tensor, repetition_S: Tensor, presence_S: Tensor, frequency_S: Tensor, bias_count_S: Tensor,
    bias_id_SN: Tensor, bias_value_SN: Tensor, penalties: bool, biases: bool,
) -> Tensor:  # fmt: skip
    return torch.empty_like(logits_RV)


@recount_slots.register_fake
def _(
    tally_SV: Tensor, slot_B: Tensor, repetition_S: Tensor, presence_S: Tensor, frequency_S: Tensor,
    history_SL: Tensor, prompt_len_S: Tensor, committed_S: Tensor,
) -> None:  # fmt: skip
    return None


@count_tokens.register_fake
def _(
    tally_SV: Tensor, slot_B: Tensor, repetition_S: Tensor, presence_S: Tensor, frequency_S: Tensor,
    record_BC: Tensor, first: int,
) -> None:  # fmt: skip
    return None


@adjust_rows.register_kernel("cuda")
def _(
    logits_RV: Tensor, slot_R: Tensor, cell_R: Tensor, committed_S: Tensor, pending_SW: Tensor, seen_SW: Tensor | None,
    tally_SV: Tensor, repetition_S: Tensor, presence_S: Tensor, frequency_S: Tensor, bias_count_S: Tensor,
    bias_id_SN: Tensor, bias_value_SN: Tensor, penalties: bool, biases: bool,
) -> Tensor:  # fmt: skip
    from slipstream.kernels.jit import adjust

    assert logits_RV.dtype == torch.float32, f"logits are float32 here, not {logits_RV.dtype}"
    out_RV = torch.empty_like(logits_RV, memory_format=torch.contiguous_format)
    adjust.launch_adjust_rows(
        logits_RV.contiguous(), out_RV, slot_R.contiguous(), cell_R.contiguous(), committed_S, pending_SW, seen_SW,
        tally_SV, repetition_S, presence_S, frequency_S, bias_count_S, bias_id_SN, bias_value_SN, penalties=penalties,
        biases=biases,
    )  # fmt: skip
    return out_RV


@recount_slots.register_kernel("cuda")
def _(
    tally_SV: Tensor, slot_B: Tensor, repetition_S: Tensor, presence_S: Tensor, frequency_S: Tensor,
    history_SL: Tensor, prompt_len_S: Tensor, committed_S: Tensor,
) -> None:  # fmt: skip
    from slipstream.kernels.jit import adjust

    adjust.launch_recount_slots(
        tally_SV, slot_B.contiguous(), repetition_S, presence_S, frequency_S, history_SL, prompt_len_S, committed_S
    )


@count_tokens.register_kernel("cuda")
def _(
    tally_SV: Tensor, slot_B: Tensor, repetition_S: Tensor, presence_S: Tensor, frequency_S: Tensor,
    record_BC: Tensor, first: int,
) -> None:  # fmt: skip
    from slipstream.kernels.jit import adjust

    adjust.launch_count_tokens(
        tally_SV, slot_B.contiguous(), repetition_S, presence_S, frequency_S, record_BC.contiguous(), first=first
    )
