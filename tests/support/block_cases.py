"""A block drafter on random weights in the middle of a run: slots with context in pages, and the end of a frame."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slipstream.draft.block_config import parse_block_config
from slipstream.draft.block_fused import FusedBlock
from slipstream.draft.block_model import BlockModel, block_shapes
from slipstream.draft.dflash import BlockDrafter
from slipstream.draft.protocol import Drafts, DraftView, TargetRows
from slipstream.kernels.tuning import PassConfig
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from slipstream.models.dummy import DummyTensors
from slipstream.models.layers import Embedding
from slipstream.models.linear import Dense
from slipstream.models.weights import WeightBuilder
from slipstream.sampling.slot_params import SlotParams
from tests.support.tiny import tiny_config

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"architectures": ["DFlashDraftModel"]},
    "no markov": {"architectures": ["Qwen3DSparkModel"]},
    "a key head per head": {"architectures": ["Qwen3DSparkModel"], "num_key_value_heads": 4},
    **{
        head: {"architectures": ["Qwen3DSparkModel"], "markov_rank": 24, "markov_head_type": head,
               "enable_confidence_head": True}
        for head in ("vanilla", "gated", "rnn")
    },
}  # fmt: skip

LIBRARY = PassConfig(rope=0, residual=0, silu=0, head=0, linear=0)
CONTEXT = [9, 17, 4, 30, 12]
"""Committed length of each slot."""


class BlockCase:
    """Slots 1, 2, ...; the frame had `width` rows each, of which some stay. The last slot of many is not live."""

    def __init__(
        self, kind: str, *, slots: int, width: int = 5, block_size: int = 5, dtype: torch.dtype = torch.float32,
        device: str = "cpu", hidden: int = 64, vocab: int = 203, page: int = 4, bias: bool = False,
    ) -> None:  # fmt: skip
        torch.manual_seed(slots)
        self.device, self.slots, self.page = torch.device(device), slots, page
        target = tiny_config("qwen3", vocab_size=vocab, hidden_size=hidden, num_hidden_layers=4)
        weight = lambda: (torch.randn(vocab, hidden) * hidden**-0.5).to(self.device, dtype)
        host = SimpleNamespace(config=target, dtype=dtype, device=self.device, embed=Embedding(weight()),
                               head=Dense(weight()))  # fmt: skip
        values = {
            "model_type": "qwen3", "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 2 * hidden,
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 128,
            "block_size": block_size, "mask_token_id": 3, "target_layer_ids": [0, 2], "num_target_layers": 4,
            **KINDS[kind],
        }  # fmt: skip
        block = parse_block_config(values, target)
        block = replace(block, shape=replace(block.shape, qkv_bias=bias))
        shapes = block_shapes(block, hidden)
        if bias:
            for i in range(2):
                for x in "qkv":
                    name = f"layers.{i}.self_attn.{x}_proj"
                    shapes[f"{name}.bias"] = shapes[f"{name}.weight"][:1]
        source = DummyTensors(shapes, seed=1, device=self.device)
        self.model = BlockModel(block, WeightBuilder(source, device=self.device, dtype=dtype), host)
        for norm in [x for b in self.model.layers for x in (b.q_norm, b.k_norm, b.input_norm, b.post_norm)]:
            norm.weight.copy_(1 + 0.2 * torch.randn(norm.weight.shape))
        if self.model.markov is not None:  # strong enough to change tokens
            self.model.markov.w2.weight_NK.normal_()  # type: ignore[attr-defined]
            self.model.markov.w1.table_VH.normal_()  # type: ignore[union-attr]
        pages = -(-(max(CONTEXT) + 2 * block_size + width) // page)
        table = torch.zeros(slots + 1, pages, dtype=torch.int64)
        table[1:] = (torch.randperm(slots * pages) + 1).view(slots, pages)
        if slots > 2:
            table[2, -(-(CONTEXT[1] + 2) // page) :] = 0  # its block reaches beyond its pages
        self.num_pages, self.table_SP = slots * pages, table.to(self.device)
        committed = torch.tensor([0, *CONTEXT[:slots]], device=self.device)
        live = torch.arange(1, slots + 1, device=self.device)
        if slots > 2:
            live[-1] = 0
        self.history_SL = torch.randint(0, vocab, (slots + 1, 64), device=self.device)
        tap = lambda rows: [torch.randn(rows, hidden, device=self.device).to(dtype) for _ in range(2)]
        # Everything before the frame's rows, whose first stands at the position that the bonus token had.
        start = (committed[1:] - 3).clamp(min=0)
        self.past = [(s + 1, int(n), tap(int(n))) for s, n in enumerate(start)]
        slot_R = torch.arange(1, slots + 1, device=self.device).repeat_interleave(width)
        pos_R = (start[:, None] + torch.arange(width, device=self.device)).flatten()
        if slots > 2:
            slot_R, pos_R = slot_R.clone(), pos_R.clone()
            slot_R[-width:], pos_R[-width:] = 0, 0
        zero_B = torch.zeros_like(live)
        rows = TargetRows(
            slot_R=slot_R, pos_R=pos_R, token_R=pos_R, owner_R=slot_R, slot_B=live, rows_B=zero_B,
            row_of_BW=zero_B[:, None], taps=tuple(tap(slots * width)),
        )  # fmt: skip
        live_committed = torch.where(live > 0, committed[live], 0)
        self.view = DraftView(
            slot_B=live, committed_B=live_committed, drafted_B=zero_B, accepted_B=zero_B, emitted_B=zero_B, rows=rows,
            history_SL=self.history_SL, committed_S=committed, table_SP=self.table_SP, params=None, laws=None,
            len_ub=int(committed.max()) + 1, first_page=(), drafts=block.max_drafts, sampled=False, filtered=False,
            rejection=False, coupled=False,
        )  # fmt: skip

    def sampled(self) -> DraftView:
        """The same frame with slots of all modes."""
        n, device = self.slots, self.device
        params = SlotParams(
            mode=torch.arange(n, device=device) % 3, key=torch.arange(n, device=device) + 5,
            child=torch.zeros(n, dtype=torch.int64, device=device), temperature=torch.full((n,), 0.8, device=device),
            top_k=torch.full((n,), 20, device=device), top_p=torch.full((n,), 0.9, device=device),
            min_p=torch.zeros(n, device=device),
        )  # fmt: skip
        return replace(self.view, params=params, sampled=True, filtered=True, rejection=True, coupled=True)

    def drafter(self, cut: PassConfig | None, *, drafts: int, pdl: bool = False, **options: Any) -> BlockDrafter:
        """cut None: in plain operations, without any kernel; else the fused round."""
        c = self.model.config
        kv = KVPages(
            num_layers=c.num_layers, num_pages=self.num_pages, page_size=self.page, num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim, dtype=self.model.dtype, device=self.device,
        )  # fmt: skip
        made = BlockDrafter(self.model, kv=kv, max_drafts=drafts, max_len=96, **options)
        if cut is not None:
            kv.data.fill_(float("nan"))  # what nobody wrote must not matter
            kv.data[:, :, 0] = 0
            on_gpu = self.device.type == "cuda"
            workspace = Workspace(self.device) if on_gpu else Workspace(self.device, floats=1, counters=1)
            workspace.partial.fill_(float("nan"))
            assert FusedBlock.fits(self.model)
            made.fused = FusedBlock(self.model, kv, workspace, positions=128, pdl=pdl, config=cut)
        return made

    def round(self, drafter: BlockDrafter, view: DraftView) -> Drafts:
        for slot, n, taps in self.past:
            at_R = torch.arange(n, device=self.device)
            drafter._learn(taps, torch.full_like(at_R, slot), at_R, self.table_SP)
        return drafter.propose(drafter.extend(view), view)

    def written(self, drafter: BlockDrafter) -> Tensor:
        """Keys and values of the live slots' committed positions."""
        at = [(s, p) for s in self.view.slot_B.tolist() if s for p in range(int(self.view.committed_S[s]))]
        slot, pos = (torch.tensor(x, device=self.device) for x in zip(*at, strict=True))
        return drafter.kv.data[:, :, self.table_SP[slot, pos // self.page], pos % self.page]
