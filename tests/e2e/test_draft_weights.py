"""An EAGLE-3 head beside a 4-bit GGUF target on a CPU: its weights get 8 bits or stay; tokens are the target's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.errors import ConfigError
from tests.support.eagle import write_eagle3
from tests.support.tiny_gguf import write_tiny_gguf

SIZES: dict[str, Any] = {"hidden_size": 64, "vocab_size": 128, "intermediate_size": 96, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("draft_weights")
    write_tiny_gguf(root / "m.gguf", kinds={"*": "Q4_0", "embed_tokens": "Q8_0"}, spread=1.0, **SIZES)
    (root / "config.json").write_text(json.dumps(SIZES))
    return str(root / "m.gguf"), str(write_eagle3(root / "eagle3", root, draft_vocab=32))


def test_weights_and_tokens(files: tuple[str, str]) -> None:
    model, draft = files
    params = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 0.9)]
    prompts = [[5, 9, 2, 77, 31], [100, 4, 4]]
    with LLM(model, max_model_len=64) as plain:
        wanted = [o.outputs[0].token_ids for o in plain.generate(prompts, params)]
    sizes = {}
    for options, kept in (
        ({}, "rounded to 8 bits"),
        ({"draft_weights": "dense"}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
    ):
        with LLM(model, draft=draft, num_drafts=3, max_model_len=64, **options) as llm:
            assert llm.resolved["draft_weights"] == kept
            sizes[kept] = llm._built.device.frame.drafter.weight_bytes()
            outs = llm.generate(prompts, params)
            assert all(o.spec.rounds > 0 for o in outs)
            if not options.get("dtype"):
                assert [o.outputs[0].token_ids for o in outs] == wanted
    assert sizes["rounded to 8 bits"] < 0.6 * sizes["bfloat16"]


def test_what_it_may_be(files: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="draft_weights='int3' must be auto or dense"):
        LLM(files[0], draft=files[1], draft_weights="int3")
