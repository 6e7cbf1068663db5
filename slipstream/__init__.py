"""Slipstream serves large language models with speculative decoding.

    from slipstream import LLM, SamplingParams

The names are loaded on first use: `import slipstream` alone imports neither torch nor a tokenizer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.errors import SlipstreamError
    from slipstream.llm import LLM
    from slipstream.outputs import RequestOutput
    from slipstream.structured import StructuredOutputsParams
    from slipstream.types import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "RequestOutput", "SamplingParams", "SlipstreamError", "StructuredOutputsParams", "__version__"]

_HOMES = {
    "LLM": "slipstream.llm",
    "RequestOutput": "slipstream.outputs",
    "SamplingParams": "slipstream.types",
    "SlipstreamError": "slipstream.errors",
    "StructuredOutputsParams": "slipstream.structured",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
