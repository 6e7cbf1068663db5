"""DFlash and DSpark as engine drafters: context rows go into paged KV once, a block of masks is read each round.

The drafter's pages have the target's ids. `extend` writes keys and values of the rows that the target has just
computed; a row that is not accepted is overwritten before anybody may see it. A block stands at anchor, anchor + 1, ...
and sees the context before the anchor and all of itself: as paged attention, every row of it stands at the block's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.attention.paged import PagedAttention, RowGrid, cache_slots
from slipstream.attention.protocol import AttentionContext
from slipstream.draft.block_config import parse_block_config
from slipstream.draft.block_model import BlockModel, load_block_model
from slipstream.draft.choose import choose
from slipstream.draft.confidence import load_temperatures
from slipstream.draft.protocol import Drafts, DraftView, FirstDraft, PrefillView
from slipstream.errors import ConfigError
from slipstream.memory.kv import KVPages
from slipstream.types import Admit

if TYPE_CHECKING:
    from slipstream.draft.block_fused import FusedBlock


class BlockPages:
    """Keys and values of context rows, and the attention of a block over them. workspace: on a GPU, the kernels'."""

    def __init__(self, kv: KVPages, workspace: Any = None) -> None:
        self.kv, self.workspace = kv, workspace

    def write(self, context: Sequence[tuple[Tensor, Tensor]], table_SP: Tensor, slot_R: Tensor, pos_R: Tensor) -> None:
        """Rows [R] of (slot, position); slot 0 is the sink."""
        cell_R = cache_slots(table_SP, slot_R, pos_R, self.kv.page_size)
        for layer, (k_RKD, v_RKD) in enumerate(context):
            self.kv.write(layer, cell_R, k_RKD, v_RKD)

    def block_attention(
        self,
        table_SP: Tensor,
        slot_B: Tensor,
        pos_BT: Tensor,
        *,
        len_ub: int,
        heads_per_kv: int,
    ) -> AttentionContext:
        """Each block's rows see the context before it and the whole block. len_ub: host bound on its end."""
        slot_R = slot_B[:, None].expand_as(pos_BT).reshape(-1)
        cell_R = cache_slots(table_SP, slot_R, pos_BT.reshape(-1), self.kv.page_size)
        # Rows past the slot's pages went to the sink: nobody sees them.
        owned_B1 = (table_SP[slot_B] > 0).sum(1, keepdim=True) * self.kv.page_size
        end_BT = torch.minimum(pos_BT[:, -1:], owned_B1 - 1).clamp(min=0).expand_as(pos_BT)
        if self.workspace is not None:
            from slipstream.attention.kernel import KernelAttention

            return KernelAttention(
                self.kv, table_SP=table_SP, slot_R=slot_R, pos_R=end_BT.reshape(-1), cache_slot_R=cell_R,
                workspace=self.workspace,
            )  # fmt: skip
        return PagedAttention(
            self.kv, grid=RowGrid(pos_BW=end_BT), cache_slot_R=cell_R, table_BP=table_SP[slot_B],
            len_ub=min(len_ub, table_SP.shape[1] * self.kv.page_size), heads_per_kv=heads_per_kv,
            mask_dtype=self.kv.data.dtype, clean=self.kv.data.device.type != "cpu",
        )  # fmt: skip


class BlockDrafter:
    """Drafts `max_drafts` tokens from one pass over a block; a Markov head is stepped left to right behind it.

    confidence_threshold: drafts are offered up to the first one whose confidence is below it (0: all). A confidence
    depends on the tokens before its draft only, so the cut cannot bias the output. temperatures: one per position of
    the block, or a file of them (see `load_temperatures`); they divide the confidence logits.
    A block is as long as the drafts need: fewer drafts than the checkpoint's block make a shorter one.
    """

    reads_hidden, rereads, lookahead = False, 0, True
    options = ("confidence_threshold", "temperatures")
    confident = cuts = False

    @staticmethod
    def load(folder: Path, values: Mapping[str, Any], target: Any, *, seed: int | None) -> BlockModel:
        """The network of a checkpoint; seed: random weights instead (see `load_block_model`)."""
        return load_block_model(folder, parse_block_config(values, target.config), target, dummy_seed=seed)

    def __init__(
        self,
        model: BlockModel,
        *,
        kv: KVPages,
        max_drafts: int,
        max_len: int = 0,
        slots: int = 0,
        real: torch.dtype = torch.float32,
        workspace: Any = None,
        confidence_threshold: float = 0.0,
        temperatures: str | Path | Sequence[float] | None = None,
        confident: bool = False,
    ) -> None:
        """confident: confidences come with the drafts; they schedule verification."""
        del slots  # what it keeps is in the pages
        config, threshold = model.block, confidence_threshold
        if not 1 <= max_drafts <= config.max_drafts:
            raise ConfigError(
                f"num_drafts={max_drafts} must be from 1 to {config.max_drafts}: the draft has "
                f"block_size={config.block_size}"
            )
        if not 0.0 <= threshold <= 1.0:
            raise ConfigError(f"confidence_threshold={threshold} must be from 0 to 1")
        if model.confidence is None and (threshold > 0 or temperatures is not None or confident):
            raise ConfigError(
                "confidence_threshold, temperatures and confidence_schedule need a draft with a confidence head"
            )
        scale = [1.0] * config.max_drafts
        if temperatures is not None:
            scale = load_temperatures(temperatures, config.max_drafts)
        self.model = model
        self.taps = config.taps
        self.max_drafts = max_drafts
        self.draft_vocab: int | None = config.shape.vocab_size
        self.real = real
        self.pages = BlockPages(kv, workspace)
        self.kv = kv
        self.threshold, self.confident, self.cuts = threshold, confident, threshold > 0
        self.heads_per_kv = config.shape.num_heads // config.shape.num_kv_heads
        self.rows = config.rows_for(max_drafts)
        self.offset_T = torch.arange(self.rows, device=model.device)
        self.mask_T = torch.full((self.rows,), config.mask_token_id, dtype=torch.int64, device=model.device)
        self.temperature_K = torch.tensor(scale[:max_drafts], dtype=torch.float32, device=model.device)
        self.fused: FusedBlock | None = None
        if workspace is not None:
            from slipstream.draft.block_fused import FusedBlock

            if FusedBlock.fits(model):
                positions = (max_len or model.config.max_position_embeddings) + self.rows + 1
                self.fused = FusedBlock(model, kv, workspace, positions=positions, pdl=True)

    def admit(self, admit: Admit) -> None:
        """Nothing to forget: all of its state is in the pages, which the new owner prefills."""

    def clear_pages(self, pages_P: Tensor) -> None:
        self.kv.clear(pages_P)

    def weight_bytes(self) -> int:
        return self.model.weight_bytes()

    def prefill(self, view: PrefillView) -> None:
        self._learn(view.taps, view.slot_R, view.pos_R, view.table_SP)

    def extend(self, view: DraftView) -> FirstDraft:
        """Learn the verified rows; the drafts come from the block that `propose` reads."""
        rows = view.rows
        self._learn(rows.taps, rows.slot_R, rows.pos_R, view.table_SP)
        zero_B = torch.zeros_like(view.slot_B)
        return FirstDraft(token_B=zero_B, count_B=zero_B)

    def _learn(self, taps: Sequence[Tensor], slot_R: Tensor, pos_R: Tensor, table_SP: Tensor) -> None:
        if self.fused is not None:
            self.fused.learn(taps, slot_R, pos_R, table_SP)
        else:
            self.pages.write(self.model.context(taps, pos_R), table_SP, slot_R, pos_R)

    def propose(self, first: FirstDraft, view: DraftView) -> Drafts:
        del first
        if self.fused is not None and view.slot_B.shape[0] * self.rows <= self.fused.max_rows:
            drafted = self.fused.draft(
                view, rows=self.rows, skip=self.rows - self.max_drafts, drafts=min(self.max_drafts, view.drafts),
                real=self.real, confident=self.threshold > 0 or self.confident,
            )  # fmt: skip
            return self._offered(view, drafted.token_BK, drafted.q_BKV, drafted.confidence_BK)
        anchor_B = view.history_SL[view.slot_B, view.committed_B]
        token_BT = torch.cat([anchor_B[:, None], self.mask_T[1:].expand(anchor_B.shape[0], -1)], 1)
        pos_BT = view.committed_B[:, None] + self.offset_T
        attention = self.pages.block_attention(
            view.table_SP, view.slot_B, pos_BT, len_ub=view.len_ub + self.rows, heads_per_kv=self.heads_per_kv
        )  # fmt: skip
        hidden_BTH = self.model.forward(token_BT, pos_BT, attention)
        hidden_BKH = hidden_BTH[:, self.rows - self.max_drafts :][:, : view.drafts]
        return self._chain(hidden_BKH, anchor_B, view)

    def _chain(self, hidden_BKH: Tensor, anchor_B: Tensor, view: DraftView) -> Drafts:
        """Tokens left to right; each row's law may lean on the token before it."""
        slots, drafts, _ = hidden_BKH.shape
        base_BKV = self.model.logits(hidden_BKH.flatten(0, 1)).view(slots, drafts, -1)
        markov, wants_confidence = self.model.markov, self.threshold > 0 or self.confident
        state_BR = None if markov is None else markov.start(hidden_BKH[:, 0])
        prev_B, tokens, laws, confidences = anchor_B, [], [], []
        for step in range(drafts):
            logits_BV, hidden_BH, prev_BR = base_BKV[:, step], hidden_BKH[:, step], None
            if markov is not None and state_BR is not None:
                bias_BV, prev_BR, state_BR = markov.step(prev_B, hidden_BH, state_BR)
                logits_BV = logits_BV + bias_BV
            else:
                logits_BV = logits_BV.clone()  # `choose` overwrites what it gets
            if wants_confidence:
                confidences.append(self.model.confidence_logit(hidden_BH, prev_BR))
            prev_B, law_BV = choose(logits_BV, view, step, real=self.real, vocab=logits_BV.shape[1])
            tokens.append(prev_B)
            if law_BV is not None:
                laws.append(law_BV)
        return self._offered(
            view, torch.stack(tokens, 1), torch.stack(laws, 1) if laws else None,
            torch.stack(confidences, 1) if confidences else None,
        )  # fmt: skip

    def _offered(
        self, view: DraftView, token_BK: Tensor, q_BKV: Tensor | None, confidence_BK: Tensor | None
    ) -> Drafts:  # fmt: skip
        """All drafts, or those before the first one that is not sure enough."""
        drafts = token_BK.shape[1]
        count_B = torch.full_like(view.slot_B, drafts)
        if confidence_BK is not None:
            confidence_BK = confidence_BK / self.temperature_K[:drafts]
            if self.threshold > 0:
                sure_BK = torch.sigmoid(confidence_BK) >= self.threshold
                count_B = torch.minimum(count_B, sure_BK.to(torch.int64).cumprod(1).sum(1))
        return Drafts(
            token_BK=token_BK, count_B=count_B, q_BKV=q_BKV, confidence_BK=confidence_BK if self.confident else None
        )
