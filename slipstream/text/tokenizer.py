"""The tokenizer as the engine sees it, wherever it was loaded from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import tokenizers

from slipstream.errors import InvalidRequestError, ModelLoadError, RequestFailedError
from slipstream.text.chat import ChatTemplate
from slipstream.text.pieces import PieceDecoder

_ABSENT = "this model has no tokenizer: give prompts as token ids"


@dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """What a loader hands over.

    bos / eos (add_bos, add_eos): added by `encode` when the backend's own post-processor does not;
    None leaves that to the backend, False takes away what it adds. special_tokens: role -> text, for
    templates ("bos_token", "eos_token", ...). templates: name -> Jinja source.
    """

    backend: tokenizers.Tokenizer
    decoder: PieceDecoder
    special_ids: frozenset[int]
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    eos_id: int | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """Text to token ids and back.

    Made by `from_dir`, `from_gguf` or `absent`. present: False when the model came without one; then
    every method on text raises InvalidRequestError, and `token_bytes` gives b"".

    bos_id: id or None. eos_ids: ids that end a generation, the most usual one first. special_ids: ids
    hidden by skip_special_tokens. leading_spaces: spaces dropped at the start of a text (SentencePiece).
    vocab_size: highest id + 1; a model's own vocabulary may be padded beyond it.
    """

    def __init__(self, parts: TokenizerParts | None, *, eos_ids: Sequence[int] = (), bos_id: int | None = None) -> None:
        self._parts = parts
        self.present = parts is not None
        self.bos_id = parts.bos_id if parts else bos_id
        self.eos_ids: tuple[int, ...] = parts.eos_ids if parts else tuple(eos_ids)
        self.special_ids: frozenset[int] = parts.special_ids if parts else frozenset()
        self.leading_spaces = parts.decoder.strip if parts else 0
        self.chat_template: ChatTemplate | None = None
        if parts and parts.templates:
            self.chat_template = ChatTemplate(parts.templates, parts.special_tokens)
        self._pieces: dict[int, bytes] = {}
        added = parts.backend.get_added_tokens_decoder() if parts else {}
        size = parts.backend.get_vocab_size(with_added_tokens=True) if parts else 0
        self.vocab_size = max([size, *(i + 1 for i in added)])
        self._prefix, self._suffix, self._drop_prefix = _affixes(parts)

    @classmethod
    def absent(cls, *, eos_ids: Sequence[int] = (), bos_id: int | None = None) -> Tokenizer:
        """The tokenizer of a model that has none: token-id prompts work, text does not."""
        return cls(None, eos_ids=eos_ids, bos_id=bos_id)

    @classmethod
    def from_path(cls, source: Path | None) -> Tokenizer:
        """From a GGUF file or a Hugging Face directory; `absent` for None."""
        if source is None:
            return cls.absent()
        return cls.from_gguf(source) if source.suffix == ".gguf" else cls.from_dir(source)

    @classmethod
    def from_dir(cls, directory: str | os.PathLike[str]) -> Tokenizer:
        """From a Hugging Face directory; `absent` when it holds no tokenizer files.

        Raises ModelLoadError for damaged files, UnsupportedError for a kind without tokenizer.json.
        """
        from slipstream.text.hf import load_parts, stop_ids_of

        parts = load_parts(Path(directory))
        return cls(parts) if parts else cls.absent(eos_ids=stop_ids_of(Path(directory)))

    @classmethod
    def from_gguf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> Tokenizer:
        """From a GGUF file, or from its metadata (key -> plain value, arrays as lists).

        `absent` when there is no `tokenizer.ggml.model`. Raises ModelLoadError for damaged metadata,
        UnsupportedError for a tokenizer kind that is not known.
        """
        from slipstream.text.gguf_metadata import read_gguf_metadata
        from slipstream.text.gguf_vocab import load_parts

        metadata = source if isinstance(source, Mapping) else read_gguf_metadata(source)
        parts = load_parts(metadata)
        return cls(parts) if parts else cls.absent()

    @property
    def vocab(self) -> dict[str, int]:
        """Token string -> id, added tokens included; a new dict, empty when absent."""
        return self._parts.backend.get_vocab(with_added_tokens=True) if self._parts else {}

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers` object. Raises InvalidRequestError when absent."""
        if self._parts is None:
            raise InvalidRequestError(_ABSENT)
        return self._parts.backend

    def encode(self, text: str | bytes, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. add_special_tokens: with what the model expects around a text (often BOS).

        Raises InvalidRequestError for bytes that are not UTF-8 or a string with lone surrogates.
        """
        backend = self.backend
        text = _checked(text)
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            # The library's Rust panics derive from BaseException; a prompt must not take the engine down.
            raise RequestFailedError(f"the tokenizer failed on this text: {str(error)[:200]}") from error
        if add_special_tokens:
            if self._drop_prefix and ids[:1] == [self.bos_id]:
                ids = ids[1:]
            ids = [*self._prefix, *ids, *self._suffix]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, *, continues: bool = False) -> str:
        """Text of `ids`: the UTF-8 decoding of their bytes, U+FFFD where that is invalid.

        Ids outside the vocabulary give nothing. continues: see `IncrementalDetokenizer`.
        """
        from slipstream.text.detokenizer import IncrementalDetokenizer

        if self._parts is None:
            raise InvalidRequestError(_ABSENT)
        stream = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens, continues=continues)
        return stream.push(ids) + stream.flush()

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write a Hugging Face directory that gives the same ids, see `export`. InvalidRequestError when absent."""
        from slipstream.text.export import export

        if self._parts is None:
            raise InvalidRequestError(_ABSENT)
        export(self._parts, Path(directory))

    def has_token(self, token_id: int) -> bool:
        """Whether the id stands for a token."""
        return self._parts is not None and self._token(token_id) is not None

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """Bytes the token adds to a text; not always whole characters. first: it begins the text."""
        if self._parts is None:
            return b""
        decoder = self._parts.decoder
        if first and decoder.drop_first:
            return decoder.first_to_bytes(self._token(token_id) or "")
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = decoder.to_bytes(self._token(token_id) or "")
            self._pieces[token_id] = piece
        return piece

    def _token(self, token_id: int) -> str | None:
        assert self._parts is not None
        if not 0 <= token_id < self.vocab_size:
            return None
        return self._parts.backend.id_to_token(int(token_id))

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        *,
        tokenize: Literal[False] = False,
        template: str | None = None,
        **variables: Any,
    ) -> str: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        *,
        tokenize: Literal[True],
        template: str | None = None,
        **variables: Any,
    ) -> list[int]: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        *,
        tokenize: bool = False,
        template: str | None = None,
        **variables: Any,
    ) -> str | list[int]:
        """The conversation as one prompt, text or (tokenize) ids.

        template: name of one of several templates; by default "default", or "tool_use" when there are tools.
        variables: passed on to the template. Raises InvalidRequestError when there is no template or it
        fails.
        """
        if self.chat_template is None:
            raise InvalidRequestError("this model has no chat template" if self.present else _ABSENT)
        text = self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, name=template, **variables
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _checked(text: str | bytes) -> str:
    try:
        if isinstance(text, bytes):
            return text.decode("utf-8")
        text.encode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"prompt is not valid UTF-8 at byte {error.start}: {error.reason}") from error
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the prompt holds a lone surrogate at character {error.start}") from error
    except AttributeError as error:
        raise InvalidRequestError(f"a text prompt must be a string, not {type(text).__name__}") from error
    return text


def _affixes(parts: TokenizerParts | None) -> tuple[list[int], list[int], bool]:
    """Ids to put before and after an encoded text, and whether the backend's BOS must go."""
    if parts is None:
        return [], [], False
    try:
        own = parts.backend.encode("", add_special_tokens=True).ids
    except Exception as error:
        raise ModelLoadError(f"the tokenizer cannot encode an empty text: {error}") from error
    has_bos = bool(own) and own[0] == parts.bos_id
    has_eos = bool(own) and own[-1] == parts.eos_id and len(own) > int(has_bos)
    prefix = [parts.bos_id] if parts.add_bos and parts.bos_id is not None and not has_bos else []
    suffix = [parts.eos_id] if parts.add_eos and parts.eos_id is not None and not has_eos else []
    return prefix, suffix, parts.add_bos is False and has_bos
