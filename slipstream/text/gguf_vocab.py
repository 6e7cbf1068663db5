"""Tokenizers from GGUF metadata (`tokenizer.ggml.*`, as llama.cpp writes and reads it)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from slipstream.errors import ModelLoadError, UnsupportedError
from slipstream.text.pieces import PieceDecoder
from slipstream.text.tokenizer import TokenizerParts

# Token types.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"


@dataclass(frozen=True)
class _Split:
    """How text is cut before byte-level BPE: by each pattern in turn, within the pieces so far.

    whole_words: a piece that is a token is taken as it is, merges or not. nfc: text is normalised first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2 = _Split((_WORDS_GPT2,))
_L3 = _Split((_LLAMA3,), whole_words=True, add_bos=True)
_QW = _Split((_QWEN2,), nfc=True)
_SPLITS = {
    "gpt-2": _GPT2,
    "smollm": _Split((r"\p{N}", _WORDS_GPT2)),
    "llama-bpe": _L3,
    "llama3": _L3,
    "llama-v3": _L3,
    "qwen2": _QW,
    "deepseek-r1-qwen": _QW,
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+", _WORDS_GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}

# Control tokens that end a turn; files often name only one of them as end of sequence.
_END_NAMES = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
)

_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def load_parts(metadata: Mapping[str, Any]) -> TokenizerParts | None:
    """Everything a Tokenizer needs, or None when the metadata describes no tokenizer."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind in ("none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(f"GGUF tokenizer model {kind!r} is not supported; gpt2 and llama are")
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int, [1] * len(tokens))
    if not tokens or len(types) != len(tokens):
        raise ModelLoadError(f"tokenizer.ggml has {len(tokens)} tokens and {len(types)} token types")
    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocab.setdefault(token, i)  # of equal tokens the first one is encoded
    build = _byte_level if kind == "gpt2" else _sentencepiece
    backend, decoder, add_bos = build(metadata, tokens, vocab)
    special = frozenset(i for i, t in enumerate(types) if t in (_CONTROL, _UNKNOWN))
    for wanted in (_CONTROL, _USER_DEFINED):
        made = [
            tokenizers.AddedToken(tokens[i], special=wanted == _CONTROL, normalized=False)
            for i, t in enumerate(types)
            if t == wanted and tokens[i]
        ]
        (backend.add_special_tokens if wanted == _CONTROL else backend.add_tokens)(made)
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {}
    names = (*_ROLES, "eot", "eom")
    ids = {n: _id(metadata, n, len(tokens), defaults.get(n)) for n in names}
    by_name = [vocab[n] for n in _END_NAMES if n in vocab and types[vocab[n]] == _CONTROL]
    ends = [ids["eos"], ids["eot"], ids["eom"], *by_name]
    return TokenizerParts(
        backend=backend,
        decoder=decoder,
        special_ids=special,
        bos_id=ids["bos"],
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        eos_id=ids["eos"],
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        special_tokens={role: tokens[at] for name, role in _ROLES.items() if (at := ids[name]) is not None},
        templates=_templates(metadata),
    )


def _list(metadata: Mapping[str, Any], name: str, kind: type, default: list[Any] | None = None) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(values, list) or not all(isinstance(v, kind) for v in values):
        raise ModelLoadError(f"tokenizer.ggml.{name} is missing or not a list of {kind.__name__}")
    return values


def _id(metadata: Mapping[str, Any], name: str, size: int, default: int | None) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    # llama.cpp writes all ones, or an id past the end, for "none".
    return value if isinstance(value, int) and 0 <= value < size else None


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in metadata.items():
        if key == "tokenizer.chat_template" and isinstance(value, str):
            found["default"] = value
        elif key.startswith("tokenizer.chat_template.") and isinstance(value, str):
            found[key.removeprefix("tokenizer.chat_template.")] = value
    return found


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:
        raise ModelLoadError(f"the GGUF vocabulary and merges do not fit: {str(error)[:200]}") from error


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], vocab: dict[str, int]
) -> tuple[tokenizers.Tokenizer, PieceDecoder, bool]:
    """GPT-2 style: bytes as printable characters, merges given in order."""
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    split = _SPLITS.get(name)
    if split is None:
        raise UnsupportedError(f"GGUF pre-tokenizer {name!r} is not supported; known: {', '.join(_SPLITS)}")
    merges: list[tuple[str, str]] = []
    for i, line in enumerate(_list(metadata, "merges", str)):
        # A merge is two tokens around one space; the first may begin with a space in some files.
        cut = line.find(" ", 1)
        if cut < 0 or cut == len(line) - 1:
            raise ModelLoadError(f"tokenizer.ggml.merges[{i}]={line[:40]!r} is not two tokens")
        merges.append((line[:cut], line[cut + 1 :]))
    backend = _bpe(vocab, merges, ignore_merges=split.whole_words)
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(p), "isolated") for p in split.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    if prefix:
        raise UnsupportedError("tokenizer.ggml.add_space_prefix=True is not supported for model 'gpt2'")
    return backend, PieceDecoder(byte_level=True), split.add_bos


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], vocab: dict[str, int]
) -> tuple[tokenizers.Tokenizer, PieceDecoder, bool]:
    """SentencePiece BPE: merges follow from the scores.

    SentencePiece joins the adjacent pair whose joined piece has the highest score, leftmost first. Every way
    to split a piece in two becomes a merge, ranked by that score. Where two splits of one piece overlap
    (`a|aa` and `aa|a`), ranks decide instead of position; real vocabularies agree but for that.
    """
    scores = _list(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise ModelLoadError(f"tokenizer.ggml has {len(tokens)} tokens and {len(scores)} scores")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    pieces = {t: i for t, i in vocab.items() if types[i] in (_NORMAL, _USER_DEFINED)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, i in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-float(scores[i]), pieces[left], pieces[right], left, right))
    ranked.sort(key=lambda r: r[:3])
    unknown = _id(metadata, "unknown", len(tokens), 0)
    backend = _bpe(
        vocab,
        [(left, right) for *_, left, right in ranked],
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if prefix else chain)
    return backend, PieceDecoder(byte_fallback=True, replace=(("▁", " "),), strip=int(prefix)), True
