"""What only some requests ask of a frame's logits, between the target and the temperature. One path for all frames.

The order, for each row: penalties, biases; then, where all logits are sampled (device/frame.py, kernels/sample.py), the
ban on stop ids, temperature and filters. A row is treated as plain decoding treats its position: a draft counts the
drafts before it as said. Every token that a round commits is counted at its end, the first one of a prompt too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.state import SlotState
from slipstream.kernels import adjust as ops
from slipstream.types import RECORD_COLUMNS, FramePlan


class LogitStages:
    """Owns the tallies, one int32 per slot and token: 4 S V bytes, allocated at start."""

    def __init__(self, state: SlotState, vocab: int) -> None:
        self.state = state
        self.tally_SV = torch.zeros(state.active_S.shape[0], vocab, dtype=torch.int32, device=state.device)

    @property
    def nbytes(self) -> int:
        return self.tally_SV.nbytes

    def admitted(self, plan: FramePlan, slot_B: Tensor) -> None:
        """The prompts of these slots have been read: what they hold counts from here on."""
        state = self.state
        if plan.penalties:
            ops.recount_slots(
                self.tally_SV, slot_B, *self._penalties(), state.history_SL, state.prompt_len_S, state.committed_S
            )

    def adjust(self, plan: FramePlan, slot_R: Tensor, cell_R: Tensor, logits_RV: Tensor) -> Tensor:
        """The rows' logits [R, V] as their requests want them; those given stay as they are.

        cell_R: where each row is kept in the cache, the committed length and its place in the round.
        """
        if not plan.adjusted:
            return logits_RV
        state = self.state
        out_RV: Tensor = ops.adjust_rows(
            logits_RV, slot_R, cell_R, state.committed_S, state.pending_SW, state.seen_SW if state.tree else None,
            self.tally_SV, *self._penalties(), state.bias_count_S, state.bias_id_SN, state.bias_value_SN,
            plan.penalties, plan.biases,
        )  # fmt: skip
        return out_RV

    def committed(self, plan: FramePlan, slot_B: Tensor, record_BC: Tensor) -> None:
        """Count what the round has brought."""
        if plan.penalties:
            ops.count_tokens(self.tally_SV, slot_B, *self._penalties(), record_BC, RECORD_COLUMNS)

    def _penalties(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.state.repetition_S, self.state.presence_S, self.state.frequency_S
