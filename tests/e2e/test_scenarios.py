"""Reports of users of other engines that no other test covers; tests/scenarios.toml names the test of each report."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.kernels.draft import lookup
from tests.support.block_draft import write_block_draft
from tests.support.eagle import write_eagle3
from tests.support.kit import VOCAB, tiny_model_dir
from tests.support.reference import DenseReference

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("scenarios") / "target", seed=1)


@pytest.fixture(scope="module")
def reference(target: Path) -> DenseReference:
    return DenseReference(LLM(str(target), dtype="float64", max_model_len=128)._built.model)


def rounds(out: Any) -> tuple[int, int, int]:
    return out.spec.rounds, out.spec.drafted, out.spec.accepted


@pytest.mark.parametrize("tree", [None, {"topk": 3, "levels": 2, "total": 6}], ids=["chain", "tree"])
def test_a_head_goes_past_the_length_it_was_trained_on(
    target: Path, reference: DenseReference, tmp_path: Path, tree: dict[str, int] | None
) -> None:
    """S11: a prompt longer than the head's own context. S31: nobody beside it loses acceptance, then or later."""
    head = write_eagle3(tmp_path / "head", target, draft_vocab=24, max_position_embeddings=32)
    long, short = [(7 * i) % VOCAB for i in range(80)], [5, 9, 31]
    shape = {"num_drafts": 3} if tree is None else {"draft_tree": tree}
    params = SamplingParams(max_tokens=16, **GREEDY)
    with LLM(str(target), draft=str(head), dtype="float64", max_model_len=128, prefix_cache=False, **shape) as llm:
        [alone] = llm.generate([short], params)
        beside, far = llm.generate([short, long], params)
        [after] = llm.generate([short], params)
    for out, prompt in ((alone, short), (beside, short), (far, long), (after, short)):
        assert out.outputs[0].token_ids == reference.continuation(tuple(prompt), params)
    assert rounds(alone) == rounds(beside) == rounds(after)


@pytest.mark.parametrize("topk", [1, 3])
def test_a_tree_of_one_level(target: Path, reference: DenseReference, tmp_path: Path, topk: int) -> None:
    """S13: only children of the root."""
    head = write_eagle3(tmp_path / "head", target, draft_vocab=24)
    params = SamplingParams(max_tokens=24, **GREEDY)
    tree = {"topk": topk, "levels": 1, "total": topk + 1}
    with LLM(str(target), draft=str(head), dtype="float64", max_model_len=64, draft_tree=tree) as llm:
        outs = llm.generate([[5, 9, 31], [7]], params)
        for out, prompt in zip(outs, ((5, 9, 31), (7,)), strict=True):
            assert out.outputs[0].token_ids == reference.continuation(prompt, params)
            assert 0 < out.spec.drafted <= topk * out.spec.rounds and len(out.spec.accepted_per_position) <= 1
        llm.check_idle()


def test_ngram_state_does_not_outlive_a_request(target: Path) -> None:
    """S23: the same request drafts the same, first or after others in its slot; what they learned is gone."""
    params = SamplingParams(max_tokens=40, **GREEDY)
    prompt = [5, 9, 31, 5, 9]
    others = [[(i * i + j) % VOCAB for i in range(60)] for j in range(3)]
    with LLM(str(target), draft="ngram", dtype="float64", max_model_len=128, max_slots=1, prefix_cache=False) as llm:
        [fresh] = llm.generate([prompt], params)
        llm.generate(others, SamplingParams(max_tokens=60, temperature=1.5, seed=1, ignore_eos=True))
        [later] = llm.generate([prompt], params)
    assert rounds(fresh) == rounds(later) and fresh.spec.drafted > 0


def test_the_number_of_drafts_comes_from_the_draft(target: Path, tmp_path: Path) -> None:
    """S52: a block drafter says how many it makes; a user may ask for fewer, and is refused more."""
    head = write_block_draft(tmp_path / "head", target, "dflash", block_size=5)
    with LLM(str(target), draft=str(head), dtype="float64", max_model_len=64) as llm:
        most = llm.resolved["num_drafts"]
        [out] = llm.generate([[5, 9]], SamplingParams(max_tokens=12, **GREEDY))
        assert most >= 4 and max(drafted for drafted, _, _ in out.spec.counts) == most
    with LLM(str(target), draft=str(head), num_drafts=2, dtype="float64", max_model_len=64) as llm:
        assert llm.resolved["num_drafts"] == 2


@pytest.mark.serial
def test_ngram_matching_costs_one_pass_over_the_history() -> None:
    """S20: a history of 50,000 tokens, matches of up to 50, 31 drafts. No worse than in proportion to the length."""

    def seconds(length: int) -> float:
        history_BL = torch.randint(0, 3, (1, length), generator=torch.Generator().manual_seed(1))
        history_BL[0, -60:] = history_BL[0, 100:160]
        committed_B, offset_K = torch.tensor([length - 1]), torch.arange(31)
        times = []
        for _ in range(7):
            began = time.perf_counter()
            drafts_BK, matched_B = lookup(history_BL, committed_B, 10, 50, offset_K)
            assert matched_B.item() == 50 and drafts_BK[0].tolist() == history_BL[0, 160:191].tolist()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    short, long = seconds(12_500), seconds(50_000)
    assert long < 0.25 and long < 12 * short, f"{short * 1e3:.2f} ms, {long * 1e3:.2f} ms"
