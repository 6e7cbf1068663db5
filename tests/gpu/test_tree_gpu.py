"""Draft trees on a GPU: their kernels against the references, whole rounds against the reference implementation's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.benchmark.audit_cells import SAMPLING, Frames, failures, run_cell
from slipstream.kernels import tree as ops
from slipstream.kernels.attention import paged_attention
from slipstream.kernels.workspace import Workspace
from tests.support.eagle import rounds_of_the_reference, write_eagle3
from tests.support.kernel_cases import relative_error
from tests.support.tiny import write_tiny_checkpoint
from tests.support.tree_cases import random_paths, random_rounds, random_trees

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("nodes", [2, 16, 64])
@pytest.mark.parametrize("rows", [1, 127, 4096])
def test_tree_rows(nodes: int, rows: int) -> None:
    committed, depth, seen = random_trees(64, nodes)
    slot = torch.randint(0, 65, (rows,))
    cell = committed[slot] + torch.randint(0, nodes, (rows,))
    case = (slot, cell, committed, depth, seen)
    for a, b in zip(ops.tree_rows(*(t.cuda() for t in case)), ops.placed_rows(*case), strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("shape", [(1, 0, 16, 4, 16), (30, 34, 64, 9, 64), (5, 2, 9, 3, 5), (200, 56, 2, 1, 2)])
def test_walk_trees(shape: tuple[int, int, int, int, int]) -> None:
    case = random_rounds(*shape)
    got = ops.walk_trees(*(t.cuda() for t in case[:-1]), case[-1])
    for a, b in zip(got, ops.walked_trees(*case), strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("slots", [1, 5, 64])
@pytest.mark.parametrize(
    ("page", "depth", "heads", "dim"), [(1, 4, 2, 12), (3, 1, 1, 8), (16, 7, 8, 128), (32, 63, 3, 64)]
)
def test_compact_path(dtype: torch.dtype, slots: int, page: int, depth: int, heads: int, dim: int) -> None:
    """A wrong order of reads and writes shows as other numbers: paths overlap themselves. Often, for races are rare."""
    case = random_paths(slots, 2, depth, page=page, shape=(heads, dim), dtype=dtype, seed=depth)
    want = case.data.clone()
    ops.moved_path(want, *case[1:])
    there = case.to("cuda")
    for _ in range(20):
        got = there.data.clone()
        ops.compact_path(got, *there[1:])
        assert torch.equal(got.cpu().nan_to_num(99), want.nan_to_num(99))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("slots", "width", "first_cell"), [(1, 64, 0), (3, 10, 1), (40, 16, 0)])
def test_attention_over_trees(dtype: torch.dtype, slots: int, width: int, first_cell: int) -> None:
    """Rows see the committed positions and the nodes of their bits, the 64th too; cells nobody sees are NaN."""
    torch.manual_seed(0)
    page, heads, kv_heads, dim = 16, 8, 2, 64
    base = torch.randint(1, 300, (slots,))
    pages = -(-(300 + width) // page)
    table = torch.cat([torch.zeros(1, pages).long(), torch.randperm(slots * pages).view(slots, pages) + 1])
    k, v = (torch.full((slots * pages + 1, page, kv_heads, dim), float("nan")) for _ in range(2))
    for s in range(slots):
        at = torch.arange(first_cell, int(base[s]) + width + first_cell)
        cells = (table[s + 1, at // page], at % page)
        k[cells], v[cells] = torch.randn(len(at), kv_heads, dim), torch.randn(len(at), kv_heads, dim)
    slot = torch.arange(1, slots + 1).repeat_interleave(width)
    past = (base - 1).clamp(min=first_cell).repeat_interleave(width)
    own = (torch.ones(width).long() << torch.arange(width)).repeat(slots)
    seen = own | 1 | (torch.randint(-(2**62), 2**62, own.shape) & (own - 1))
    q = torch.randn(slots * width, heads, dim).to(dtype)
    work, cpu = Workspace("cuda"), Workspace("cpu", floats=8)
    case = (q, k.to(dtype), v.to(dtype), table, slot, past, seen)
    want = paged_attention(*case, dim**-0.5, cpu.partial, cpu.counters, first_cell=first_cell)
    got = paged_attention(
        *(t.cuda() for t in case), dim**-0.5, work.partial, work.counters, per_slot=width, first_cell=first_cell
    )
    assert relative_error(got.cpu(), want) < (2e-5 if dtype == torch.float32 else 2e-2)
    assert not work.counters.any()


@pytest.mark.parametrize(("graphs", "run_ahead", "page_size"), [(True, 2, 32), (True, 8, 16), (False, 1, 1)])
def test_rounds_of_the_reference(golden_dir: Path, graphs: bool, run_ahead: int, page_size: int) -> None:
    rounds_of_the_reference(
        golden_dir, "tree", device="cuda", page_size=page_size, run_ahead=run_ahead, cuda_graphs=graphs
    )


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 5, "top_p": 0.9}], ids=str)
def test_a_wide_tree_for_many_slots(tmp_path: Path, sampling: dict[str, Any]) -> None:
    """64 nodes for 20 slots: more rows than the fused products stream, scratch of the size that they need."""
    target = write_tiny_checkpoint(tmp_path / "t", seed=1, hidden_size=128, head_dim=32)
    draft = write_eagle3(tmp_path / "e", target)
    prompts = [[5 + i, 6, 7] for i in range(20)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, **sampling)
    common: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_slots": 20, "max_model_len": 96}
    with LLM(model=str(target), **common) as llm:
        want = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    with LLM(
        model=str(target), draft=str(draft), draft_tree={"topk": 10, "levels": 7, "total": 64},
        slot_buckets=(1, 20), **common,
    ) as llm:  # fmt: skip
        outs = llm.generate(prompts, params)
        llm.check_idle()
    assert [o.outputs[0].token_ids for o in outs] == want
    assert sum(o.spec.accepted for o in outs) > 0


@pytest.mark.parametrize("sampling", list(SAMPLING))
def test_frames_of_trees_never_wait(tmp_path: Path, sampling: str) -> None:
    """Steady decode under the auditor, from captured graphs: no wait, copy, allocation or compilation."""
    frames = Frames(watched=8, traced=8, timed=16)
    target = write_tiny_checkpoint(
        tmp_path / "t", seed=1, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        intermediate_size=512, vocab_size=32768, num_hidden_layers=4, max_position_embeddings=1024,
    )  # fmt: skip
    with LLM(
        model=str(target), draft=str(write_eagle3(tmp_path / "e", target)), device="cuda", dtype="bfloat16",
        draft_tree={"topk": 3, "levels": 3, "total": 8}, max_slots=4, slot_buckets=(1, 4), max_model_len=768,
    ) as llm:  # fmt: skip
        for batch in (1, 4):
            cell = run_cell(llm, batch=batch, sampling=sampling, frames=frames)
            assert not failures(cell, host_us=None, idle_between=None), cell
