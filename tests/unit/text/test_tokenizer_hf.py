"""Tokenizers from Hugging Face directories, compared with transformers."""

from __future__ import annotations

import json

import pytest

from slipstream.errors import InvalidRequestError, ModelLoadError, UnsupportedError
from slipstream.text import Tokenizer
from tests.support.text_kit import CHATML, write_hf

TEXTS = [
    "the stopping END",
    " ab  abc\n\n x 123",
    "né日本😀",
    "",
    "<|im_start|>user\nab<|im_end|>",
    "the<s> a",
]


@pytest.mark.parametrize("kind", ["byte_level", "spm"])
def test_same_ids_and_text_as_transformers(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    directory = write_hf(tmp_path, kind=kind)
    ours = Tokenizer.from_dir(directory)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(directory))
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip) == expected
    assert ours.bos_id == theirs.bos_token_id and ours.eos_ids == (theirs.eos_token_id,)
    assert ours.special_ids == set(theirs.all_special_ids) | ({0} if kind == "byte_level" else set())


def test_ends_of_generation(tmp_path):
    write_hf(tmp_path)
    assert Tokenizer.from_dir(tmp_path).eos_ids == (2,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    assert Tokenizer.from_dir(tmp_path).eos_ids == (0, 2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 0]}')
    assert Tokenizer.from_dir(tmp_path).eos_ids == (5, 0, 2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    absent = Tokenizer.from_dir(tmp_path)
    assert not absent.present and absent.eos_ids == (5, 0)


def test_bos_and_eos_flags_count_for_the_classes_that_heed_them(tmp_path):
    flags = {"add_bos_token": True, "add_eos_token": True}
    heed = Tokenizer.from_dir(write_hf(tmp_path / "a", tokenizer_class="LlamaTokenizerFast", **flags)).encode("ab")
    other = Tokenizer.from_dir(write_hf(tmp_path / "b", tokenizer_class="Qwen2Tokenizer", **flags)).encode("ab")
    assert heed == [1, *other, 2]
    spm = write_hf(tmp_path / "c", kind="spm", tokenizer_class="LlamaTokenizer", add_bos_token=True)
    assert Tokenizer.from_dir(spm).encode("ab").count(1) == 1  # the post-processor has put it there already
    none = write_hf(tmp_path / "d", kind="spm", tokenizer_class="LlamaTokenizer", add_bos_token=False)
    assert Tokenizer.from_dir(none).encode("ab").count(1) == 0


def test_added_tokens_that_tokenizer_json_lacks(tmp_path):
    size = Tokenizer.from_dir(write_hf(tmp_path / "plain")).vocab_size
    entries = {
        str(size): {"content": "<think>", "special": False, "normalized": False},
        str(size + 1): {"content": "<|tool|>", "special": True, "normalized": False},
        str(size + 9): {"content": "<|far|>", "special": True},
    }
    tokenizer = Tokenizer.from_dir(write_hf(tmp_path / "more", added_tokens_decoder=entries))
    ids = tokenizer.encode("<think><|tool|>")
    assert ids == [size, size + 1] and tokenizer.decode(ids) == "<think>"
    # An id that does not follow would shift: it is left out instead.
    assert "<|far|>" not in tokenizer.vocab and tokenizer.vocab_size == size + 2
    named = Tokenizer.from_dir(write_hf(tmp_path / "named", additional_special_tokens=["ing", "not there"]))
    assert named.vocab["ing"] in named.special_ids and "not there" not in named.vocab


def test_limits_saved_with_the_file_do_not_cut_prompts(tmp_path):
    write_hf(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    spec["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    assert len(Tokenizer.from_dir(tmp_path).encode("x" * 10)) == 10


def test_template_sources(tmp_path):
    say = [{"role": "user", "content": "x"}]
    assert Tokenizer.from_dir(write_hf(tmp_path / "none")).chat_template is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        Tokenizer.from_dir(tmp_path / "none").apply_chat_template(say)
    listed = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer.from_dir(write_hf(tmp_path / "list", chat_template=listed))
    assert tokenizer.apply_chat_template(say) == "plain"
    assert tokenizer.apply_chat_template(say, tools=[{"type": "function"}]) == "tools"
    assert tokenizer.apply_chat_template(say, template="tool_use") == "tools"
    with pytest.raises(InvalidRequestError, match="'rag'"):
        tokenizer.apply_chat_template(say, template="rag")
    directory = write_hf(tmp_path / "file", chat_template="config")
    assert Tokenizer.from_dir(directory).apply_chat_template(say) == "config"
    (directory / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    assert Tokenizer.from_dir(directory).apply_chat_template(say, False) == "<|im_start|>user\nx<|im_end|>\n"


def test_bad_files_are_named(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match=r"tokenizer\.model"):
        Tokenizer.from_dir(tmp_path)
    for content in ("{", "[]", "{}", '{"model": {"type": "Nope"}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
            Tokenizer.from_dir(tmp_path)
    write_hf(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    spec["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    with pytest.raises(UnsupportedError, match="WordPiece"):
        Tokenizer.from_dir(tmp_path)


def test_metaspace_decoder(tmp_path):
    write_hf(tmp_path, kind="spm")
    spec = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    spec["normalizer"] = None
    meta = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
    spec["pre_tokenizer"], spec["decoder"] = meta, meta
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    tokenizer = Tokenizer.from_dir(tmp_path)
    for text in ("the ab", " the", "a"):
        ids = tokenizer.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip)
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the" and tokenizer.decode(ids, continues=True) == " the"
