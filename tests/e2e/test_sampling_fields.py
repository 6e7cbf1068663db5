"""Penalties, biases and min_tokens: each position of a frame exactly as in plain decoding, whatever drafts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.support.equality_cells import TREE, model_dirs
from tests.support.kit import VOCAB
from tests.support.pairwise import pairwise
from tests.support.reference import DenseReference, planted_oracle
from tests.support.tree_oracle import oracle_tree

FIELDS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.0},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": {3: 4.0, 7: -100.0, 11: 3.5}},
    "min-tokens": {"min_tokens": 12, "stop_token_ids": list(range(0, VOCAB, 7)), "presence_penalty": 0.5},
    "all": {
        "presence_penalty": 0.7, "frequency_penalty": 0.9, "repetition_penalty": 1.3, "logit_bias": {5: 2.0, 6: -2.0},
        "min_tokens": 9, "stop_token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
    },
}  # fmt: skip
FACTORS: dict[str, Any] = {
    "fields": tuple(FIELDS),
    "drafter": (
        *("none", "ngram", "oracle", "draft-good", "eagle3", "dflash", "dspark"), *("oracle-tree", "eagle3-tree"),
    ),
    "sampling": ("greedy", "seeded"),
    "run_ahead": (1, 2, 8),
    "event": ("none", "preempt"),
}  # fmt: skip
MAX_TOKENS = 20


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return model_dirs(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(dirs: dict[str, Path]) -> DenseReference:
    llm = LLM(model=str(dirs["target"]), dtype="float64", max_model_len=256)
    return DenseReference(llm._built.model)


def want(reference: DenseReference, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """The continuation up to the first stop id that counts."""
    tokens = reference.continuation(prompt, params)
    ends = [i for i, t in enumerate(tokens) if t in params.stop_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize("cell", pairwise(FACTORS), ids=lambda c: "-".join(str(v) for v in c.values()))
def test_equals_plain_decoding(dirs: dict[str, Path], reference: DenseReference, cell: dict[str, Any]) -> None:
    """Three requests with the fields and one without any, in the same frames."""
    rng = random.Random(str(sorted(cell.items())))
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))) for _ in range(4)]
    law = {"temperature": 0.0} if cell["sampling"] == "greedy" else {"temperature": 0.9, "top_p": 0.95}
    params = [
        SamplingParams(
            **law, max_tokens=MAX_TOKENS, seed=i if cell["sampling"] == "seeded" else None, ignore_eos=True,
            **(FIELDS[cell["fields"]] if i != 2 else {}),
        )
        for i in range(4)
    ]  # fmt: skip
    oracle = planted_oracle(lambda r: reference.continuation(r.prompt_token_ids, r.params, r.child), vocab=VOCAB)
    drafter = cell["drafter"].removesuffix("-tree")
    tree = TREE if drafter != cell["drafter"] else None
    known: dict[str, Any] = {"none": None, "ngram": "ngram", "oracle": oracle if tree is None else oracle_tree(oracle)}
    draft = known.get(drafter, str(dirs.get(drafter)))
    llm = LLM(
        model=str(dirs["target"]), dtype="float64", draft=draft, draft_tree=tree,
        num_drafts=None if draft is None or tree else 3, run_ahead=cell["run_ahead"], prefill_chunk=5,
        page_size=4, num_pages=20 if cell["event"] == "preempt" else 80, max_slots=4, max_model_len=64,
    )  # fmt: skip
    outs = llm.generate([list(p) for p in prompts], params)
    expected = [want(reference, p, s) for p, s in zip(prompts, params, strict=True)]
    assert [o.outputs[0].token_ids for o in outs] == expected
    if cell["drafter"] in ("oracle", "oracle-tree"):
        assert sum(o.spec.accepted for o in outs) > 0
    llm.check_idle()
