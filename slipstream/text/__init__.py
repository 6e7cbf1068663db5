"""Text in, text out: tokenizers, incremental detokenisation, stop strings, chat templates."""

from slipstream.text.chat import ChatTemplate
from slipstream.text.detokenizer import IncrementalDetokenizer
from slipstream.text.gguf_metadata import read_gguf_metadata
from slipstream.text.stops import StopStringChecker, TextDelta, TextStream
from slipstream.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "StopStringChecker",
    "TextDelta",
    "TextStream",
    "Tokenizer",
    "read_gguf_metadata",
]
