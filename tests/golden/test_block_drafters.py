"""DFlash and DSpark networks against reference numbers: two rounds on one paged context, without the engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.draft.block_config import parse_block_config
from slipstream.draft.block_fused import FusedBlock
from slipstream.draft.block_model import BlockModel, load_block_model
from slipstream.draft.detect import kind_of
from slipstream.draft.dflash import BlockPages
from slipstream.draft.protocol import DraftView
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from slipstream.models.layers import Embedding
from slipstream.models.linear import Dense
from tests.support.draft_views import no_rows
from tests.support.tiny import tiny_config

CASES = ["dflash_zlab", "dspark_vanilla", "dspark_gated", "dspark_rnn", "dspark_markov0"]
CLOSE = {"atol": 2e-4, "rtol": 1e-4}
PAGE = 4


def fake_target(tensors: dict[str, Tensor], values: dict[str, Any]) -> Any:
    """What a block drafter takes from a target: sizes, and embedding and head where the checkpoint has none."""
    config = tiny_config("qwen3", vocab_size=values["vocab_size"], hidden_size=values["hidden_size"],
                         num_hidden_layers=values["num_target_layers"])  # fmt: skip
    target = SimpleNamespace(config=config, dtype=torch.float32, device=torch.device("cpu"), embed=None, head=None)
    if "target_embed_tokens" in tensors:
        table = tensors["target_embed_tokens"]
        target.embed = Embedding(table)
        target.head = Dense(tensors["target_lm_head"])
    return target


class Rounds:
    """One slot's drafter: learns context rows, drafts blocks."""

    def __init__(self, folder: Path) -> None:
        self.tensors = load_file(folder / "expected.safetensors")
        values = json.loads((folder / "config.json").read_text())
        assert kind_of(values, folder) in ("dflash", "dspark")
        target = fake_target(self.tensors, values)
        self.config = parse_block_config(values, target.config)
        self.model: BlockModel = load_block_model(folder, self.config, target)
        c = self.config.shape
        kv = KVPages(num_layers=c.num_layers, num_pages=12, page_size=PAGE, num_kv_heads=c.num_kv_heads,
                     head_dim=c.head_dim, dtype=torch.float32, device=torch.device("cpu"))  # fmt: skip
        kv.data[:, 0].fill_(7.0)  # what is masked must not matter
        kv.data[:, 1].fill_(-7.0)
        self.table_SP = torch.zeros(2, 10, dtype=torch.int64)
        self.table_SP[1] = torch.tensor([3, 7, 1, 9, 2, 12, 5, 4, 8, 6])
        self.pages = BlockPages(kv)
        self.length = 0

    def learn(self, context: Tensor) -> None:
        rows = context.shape[0]
        pos_R = torch.arange(self.length, self.length + rows)
        taps = context.chunk(len(self.config.taps), 1)
        self.pages.write(self.model.context(taps, pos_R), self.table_SP, torch.ones_like(pos_R), pos_R)
        self.length += rows

    def block(self, anchor: Tensor) -> Tensor:
        """Hidden states [T, H] of a full block after `length` context rows."""
        rows = self.config.block_size
        token_BT = torch.full((1, rows), self.config.mask_token_id)
        token_BT[0, 0] = anchor
        pos_BT = torch.arange(self.length, self.length + rows)[None]
        attention = self.pages.block_attention(
            self.table_SP, torch.ones(1, dtype=torch.int64), pos_BT, len_ub=self.length + rows,
            heads_per_kv=self.config.shape.num_heads // self.config.shape.num_kv_heads,
        )  # fmt: skip
        return self.model.forward(token_BT, pos_BT, attention)[0]

    def chain(self, hidden_TH: Tensor, anchor: Tensor, choose: Any) -> tuple[list[int], Tensor, Tensor | None]:
        """Tokens, corrected logits [T, V] and confidence logits [T] of a DSpark block; choose(k, logits) -> token."""
        base = self.model.logits(hidden_TH)
        prev_B, tokens, rows, confidences = anchor.view(1), [], [], []
        state = self.model.markov.start(hidden_TH[:1]) if self.model.markov else None
        for k in range(len(hidden_TH)):
            logits_BV, prev_BR = base[k : k + 1], None
            if self.model.markov is not None:
                bias_BV, prev_BR, state = self.model.markov.step(prev_B, hidden_TH[k : k + 1], state)
                logits_BV = logits_BV + bias_BV
            if self.model.confidence is not None:
                confidences.append(self.model.confidence_logit(hidden_TH[k : k + 1], prev_BR))
            prev_B = choose(k, logits_BV[0]).view(1)
            tokens.append(int(prev_B))
            rows.append(logits_BV[0])
        return tokens, torch.stack(rows), torch.cat(confidences) if confidences else None


def end_of_frame(length: int, anchor: Tensor, table_SP: Tensor, drafts: int) -> DraftView:
    """A greedy frame's end for the one slot: `length` tokens are committed, then comes the anchor."""
    zero_B, one_B = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    history = torch.zeros(2, 64, dtype=torch.int64)
    history[1, length] = anchor
    return DraftView(
        slot_B=one_B, committed_B=one_B * length, drafted_B=zero_B, accepted_B=zero_B, emitted_B=zero_B,
        rows=no_rows(zero_B), history_SL=history, committed_S=torch.tensor([0, length]), table_SP=table_SP, params=None,
        laws=None, len_ub=length + 1, first_page=(), drafts=drafts, sampled=False, filtered=False, rejection=False,
        coupled=False,
    )  # fmt: skip


@pytest.fixture(params=CASES)
def rounds(request: pytest.FixtureRequest, golden_dir: Path) -> Rounds:
    with torch.inference_mode():
        return Rounds(golden_dir / request.param)


def test_two_rounds(rounds: Rounds) -> None:
    t = rounds.tensors
    with torch.inference_mode():
        for r in ("r1_", "r2_"):
            rounds.learn(t[r + "context"])
            hidden = rounds.block(t[r + "anchor"])
            torch.testing.assert_close(hidden, t[r + "hidden"], **CLOSE)
            torch.testing.assert_close(rounds.model.logits(hidden), t[r + "base_logits"], **CLOSE)
            drafts = t[r + "draft_tokens"].tolist()
            if not rounds.config.anchor_predicts:
                assert rounds.model.logits(hidden)[1:].argmax(1).tolist() == drafts
                continue
            tokens, corrected, confidence = rounds.chain(hidden, t[r + "anchor"], lambda k, x: x.argmax())
            assert tokens == drafts
            torch.testing.assert_close(corrected, t[r + "corrected_logits"], **CLOSE)
            if confidence is not None:
                torch.testing.assert_close(confidence, t[r + "confidence_logits"], **CLOSE)


def test_two_rounds_as_a_gpu_runs_them(rounds: Rounds) -> None:
    """The fused round, each kernel by its definition."""
    t, c = rounds.tensors, rounds.config
    with torch.inference_mode():
        # Heads of 24 straddle the streaming product's tiles; the definitions know no tiles.
        assert FusedBlock.fits(rounds.model) == (c.shape.head_dim == 16)
        kv, wants = rounds.pages.kv, rounds.model.confidence is not None
        fused = FusedBlock(rounds.model, kv, Workspace("cpu", floats=1, counters=1), positions=64, pdl=False)
        for r in ("r1_", "r2_"):
            taps = t[r + "context"].chunk(len(c.taps), 1)
            pos_R = torch.arange(rounds.length, rounds.length + taps[0].shape[0])
            fused.learn(taps, torch.ones_like(pos_R), pos_R, rounds.table_SP)
            rounds.length += len(pos_R)
            out = fused.draft(
                end_of_frame(rounds.length, t[r + "anchor"], rounds.table_SP, c.max_drafts), rows=c.block_size,
                skip=c.block_size - c.max_drafts, drafts=c.max_drafts, real=torch.float32, confident=wants,
            )  # fmt: skip
            assert out.token_BK[0].tolist() == t[r + "draft_tokens"].tolist()
            if out.confidence_BK is not None:
                torch.testing.assert_close(out.confidence_BK[0], t[r + "confidence_logits"], **CLOSE)


@pytest.mark.parametrize("case", ["dspark_vanilla", "dspark_gated", "dspark_rnn"])
def test_a_given_path_and_a_sampled_one(case: str, golden_dir: Path) -> None:
    with torch.inference_mode():
        rounds = Rounds(golden_dir / case)
        t = rounds.tensors
        for r in ("r1_", "r2_"):
            rounds.learn(t[r + "context"])
            hidden, anchor = rounds.block(t[r + "anchor"]), t[r + "anchor"]
            forced = t[r + "forced_tokens"]
            _, corrected, confidence = rounds.chain(hidden, anchor, lambda k, x, forced=forced: forced[k])
            torch.testing.assert_close(corrected, t[r + "forced_corrected_logits"], **CLOSE)
            torch.testing.assert_close(confidence, t[r + "forced_confidence_logits"], **CLOSE)
            laws: list[Tensor] = []

            def sample(k: int, logits_V: Tensor, r: str = r, laws: list[Tensor] = laws) -> Tensor:
                laws.append((logits_V / 0.8).softmax(0))
                return (laws[-1].double().cumsum(0) > t[r + "uniforms"][k]).long().argmax()

            tokens, _, _ = rounds.chain(hidden, anchor, sample)
            assert tokens == t[r + "sampled_tokens"].tolist()
            torch.testing.assert_close(torch.stack(laws), t[r + "sampled_probs"], **CLOSE)


def test_conventions(golden_dir: Path) -> None:
    """The trap of names: `dflash_*_block7` is DSpark without a Markov head, and keeps all rows of its block."""
    found = {}
    for case in CASES:
        values = json.loads((golden_dir / case / "config.json").read_text())
        target = tiny_config("qwen3", vocab_size=values["vocab_size"], hidden_size=64, num_hidden_layers=8)
        config = parse_block_config(values, target)
        assert config.taps == (2, 4, 6)
        found[case] = (config.anchor_predicts, config.max_drafts, config.markov_rank > 0)
    assert found == {
        "dflash_zlab": (False, 7, False),
        "dspark_vanilla": (True, 7, True),
        "dspark_gated": (True, 5, True),
        "dspark_rnn": (True, 7, True),
        "dspark_markov0": (True, 7, False),
    }
