"""What only some requests ask of a frame's logits, between the target and the temperature. One path for all frames.

The order, for each row: penalties, biases, custom processors, a grammar's mask; then, where all logits are sampled
(device/frame.py, kernels/sample.py), the ban on stop ids, temperature and filters. Log-probabilities are of the logits
before all that. A row is treated as plain decoding treats its position: a draft counts the drafts before it as said.
Every token that a round commits is counted at its end, the first one of a prompt too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from slipstream.device.masks import MaskTable
from slipstream.device.state import SlotState
from slipstream.kernels import adjust as ops
from slipstream.kernels.logprobs import token_logprobs
from slipstream.logprobs import PROMPT_ROWS, TOKEN_COLUMNS
from slipstream.sampling.custom import Processor, ProcessorRows
from slipstream.types import RECORD_COLUMNS, FramePlan


class LogitStages:
    """Owns the tallies (one int32 per slot and token), masks, and the table of log-probabilities; allocated at start.

    logprobs_NC: rows for every token that a decode frame can emit, from ends_at on for first tokens of prompts, from
    prompt_at on for rows of a chunk. What a launch writes there is copied down before the next one.
    """

    def __init__(
        self, state: SlotState, vocab: int, *, kernels: bool, processors: Mapping[str, Processor] | None = None
    ) -> None:
        self.state, self.kernels, self.processors = state, kernels, dict(processors or {})
        self.masks = MaskTable(state, vocab)
        self.tally_SV = torch.zeros(state.active_S.shape[0], vocab, dtype=torch.int32, device=state.device)
        self.ends_at = state.decode_B.shape[0] * (state.num_drafts + 1)
        self.prompt_at = self.ends_at + state.last_slot_B.shape[0]
        rows = self.prompt_at + state.chunk_slot_R.shape[0]
        self.logprobs_NC = torch.zeros(rows, TOKEN_COLUMNS, dtype=torch.int64, device=state.device)

    @property
    def nbytes(self) -> int:
        return self.tally_SV.nbytes + self.logprobs_NC.nbytes + self.masks.nbytes

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
            changes = plan.sampled or plan.min_tokens  # later stages write into what they get
            return logits_RV.clone() if plan.logprobs and changes else logits_RV
        state = self.state
        out_RV: Tensor = ops.adjust_rows(
            logits_RV, slot_R, cell_R, state.committed_S, state.pending_SW, state.seen_SW if state.tree else None,
            self.tally_SV, *self._penalties(), state.bias_count_S, state.bias_id_SN, state.bias_value_SN,
            plan.penalties, plan.biases,
        )  # fmt: skip
        if plan.custom:
            out_RV = self._customize(slot_R, cell_R, out_RV)
        if plan.masked:
            self.masks.apply(slot_R, cell_R, out_RV, kernels=self.kernels)
        return out_RV

    def _customize(self, slot_R: Tensor, cell_R: Tensor, logits_RV: Tensor) -> Tensor:
        """Custom processors one after the other, each for the rows whose requests ask for it."""
        state = self.state
        node_R = (cell_R - state.committed_S[slot_R]).clamp(0, state.pending_SW.shape[1] - 1)
        depth_R = state.depth_SW[slot_R, node_R] if state.tree else node_R
        position_R = state.committed_S[slot_R] + depth_R + 1
        # The first row of a round stands at the last token that history has; a prompt's end knows no other.
        last_R = state.history_SL[slot_R, state.committed_S[slot_R]]
        token_R = torch.where(node_R == 0, last_R, state.pending_SW[slot_R, node_R])
        for name, function in self.processors.items():
            argument_R = state.custom_S[name][slot_R]
            rows = ProcessorRows(
                argument_R=argument_R, position_R=position_R, prompt_len_R=state.prompt_len_S[slot_R], token_R=token_R
            )
            asked_R1 = (argument_R == argument_R)[:, None]  # NaN where nobody asks
            logits_RV = torch.where(asked_R1, function(logits_RV.clone(), rows), logits_RV)
        return logits_RV

    def committed(
        self, plan: FramePlan, slot_B: Tensor, record_BC: Tensor, raw_RV: Tensor, row_BW: Tensor, at: int
    ) -> None:
        """Count what the round has brought; its log-probabilities go to the table from row `at` on.

        raw_RV: the model's own logits; row_BW: the row that each token of the record was judged by, or came from.
        """
        state = self.state
        if plan.penalties:
            ops.count_tokens(self.tally_SV, slot_B, *self._penalties(), record_BC, RECORD_COLUMNS)
        if plan.logprobs:
            token_BW = record_BC[:, RECORD_COLUMNS:]
            width_W = torch.arange(token_BW.shape[1], device=slot_B.device)
            wanted_BW = (width_W < record_BC[:, 1:2]) * state.logprobs_S[slot_B][:, None]
            token_logprobs(self.logprobs_NC, at, raw_RV, row_BW.flatten(), token_BW.flatten(), wanted_BW.flatten())

    def prompt(
        self, plan: FramePlan, slot_R: Tensor, pos_R: Tensor, hidden_RH: Tensor, head: Callable[[Tensor], Tensor]
    ) -> None:
        """Log-probabilities of what follows each prompt row, a few rows' logits at a time."""
        if not plan.prompt_logprobs:
            return
        state, rows = self.state, slot_R.shape[0]
        token_R = state.history_SL[slot_R, pos_R + 1]
        wanted_R = state.prompt_logprobs_S[slot_R]
        row_R = torch.arange(rows, device=slot_R.device)
        for first in range(0, rows, PROMPT_ROWS):
            part = slice(first, min(first + PROMPT_ROWS, rows))
            count = part.stop - first
            token_logprobs(
                self.logprobs_NC, self.prompt_at + first, head(hidden_RH[part]), row_R[:count], token_R[part],
                wanted_R[part],
            )  # fmt: skip

    def _penalties(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.state.repetition_S, self.state.presence_S, self.state.frequency_S
