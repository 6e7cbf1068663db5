"""A block drafter's round as fused kernels: context rows, the block's pass, the chain of tokens.

Few rows: four launches for the context (with the taps joined), five a layer for the block, and two for each token of a
Markov chain whose drafts are certain. The base logits [R, V] are written once, and read once by the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.draft.block_model import BlockLayer, BlockModel, MarkovHead
from slipstream.draft.choose import choose
from slipstream.draft.protocol import DraftView
from slipstream.kernels.block import block_rows, context_write, markov_next
from slipstream.kernels.gemm import markov_head
from slipstream.kernels.norm import rms_norm
from slipstream.kernels.tuning import MAX_FUSED_ROWS, MAX_STREAM_ROWS, PassConfig, rows_bucket
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from slipstream.models.fused_layers import FusedLayers, Rows, Stream
from slipstream.models.layers import Embedding
from slipstream.models.linear import Dense


class _Layer:
    """A `BlockLayer` with one product for q, k and v.

    k and v of all layers lie together for the context, so those that block rows read are a copy; q is in it alone.
    """

    def __init__(self, layer: BlockLayer) -> None:
        q, kv = layer.q, layer.kv
        assert isinstance(q, Dense)
        biases = None if q.bias_N is None or kv.bias_N is None else torch.cat([q.bias_N, kv.bias_N])
        self.qkv = Dense(torch.cat([q.weight_NK, kv.weight_NK]), biases)
        size = q.weight_NK.shape[0]
        layer.q = Dense(self.qkv.weight_NK[:size], None if biases is None else biases[:size])
        self.input_norm, self.post_norm = layer.input_norm, layer.post_norm
        self.q_norm, self.k_norm = layer.q_norm, layer.k_norm
        self.o, self.gate_up, self.down = layer.o, layer.gate_up, layer.down


@dataclass(frozen=True, kw_only=True)
class BlockDrafts:
    """token_BK [B, k]. q_BKV: their law, None if one-hot or in slot state. confidence_BK: raw logits, if asked for."""

    token_BK: Tensor
    q_BKV: Tensor | None
    confidence_BK: Tensor | None


class FusedBlock:
    """Runs a `BlockModel` against its paged KV. Build it only where `fits` says so."""

    max_rows = MAX_FUSED_ROWS

    def __init__(
        self,
        model: BlockModel,
        kv: KVPages,
        workspace: Workspace,
        *,
        positions: int,
        pdl: bool,
        config: PassConfig | None = None,
    ) -> None:
        """positions: how many have angles. config: another cut than the measured one."""
        self.model, self.kv, self.workspace = model, kv, workspace
        self.layers = FusedLayers(model.config, workspace, model.device, positions=positions, pdl=pdl, cut=config)
        self.blocks = [_Layer(layer) for layer in model.layers]
        self.gains = [b.input_norm.weight for b in self.blocks[1:]] + [model.norm.weight]
        self.k_gain_ED = torch.stack([b.k_norm.weight for b in self.blocks])

    @staticmethod
    def fits(model: BlockModel) -> bool:
        """bf16 or float32 weights, all dense, without biases where the kernels take none."""
        if model.dtype not in (torch.bfloat16, torch.float32) or not isinstance(model.embed, Embedding):
            return False
        if model.config.rope.partial != 1.0 or not isinstance(model.fc, Dense):
            return False
        others: list[Any] = [model.head]
        if model.markov is not None:
            others.append(model.markov.w2)
            if not isinstance(model.markov.w1, Embedding):
                return False
        blocks: list[Any] = [_Products(layer) for layer in model.layers]
        return FusedLayers.fit(model.config, blocks, others)

    def learn(self, taps: Sequence[Tensor], slot_R: Tensor, pos_R: Tensor, table_SP: Tensor) -> None:
        """Write keys and values of rows whose features [R, Ht] the target has computed."""
        model, layers = self.model, self.layers
        fc: Any = model.fc
        eps, streamed = model.config.rms_norm_eps, slot_R.shape[0] <= layers.cut.linear
        features_RF = torch.cat([tap.to(model.dtype) for tap in taps], 1)
        stream = layers.start(layers.linear(features_RF, fc.weight_NK, fc.bias_N), model.hidden_norm.weight)
        kv_RM = layers.linear(stream.x_RH, model.kv.weight_NK, dependent=True)
        context_write(
            kv_RM, self.kv.data, layers.cos_LD, layers.sin_LD, self.k_gain_ED, table_SP, slot_R, pos_R, eps,
            model.kv.bias_N, stream.sq_TR, model.config.hidden_size, eps, layers.pdl if streamed else layers.pdl_after,
        )  # fmt: skip

    def draft(
        self, view: DraftView, *, rows: int, skip: int, drafts: int, real: torch.dtype, confident: bool
    ) -> BlockDrafts:
        """Drafts from one block per slot. rows: of a block. skip: its first rows that give no draft."""
        model, layers, c = self.model, self.layers, self.model.config
        markov, slots = model.markov, view.slot_B.shape[0]
        token_R, slot_R, pos_R, last_R, anchor_B = block_rows(
            view.slot_B, view.committed_B, view.history_SL, view.table_SP, self.kv.page_size,
            model.block.mask_token_id, rows,
        )  # fmt: skip
        e_BR = None if markov is None else markov.w1(anchor_B)
        stream = self._pass(token_R, Rows(slot_R, pos_R, view.table_SP, rows, last_R=last_R))
        stream, first, kept = self._drafting(stream, slots, rows, skip, drafts)
        dependent, hidden_BKH = kept == rows, None
        if confident or (markov is not None and markov.mix is not None) or slots * kept > layers.cut.head:
            normed_RH = rms_norm(stream.h_RH, model.norm.weight, c.rms_norm_eps, layers.pdl and dependent)
            hidden_BKH = normed_RH.view(slots, kept, -1)
        certain = markov is None and not view.sampled
        logits_RV, best_R = layers.head(
            stream, model.head, model.norm, logits=not certain, dependent=dependent, best=certain,
            normed_RH=None if hidden_BKH is None else hidden_BKH.flatten(0, 1),
        )  # fmt: skip
        base_BKV, q_BKV = logits_RV.view(slots, kept, -1), None
        if hidden_BKH is not None:
            hidden_BKH = hidden_BKH[:, first : first + drafts]
        if certain:
            assert best_R is not None
            token_BK = best_R.view(slots, kept)[:, first : first + drafts]
        elif markov is not None and not view.sampled and slots <= MAX_STREAM_ROWS:
            streamed = slots * kept <= layers.cut.head
            pdl = layers.pdl and dependent if streamed else layers.pdl_after
            token_BK = self._greedy_chain(markov, e_BR, hidden_BKH, base_BKV, first, drafts, pdl)
        else:
            token_BK, q_BKV = self._chain(view, e_BR, hidden_BKH, base_BKV, first, drafts, real)
        confidence_BK = self._confidence(anchor_B, token_BK, hidden_BKH) if confident else None
        return BlockDrafts(token_BK=token_BK, q_BKV=q_BKV, confidence_BK=confidence_BK)

    def _pass(self, token_R: Tensor, rows: Rows) -> Stream:
        stream = self.layers.start(self.model.embed(token_R), self.blocks[0].input_norm.weight)
        for block, gain_H, (k_PSKD, v_PSKD) in zip(self.blocks, self.gains, self.kv.paged, strict=True):
            stream = self.layers.layer(block, stream, gain_H, k_PSKD, v_PSKD, rows)
        return stream

    def _drafting(self, stream: Stream, slots: int, rows: int, skip: int, drafts: int) -> tuple[Stream, int, int]:
        """The rows for the head, the first of a slot that gives a draft, how many a slot has.

        Rows that give none are left in where the head's product costs the same with them.
        """
        count = slots * rows
        if drafts == rows or (count <= self.layers.cut.head and rows_bucket(count) == rows_bucket(slots * drafts)):
            return stream, skip, rows
        assert stream.sq_TR is not None
        slot_B1 = torch.arange(slots, device=stream.h_RH.device)[:, None]
        at_R = (slot_B1 * rows + torch.arange(skip, skip + drafts, device=slot_B1.device)).flatten()
        return Stream(stream.h_RH[at_R], stream.x_RH[at_R], stream.sq_TR[:, at_R].contiguous()), 0, drafts

    def _greedy_chain(
        self, markov: MarkovHead, e_BR: Tensor | None, hidden_BKH: Tensor | None, base_BKV: Tensor, first: int,
        drafts: int, pdl: bool,
    ) -> Tensor:  # fmt: skip
        """Each token is the argmax of its base logits and the bias that the token before it gives."""
        assert e_BR is not None
        w1: Any = markov.w1
        ws, w2_VR = self.workspace, self.layers.weight(markov.w2)
        token_BK = torch.empty(base_BKV.shape[0], drafts, dtype=torch.int64, device=base_BKV.device)
        state_BR = torch.zeros_like(e_BR) if markov.kind == "rnn" else e_BR
        for step in range(drafts):
            x_BR = e_BR
            if hidden_BKH is not None and markov.mix is not None:
                x_BR, state_BR = markov.mixed(e_BR, hidden_BKH[:, step], state_BR)
                pdl = False  # those operations stand between
            _, best_TB, where_TB = markov_head(
                x_BR, w2_VR, base_BKV, first + step, ws.partial, ws.counters, False, pdl
            )  # fmt: skip
            pdl = self.layers.pdl
            e_BR = markov_next(best_TB, where_TB, w1.table_VH, token_BK, step, pdl)
        return token_BK

    def _chain(
        self, view: DraftView, e_BR: Tensor | None, hidden_BKH: Tensor | None, base_BKV: Tensor, first: int,
        drafts: int, real: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Tokens left to right, each by its slot's own law; the laws, where they do not go to slot state."""
        markov, ws, tokens, laws = self.model.markov, self.workspace, [], []
        state_BR = e_BR if markov is None or markov.kind != "rnn" or e_BR is None else torch.zeros_like(e_BR)
        for step in range(drafts):
            if markov is None or e_BR is None or state_BR is None:
                logits_BV = base_BKV[:, first + step].clone()  # `choose` overwrites what it gets
            else:
                x_BR = e_BR
                if hidden_BKH is not None and markov.mix is not None:
                    x_BR, state_BR = markov.mixed(e_BR, hidden_BKH[:, step], state_BR)
                if x_BR.shape[0] <= MAX_STREAM_ROWS:
                    w2_VR = self.layers.weight(markov.w2)
                    logits_BV = markov_head(x_BR, w2_VR, base_BKV, first + step, ws.partial, ws.counters)[0]
                else:
                    logits_BV = base_BKV[:, first + step] + markov.w2(x_BR)
            token_B, law_BV = choose(logits_BV, view, step, real=real, vocab=base_BKV.shape[2])
            tokens.append(token_B)
            if law_BV is not None:
                laws.append(law_BV)
            if markov is not None:
                e_BR = markov.w1(token_B)
        return torch.stack(tokens, 1), torch.stack(laws, 1) if laws else None

    def _confidence(self, anchor_B: Tensor, token_BK: Tensor, hidden_BKH: Tensor | None) -> Tensor:
        """Raw confidence logits [B, k] of all drafts at once: each looks at the token before its own."""
        assert hidden_BKH is not None
        model, e_RR = self.model, None
        if model.markov is not None and model.block.confidence == "markov":
            e_RR = model.markov.w1(torch.cat([anchor_B[:, None], token_BK[:, :-1]], 1).flatten())
        return model.confidence_logit(hidden_BKH.flatten(0, 1), e_RR).view(token_BK.shape)


class _Products:
    """What `FusedLayers.fit` looks at of a layer, before its weights are joined."""

    def __init__(self, layer: BlockLayer) -> None:
        self.qkv, self.o, self.gate_up, self.down = layer.q, layer.o, layer.gate_up, layer.down
