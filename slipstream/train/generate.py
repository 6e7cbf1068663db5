"""On-policy conversations, made by our own engine."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError
from slipstream.llm import LLM
from slipstream.train.corpus import Corpus, loops
from slipstream.types import SamplingParams

_MARK = "\u241f"  # stands for the user's text while the template's header is found
_ROUNDS = 16  # answers asked for at once, in slots of the engine: between them there is a word of progress
_CHARS = 4  # of a token of English, about
Progress = Callable[[str, int, int], None]

FOLLOW_UPS = (
    "Summarize the following text in a few sentences:\n\n{text}",
    "Rewrite the following text in your own words:\n\n{text}",
    "What are the main points of this passage?\n\n{text}",
    "Read this passage and answer the question after it.\n\n{text}\n\nQuestion: What is this passage about, and why "
    "does it matter?",
    "Translate the following text to French:\n\n{text}",
    "Correct the mistakes in this text and explain each change:\n\n{text}",
    "Here are two documents.\n\nDocument 1: {text}\n\nDocument 2: {other}\n\nUse them to answer: {question}",
    "{question}\n\nUse the following information to answer:\n{text}",
)
"""Second-round prompts around earlier answers: long contexts from which answers copy."""

OPENERS = (
    "", "Translate German to English: ", "", "Summarize the following article:\n\n", "",
    "Write a Python function that ", "", "A store ", "", "Translate the following sentence to English: ", "",
    "Question: ", "", "Who ", "", "Compose ", "", "If ", "", "Solve: ", "", "Imagine ", "", "What is ", "",
    "Explain ", "", "When did ", "", "Write an email ", "", "Read the passage and answer.\n\nPassage: ", "",
    "How many ", "", "Edit this paragraph: ", "", "Implement ",
)  # fmt: skip
"""How user turns begin; the model goes on. Left to itself it asks for advice and little else: a draft trained on that
agreed with its target at 0.56 of the positions there, and at 0.18 on short questions, translations and sums."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is generated.

    conversations: answers wanted. max_len: most tokens of prompt and answer; a draft is no better than its luck at
    positions it has not seen. follow_ups: share of conversations whose prompt quotes earlier answers, up to half of
    max_len of them. temperatures: answers cycle through them, 0 is greedy. distinct: least share of different 4-grams
    in an answer; a small model's greedy answers do repeat themselves, and a draft has to follow them there too. seed:
    of every draw. seconds: no more answers are begun after them, so that fewer than wanted are made; None: no limit.
    """

    conversations: int = 20_000
    max_len: int = 1024
    max_prompt: int = 128
    follow_ups: float = 0.3
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    top_p: float = 0.95
    distinct: float = 0.3
    seed: int = 0
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"a time limit of {self.seconds} s must be above 0")


def user_header(llm: LLM) -> list[int]:
    """Token ids of the chat template up to where the user's text begins."""
    text = llm.tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    head, found, _ = text.partition(_MARK)
    if not found:
        raise ConfigError("the model's chat template does not show the user's text; give --prompts FILE")
    return llm.tokenizer.encode(head, add_special_tokens=False)


def read_prompts(path: Path) -> list[str]:
    """User turns from a file: JSON lines with "prompt" or "turns", or plain text, one per line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {str(path)!r} cannot be read: {error}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if line.lstrip().startswith("{"):
            try:
                value: Any = json.loads(line)
                prompts.append(str(value["prompt"] if "prompt" in value else value["turns"][0]))
            except (ValueError, KeyError, IndexError, TypeError, RecursionError):
                raise ConfigError(f'{path} line {number} needs "prompt" or a list "turns"') from None
        else:
            prompts.append(line)
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return prompts


def make_prompts(llm: LLM, count: int, recipe: Recipe, progress: Progress | None = None) -> list[str]:
    """`count` user turns that the model writes itself, without repetitions."""
    header = user_header(llm)
    starts = [header + (llm.tokenizer.encode(o, add_special_tokens=False) if o else []) for o in OPENERS]
    seen: dict[str, None] = {}
    round_, size = 0, max(64, count + count // 4)
    batch, longest = _ROUNDS * llm.resolved["max_slots"], max(map(len, starts))
    while len(seen) < count:
        params = [
            SamplingParams(
                temperature=1.0,
                top_p=recipe.top_p,
                max_tokens=max(1, min(recipe.max_prompt, recipe.max_len - longest)),
                seed=recipe.seed * 7919 + round_ + i,
            )
            for i in range(size)
        ]
        before, turns = len(seen), [(round_ + i) % len(OPENERS) for i in range(size)]
        for at in range(0, size, batch):
            some = turns[at : at + batch]
            outs = llm.generate([starts[t] for t in some], params[at : at + batch], use_tqdm=False)
            for turn, out in zip(some, outs, strict=True):
                text = (OPENERS[turn] + out.outputs[0].text).strip()
                if len(text) >= 8 and out.outputs[0].finish_reason == "stop" and not loops(out.outputs[0].token_ids):
                    seen.setdefault(text)
            if progress is not None:
                progress("prompts", min(len(seen), count), count)
        round_ += size
        if len(seen) - before < size // 100:
            raise ConfigError(
                f"the model wrote only {len(seen)} different prompts in {round_} tries; give --prompts FILE"
            )
        size = max(64, (count - len(seen)) * 2)
    return list(seen)[:count]


def answer(
    llm: LLM,
    prompts: Sequence[str],
    recipe: Recipe,
    *,
    offset: int = 0,
    until: float | None = None,
    progress: Progress | None = None,
) -> list[tuple[list[int], list[int], str]]:
    """(prompt ids, answer ids, answer text) of every prompt whose answer is no loop. until: of time.monotonic()."""
    room = recipe.max_len
    asked = [(i, llm.chat_prompt([{"role": "user", "content": p}])) for i, p in enumerate(prompts)]
    asked = [(i, ids) for i, ids in asked if len(ids) + 16 <= room]
    params = []
    for i, ids in asked:
        t = recipe.temperatures[(offset + i) % len(recipe.temperatures)]
        params.append(
            SamplingParams(
                temperature=t,
                top_p=recipe.top_p if t else 1.0,
                max_tokens=room - len(ids),
                seed=recipe.seed * 104_729 + offset + i,
            )
        )
    made, batch = [], _ROUNDS * llm.resolved["max_slots"]
    for at in range(0, len(asked), batch):
        if until is not None and time.monotonic() > until:
            break
        outs = llm.generate([ids for _, ids in asked[at : at + batch]], params[at : at + batch], use_tqdm=False)
        for (_, ids), out in zip(asked[at : at + batch], outs, strict=True):
            told = out.outputs[0]
            if len(told.token_ids) >= 8 and not loops(told.token_ids, least=recipe.distinct):
                made.append((ids, list(told.token_ids), told.text))
        if progress is not None:
            progress("answers", min(at + batch, len(asked)), len(asked))
    return made


def follow_ups(answers: Sequence[str], questions: Sequence[str], count: int, recipe: Recipe) -> list[str]:
    """Prompts that quote earlier answers."""
    rng = random.Random(recipe.seed)
    texts = [t.strip() for t in answers if len(t) >= 200]
    if not texts:
        return []
    most = recipe.max_len // 2 * _CHARS
    made = []
    for i in range(count):
        room = rng.randint(min(400, most), most)
        text, other = _document(rng, texts, room * 2 // 3), _document(rng, texts, room // 3)
        made.append(FOLLOW_UPS[i % len(FOLLOW_UPS)].format(text=text, other=other, question=rng.choice(questions)))
    return made


def _document(rng: random.Random, texts: Sequence[str], chars: int) -> str:
    """Some of `texts` as paragraphs, at most `chars` characters."""
    parts = [rng.choice(texts)]
    while sum(len(p) for p in parts) < chars:
        parts.append(rng.choice(texts))
    return "\n\n".join(parts)[:chars]


def generate_corpus(
    llm: LLM, recipe: Recipe, *, prompts: Sequence[str] | None = None, progress: Progress | None = None
) -> Corpus:
    """The whole corpus: prompts (self-written unless given), answers, and follow-ups around them, shuffled."""
    later = int(recipe.conversations * recipe.follow_ups)
    first = recipe.conversations - later
    began = time.monotonic()
    ends = [None if recipe.seconds is None else began + recipe.seconds * (1 - x) for x in (recipe.follow_ups, 0.0)]
    asked = list(prompts)[:first] if prompts is not None else make_prompts(llm, first, recipe, progress)
    told = answer(llm, asked, recipe, until=ends[0], progress=progress)
    more = follow_ups([t for _, _, t in told], asked, later, recipe)
    told += answer(llm, more, recipe, offset=len(asked), until=ends[1], progress=progress)
    pairs = [(p, a) for p, a, _ in told]
    random.Random(recipe.seed).shuffle(pairs)
    return Corpus.pack(pairs, recipe.max_len)
