"""Recurrent layers on a GPU: compiled kernels against the references, the engine against the CPU and golden cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.attention.dense import DenseCausal
from slipstream.kernels import delta, delta_ops
from tests.support.delta_cases import Case, delta_case, prompt_rows
from tests.support.kernel_cases import relative_error
from tests.support.reference import planted_oracle
from tests.support.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BIG = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_hidden_layers": 4,
}  # fmt: skip
PROMPTS = [[5, 6, 7] * 10, [9] * 20, [1, 2], list(range(30, 70))]
LIMIT = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SHAPE = {"heads": 4, "key_heads": 2, "dk": 128, "dv": 128}


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    torch.manual_seed(0)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def same_memory(there: Case, here: Case, limit: float) -> None:
    for got, want in zip(there.memory[:4], here.memory[:4], strict=True):
        got = got[1:].cpu().float()
        assert torch.equal(got.isnan(), want[1:].isnan())
        assert relative_error(got.nan_to_num(), want[1:].float().nan_to_num()) < limit


def rounded(c: Case, dtype: torch.dtype) -> Case:
    """The same numbers as a GPU in `dtype` has them, kept in float32."""
    return c.to("cpu", dtype).to("cpu", torch.float32)


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize(
    ("rows", "interval", "early"), [([1, 4, 0, 2], 5, 0), ([4] * 9, 5, 1), ([1] * 40, 0, 0), ([8, 8, 8], 64, 0)]
)
def test_decode_rows(rows: list[int], interval: int, early: int, dtype: torch.dtype) -> None:
    lacks = [0, 3, 1, 2] * 10
    lengths = [1, 9, 6, 12, 30, 77, 63, 64, 65, 66] * 4
    here = rounded(
        delta_case(
            rows, lengths=lengths, lacks=[min(a, b) for a, b in zip(lacks, lengths, strict=True)], interval=interval,
            early=early, replays=max(3, max(rows) - 1), padding=early * 3, **SHAPE,
        ),
        dtype,
    )  # fmt: skip
    there = here.to("cuda", dtype)

    def run(c: Case) -> Tensor:
        rows_of = (c.committed_S, c.slot_B, c.rows_B, c.owner_R, c.row_of_BW)
        out: Tensor = delta_ops.delta_rows(c.x_RX, *c.memory, *c.weights, *rows_of)
        delta_ops.delta_absorb(c.memory.absorbed_S, c.committed_S, c.slot_B, c.rows_B)
        return out

    want, got = run(here), run(there)
    assert relative_error(got.float(), want) < LIMIT[dtype]
    same_memory(there, here, LIMIT[dtype])
    assert torch.equal(there.memory.absorbed_S[1:].cpu(), here.memory.absorbed_S[1:])


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("spans", [[(2, 0, 300), (1, 5, 2), (3, 64, 200)], [(1, 30, 3)], [(3, 0, 17), (2, 0, 16)]])
def test_prompt_rows(spans: list[delta.Span], early: int, dtype: torch.dtype) -> None:
    made = delta_case([1, 1, 1], lengths=[5, 0, 64], lacks=[0, 0, 0], interval=64, early=early, **SHAPE)
    x_RX, slot_R, pos_R = prompt_rows(made, spans, padding=40)
    here = rounded(made, dtype)
    there, x_RX = here.to("cuda", dtype), x_RX.to(dtype)
    tile_3T = delta.delta_tiles(slot_R, pos_R, delta_ops.PROMPT_TILE, 4, early)

    def run(c: Case, x_RX: Tensor) -> Tensor:
        m, device = c.memory, x_RX.device
        out: Tensor = delta_ops.delta_prompt(
            x_RX, *m[:4], m.saved_SC, m.interval, m.early, *c.weights, slot_R.to(device), pos_R.to(device),
            tile_3T.to(device),
        )  # fmt: skip
        return out

    want, got = run(here, x_RX.float()), run(there, x_RX.cuda())
    assert relative_error(got.float(), want) < LIMIT[dtype]
    same_memory(there, here, LIMIT[dtype])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("m") / "hybrid", "qwen3_5_text", seed=1, **BIG))


def generate(model: str, device: str, params: SamplingParams, **options: Any) -> list[list[int]]:
    with LLM(
        model=model, device=device, dtype="float32", max_slots=4, max_model_len=128, page_size=16, **options
    ) as llm:
        outs = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
        again = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
        assert again == outs, "a second time, with whatever the first left behind"
        llm.check_idle()
        return outs


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 3, "top_p": 0.9}], ids=str)
def test_gpu_equals_cpu_with_and_without_graphs(model: str, sampling: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, **sampling)
    want = generate(model, "cpu", params)
    known = {tuple(p): w for p, w in zip(PROMPTS, want, strict=True)}
    oracle = planted_oracle(lambda r: known[r.prompt_token_ids], vocab=96, seed=3)
    for draft in (None, "ngram", oracle):
        for graphs, run_ahead in ((False, 2), (True, 1), (True, 8)):
            options = {"draft": draft, "cuda_graphs": graphs, "run_ahead": run_ahead}
            assert generate(model, "cuda", params, **options) == want, options


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_golden_tokens(golden_dir: Path, case: str, draft: str | None) -> None:
    folder = golden_dir / f"target_{case}"
    expected = load_file(folder / "expected.safetensors")
    prompt, want = expected["prompt_ids"].tolist(), expected["greedy_ids"].tolist()
    with LLM(model=str(folder), device="cuda", dtype="float32", max_slots=2, draft=draft) as llm:
        out = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=len(want), ignore_eos=True))[0]
    assert out.outputs[0].token_ids == want


def test_poison_in_states_reaches_nobody(model: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {"model": model, "device": "cuda", "dtype": "float32", "draft": "ngram"}
    with LLM(max_slots=4, max_model_len=128, page_size=16, prefix_cache=False, **options) as llm:
        want = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
        frame = llm._built.device.frame
        for tensor in (frame.states.state, frame.states.recent, frame.kv.data, frame.workspace.partial):
            tensor.fill_(float("nan"))
        victim = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
        next(victim)
        victim.close()
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)] == want


def test_bf16_tokens_are_the_plain_passes_argmax(model: str) -> None:
    """Teacher-forced: the plain pass without cache gives each token its largest logit, or nearly."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(model=model, device="cuda", dtype="bfloat16", draft="ngram", max_slots=4, max_model_len=128) as llm:
        outs = llm.generate(PROMPTS, params)
        plain = llm._built.model
    gaps = []
    for prompt, out in zip(PROMPTS, outs, strict=True):
        tokens = prompt + out.outputs[0].token_ids
        pos = torch.arange(len(tokens), device="cuda")
        with torch.inference_mode():
            hidden, _ = plain.forward(torch.tensor(tokens, device="cuda"), pos, DenseCausal(pos))
            logits = plain.logits(hidden)[len(prompt) - 1 : -1]
        chosen = torch.tensor(out.outputs[0].token_ids, device="cuda")
        gaps.append(logits.amax(1) - logits.gather(1, chosen[:, None])[:, 0])
    gap = torch.cat(gaps)
    assert float(gap.max()) < 1.0, "bf16 rounds states and rows differently along the two ways"
    assert float((gap == 0).float().mean()) > 0.85
