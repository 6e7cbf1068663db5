"""From a token's string to the bytes it stands for.

A `tokenizers` decoder maps a list of token strings to one string, and may only be called on whole
sequences. Every decoder of the families we serve is a per-token map to bytes followed by at most one
change at the very start of the text, so that is how it is held here: text is then the UTF-8 decoding of
joined bytes, and can be produced token by token.

One difference follows: where a run of byte tokens is not valid UTF-8, `tokenizers` turns each of its
bytes into U+FFFD, the valid characters of the run included, which no stream can know beforehand. Here, as for
byte-level tokens, only the invalid part becomes U+FFFD.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import UnsupportedError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def byte_alphabet() -> dict[str, int]:
    """The byte-level BPE alphabet of GPT-2: one printable character for each of the 256 bytes.

    Printable Latin-1 characters stand for themselves, the others follow from U+0100 on in byte order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    rest = [b for b in range(256) if b not in set(plain)]
    table.update({chr(0x100 + i): b for i, b in enumerate(rest)})
    return table


_ALPHABET = byte_alphabet()


@dataclass(frozen=True, kw_only=True)
class PieceDecoder:
    """How token strings become bytes.

    byte_level: the strings are written in the GPT-2 byte alphabet. byte_fallback: `<0x41>` is one byte.
    replace: (old, new) applied to each string in order. strip: leading spaces dropped from the whole text.
    drop_first: this character is dropped from the first token instead (Metaspace).
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    strip: int = 0
    drop_first: str = ""

    def to_bytes(self, token: str) -> bytes:
        for old, new in self.replace:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.match(token)):
            return bytes([int(match[1], 16)])
        if self.byte_level:
            values = [_ALPHABET.get(c) for c in token]
            if None not in values:
                return bytes(v for v in values if v is not None)
        return token.encode("utf-8", errors="replace")

    def first_to_bytes(self, token: str) -> bytes:
        """As `to_bytes` for the first token of a text."""
        return self.to_bytes(token.replace(self.drop_first, "") if self.drop_first else token)


def parse_decoder(spec: Mapping[str, Any] | None) -> PieceDecoder:
    """The `decoder` object of a tokenizer.json. Raises UnsupportedError for a kind that is not known."""
    steps: list[Mapping[str, Any]] = []
    if spec is not None:
        steps = list(spec["decoders"]) if spec.get("type") == "Sequence" else [spec]
    byte_level = byte_fallback = False
    replace: list[tuple[str, str]] = []
    strip, drop_first = 0, ""
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel":
            byte_level = True
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Fuse":
            continue
        elif kind == "Replace" and isinstance(step.get("pattern", {}).get("String"), str):
            replace.append((step["pattern"]["String"], step["content"]))
        elif kind == "Strip" and step.get("content") == " " and not step.get("stop"):
            strip += int(step.get("start", 0))
        elif kind == "Metaspace":
            mark = step.get("replacement", "▁")
            replace.append((mark, " "))
            if step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True):
                drop_first = mark
        else:
            raise UnsupportedError(f"tokenizer decoder {kind!r} is not supported")
    return PieceDecoder(
        byte_level=byte_level,
        byte_fallback=byte_fallback,
        replace=tuple(replace),
        strip=strip,
        drop_first=drop_first,
    )
