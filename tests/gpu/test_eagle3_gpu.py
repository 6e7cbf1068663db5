"""EAGLE-3 on a GPU: the fused pass is the plain one, and whole rounds are the reference's, from captured graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.attention.dense import DenseCausal
from slipstream.draft.checkpoint import TensorTable
from slipstream.draft.eagle3_config import parse_eagle3
from slipstream.draft.eagle3_fused import FusedHead
from slipstream.draft.eagle3_model import Eagle3Model, draft_ids
from slipstream.kernels.tuning import PassConfig
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from tests.support.eagle import head_tensors, head_values, rounds_of_the_reference, stand_in_target
from tests.support.kernel_cases import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_float32"),
]

H, V, PAGE = 256, 1000, 16
LIMIT = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def make(dtype: torch.dtype, shape: dict[str, Any], changes: dict[str, Any]) -> Eagle3Model:
    tensors = head_tensors(hidden=H, vocab=V, own_embedding=True, spread=1.0, **shape)
    values = head_values(hidden=H, vocab=V, draft_vocab=shape.get("draft_vocab"), **changes)
    target = stand_in_target(hidden=H, vocab=V, layers=4, dtype=dtype, device="cuda")
    config, table = parse_eagle3(values, target.config), TensorTable(tensors)
    return Eagle3Model(config, table, target, draft_ids(table, config, target.device))


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize(
    ("pdl", "cut"),
    [(False, PassConfig()), (True, PassConfig()), (True, PassConfig(rope=0, residual=0, silu=0, head=0, linear=0))],
    ids=("streamed", "dependent launches", "library"),
)
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ({"draft_vocab": 600}, {}),
        ({"qk_norm": True}, {"norm_before_residual": True}),
        ({"wide": (True, False), "tap_norms": True, "fc_bias": True}, {"num_hidden_layers": 2}),
    ],
    ids=("official", "normed", "two layers"),
)
def test_the_fused_pass_is_the_plain_one(
    dtype: torch.dtype, pdl: bool, cut: PassConfig, shape: dict[str, Any], changes: dict[str, Any]
) -> None:
    """37 rows of one slot in passes of 30, 1 and 6 over pages that are NaN wherever nothing was written."""
    torch.manual_seed(0)
    with torch.inference_mode():
        head = make(dtype, shape, changes)
        c, rows, device = head.config, 37, torch.device("cuda")
        kv = KVPages(
            num_layers=c.num_layers, num_pages=4, page_size=PAGE, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim,
            dtype=dtype, device=device,
        )  # fmt: skip
        kv.data.fill_(float("nan"))
        work = Workspace(device)
        work.partial.fill_(float("nan"))
        assert FusedHead.fits(head)
        fused = FusedHead(head, kv, work, positions=64, first_cell=1, pdl=pdl, config=cut)
        table = torch.tensor([[0, 0, 0], [3, 1, 4]], device=device)
        taps = [torch.randn(rows, H, device=device).to(dtype) for _ in range(2)]
        token, at = torch.randint(0, V, (rows,), device=device), torch.arange(rows, device=device)
        state, normed = head.forward(token, head.fuse(taps), at, head.rotary(64), DenseCausal(at))
        logits = head.logits(normed)
        x = fused.features(taps)
        for begin, end in ((0, 30), (30, 31), (31, 37)):
            n = end - begin
            last = torch.tensor([n - 1], device=device) if n > 1 else None
            out = fused.run(
                token[begin:end], x[begin:end], torch.ones(n, dtype=torch.int64, device=device), at[begin:end] + 1,
                table, last_B=last, logits=True, per_slot=n,
            )  # fmt: skip
            assert relative_error(out.state_BH[0], state[end - 1]) < LIMIT[dtype]
            assert relative_error(out.logits_BD[0], logits[end - 1]) < LIMIT[dtype]
            best = out.logits_BD[0].argmax()
            assert out.token_B is not None
            assert int(out.token_B[0]) == int(best if head.id_D is None else head.id_D[best])
        assert not work.counters.any()


@pytest.mark.parametrize(("graphs", "run_ahead", "page_size"), [(True, 2, 32), (True, 8, 16), (False, 1, 1)])
def test_rounds_of_the_reference(golden_dir: Path, graphs: bool, run_ahead: int, page_size: int) -> None:
    rounds_of_the_reference(
        golden_dir, "chain", device="cuda", page_size=page_size, run_ahead=run_ahead, cuda_graphs=graphs
    )


def test_sampled_drafts_are_accepted_and_their_laws_are_laws(golden_dir: Path) -> None:
    """Unseeded and seeded slots: drafts of either kind hold, and q is zero outside the draft vocabulary."""
    case = json.loads((golden_dir / "e2e_eagle3" / "expected.json").read_text())
    prompts = [p["prompt_ids"] for p in case["prompts"]] * 4
    with LLM(
        model=str(golden_dir / "e2e_target"), draft=str(golden_dir / "e2e_eagle3"), num_drafts=4, device="cuda",
        dtype="float32", max_slots=16, max_model_len=128,
    ) as llm:  # fmt: skip
        for seed in (None, 5):
            params = SamplingParams(temperature=0.7, top_p=0.95, seed=seed, max_tokens=48, ignore_eos=True)
            outs = llm.generate(prompts, params)
            assert sum(o.spec.emitted for o in outs) / sum(o.spec.rounds for o in outs) > 2.0
        frame = llm._built.device.frame
        q, ids = frame.state.draft_q, frame.drafter.model.id_D
        used = q.sum(2) > 0
        assert used[1:13].all() and torch.allclose(q.sum(2)[used], torch.ones(()).cuda(), atol=1e-4)
        assert not q.index_fill(2, ids, 0.0).any()
        llm.check_idle()
