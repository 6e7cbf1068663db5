"""Options, files and callers that used to end in a traceback, in silence or in a hang."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.config import LLMConfig
from slipstream.errors import ConfigError, InvalidRequestError, ModelLoadError
from slipstream.models.loader import load_model
from slipstream.text import Tokenizer
from tests.support.tiny import write_tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("left") / "m"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_model_len": "5"}, "max_model_len='5' must be a whole number, not str"),
        ({"max_slots": 2.0}, "max_slots=2.0 must be a whole number, not float"),
        ({"run_ahead": True}, "run_ahead=True must be a whole number, not bool"),
        ({"seed": None}, "seed=None must be a whole number"),
        ({"model": 3}, "model=3 must be text or a path, not int"),
        ({"dtype": 16}, "dtype=16 must be text, not int"),
        ({"prefix_cache": "off"}, "prefix_cache='off' must be True or False, not str"),
        ({"draft_options": [1]}, "draft_options="),
        ({"slot_buckets": "1,2"}, "slot_buckets='1,2' must be a list of whole numbers"),
        ({"row_tiers": (1, "2")}, "row_tiers="),
        ({"draft": "ngram", "synthetic_acceptance": "2"}, "synthetic_acceptance='2' must be a number, not str"),
        ({"draft": "ngram", "num_drafts": 0}, "num_drafts=0 leaves draft='ngram' nothing to do"),
    ],
)
def test_options_of_the_wrong_kind_are_named(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        LLMConfig.from_options(**option)
    assert message in str(error.value)


def test_a_path_is_a_model(model: str) -> None:
    assert LLMConfig.from_options(model=Path(model), draft="none", num_drafts=0).draft == "none"


def test_damaged_template_and_special_tokens_are_load_errors(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_bytes(b"{{ '\xff' }}")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja cannot be read"):
        load_model(str(folder), dtype="auto", device="cpu", load_format="auto", revision=None, seed=0)


@pytest.mark.parametrize("value", [-1, True, "<x>"])
def test_special_tokens_must_be_a_list(value: Any, tmp_path: Path) -> None:
    spec = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"additional_special_tokens": value}))
    with pytest.raises(ModelLoadError, match="additional_special_tokens"):
        Tokenizer.from_dir(tmp_path)


def test_a_model_may_have_many_ends(model: str, tmp_path: Path) -> None:
    """20 end-of-sequence ids, each of which ends an answer, and room for a few stop ids of the user's."""
    with LLM(model=model, max_model_len=64) as llm:
        plain = llm.generate([[5, 9, 11]], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    tokens = plain[0].outputs[0].token_ids
    first = tokens.index(tokens[4])
    spare = [i for i in range(llm.model_config.vocab_size) if i not in tokens]
    folder = tmp_path / "m"
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*spare[:19], tokens[4]]}))
    with LLM(model=str(folder), max_model_len=64) as llm:
        out = llm.generate([[5, 9, 11]], GREEDY)[0].outputs[0]
        assert (out.token_ids, out.finish_reason) == (tokens[: first + 1], "stop")
        more = SamplingParams(temperature=0.0, max_tokens=4, stop_token_ids=spare[19:29])
        with pytest.raises(InvalidRequestError, match="stop token ids; the limit is"):
            llm.generate([[5, 9, 11]], more)


def test_several_threads_share_an_engine(model: str) -> None:
    with LLM(model=model, max_model_len=64, max_slots=3) as llm:
        prompts = [[3 + i, 7, 2 * i + 5] for i in range(6)]
        alone = [llm.generate([p], GREEDY)[0].outputs[0].token_ids for p in prompts]
        got: dict[int, list[list[int]]] = {}

        def ask(i: int) -> None:
            whole = [o.outputs[0].token_ids for o in llm.generate([prompts[i], prompts[i - 1]], GREEDY)]
            streamed = [t for chunk in llm.stream(prompts[i], GREEDY) for t in chunk.token_ids]
            got[i] = [*whole, streamed]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        assert got == {i: [alone[i], alone[i - 1], alone[i]] for i in range(6)}
        llm.check_idle()


@pytest.fixture
def medium() -> Iterator[None]:
    """A process that allows shortcuts in float32 products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize(("dtype", "inside"), [("float32", "ieee"), ("bfloat16", "bf16")])
def test_float32_is_float32_inside_the_engine_only(
    model: str, dtype: str, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    with LLM(model=model, dtype=dtype, max_model_len=64) as llm:
        target = llm._built.model
        forward = target.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.add((torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision))
            return forward(*args, **kwargs)

        monkeypatch.setattr(target, "forward", watched)
        llm.generate([[5, 9, 11]], GREEDY)
    assert {cpu for _, cpu in seen} == {inside}
    assert all(gpu == "ieee" for gpu, _ in seen) or dtype == "bfloat16"
    assert torch.get_float32_matmul_precision() == "medium", "the process keeps its own setting"
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("redirect", "message"), [("> /dev/full", "cannot write the output"), (">&-", "is closed")])
@pytest.mark.parametrize("command", ["--help", "generate --prompt-ids 5,9 --max-tokens 2 --model"])
def test_output_that_cannot_be_written_is_one_line(model: str, command: str, redirect: str, message: str) -> None:
    name = model if command.endswith("--model") else ""
    line = f"{sys.executable} -m slipstream {command} {name} {redirect}"
    done = subprocess.run(["sh", "-c", line], check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 74
    assert done.stderr.count("\n") == 1 and message in done.stderr
