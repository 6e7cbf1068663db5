"""Prefill on a GPU: captured = eager bit for bit, whatever the chunks; NaN in free pages reaches nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.kernels.prefill import prefill_attention, prefill_tiles, rows_per_tile
from tests.support.kernel_cases import attention_by_loops, paged_case, relative_error
from tests.support.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LIMIT = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
LONG = [[(7 * i + j) % 90 for i in range(n)] for j, n in enumerate((300, 150, 40, 7, 1, 221))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    shape = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
    return str(write_tiny_checkpoint(Path(tmp_path_factory.mktemp("prefill")) / "llama", "llama", seed=1, **shape))


def tokens(model: str, prompts: list[list[int]] = LONG, *, poison: bool = False, seed: int | None = None,
           **options: Any) -> list[list[int]]:  # fmt: skip
    params = SamplingParams(temperature=0.0 if seed is None else 0.8, seed=seed, max_tokens=12, ignore_eos=True)
    base: dict[str, Any] = {"max_slots": 6, "max_model_len": 512, "page_size": 16, "dtype": "float32"}
    with LLM(model=model, device="cuda", **{**base, **options}) as llm:
        if poison:
            llm._built.device.frame.kv.data.fill_(float("nan"))
        outs = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        if options.get("prefix_cache", True):
            assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == outs, "prefix hits"
        llm.check_idle()
    return outs


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize(("kv_heads", "dim"), [(8, 128), (2, 64), (4, 16)])
def test_attention_of_chunks(dtype: torch.dtype, kv_heads: int, dim: int) -> None:
    """A long prompt, a prefix hit, one row of a long context, and sink rows; NaN wherever nobody may look."""
    case = paged_case([0, 200, 300], [150, 70, 1], page=32, kv_heads=kv_heads, dim=dim, dtype=dtype)
    q = torch.randn(case.slot.shape[0], kv_heads * 4, dim).to(dtype)
    k, v, table, slot, pos = (t.cuda() for t in (case.k, case.v, case.table, case.slot, case.pos))
    tiles = prefill_tiles(slot, rows_per_tile(slot.shape[0], 4, dim, dtype.itemsize), table.shape[0] + 3)
    got = prefill_attention(q.cuda(), k, v, table, slot, pos, tiles, dim**-0.5)
    assert relative_error(got, attention_by_loops(q, case, dim**-0.5)) < LIMIT[dtype]
    assert (got[slot == 0] == 0).all()


@pytest.mark.parametrize("seed", range(6))
def test_a_prompt_rows_attention_has_the_same_bits_in_any_chunk(seed: int) -> None:
    torch.manual_seed(seed)
    case = paged_case([0], [400], page=32, kv_heads=8, dim=128, dtype=torch.bfloat16)
    k, v, table, slot, pos = (t.cuda() for t in (case.k, case.v, case.table, case.slot, case.pos))
    q = torch.randn(slot.shape[0], 32, 128, device="cuda").bfloat16()

    def run(first: int, end: int) -> torch.Tensor:
        tiles = prefill_tiles(slot[first:end], rows_per_tile(end - first, 4, 128, 2), table.shape[0])
        return prefill_attention(q[first:end], k, v, table, slot[first:end], pos[first:end], tiles, 0.1)

    whole = run(1, 401)  # 400 rows and a tile of 64 queries, as both parts of the cuts below
    for cut in (150, 167, 201, 232, 260):
        assert torch.equal(torch.cat([run(1, cut), run(cut, 401)]), whole)


@pytest.mark.parametrize("draft", [None, "ngram", "model"])
@pytest.mark.parametrize("seed", [None, 3])
def test_graphs_and_chunks_change_nothing(model: str, draft: str | None, seed: int | None) -> None:
    given: dict[str, Any] = {"draft": model if draft == "model" else draft, "seed": seed}
    want = tokens(model, cuda_graphs=False, **given)
    assert tokens(model, **given) == want
    assert tokens(model, prefill_chunk=128, prefill_tiers=(32, 128), **given) == want, "several chunks a prompt"
    assert tokens(model, prefill_chunk=1024, prefill_tiers=(1024,), **given) == want, "all prompts in one chunk"
    assert tokens(model, poison=True, prefix_cache=False, **given) == want


def test_captured_prefill_gives_the_bits_of_the_eager_pass(model: str) -> None:
    """The KV that a chunk leaves, and the record, from the same state."""
    caches = []
    for graphs in (True, False):
        with LLM(model=model, device="cuda", dtype="bfloat16", max_slots=6, max_model_len=512, num_pages=256,
                 cuda_graphs=graphs, prefill_chunk_busy=128) as llm:  # fmt: skip
            outs = llm.generate(LONG, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
            kv = llm._built.device.frame.kv.data[:, :, 1:]
            caches.append((kv.clone(), [o.outputs[0].token_ids for o in outs]))
    assert torch.equal(caches[0][0], caches[1][0]) and caches[0][1] == caches[1][1]
