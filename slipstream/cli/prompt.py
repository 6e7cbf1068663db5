"""Where a prompt comes from: an argument, standard input, token ids, a conversation."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from slipstream.cli.options import token_ids, utf8
from slipstream.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from slipstream.llm import LLM

MAX_STDIN_BYTES = 16 << 20


def read_prompt(args: argparse.Namespace) -> str | list[int]:
    """PROMPT, standard input for "-", or the ids of --prompt-ids.

    Raises ConfigError unless exactly one is given, InvalidRequestError for text that is not UTF-8.
    """
    if args.prompt_ids is not None:
        if args.prompt is not None:
            raise ConfigError("PROMPT and --prompt-ids are both given; leave one out")
        return token_ids(args.prompt_ids)
    if args.prompt is None:
        raise ConfigError('nothing to generate from; give PROMPT, "-" for standard input, or --prompt-ids 1,2,3')
    return _stdin() if args.prompt == "-" else utf8(args.prompt, "PROMPT")


def _stdin() -> str:
    data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(data) > MAX_STDIN_BYTES:
        raise InvalidRequestError(f"standard input is longer than {MAX_STDIN_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise InvalidRequestError(
            f"standard input is not valid UTF-8: byte 0x{byte:02x} at offset {error.start}"
        ) from None


def has_chat_template(llm: LLM) -> bool:
    return llm.tokenizer.chat_template is not None


def room_after(llm: LLM, prompt: list[int]) -> int:
    """Tokens that fit into the context after the prompt."""
    return int(llm.resolved["max_model_len"]) - len(prompt)
