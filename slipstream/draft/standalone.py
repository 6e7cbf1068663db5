"""A standalone draft model: a smaller language model with the same vocabulary and KV pages of its own.

Its pages have the target's ids. After full acceptance its cache lacks the last draft (it was proposed but
never fed), so `extend` always feeds two tokens, the last committed one and the bonus token; rewriting a row
that is already there gives the same numbers. Source: Leviathan et al. 2023 (arXiv 2211.17192), section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.attention.paged import PagedAttention, RowGrid, cache_slots, span_attention
from slipstream.attention.protocol import AttentionContext
from slipstream.attention.windows import WindowLayers, by_layer
from slipstream.draft.choose import choose
from slipstream.draft.protocol import Drafts, DraftView, FirstDraft, PrefillView
from slipstream.memory.kv import KVPages
from slipstream.types import Admit

if TYPE_CHECKING:
    from slipstream.kernels.workspace import Workspace


class StandaloneDrafter:
    """Drafts a chain with `model`; greedy slots take its argmax, seeded ones share the target's noise,
    the others sample from its processed law q, which the verifier gets."""

    taps: tuple[int, ...] = ()
    reads_hidden, rereads, lookahead = False, 0, True

    def __init__(
        self,
        model: Any,
        *,
        kv: KVPages,
        max_drafts: int,
        real: torch.dtype = torch.float32,
        workspace: Workspace | None = None,
    ) -> None:
        """workspace: on a GPU, the kernels' scratch; attention then reads all lengths from tensors."""
        self.model = model
        self.workspace = workspace
        self.kv = kv
        self.max_drafts = max_drafts
        self.real = real
        config = model.config
        self.draft_vocab: int | None = config.vocab_size
        self.heads_per_kv = config.num_heads // config.num_kv_heads
        # Its pages follow the target's, all of them, so windows are a matter of what rows see.
        self.windows = WindowLayers.of(config.windows)

    def admit(self, admit: Admit) -> None:
        """Nothing to forget: all of its state is in the pages, which the new owner prefills."""

    def clear_pages(self, pages_P: Tensor) -> None:
        self.kv.clear(pages_P)

    def weight_bytes(self) -> int:
        return self.max_drafts * int(self.model.weight_bytes())

    def prefill(self, view: PrefillView) -> None:
        def make(kv: KVPages, table_SP: Tensor, window: int) -> AttentionContext:
            if self.workspace is not None:
                from slipstream.attention.kernel import ChunkAttention

                return ChunkAttention(
                    kv, table_SP=table_SP, slot_R=view.slot_R, pos_R=view.pos_R, cache_slot_R=view.cache_slot_R,
                    heads_per_kv=self.heads_per_kv, window=window,
                )  # fmt: skip
            return span_attention(
                kv, view.spans, pos_R=view.pos_R, cache_slot_R=view.cache_slot_R, table_SP=table_SP,
                heads_per_kv=self.heads_per_kv, window=window,
            )  # fmt: skip

        attention = by_layer(make, self.kv, view.table_SP, self.windows)
        self.model.forward(view.token_R, view.pos_R, attention)

    def extend(self, view: DraftView) -> FirstDraft:
        slots = view.slot_B.shape[0]
        pos_BW = torch.stack([view.committed_B - 1, view.committed_B], 1).clamp(min=0)
        token_BW = view.history_SL[view.slot_B[:, None], pos_BW]
        hidden_RH = self._pass(token_BW, pos_BW, view, view.len_ub)
        logits_BV = self.model.logits(hidden_RH.view(slots, 2, -1)[:, 1])
        token_B, q_BV = self._choose(logits_BV, view, 0)
        count_B = (view.slot_B > 0).to(torch.int64) * min(self.max_drafts, view.drafts)
        return FirstDraft(token_B=token_B, count_B=count_B, q_BV=q_BV)

    def propose(self, first: FirstDraft, view: DraftView) -> Drafts:
        tokens, laws = [first.token_B], [first.q_BV]
        for step in range(1, min(self.max_drafts, view.drafts)):
            pos_BW = (view.committed_B + step)[:, None]
            hidden_RH = self._pass(tokens[-1][:, None], pos_BW, view, view.len_ub + step)
            token_B, q_BV = self._choose(self.model.logits(hidden_RH), view, step)
            tokens.append(token_B)
            laws.append(q_BV)
        dense = [q for q in laws if q is not None]
        return Drafts(
            token_BK=torch.stack(tokens, 1),
            count_B=first.count_B,
            q_BKV=torch.stack(dense, 1) if dense else None,
        )

    def _pass(self, token_BW: Tensor, pos_BW: Tensor, view: DraftView, len_ub: int) -> Tensor:
        """One forward over W rows of every slot; dead slots write to the sink."""
        slot_R = view.slot_B[:, None].expand_as(pos_BW).reshape(-1)
        pos_R = torch.where(slot_R > 0, pos_BW.reshape(-1), 0)
        cache_slot_R = cache_slots(view.table_SP, slot_R, pos_R, self.kv.page_size)

        def make(kv: KVPages, table_SP: Tensor, window: int) -> AttentionContext:
            if self.workspace is not None:
                from slipstream.attention.kernel import KernelAttention

                return KernelAttention(
                    kv, table_SP=table_SP, slot_R=slot_R, pos_R=pos_R, cache_slot_R=cache_slot_R,
                    workspace=self.workspace, window=window,
                )  # fmt: skip
            return PagedAttention(
                kv, grid=RowGrid(pos_BW=pos_R.view_as(pos_BW)), cache_slot_R=cache_slot_R,
                table_BP=table_SP[view.slot_B], heads_per_kv=self.heads_per_kv, mask_dtype=kv.data.dtype,
                len_ub=min(len_ub, table_SP.shape[1] * kv.page_size), window=window,
            )  # fmt: skip

        attention = by_layer(make, self.kv, view.table_SP, self.windows)
        hidden_RH, _ = self.model.forward(token_BW.reshape(-1), pos_R, attention)
        return hidden_RH  # type: ignore[no-any-return]

    def _choose(self, logits_BV: Tensor, view: DraftView, step: int) -> tuple[Tensor, Tensor | None]:
        """Draft `step` of every slot, and q [B, V] when some slot is judged by rejection."""
        return choose(logits_BV, view, step, real=self.real, vocab=self.model.config.vocab_size)
