"""A stand-in for the engine: the command line is tested without a model."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slipstream.draft import default
from slipstream.errors import InvalidRequestError
from slipstream.types import SpecStats


class FakeTokenizer:
    """One token per byte."""

    special_ids: frozenset[int] = frozenset()
    leading_spaces = 0

    def __init__(self, *, template: bool = True, present: bool = True) -> None:
        self.chat_template = "template" if template else None
        self.present = present

    def has_token(self, token_id: int) -> bool:
        return self.present and 0 <= token_id < 256

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        return bytes([token_id])

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@dataclass
class Engine:
    """What the fake `LLM` does and what it saw. Each chunk is (text, tokens, accepted)."""

    chunks: list[tuple[str, bytes, int]] = field(
        default_factory=lambda: [("He", b"He", 0), ("llo", b"llo", 2), ("!", b"!", 0)]
    )
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    on_chunk: Callable[[int], None] = lambda n: None
    error: Exception | None = None
    finish_reason: str = "stop"
    options: dict[str, Any] = field(default_factory=dict)
    prompts: list[Any] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)
    aborted: int = 0
    closed: int = 0
    notes: list[str] = field(default_factory=list)
    resolved: dict[str, Any] = field(default_factory=lambda: {"max_model_len": 8192})

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise InvalidRequestError("this model has no chat template")
        return list("".join(f"<{m['role']}>{m['content']}" for m in messages).encode())

    def make(self, **options: Any) -> Engine:
        self.options = options
        if options.get("model") == "missing":
            from slipstream.errors import ModelLoadError

            raise ModelLoadError("model 'missing':\n no such directory")
        return self

    def stream(self, prompt: list[int], params: Any) -> Iterator[Any]:
        self.prompts.append(prompt)
        self.params.append(params)
        if self.error is not None:
            raise self.error
        spec = SpecStats(Counter([(2, 2, 3), (1, 0, 1)]))
        ids = [i for _, data, _ in self.chunks for i in data]
        output = SimpleNamespace(
            prompt_token_ids=list(prompt),
            outputs=[
                SimpleNamespace(
                    index=0,
                    text="".join(text for text, _, _ in self.chunks),
                    token_ids=ids,
                    finish_reason=self.finish_reason,
                )
            ],
            spec=spec,
            finished=True,
        )
        try:
            for n, (text, data, accepted) in enumerate(self.chunks):
                last = n == len(self.chunks) - 1
                self.on_chunk(n)
                yield SimpleNamespace(
                    text=text,
                    token_ids=list(data),
                    accepted=accepted,
                    finish_reason=self.finish_reason if last else None,
                    output=output if last else None,
                )
        except GeneratorExit:
            self.aborted += 1
            raise

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def _no_draft_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command line says is all there is."""
    monkeypatch.setattr(default, "FOLDER", tmp_path / "no-draft")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    fake = Engine()
    module = ModuleType("slipstream.llm")
    module.LLM = fake.make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slipstream.llm", module)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return fake
