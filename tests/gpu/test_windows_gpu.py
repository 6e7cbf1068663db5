"""Sliding windows and rotary positions on three axes on a GPU: kernels, captured frames, speculative equals plain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.kernels.attention import paged_attention
from slipstream.kernels.prefill import prefill_attention, prefill_tiles, rows_per_tile
from slipstream.kernels.workspace import Workspace
from tests.gpu.test_equality_gpu import BIG, GPU, PROMPTS, PlainOnTheCPU
from tests.support.eagle import write_eagle3
from tests.support.equality_cells import FACTORS, run_cell
from tests.support.kernel_cases import attention_by_loops, paged_case, relative_error
from tests.support.kit import perturb, tiny_model_dir
from tests.support.pairwise import pairwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_float32"),
]

LIMIT = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
DRAFTERS = ("none", "ngram", "oracle", "draft-good", "eagle3", "eagle3-tree")
CELLS = pairwise(
    {**FACTORS, "drafter": DRAFTERS, "batch": (1, 4), "shapes": ("buckets", "padded"), "graphs": (True, False)}, seed=4
)
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("windows")
    target = tiny_model_dir(root / "target", seed=1, layers=3, arch="gemma3_text", **BIG)
    return {
        "target": target,
        "draft-good": perturb(target, root / "good", scale=0.02),
        "eagle3": write_eagle3(root / "eagle3", target, draft_vocab=24),
    }


@pytest.fixture(scope="module")
def reference(dirs: dict[str, Path]) -> PlainOnTheCPU:
    return PlainOnTheCPU(dirs["target"])


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 256), (2, 64)])
@pytest.mark.parametrize("window", [1, 40, 512])
def test_attention_of_rows(dtype: torch.dtype, kv_heads: int, dim: int, window: int) -> None:
    """Chains, and trees where their ancestors are within the window; NaN wherever no row may look."""
    work = Workspace("cuda")
    for tree in (False, True) if window > 8 else (False,):
        case = paged_case(
            [600, 37, 900], [4, 1, 6], page=32, kv_heads=kv_heads, dim=dim, dtype=dtype, tree=tree, window=window
        )
        q = torch.randn(case.slot.shape[0], kv_heads * 4, dim).to(dtype)
        assert case.low is not None
        k, v, table, slot, pos, low = (t.cuda() for t in (case.k, case.v, case.table, case.slot, case.pos, case.low))
        seen = None if case.tree is None else case.tree.cuda()
        got = paged_attention(q.cuda(), k, v, table, slot, pos, seen, dim**-0.5, work.partial, work.counters, low_R=low)
        assert relative_error(got, attention_by_loops(q, case, dim**-0.5)) < LIMIT[dtype]
        assert (got[slot == 0] == 0).all() and not work.counters.any()


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 256), (4, 16)])
@pytest.mark.parametrize("window", [1, 33, 200])
def test_attention_of_chunks(dtype: torch.dtype, kv_heads: int, dim: int, window: int) -> None:
    case = paged_case([0, 200, 300], [150, 70, 1], page=32, kv_heads=kv_heads, dim=dim, dtype=dtype, window=window)
    q = torch.randn(case.slot.shape[0], kv_heads * 4, dim).to(dtype)
    k, v, table, slot, pos = (t.cuda() for t in (case.k, case.v, case.table, case.slot, case.pos))
    tiles = prefill_tiles(slot, rows_per_tile(slot.shape[0], 4, dim, dtype.itemsize), table.shape[0] + 3)
    got = prefill_attention(q.cuda(), k, v, table, slot, pos, tiles, dim**-0.5, 0, window)
    assert relative_error(got, attention_by_loops(q, case, dim**-0.5)) < LIMIT[dtype]


def poison(llm: LLM) -> None:
    """NaN in every window page at first, and in the sink page before each launch."""
    device, nan = llm._built.device, float("nan")
    windows, launch = device.frame.cache.windows, device.launch
    assert windows is not None and windows.kv is not None
    kv = windows.kv
    kv.data.fill_(nan)

    def poisoned(plan: Any) -> None:
        kv.data[:, :, 0].fill_(nan)
        launch(plan)

    device.launch = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_gpu_speculative_equals_cpu_plain(
    cell: dict[str, Any], dirs: dict[str, Path], reference: PlainOnTheCPU
) -> None:
    run_cell(cell, dirs, reference, cuda_graphs=cell["graphs"], prepare=poison, **GPU)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_graphs_change_no_token(dirs: dict[str, Path], dtype: str, draft: str | None) -> None:
    params = SamplingParams(temperature=0.8, seed=3, top_p=0.9, max_tokens=40, ignore_eos=True)
    outs = []
    for graphs in (True, False):
        with LLM(
            model=str(dirs["target"]), device="cuda", dtype=dtype, draft=draft, cuda_graphs=graphs, max_slots=4,
            max_model_len=128, page_size=16,
        ) as llm:  # fmt: skip
            outs.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)])
            llm.check_idle()
    assert outs[0] == outs[1]


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_text_on_three_axes_is_text_on_one(tmp_path: Path, draft: str | None) -> None:
    """A model whose rotary embedding has sections, text alone: the CPU's tokens, and those of the model without."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    given = {"vision_config": {"spatial_merge_size": 2}, "image_token_id": 90, "rope_parameters": AXES}
    outs = []
    for i, (more, device) in enumerate(((given, "cuda"), (given, "cpu"), ({}, "cuda"))):
        target = tiny_model_dir(tmp_path / str(i), seed=1, **{**BIG, **more})
        with LLM(model=str(target), device=device, dtype="float32", draft=draft, max_model_len=128) as llm:
            outs.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)])
            llm.check_idle()
    assert outs[0] == outs[1] == outs[2]
