"""Tokenizer files of a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from slipstream.errors import ModelLoadError, UnsupportedError
from slipstream.text.pieces import parse_decoder
from slipstream.text.tokenizer import TokenizerParts

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Tokenizer classes that put BOS/EOS as add_bos_token / add_eos_token say, whatever tokenizer.json holds.
_FLAG_CLASSES = ("Llama", "CodeLlama", "Gemma", "Cohere")

# Vocabularies of other formats; only their presence matters, for the message.
_OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json", "tiktoken.model")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return value


def stop_ids_of(directory: Path) -> tuple[int, ...]:
    """End-of-sequence ids that generation_config.json, or else config.json, names."""
    for name in ("generation_config.json", "config.json"):
        value = _json(directory / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = tuple(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
        if found:
            return found
    return ()


def load_parts(directory: Path) -> TokenizerParts | None:
    """Everything a Tokenizer needs, or None when the directory has no tokenizer files."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        for name in _OTHER_FILES:
            if (directory / name).is_file():
                raise UnsupportedError(f"{directory}: {name} without tokenizer.json is not supported")
        return None
    spec = _json(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelLoadError(f"{path} is not a usable tokenizer: {str(error)[:200]}") from error
    # Limits saved with the file are for training; a prompt is never cut or padded in silence.
    backend.no_truncation()
    backend.no_padding()
    config = _json(directory / "tokenizer_config.json")
    roles = {**_roles(_json(directory / "special_tokens_map.json")), **_roles(config)}
    special = _add_tokens(backend, spec, config, roles)
    ids = {role: backend.token_to_id(text) for role, text in roles.items()}
    eos_id = ids.get("eos_token")
    ends = [*stop_ids_of(directory), *([eos_id] if eos_id is not None else [])]
    flags = str(config.get("tokenizer_class", "")).startswith(_FLAG_CLASSES)
    return TokenizerParts(
        backend=backend,
        decoder=parse_decoder(spec.get("decoder")),
        special_ids=special,
        bos_id=ids.get("bos_token"),
        eos_ids=tuple(dict.fromkeys(ends)),
        eos_id=eos_id,
        add_bos=_flag(config, "add_bos_token") if flags else None,
        add_eos=_flag(config, "add_eos_token") if flags else None,
        special_tokens=roles,
        templates=_templates(directory, config),
    )


def _flag(config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    return value if isinstance(value, bool) else None


def _content(token: Any) -> str | None:
    """Text of a token that is written as a string or as an AddedToken object."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) and text else None


def _roles(config: Mapping[str, Any]) -> dict[str, str]:
    found = {role: _content(config.get(role)) for role in _ROLES}
    return {role: text for role, text in found.items() if text is not None}


def _add_tokens(
    backend: tokenizers.Tokenizer,
    spec: Mapping[str, Any],
    config: Mapping[str, Any],
    roles: Mapping[str, str],
) -> frozenset[int]:
    """Registers added tokens that tokenizer.json lacks; the ids of all special ones.

    A token is only added at the id that the files name: a new id could lie outside the model's embedding.
    """
    entries = config.get("added_tokens_decoder") or {}
    try:
        listed = sorted((int(key), entry) for key, entry in entries.items())
    except (AttributeError, ValueError, TypeError) as error:
        raise ModelLoadError(f"added_tokens_decoder in tokenizer_config.json is damaged: {error}") from error
    for token_id, entry in listed:
        text = _content(entry)
        if text is None or (backend.token_to_id(text) is None and backend.get_vocab_size() != token_id):
            continue
        options = {k: bool(entry[k]) for k in ("lstrip", "rstrip", "single_word", "normalized") if k in entry}
        add = backend.add_special_tokens if entry.get("special") else backend.add_tokens
        add([tokenizers.AddedToken(text, special=bool(entry.get("special")), **options)])
    more = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    values = more.values() if isinstance(more, Mapping) else more
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ModelLoadError(f"additional_special_tokens={more!r} in tokenizer_config.json must be a list of tokens")
    known = {t.content for t in backend.get_added_tokens_decoder().values()}
    for text in [*roles.values(), *filter(None, map(_content, values))]:
        if text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
    added = backend.get_added_tokens_decoder()
    named = {i for text in roles.values() if (i := backend.token_to_id(text)) is not None and i in added}
    return frozenset({i for i, token in added.items() if token.special} | named)


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. A chat_template.jinja file wins over tokenizer_config.json."""
    found: dict[str, str] = {}
    for source in (config.get("chat_template"), _json(directory / "chat_template.json").get("chat_template")):
        if isinstance(source, str):
            found["default"] = source
        elif isinstance(source, Mapping):
            found.update({k: v for k, v in source.items() if isinstance(v, str)})
        elif isinstance(source, list):
            for entry in source:
                if isinstance(entry, Mapping) and isinstance(entry.get("template"), str):
                    found[str(entry.get("name", "default"))] = entry["template"]
    files = {"default": directory / "chat_template.jinja"}
    folder = directory / "additional_chat_templates"
    if folder.is_dir():
        files.update({path.stem: path for path in sorted(folder.glob("*.jinja"))})
    for name, path in files.items():
        if path.is_file():
            try:
                found[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return found
