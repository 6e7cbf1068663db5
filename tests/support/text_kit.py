"""Small tokenizers, made here, of the two kinds that are supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from slipstream.text.pieces import byte_alphabet

CHATML = (
    "{%- for m in messages %}\n    {{- '<|im_start|>' + m['role'] + '\\n' + m.content ~ '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level_parts() -> tuple[list[str], list[str], list[int]]:
    """(tokens, merges, token types) of a byte-level vocabulary with multi-byte tokens of all sorts."""
    alphabet = {b: c for c, b in byte_alphabet().items()}
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet()]
    merges: list[str] = []
    for word in (" the", " stop", "ing", "END", "né", "日本", "😀", "ab", "abc", "\n\n", "  "):
        pieces = [alphabet[b] for b in word.encode()]
        joined = pieces[0]
        for piece in pieces[1:]:
            if joined + piece not in tokens:
                tokens.append(joined + piece)
                merges.append(f"{joined} {piece}")
            joined += piece
    tokens.append("xyz")  # no merge leads here: only a tokenizer that takes whole words finds it
    return tokens, merges, [3, 3, 3, *[1] * (len(tokens) - 3)]


def byte_level_metadata(pre: str = "smollm", **more: Any) -> dict[str, Any]:
    tokens, merges, types = byte_level_parts()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
        **more,
    }


def spm_metadata(**more: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: byte tokens, letters, and a few words with falling scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [2, 3, 3, *[6] * 256]
    words = ["▁t", "he", "▁the", "▁a", "in", "▁s", "to", "▁st", "▁sto", "▁stop", "ab", "abc", "▁▁", "é"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz", *"ABCDEN.,"]
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(words) + len(letters))]
    tokens += words + letters
    types += [1] * (len(words) + len(letters))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        **more,
    }


def write_hf(directory: Path, *, kind: str = "byte_level", **config: Any) -> Path:
    """A Hugging Face directory with tokenizer.json and tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    if kind == "byte_level":
        tokens, merges, _ = byte_level_parts()
        pairs = [(a, b) for a, b in (m.split(" ") for m in merges)]
        backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, pairs))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
                pre_tokenizers.ByteLevel(False, use_regex=True),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        eos = {"__type": "AddedToken", "content": "<|im_end|>", "special": True, "normalized": False}
        eos |= {"lstrip": False, "rstrip": False, "single_word": False}
        names = {"bos_token": "<|im_start|>", "eos_token": eos}
    else:
        data = spm_metadata()
        tokens = data["tokenizer.ggml.tokens"]
        pairs = [("▁", "a"), ("h", "e"), ("▁", "t"), ("▁t", "he")]
        backend = tokenizers.Tokenizer(
            models.BPE({t: i for i, t in enumerate(tokens)}, pairs, unk_token="<unk>", byte_fallback=True)
        )
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
        backend.add_special_tokens(["<unk>", "<s>", "</s>"])
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({**names, **config}), encoding="utf-8")
    return directory
