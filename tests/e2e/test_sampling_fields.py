"""Penalties, biases, min_tokens, log-probabilities: each position exactly as in plain decoding, whatever drafts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("msgspec")

from slipstream import LLM, SamplingParams
from slipstream.answers import default_params
from slipstream.errors import InvalidRequestError
from slipstream.outputs import Logprobs, RequestOutput
from slipstream.server.protocol import CompletionBody, read_body, sampling
from tests.support.equality_cells import TREE, as_on_a_gpu
from tests.support.kit import VOCAB
from tests.support.pairwise import pairwise
from tests.support.reference import DenseReference, planted_oracle
from tests.support.tree_oracle import oracle_tree

FIELDS: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": -0.4, "repetition_penalty": 1.7},
    "bias": {"logit_bias": {3: 4.0, 7: -100.0, 11: 3.5}, "logprobs": 4, "prompt_logprobs": 2},
    "min-tokens": {"min_tokens": 12, "stop_token_ids": list(range(0, VOCAB, 7)), "presence_penalty": 0.5},
    "all": {
        "presence_penalty": 0.7, "frequency_penalty": 0.9, "repetition_penalty": 1.3, "logit_bias": {5: 2.0, 6: -2.0},
        "min_tokens": 9, "stop_token_ids": [1, 2, 3, 4, 5, 6, 7, 8], "logprobs": 0,
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


def want(reference: DenseReference, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """The continuation up to the first stop id that counts."""
    tokens = reference.continuation(prompt, params)
    ends = [i for i, t in enumerate(tokens) if t in params.stop_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize("cell", pairwise(FACTORS), ids=lambda c: "-".join(str(v) for v in c.values()))
def test_equals_plain_decoding(dirs: dict[str, Path], reference: DenseReference, cell: dict[str, Any]) -> None:
    """Three requests with the fields and one without any, in the same frames."""
    rng = random.Random(7)  # the same in every cell, so that the reference is computed once
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
    for out, prompt, s in zip(outs, prompts, params, strict=True):
        check_logprobs(out, prompt, s, reference)
    llm.check_idle()


@pytest.mark.parametrize("drafter", ["none", "oracle", "oracle-tree"])
def test_the_frame_as_it_runs_on_a_gpu(dirs: dict[str, Path], reference: DenseReference, drafter: str) -> None:
    """The same frames out of the kernels' ops, each by its definition: greedy and seeded requests in one batch."""
    prompts = [(5, 9, 31, 7), (8, 8, 60), (77, 2, 2, 2, 3), (4,)]
    params = [
        SamplingParams(
            **{
                "temperature": 0.8 * (i % 2), "seed": i, "max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 2,
                **(FIELDS[name] if name else {"prompt_logprobs": 1}),
            }
        )
        for i, name in enumerate(("penalties", "all", "bias", None))
    ]  # fmt: skip
    oracle = planted_oracle(lambda r: reference.continuation(r.prompt_token_ids, r.params, r.child), vocab=VOCAB)
    draft = {"none": None, "oracle": oracle, "oracle-tree": oracle_tree(oracle)}[drafter]
    with LLM(
        model=str(dirs["target"]), dtype="float64", draft=draft, num_drafts=3 if drafter == "oracle" else None,
        draft_tree=TREE if drafter == "oracle-tree" else None, page_size=1, max_slots=4, max_model_len=64, run_ahead=2,
    ) as llm:  # fmt: skip
        as_on_a_gpu(llm)
        outs = llm.generate([list(p) for p in prompts], params)
        for out, p, s in zip(outs, prompts, params, strict=True):
            assert out.outputs[0].token_ids == want(reference, p, s)
            check_logprobs(out, p, s, reference)
        llm.check_idle()


def check_logprobs(out: RequestOutput, prompt: tuple[int, ...], s: SamplingParams, reference: DenseReference) -> None:
    """Every entry against a log-softmax of the model's own logits, from one dense pass over the sequence."""
    for child in out.outputs:
        assert (child.logprobs is None) == (s.logprobs is None)
        with torch.inference_mode():
            law = reference.logits([*prompt, *child.token_ids]).log_softmax(1)
        if s.logprobs is not None:
            assert child.logprobs is not None and len(child.logprobs) == len(child.token_ids)
            for i, of in enumerate(child.logprobs):
                check_entry(of, child.token_ids[i], law[len(prompt) + i - 1], s.logprobs)
            total = sum(of[t].logprob for of, t in zip(child.logprobs, child.token_ids, strict=True))
            assert child.cumulative_logprob == pytest.approx(total)
    if s.prompt_logprobs is None:
        assert out.prompt_logprobs is None
        return
    assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == len(prompt)
    assert out.prompt_logprobs[0] is None
    for i, entry in enumerate(out.prompt_logprobs[1:], 1):
        assert entry is not None
        check_entry(entry, prompt[i], law[i - 1], s.prompt_logprobs)


def check_entry(of: Logprobs, token: int, law_V: Any, top: int) -> None:
    assert next(iter(of)) == token
    assert of[token].rank == int((law_V > law_V[token]).sum()) + 1
    assert [i for i in law_V.topk(top).indices.tolist() if i != token] == [i for i in of if i != token]
    for i, value in of.items():
        assert value.logprob == pytest.approx(float(law_V[i]), abs=1e-6)


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_logprobs_end_with_the_returned_tokens(dirs: dict[str, Path], reference: DenseReference, draft: Any) -> None:
    """A stop string, a stop id, the length: one entry for each token that is returned, not one more."""
    prompt = (5, 9, 31, 7)
    full = reference.continuation(prompt, SamplingParams(temperature=0, max_tokens=20))
    with LLM(model=str(dirs["target"]), dtype="float64", draft=draft, max_model_len=64, run_ahead=2) as llm:
        text = llm.tokenizer.decode(full[6:8]).strip()
        for more in ({"stop": text}, {"stop_token_ids": [full[5]]}, {"max_tokens": 3}, {"max_tokens": 1}):
            s = SamplingParams(**{"temperature": 0, "max_tokens": 20, "ignore_eos": True, "logprobs": 2, **more})
            [out] = llm.generate([list(prompt)], s)
            assert 0 < len(out.outputs[0].token_ids) < 20
            check_logprobs(out, prompt, s, reference)
            chunks = list(llm.stream(list(prompt), s))
            assert all(c.logprobs is not None and len(c.logprobs) == len(c.token_ids) for c in chunks)
            assert [of for c in chunks for of in c.logprobs or ()] == out.outputs[0].logprobs


def test_prompt_logprobs_of_a_cached_prefix_and_of_several_children(
    dirs: dict[str, Path], reference: DenseReference
) -> None:
    """The cache is passed over where the prompt's values are asked for; children and neighbours may use it."""
    prompt = tuple(range(3, 40))
    s = SamplingParams(
        temperature=0.8, seed=4, max_tokens=6, n=3, logprobs=1, prompt_logprobs=3, ignore_eos=True, presence_penalty=1.0
    )
    with LLM(model=str(dirs["target"]), dtype="float64", max_model_len=64, page_size=4, prefill_chunk=16) as llm:
        first = llm.generate([list(prompt)], s)[0]
        plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        again, beside = llm.generate([list(prompt)] * 2, [s, plain])
        for out in (first, again):
            check_logprobs(out, prompt, s, reference)
            for i, child in enumerate(out.outputs):
                assert child.token_ids == reference.continuation(prompt, s, i)
        assert beside.outputs[0].token_ids == reference.continuation(prompt, plain)
        assert llm.stats()["counters"]["cached_prompt_tokens"] > 0
        llm.check_idle()


def no_repeat(logits: Any, rows: Any) -> Any:
    """Never the token before; and, from the third output token on, softer by the argument."""
    late = rows.position_R - rows.prompt_len_R >= 2
    soft = torch.where(late[:, None], logits / (1 + rows.argument_R[:, None].to(logits.dtype)), logits)
    return soft.scatter(1, rows.token_R[:, None], -50.0)


@pytest.mark.parametrize("drafter", ["none", "oracle", "oracle-tree"])
def test_custom_processors(dirs: dict[str, Path], reference: DenseReference, drafter: str) -> None:
    """Rows of requests that ask for it, at their own position and after their own token; the others are left alone."""

    class Customized(DenseReference):
        def logits(self, tokens: Any) -> Any:
            logits = super().logits(tokens)
            if self.argument is not None and len(tokens) - self.prompt_len >= 2:
                logits = logits / (1 + self.argument)
            if self.argument is not None:
                logits[-1, tokens[-1]] = -50.0
            return logits

        def of(self, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
            self.argument = (params.logits_processors or {}).get("no_repeat")
            self.prompt_len = len(prompt)
            return DenseReference.continuation(self, prompt, params)

    mine = Customized(reference.model)
    law: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0.9, seed=1, logits_processors={"no_repeat": 0.5}, **law),
        SamplingParams(temperature=0.9, seed=2, **law),
        SamplingParams(temperature=0, logits_processors={"no_repeat": 0.0}, **law),
    ]  # fmt: skip
    prompts = [(5, 9, 31, 7), (8, 8), (77, 3, 60)]
    want = []
    for p, s in zip(prompts, params, strict=True):
        mine._known.clear()
        want.append(list(mine.of(p, s)))
    known = dict(zip(prompts, want, strict=True))
    oracle = planted_oracle(lambda r: known[r.prompt_token_ids], vocab=VOCAB)
    draft = {"none": None, "oracle": oracle, "oracle-tree": oracle_tree(oracle)}[drafter]
    with LLM(
        model=str(dirs["target"]), dtype="float64", draft=draft, num_drafts=3 if drafter == "oracle" else None,
        draft_tree=TREE if drafter == "oracle-tree" else None, max_model_len=64, max_slots=3,
        processors={"no_repeat": no_repeat},
    ) as llm:  # fmt: skip
        outs = llm.generate([list(p) for p in prompts], params)
        assert [o.outputs[0].token_ids for o in outs] == want
        assert drafter == "none" or sum(o.spec.accepted for o in outs) > 0
        assert llm.resolved["processors"] == ["no_repeat"]
        with pytest.raises(InvalidRequestError, match="'other' is not one of the engine's: no_repeat"):
            llm.generate([[1]], SamplingParams(logits_processors={"other": 1}))
        llm.check_idle()


def test_a_models_own_defaults_and_the_request_before_them() -> None:
    own = default_params({"repetition_penalty": 1.5, "temperature": 0.7, "do_sample": True, "length_penalty": 2.0})
    assert (own.repetition_penalty, own.temperature) == (1.5, 0.7)
    read = [read_body(b'{"prompt": "x"%s}' % more, CompletionBody) for more in (b"", b', "repetition_penalty": 1.0')]
    assert [sampling(body, own, 8).repetition_penalty for body in read] == [1.5, 1.0]
