"""Plain decoding by recomputation, and oracles that know its result."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slipstream import SamplingParams
from slipstream.attention.dense import DenseCausal
from slipstream.draft.oracle import OracleDrafter
from slipstream.sampling.processors import process_logits
from slipstream.sampling.rng import PURPOSE_COUPLED, race_noise, request_key
from slipstream.types import Request

Ids = tuple[int, ...]


class DenseReference:
    """No cache, no engine, no drafts: one dense pass per token; argmax, or the seeded race in float64."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._known: dict[tuple[Any, ...], list[int]] = {}

    def continuation(
        self, prompt: Ids, params: SamplingParams, child: int = 0, *, count: int | None = None
    ) -> list[int]:
        """`count` tokens (default max_tokens) after `prompt`; nothing ends it. Longer results are remembered."""
        count = params.max_tokens or 0 if count is None else count
        law = (
            params.temperature, params.top_k, params.top_p, params.min_p, params.seed, params.repetition_penalty,
            params.presence_penalty, params.frequency_penalty, tuple((params.logit_bias or {}).items()),
            params.min_tokens and (params.min_tokens, tuple(params.stop_token_ids)),
        )  # fmt: skip
        tokens = self._known.setdefault((prompt, law, child), [])
        with torch.inference_mode():
            while len(tokens) < count:
                tokens.append(self._next([*prompt, *tokens], params, child, len(prompt)))
        return tokens[:count]

    def logits(self, tokens: Sequence[int]) -> Any:
        """[L, V]: what the model itself says at each position."""
        pos = torch.arange(len(tokens))
        hidden, _ = self.model.forward(torch.tensor(tokens), pos, DenseCausal(pos, self.model.config.windows))
        return self.model.logits(hidden)

    def _next(self, tokens: list[int], params: SamplingParams, child: int, prompt_len: int) -> int:
        logits = as_asked(self.logits(tokens)[-1:].clone(), params, tokens[:prompt_len], tokens[prompt_len:])
        if params.greedy:
            return int(logits.argmax())
        one = torch.ones(1, dtype=torch.float64)
        logits = process_logits(
            logits, one * params.temperature, torch.tensor([params.top_k]), one * params.top_p, one * params.min_p,
            None, filtered=True,
        )  # fmt: skip
        noise = race_noise(
            torch.tensor([request_key(params.seed)]), torch.tensor([child]), torch.tensor([len(tokens)]),
            PURPOSE_COUPLED, logits.shape[1], torch.float64,
        )  # fmt: skip
        return int((noise / logits.softmax(1)).argmin())


def as_asked(logits: Any, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Any:
    """Logits [1, V] with penalties, biases and the ban before min_tokens, token by token as the fields are defined."""
    for token in {*prompt, *output}:
        x = logits[0, token]
        logits[0, token] = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
    for token in set(output):
        logits[0, token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        logits[0, token] += bias
    if len(output) < params.min_tokens:
        logits[0, list(params.stop_token_ids)] = float("-inf")
    return logits


def planted_oracle(
    continuation: Callable[[Request], list[int]], *, vocab: int, seed: int = 0, wrong: float = 0.3, silent: float = 0.05
) -> Callable[..., OracleDrafter]:
    """A drafter factory: knows what comes next, wrong at random positions, silent at a few others."""

    def script(request: Request) -> list[int]:
        rng = random.Random(seed * 100_003 + sum(request.prompt_token_ids) + len(request.prompt_token_ids))
        right = [*request.prompt_token_ids, *continuation(request)]
        return [(t + 1) % vocab if rng.random() < wrong else -1 if rng.random() < silent else t for t in right]

    return lambda **kw: OracleDrafter(script, **kw)
