"""MTP on a GPU: hidden states and drafts are the float64 formula's, from captured graphs, and no frame waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams
from slipstream.attention.dense import DenseCausal
from slipstream.audit import watch
from slipstream.draft.mtp_fused import FusedMTP
from slipstream.draft.mtp_model import load_mtp
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from slipstream.models.config import read_json
from slipstream.models.loader import load_model
from tests.support.kernel_cases import relative_error
from tests.support.mtp import MTPFormula, add_mtp
from tests.support.tiny import write_tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_float32"),
]

BIG = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}
PROMPTS = [[5, 6, 7] * 10, [9] * 20, [1, 2], list(range(30, 70))]
LIMIT = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_text"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head: one whose pass is fused, and one with recurrent layers and gated attention."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("mtp") / "target", request.param, seed=1, **BIG)
    return add_mtp(folder, seed=3)


@pytest.fixture(scope="module")
def formula(target: Path) -> tuple[MTPFormula, Any]:
    """The head's formula and the target, both in float64 on the CPU."""
    loaded, tensors = load_model(target, dtype="float64"), load_file(target / "model.safetensors")
    head = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    return (
        MTPFormula(head, loaded.config, tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]),
        loaded.model,
    )


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
def test_hidden_states(target: Path, formula: tuple[MTPFormula, Any], dtype: torch.dtype) -> None:
    model = load_model(target, device="cuda", dtype=str(dtype).removeprefix("torch.")).model
    head = load_mtp(target, read_json(target / "config.json"), model)
    torch.manual_seed(0)
    with torch.inference_mode():
        at, token = torch.arange(11), torch.randint(0, 96, (11,))
        h = torch.randn(11, 64).to(dtype)
        x, place = h.cuda(), at.cuda()
        state, _ = head.forward(token.cuda(), head.fuse([x]), place, head.rotary(32), DenseCausal(place))
        assert relative_error(state.cpu().double(), formula[0].hidden(token, h.double())) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize("pdl", [False, True])
def test_the_fused_pass_is_the_plain_one(target: Path, dtype: torch.dtype, pdl: bool) -> None:
    """37 rows of one slot in passes of 30, 1 and 6 over pages that are NaN wherever nothing was written."""
    torch.manual_seed(0)
    model = load_model(target, device="cuda", dtype=str(dtype).removeprefix("torch.")).model
    with torch.inference_mode():
        head = load_mtp(target, read_json(target / "config.json"), model)
        c, rows, device = head.config, 37, torch.device("cuda")
        kv = KVPages(
            num_layers=1, num_pages=4, page_size=16, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, dtype=dtype,
            device=device,
        )  # fmt: skip
        kv.data.fill_(float("nan"))
        work = Workspace(device)
        work.partial.fill_(float("nan"))
        assert FusedMTP.fits(head)
        fused = FusedMTP(head, kv, work, positions=64, first_cell=1, pdl=pdl)
        table = torch.tensor([[0, 0, 0], [3, 1, 4]], device=device)
        h = torch.randn(rows, 64, device=device).to(dtype)
        token, at = torch.randint(0, 96, (rows,), device=device), torch.arange(rows, device=device)
        state, normed = head.forward(token, head.fuse([h]), at, head.rotary(64), DenseCausal(at))
        logits = head.logits(normed)
        for begin, end in ((0, 30), (30, 31), (31, 37)):
            n = end - begin
            last = torch.tensor([n - 1], device=device) if n > 1 else None
            out = fused.run(
                token[begin:end], h[begin:end], torch.ones(n, dtype=torch.int64, device=device), at[begin:end] + 1,
                table, last_B=last, logits=True, per_slot=n,
            )  # fmt: skip
            assert relative_error(out.state_BH[0], state[end - 1]) < LIMIT[dtype]
            assert relative_error(out.logits_BD[0], logits[end - 1]) < LIMIT[dtype]
            assert out.token_B is not None and int(out.token_B[0]) == int(out.logits_BD[0].argmax())
        assert not work.counters.any()


@pytest.mark.parametrize(("graphs", "run_ahead", "page_size"), [(True, 2, 32), (True, 8, 16), (False, 1, 1)])
def test_drafts_are_the_formulas(
    target: Path, formula: tuple[MTPFormula, Any], graphs: bool, run_ahead: int, page_size: int
) -> None:
    """The drafts that wait in slot state after every few tokens, in float32; a near-tie of two logits may differ."""
    reference, model = formula
    same = total = 0
    with LLM(
        str(target), dtype="float32", device="cuda", draft="mtp", num_drafts=3, page_size=page_size,
        run_ahead=run_ahead, cuda_graphs=graphs, max_slots=4, max_model_len=128, prefix_cache=False,
    ) as llm:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        ids = [llm._submit(*llm._prepare(p, params)) for p in PROMPTS]
        state = llm._built.device.frame.state
        for _ in range(6):
            for _ in range(4):
                llm._engine.step()
            torch.cuda.synchronize()
            for slot in (i for i in range(1, 5) if int(state.active_S[i])):
                length = int(state.committed_S[slot])
                tokens = state.history_SL[slot, : length + 1].tolist()
                got = state.pending_SW[slot, 1 : 1 + int(state.draft_count_S[slot])].tolist()
                with torch.inference_mode():
                    pos = torch.arange(length)
                    h, _ = model.forward(torch.tensor(tokens[:-1]), pos, DenseCausal(pos))
                    want, _ = reference.drafts(tokens, h, max(1, len(got)))
                same, total = same + (got == want[: len(got)]), total + 1
        for request_id in ids:
            llm.abort(request_id)
        llm.check_idle()
    assert total >= 12 and same >= 0.95 * total, (same, total)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8}], ids=str
)
def test_no_frame_waits(target: Path, sampling: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True, **sampling)
    with LLM(str(target), device="cuda", dtype="bfloat16", draft="mtp", max_slots=4, max_model_len=400) as llm:
        ids = [llm._submit(*llm._prepare(p, params)) for p in PROMPTS]
        for _ in range(12):
            llm._engine.step()
        with watch(device="cuda", name="mtp") as report:
            for _ in range(20):
                llm._engine.step()
        assert not report.findings, report.table()
        for request_id in ids:
            llm.abort(request_id)


def test_unseeded_drafts_are_judged_by_laws(target: Path) -> None:
    """q of every verified draft is a law, and the answers are whole."""
    with LLM(str(target), device="cuda", dtype="float32", draft="mtp", max_slots=4, max_model_len=128) as llm:
        params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=48, ignore_eos=True)
        outs = llm.generate(PROMPTS, params)
        assert all(len(o.outputs[0].token_ids) == 48 and o.spec.drafted > 0 for o in outs)
        q = llm._built.device.frame.state.draft_q
        used = q.sum(2) > 0
        assert used[1:5].all() and torch.allclose(q.sum(2)[used], torch.ones(()).cuda(), atol=1e-4)
        llm.check_idle()
