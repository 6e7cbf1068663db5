"""Tiny models over characters, random schemas, and plain decoding under a grammar by recomputation."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models

from slipstream import SamplingParams
from slipstream.text import Tokenizer as Text
from slipstream.text.grammar import Grammars
from tests.support.kit import perturb
from tests.support.reference import DenseReference, Ids
from tests.support.tiny import write_tiny_checkpoint

SPECIAL = ["<pad>", "<s>", "</s>", "<think>", "</think>"]
PAIRS = [
    '{"',
    '":',
    '": ',
    '", "',
    '"}',
    "true",
    "false",
    "null",
    '"a"',
    "[]",
    "{}",
    "},",
    '["',
    '"]',
    "ab",
    "10",
    "\n",
]
WORDS = [*SPECIAL, *(chr(c) for c in range(32, 127)), *PAIRS]
VOCAB = 128
EOS = 2


def write_characters(folder: Path) -> None:
    """A token per printable character, some of several; the last ids of the model's vocabulary have none."""
    tokenizer = Tokenizer(models.Unigram([(w, -1.0 / len(w)) for w in WORDS], unk_id=0))
    tokenizer.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in SPECIAL])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def character_tokenizer(folder: Path) -> Text:
    """The tokenizer of `write_characters`, written into the folder, with EOS."""
    write_characters(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return Text.from_dir(folder)


def ids(text: str) -> list[int]:
    return [WORDS.index(c) for c in text]


def words(row: np.ndarray) -> set[str]:
    """The words whose bits a mask's row has."""
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert not bits[VOCAB:].any()
    return {WORDS[i] for i in np.nonzero(bits)[0] if i < len(WORDS)}


def character_models(root: Path, **changes: Any) -> dict[str, Path]:
    """A random target and a draft that is often right."""
    values = {"vocab_size": VOCAB, "max_position_embeddings": 2048, **changes}
    target = write_tiny_checkpoint(root / "target", "llama", seed=1, **values)
    write_characters(target)
    return {"target": target, "draft": perturb(target, root / "draft", scale=0.02)}


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose instances are short, so that a random model ends."""
    kinds = ["string", "integer", "boolean", "enum", "null"] + ([] if depth > 1 else ["object", "array", "anyOf"])
    kind = "object" if depth == 0 else rng.choice(kinds)
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 4)}
    if kind == "integer":
        return {"type": "integer", "minimum": 0, "maximum": rng.randint(1, 500)}
    if kind == "enum":
        return {"enum": [rng.choice(["red", "a b", 7, None, True, [1], {"k": "v"}]) for _ in range(rng.randint(1, 3))]}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": rng.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "object":
        names = rng.sample(["a", "b", "name", "x y"], rng.randint(1, 3))
        return {
            "type": "object", "properties": {n: random_schema(rng, depth + 1) for n in names},
            "required": [n for n in names if rng.random() < 0.8], "additionalProperties": False,
        }  # fmt: skip
    return {"type": kind}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is an instance, for what `random_schema` makes."""
    if "enum" in schema:
        return any(value == e and type(value) is type(e) for e in schema["enum"])
    if "anyOf" in schema:
        return any(fits(value, s) for s in schema["anyOf"])
    kind = schema["type"]
    if kind == "object":
        known = schema["properties"]
        return (
            isinstance(value, dict) and set(value) <= set(known) and set(schema["required"]) <= set(value)
            and all(fits(v, known[k]) for k, v in value.items())
        )  # fmt: skip
    if kind == "array":
        return isinstance(value, list) and len(value) <= schema["maxItems"] and all(
            fits(v, schema["items"]) for v in value
        )  # fmt: skip
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= schema["maximum"]
    return value is None if kind == "null" else isinstance(value, bool)


class GrammarReference(DenseReference):
    """DenseReference whose logits are masked by a matcher of its own; ends at an end-of-sequence token."""

    def __init__(self, model: Any, tokenizer: Text) -> None:
        super().__init__(model)
        self.tokenizer = tokenizer
        self.grammars = Grammars(tokenizer, vocab_size=VOCAB, eos_ids=[EOS])
        self._allowed: torch.Tensor | None = None

    def logits(self, tokens: Any) -> Any:
        logits = super().logits(tokens)
        return logits if self._allowed is None else logits.masked_fill(~self._allowed, float("-inf"))

    def continuation(self, prompt: Ids, params: SamplingParams, child: int = 0, **kw: Any) -> list[int]:
        spec, key = params.structured_outputs, (prompt, repr(params), child)
        if spec is None:
            return super().continuation(prompt, params, child, **kw)
        if key in self._known:
            return self._known[key]
        self.grammars.check(spec)
        matcher = self.grammars.compiled(spec).result().deep_copy()
        tokens: list[int] = []
        with torch.inference_mode():
            while len(tokens) < (params.max_tokens or 0) and tokens[-1:] != [EOS]:
                bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
                free = bool(spec.after) and spec.after not in self.tokenizer.decode(tokens, skip_special_tokens=False)
                self._allowed = None if free else torch.from_numpy(bits[:VOCAB].astype(bool))
                tokens.append(self._next([*prompt, *tokens], params, child, len(prompt)))
                assert free or matcher.consume_token(tokens[-1])
        self._allowed = None
        self._known[key] = tokens
        return tokens


def instance(text: str, schema: dict[str, Any]) -> bool:
    return fits(json.loads(text), schema)
