"""Slot state: the truth about running requests, one row per slot. Slot 0 is the sink and never active.

All of it lives in one int64 arena, so whatever the host says (admit, pages, drop, which slots a frame decodes,
which prompt rows a chunk reads) is a list of (cell, value) pairs: one upload and one scatter. Real numbers are
float64 bit patterns in the same arena.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from slipstream.sampling.slot_params import SlotLaws, SlotParams
from slipstream.types import MAX_LOGIT_BIAS, MAX_STOP_IDS


class SlotState:
    """Device tensors, S = max_slots + 1 rows each; all are views of `arena` but draft_q.

    generation_S: who owns the slot. active_S: 1 while it decodes. committed_S: tokens whose KV is final.
    history_SL: tokens known, the first committed + 1 are valid (the bonus token is the last of them).
    pending_SW: column 0 the bonus token, then the drafts for the next frame; draft_count_S of them are valid.
    Where drafts are a tree (tree): column n of pending_SW is node n, breadth first, parent_SW its parent (-1 at the
    root), depth_SW its level, seen_SW bit j: whether it sees node j (itself and its ancestors).
    behind_S: last committed positions that the drafter's own cache lacks.
    prompt_len_S: tokens of the prompt, the rest of history is output. repetition_S 1, presence_S and frequency_S 0, and
    bias_count_S 0 are off; bias_id_SN and bias_value_SN hold bias_count_S pairs. logprobs_S, prompt_logprobs_S:
    alternatives wanted plus one, 0 for none.
    masked_S: 1 where a grammar decides, its masks are in device/masks.py.
    survival_SK: of the drafts, where verification is scheduled by confidence (kernels/schedule.py), else None.
    custom_S: the argument of each custom processor, NaN where it is not asked for.
    draft_q: the drafters' probabilities [S, K, V], or None while drafts are certain (one-hot).
    table_SP: page ids by position // page_size, 0 (the sink) where none. window_table_SP: those of layers with a
    sliding window, None without such layers; entries behind a slot's window mean nothing.
    widest_frame: slots of the largest bucket, where that is more than max_slots.
    Where the target has recurrent layers (memory/states.py): absorbed_S tokens are in the slot's state, saved_SC says
    where states are saved.
    rope_delta_S: rotary position less token number behind the prompt, chunk_rope_3R: the same for each row of a chunk,
    on three axes; None for targets with one.
    chunk_given_R: 1 where a chunk's row has an embedding of its own; None where none are taken (device/media.py).
    decode_B, chunk_slot_R, chunk_pos_R, last_row_B, last_slot_B: the plan's lists, written by the host.
    """

    def __init__(
        self,
        *,
        max_slots: int,
        max_len: int,
        pages_per_slot: int,
        num_drafts: int,
        chunk_rows: int,
        widest_frame: int = 0,
        max_stop_ids: int = MAX_STOP_IDS,
        device: torch.device,
        real: torch.dtype = torch.float32,
        draft_vocab: int | None = None,
        tree: bool = False,
        processors: tuple[str, ...] = (),
        saved_states: int = 0,
        windows: bool = False,
        scheduled: bool = False,
        pictures: bool = False,
        given: bool = False,
    ) -> None:
        """saved_states: columns of saved_SC, 0 for a target without recurrent layers. windows: the target has layers
        with a sliding window. pictures: its rotary embedding has positions on three axes. given: prompts may bring
        embeddings."""
        s, widest = max_slots + 1, max(max_slots, widest_frame)
        self.device, self.real, self.num_drafts = device, real, num_drafts
        self.shapes: dict[str, tuple[int, ...]] = {
            "generation": (s,),
            "active": (s,),
            "committed": (s,),
            "max_len": (s,),
            "min_len": (s,),
            "prompt_len": (s,),
            "draft_count": (s,),
            "max_drafts": (s,),
            "behind": (s,),
            "masked": (s,),
            "mode": (s,),
            "key": (s,),
            "child": (s,),
            "top_k": (s,),
            "temperature": (s,),
            "top_p": (s,),
            "min_p": (s,),
            "repetition": (s,),
            "presence": (s,),
            "frequency": (s,),
            "logprobs": (s,),
            "prompt_logprobs": (s,),
            **{f"custom {name}": (s,) for name in processors},
            "bias_count": (s,),
            "bias_id": (s, MAX_LOGIT_BIAS),
            "bias_value": (s, MAX_LOGIT_BIAS),
            "stop_ids": (s, max_stop_ids),
            "pending": (s, num_drafts + 1),
            **dict.fromkeys(("parent", "depth", "seen") if tree else (), (s, num_drafts + 1)),
            **({"absorbed": (s,), "saved": (s, saved_states)} if saved_states else {}),
            **({"survival": (s, num_drafts)} if scheduled else {}),
            "table": (s, pages_per_slot),
            **({"window_table": (s, pages_per_slot)} if windows else {}),
            "history": (s, max_len + num_drafts + 2),
            "decode": (widest,),
            "chunk_slot": (chunk_rows,),
            "chunk_pos": (chunk_rows,),
            **({"rope_delta": (s,), "chunk_rope": (3, chunk_rows)} if pictures else {}),
            **({"chunk_given": (chunk_rows,)} if given else {}),
            "last_row": (widest,),
            "last_slot": (widest,),
            "scratch": (1,),
        }
        sizes = [int(torch.Size(shape).numel()) for shape in self.shapes.values()]
        starts = list(itertools.accumulate(sizes, initial=0))
        self.offset = dict(zip(self.shapes, starts, strict=False))
        self.arena = torch.zeros(starts[-1], dtype=torch.int64, device=device)

        def view(name: str) -> Tensor:
            shape = self.shapes[name]
            at = self.offset[name]
            return self.arena[at : at + int(torch.Size(shape).numel())].view(shape)

        self.generation_S = view("generation")
        self.active_S = view("active")
        self.committed_S = view("committed")
        self.max_len_S = view("max_len")
        self.min_len_S = view("min_len")
        self.history_SL = view("history")
        self.pending_SW = view("pending")
        self.draft_count_S = view("draft_count")
        self.tree = tree
        if tree:
            self.parent_SW, self.depth_SW = view("parent").fill_(-1), view("depth")
            self.seen_SW = view("seen").fill_(1)
        if saved_states:
            self.absorbed_S, self.saved_SC = view("absorbed"), view("saved")
        self.survival_SK = view("survival") if scheduled else None
        self.max_drafts_S = view("max_drafts")
        self.behind_S = view("behind")
        self.masked_S = view("masked")
        self.table_SP = view("table")
        self.window_table_SP = view("window_table") if windows else None
        self.stop_ids_ST = view("stop_ids").fill_(-1)
        self.mode_S, self.key_S, self.child_S = view("mode"), view("key"), view("child")
        self.top_k_S = view("top_k")
        self.temperature_S = view("temperature").view(torch.float64)
        self.top_p_S = view("top_p").view(torch.float64)
        self.min_p_S = view("min_p").view(torch.float64)
        self.prompt_len_S = view("prompt_len")
        self.repetition_S = view("repetition").view(torch.float64).fill_(1.0)
        self.presence_S = view("presence").view(torch.float64)
        self.frequency_S = view("frequency").view(torch.float64)
        self.logprobs_S, self.prompt_logprobs_S = view("logprobs"), view("prompt_logprobs")
        self.custom_S = {name: view(f"custom {name}").view(torch.float64).fill_(math.nan) for name in processors}
        self.bias_count_S, self.bias_id_SN = view("bias_count"), view("bias_id")
        self.bias_value_SN = view("bias_value").view(torch.float64)
        self.rope_delta_S = view("rope_delta") if pictures else None
        self.chunk_rope_3R = view("chunk_rope") if pictures else None
        self.chunk_given_R = view("chunk_given") if given else None
        self.decode_B = view("decode")
        self.chunk_slot_R, self.chunk_pos_R = view("chunk_slot"), view("chunk_pos")
        self.last_row_B, self.last_slot_B = view("last_row"), view("last_slot")
        self.draft_q = (
            torch.zeros(s, num_drafts, draft_vocab, dtype=real, device=device) if draft_vocab and num_drafts else None
        )

    def laws(self) -> SlotLaws:
        """Slot state for kernels that read it by slot id."""
        params = SlotParams(
            mode=self.mode_S, key=self.key_S, child=self.child_S, temperature=self.temperature_S, top_k=self.top_k_S,
            top_p=self.top_p_S, min_p=self.min_p_S,
        )  # fmt: skip
        return SlotLaws(params=params, stop_ids_ST=self.stop_ids_ST, min_len_S=self.min_len_S, q_SKV=self.draft_q)

    def params(self, slot: Tensor) -> SlotParams:
        """Gather the sampling state of `slot` [B] or [R]."""
        return SlotParams(
            mode=self.mode_S[slot],
            key=self.key_S[slot],
            child=self.child_S[slot],
            temperature=self.temperature_S[slot].to(self.real),
            top_k=self.top_k_S[slot],
            top_p=self.top_p_S[slot].to(self.real),
            min_p=self.min_p_S[slot].to(self.real),
        )
