"""Equality on the GPU: graphs change no bit, float32 without TF32 gives the CPU's tokens, nobody sees a neighbour."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams
from slipstream.attention.dense import DenseCausal
from tests.support.equality_cells import FACTORS, fields_of, model_dirs, run_cell
from tests.support.pairwise import pairwise
from tests.support.reference import planted_oracle

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

CELLS = pairwise({**FACTORS, "shapes": ("buckets", "padded", "default"), "graphs": (True, False)}, seed=11)
# S14: block drafts at as many streams as broke captured graphs elsewhere.
CELLS += [
    {
        "drafter": drafter, "sampling": "mixed", "batch": 32, "page_size": 16, "prefix": "miss", "chunk": 256,
        "event": "none", "run_ahead": 2, "shapes": "default", "graphs": True,
    }
    for drafter in ("dflash", "dspark")
]  # fmt: skip
POISONED = pairwise(
    {
        "drafter": ("none", "ngram", "suffix", "draft-good", "dspark", "eagle3", "mtp"),
        "event": ("abort", "preempt", "stop"), "run_ahead": (1, 2, 8),
        "sampling": ("greedy", "mixed"), "graphs": (True, False), "shapes": ("buckets", "padded"),
    },
    seed=5,
)  # fmt: skip
GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
BIG = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}
PROMPTS = [[5, 6, 7] * 10, [9] * 20, [1, 2], list(range(30, 70))]


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return model_dirs(tmp_path_factory.mktemp("tiny"), **BIG)


class PlainOnTheCPU:
    """Plain decoding on the CPU in float32, one request at a time."""

    def __init__(self, model: Path) -> None:
        self.llm = LLM(model=str(model), device="cpu", dtype="float32", max_model_len=256, prefix_cache=False)
        self.known: dict[Any, list[int]] = {}

    def continuation(self, prompt: tuple[int, ...], params: SamplingParams, child: int = 0) -> list[int]:
        assert child == 0
        fields = fields_of(params)
        key = (prompt, *fields.values())
        if key not in self.known:
            (out,) = self.llm.generate(list(prompt), SamplingParams(**fields))
            self.known[key] = out.outputs[0].token_ids
        return self.known[key]


@pytest.fixture(scope="module")
def reference(dirs: dict[str, Path]) -> PlainOnTheCPU:
    return PlainOnTheCPU(dirs["target"])


def name(cell: dict[str, Any]) -> str:
    return "-".join(str(v) for v in cell.values())


@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_gpu_speculative_equals_cpu_plain(
    cell: dict[str, Any], dirs: dict[str, Path], reference: PlainOnTheCPU
) -> None:
    run_cell(cell, dirs, reference, cuda_graphs=cell["graphs"], **GPU)


def poison_every_launch(llm: LLM) -> None:
    """NaN in all pages at first, and in the sink page and the kernels' scratch before each launch."""
    device, nan = llm._built.device, float("nan")
    frame, launch = device.frame, device.launch
    frame.kv.data.fill_(nan)

    def poisoned(plan: Any) -> None:
        frame.kv.data[:, :, 0].fill_(nan)
        frame.workspace.partial.fill_(nan)
        launch(plan)

    device.launch = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("cell", POISONED, ids=name)
def test_nobody_leaks_into_a_neighbour(cell: dict[str, Any], dirs: dict[str, Path], reference: PlainOnTheCPU) -> None:
    """Slots leave by abort, preemption or a stop string while NaN stands wherever nobody may look."""
    cell = {"batch": 4, "page_size": 16, "prefix": "miss", "chunk": 256, **cell}
    run_cell(
        cell, dirs, reference, cuda_graphs=cell["graphs"], prepare=poison_every_launch, prefix_cache=False, **GPU
    )  # fmt: skip


def state_after(model: Path, *, graphs: bool, dtype: str, draft: str | None, sampling: dict[str, Any]) -> Any:
    """Tokens, and the bits of KV, history and sampling-free slot state that the run leaves."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, **sampling)
    with LLM(
        model=str(model), device="cuda", dtype=dtype, draft=draft, cuda_graphs=graphs, max_slots=4, max_model_len=128,
        page_size=16, slot_buckets=(2, 4),
    ) as llm:  # fmt: skip
        tokens = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
        frame = llm._built.device.frame
        state = frame.state
        cells = [state.history_SL, state.committed_S, state.pending_SW, state.draft_count_S, state.table_SP]
        bits = frame.kv.data[:, :, 1:].contiguous().view(torch.uint8)
        return tokens, [bits.cpu(), *(t[1:].cpu() for t in cells)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "itself"])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, {"temperature": 0.8, "seed": 3, "top_p": 0.9, "min_p": 0.02}],
    ids=["greedy", "seed"],
)
def test_graphs_change_no_bit(dtype: str, drafter: str, sampling: dict[str, Any], dirs: dict[str, Path]) -> None:
    draft = {"none": None, "ngram": "ngram", "itself": str(dirs["target"])}[drafter]
    eager, captured = (
        state_after(dirs["target"], graphs=g, dtype=dtype, draft=draft, sampling=sampling) for g in (False, True)
    )
    assert captured[0] == eager[0]
    for a, b in zip(captured[1], eager[1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", ["target_llama", "target_qwen3"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "oracle", "itself"])
def test_golden_tokens(golden_dir: Path, case: str, drafter: str) -> None:
    """The reference implementation's float32 tokens, exactly, at several page and chunk sizes."""
    expected = load_file(golden_dir / case / "expected.safetensors")
    prompt, want = expected["prompt_ids"].tolist(), expected["greedy_ids"].tolist()
    folder = str(golden_dir / case)
    draft: dict[str, Any] = {
        "none": {},
        "ngram": {"draft": "ngram", "draft_options": {"min_n": 1, "gate": False}},
        "oracle": {"draft": planted_oracle(lambda r: want, vocab=256, seed=1)},
        "itself": {"draft": folder},
    }[drafter]
    params = SamplingParams(temperature=0, max_tokens=len(want), ignore_eos=True)
    for page, chunk, run_ahead in ((1, 3, 1), (16, 7, 2), (32, 256, 8)):
        options = {"page_size": page, "prefill_chunk": chunk, "run_ahead": run_ahead, "max_model_len": 64}
        with LLM(model=folder, max_slots=4, **options, **draft, **GPU) as llm:
            outs = llm.generate([prompt, prompt], params)
        assert [o.outputs[0].token_ids for o in outs] == [want, want], options


def test_bf16_teacher_forced(dirs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Each speculative token is plain decoding's argmax, or within twice the paths' largest logit difference."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(
        model=str(dirs["target"]), device="cuda", dtype="bfloat16", draft=str(dirs["draft-good"]), max_slots=4,
        max_model_len=128, num_drafts=3,
    ) as llm:  # fmt: skip
        outs = llm.generate(PROMPTS, params)
        assert sum(o.spec.accepted for o in outs) > 0
        frame = llm._built.device.frame
        exact, total, apart, worst = 0, 0, 0.0, 0.0
        for prompt, out in zip(PROMPTS, outs, strict=True):
            chosen = torch.tensor(out.outputs[0].token_ids, device="cuda")
            tokens = torch.cat([torch.tensor(prompt, device="cuda"), chosen])
            plain, *others = (
                logits[len(prompt) - 1 : -1]
                for logits in (forced(frame, tokens, 1), forced(frame, tokens, 4), prefilled(frame.model, tokens))
            )
            apart = max(apart, *(float((plain - other).abs().max()) for other in others))
            gap = plain.amax(1) - plain.gather(1, chosen[:, None])[:, 0]
            worst = max(worst, float(gap.max()))
            exact, total = exact + int((gap == 0).sum()), total + len(chosen)
    with capsys.disabled():
        print(json.dumps({"bf16_teacher_forced_share": exact / total, "largest_difference": apart, "worst_gap": worst}))
    assert worst <= 2 * apart and exact / total > 0.9


def prefilled(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [L, V] by the unfused pass over all rows at once, as prefill runs them."""
    pos = torch.arange(len(tokens), device="cuda")
    with torch.inference_mode():
        hidden, _ = model.forward(tokens, pos, DenseCausal(pos))
        return model.logits(hidden).float()  # type: ignore[no-any-return]


def forced(frame: Any, tokens: torch.Tensor, rows: int) -> torch.Tensor:
    """Logits [L, V] of every position by the captured frame's own pass, `rows` at a time through slot 1's pages."""
    state, logits = frame.state, []
    with torch.inference_mode():
        state.table_SP[1] = torch.arange(1, state.table_SP.shape[1] + 1, device="cuda")
        for start in range(0, len(tokens), rows):
            token_R = tokens[start : start + rows]
            pos_R = torch.arange(start, start + len(token_R), device="cuda")
            slot_R = torch.ones_like(pos_R)
            logits.append(
                frame.fused.run(
                    token_R, slot_R, pos_R, state.table_SP, logits=True, width=len(token_R)
                ).logits_RV.clone()
            )
    return torch.cat(logits)
