"""DFlash and DSpark on a GPU: the fused round is the plain one, and whole rounds are the reference's, from graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.draft.block_fused import FusedBlock
from slipstream.draft.protocol import Drafts, DraftView
from slipstream.kernels import block, gemm
from slipstream.kernels.norm import rms_norm
from slipstream.kernels.sample import argmax_finish
from slipstream.kernels.tuning import PassConfig
from slipstream.kernels.workspace import Workspace
from slipstream.models.fused_layers import Rows
from tests.support.block_cases import KINDS, LIBRARY, BlockCase
from tests.support.block_rounds import RUNS, recorded_rounds
from tests.support.kernel_cases import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_float32"),
]

LIMIT = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("cut", [PassConfig(), LIBRARY], ids=("streamed", "library"))
@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_round_is_the_plain_one(kind: str, cut: PassConfig) -> None:
    """float32: the same tokens, counts, laws and cache."""
    with torch.inference_mode():
        case = BlockCase(kind, slots=5, hidden=128, vocab=1003, page=16, bias=True, device="cuda")
        options: dict[str, Any] = {"confidence_threshold": 0.5} if case.model.confidence is not None else {}
        full = case.model.max_drafts
        for view in (case.view, replace(case.sampled(), drafts=2)):
            plain = case.drafter(None, drafts=full, **options)
            fused = case.drafter(cut, drafts=full, pdl=True, **options)
            want, got = case.round(plain, view), case.round(fused, view)
            alive = view.slot_B > 0
            assert torch.equal(got.token_BK[alive], want.token_BK[alive])
            assert torch.equal(got.count_B[alive], want.count_B[alive])
            if want.q_BKV is not None and got.q_BKV is not None:
                assert relative_error(got.q_BKV[alive], want.q_BKV[alive]) < 1e-3
            assert relative_error(case.written(fused), case.written(plain)) < LIMIT[torch.float32]
            assert fused.fused is not None and not fused.fused.workspace.counters.any()


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize("cut", [PassConfig(), LIBRARY], ids=("streamed", "library"))
@pytest.mark.parametrize("page", [1, 16])
def test_hidden_states_and_base_logits(dtype: torch.dtype, cut: PassConfig, page: int) -> None:
    with torch.inference_mode():
        case = BlockCase("dflash", slots=2, hidden=256, vocab=1000, page=page, dtype=dtype, device="cuda")
        plain, fused = case.drafter(None, drafts=4), case.drafter(cut, drafts=4, pdl=True)
        case.round(plain, case.view), case.round(fused, case.view)
        assert relative_error(case.written(fused), case.written(plain)) < LIMIT[dtype]
        view, ran = case.view, fused.fused
        assert isinstance(ran, FusedBlock)
        token, slot, pos, last, _ = block.block_rows(
            view.slot_B, view.committed_B, view.history_SL, view.table_SP, page, 3, 5
        )
        pos_BT = pos.view(2, 5)
        attention = plain.pages.block_attention(
            view.table_SP, view.slot_B, pos_BT, len_ub=view.len_ub + 5, heads_per_kv=plain.heads_per_kv
        )
        want = case.model.forward(token.view(2, 5), pos_BT, attention).flatten(0, 1)
        stream = ran._pass(token, Rows(slot, pos, view.table_SP, 5, last_R=last))
        hidden = rms_norm(stream.h_RH, case.model.norm.weight, 1e-6)
        assert relative_error(hidden, want) < LIMIT[dtype]
        logits, best = ran.layers.head(stream, case.model.head, case.model.norm, logits=True)
        assert relative_error(logits, case.model.logits(want)) < LIMIT[dtype]
        assert torch.equal(best, logits.argmax(1))


@pytest.mark.parametrize(("rank", "vocab"), [(24, 1003), (64, 4096), (256, 151936)])
@pytest.mark.parametrize("slots", [1, 8, 32, 100])
@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
def test_a_chain_of_tokens(dtype: torch.dtype, slots: int, rank: int, vocab: int) -> None:
    """Bias, choice and the next step's input, against the definitions in float64; the counters are left at zero."""
    torch.manual_seed(0)
    drafts, work = 3, Workspace("cuda")
    work.partial.fill_(float("nan"))
    w1, w2 = (torch.randn(vocab, rank, device="cuda").to(dtype) for _ in range(2))
    base = torch.randn(slots, drafts, vocab, device="cuda")
    tokens, x = torch.full((slots, drafts), -9, device="cuda"), w1[:slots].clone()
    for step in range(drafts):
        logits, best, where = gemm.markov_head(x, w2, base, step, work.partial, work.counters)
        want = base[:, step].double() + x.double() @ w2.double().T
        assert relative_error(logits, want) < 2e-5
        x = block.markov_next(best, where, w1, tokens, step)
        assert torch.equal(tokens[:, step], logits.argmax(1)) and torch.equal(x, w1[tokens[:, step]])
        assert torch.equal(argmax_finish(best, where, vocab), tokens[:, step])
        blind = gemm.markov_head(x, w2, base, step, work.partial, work.counters, False)
        assert blind[1].shape == best.shape
    assert not work.counters.any()


@pytest.mark.parametrize("kind", ["dflash", "vanilla", "rnn"])
@pytest.mark.parametrize("cut", [PassConfig(), LIBRARY], ids=("streamed", "library"))
def test_a_captured_round_repeats_its_tokens(kind: str, cut: PassConfig) -> None:
    """Dependent launches: 30 replays give what one round without them gave."""
    with torch.inference_mode():
        case = BlockCase(kind, slots=5, hidden=256, vocab=4096, page=16, dtype=torch.bfloat16, device="cuda")
        drafts = case.model.max_drafts
        want = case.round(case.drafter(cut, drafts=drafts), case.view).token_BK.clone()
        fused = case.drafter(cut, drafts=drafts, pdl=True)
        case.round(fused, case.view)

        def end(view: DraftView) -> Drafts:
            return fused.propose(fused.extend(view), view)

        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            end(case.view)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = end(case.view)
        alive = case.view.slot_B > 0
        for _ in range(30):
            graph.replay()
            assert torch.equal(out.token_BK[alive], want[alive])


@pytest.mark.parametrize(("graphs", "run_ahead", "page_size"), [(True, 2, 32), (True, 8, 16), (False, 1, 1)])
@pytest.mark.parametrize("name", list(RUNS))
def test_rounds_of_the_reference(golden_dir: Path, name: str, graphs: bool, run_ahead: int, page_size: int) -> None:
    recorded_rounds(
        golden_dir, name, device="cuda", max_slots=2, page_size=page_size, run_ahead=run_ahead, cuda_graphs=graphs
    )
