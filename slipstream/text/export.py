"""A tokenizer as the files of a Hugging Face directory, for tools that cannot read a GGUF file's vocabulary."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from slipstream.text.tokenizer import TokenizerParts

FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def export(parts: TokenizerParts, folder: Path) -> None:
    """Write FILES into `folder`, each of them whole or not at all.

    Begin and end of sequence that the model expects around a text become part of tokenizer.json, chat templates and the
    texts of special tokens of tokenizer_config.json; generation_config.json has every id that ends an answer.
    """
    backend = tokenizers.Tokenizer.from_str(parts.backend.to_str())
    around = _around(parts)
    if around is not None:
        backend.post_processor = around
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= parts.special_tokens
    if len(parts.templates) == 1:
        config["chat_template"] = next(iter(parts.templates.values()))
    elif parts.templates:
        config["chat_template"] = [{"name": n, "template": t} for n, t in parts.templates.items()]
    generation = {"bos_token_id": parts.bos_id, "eos_token_id": list(parts.eos_ids)}
    folder.mkdir(parents=True, exist_ok=True)
    contents = (backend.to_str(pretty=True), json.dumps(config, indent=2), json.dumps(generation, indent=2))
    for name, text in zip(FILES, contents, strict=True):
        part = folder / f".{name}.{os.getpid()}"
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(folder / name)


def _around(parts: TokenizerParts) -> processors.TemplateProcessing | None:
    """What puts begin and end of sequence around each text; None where the model wants neither."""
    ends = (parts.bos_id if parts.add_bos else None, parts.eos_id if parts.add_eos else None)
    bos, eos = (None if at is None else (at, parts.backend.id_to_token(at)) for at in ends)
    if bos is None and eos is None:
        return None

    def one(name: str, kind: int) -> str:
        words = [bos and f"{bos[1]}:{kind}", f"${name}:{kind}", eos and f"{eos[1]}:{kind}"]
        return " ".join(word for word in words if word)

    tokens = [(text, number) for number, text in (pair for pair in (bos, eos) if pair)]
    return processors.TemplateProcessing(
        single=one("A", 0), pair=f"{one('A', 0)} {one('B', 1)}", special_tokens=list(dict.fromkeys(tokens))
    )
