"""User turns of many kinds, from a grammar: text to train a draft on, on policy, for benchmarks of mixed tasks.

    python bench/draft_prompts.py --count 30000 --seed 0 > prompts.jsonl
    slipstream train eagle3 --prompts prompts.jsonl --out my-draft

Prints a JSON object per line, {"prompt", "category"}, the same for the same count and seed. The categories are those
of Spec-Bench (Xia et al. 2024); every sentence was written for this project, so that its prompts stay unseen.

The files in prompt_grammar/ hold named lists, `[name]` and then items, separated by line ends or " ; ". In an item:

    {city}        an item of the list `city`            {3-40}      a number
    {a=city}      the same, remembered as `a`           {a}         what is remembered
    {!a=3-40}     remembered without being shown        {=a*2+b}    arithmetic on remembered numbers
    {|one|two}    one of these                          {^city}     with a capital, {@a}: every word
    {a.he}        he or she for a remembered first name; also .his, .him, .He, .His

A list `story_*` (news) or `entry_*` (an encyclopaedia) is a passage about one thing: what "!" remembers, one of the
sentences after "+", questions after "?", and sentences of which each passage takes some.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

GRAMMAR = Path(__file__).resolve().parent / "prompt_grammar"
OPEN = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SHARES = {
    "translation": 18, "math_reasoning": 18, "qa": 14, "summarization": 12, "rag": 14, **dict.fromkeys(OPEN, 3)
}  # fmt: skip
"""Percent of the prompts, by category."""
CLOSINGS = {
    **dict.fromkeys(("writing", "roleplay", "stem", "humanities"), "closing"),
    **dict.fromkeys(("reasoning", "math"), "closing_steps"),
    "coding": "closing_code",
}
"""The list of wishes that end some of the prompts."""
MAX_CHARS = {category: 2600 if category in ("summarization", "rag") else 2000 for category in SHARES}
MAX_TRIES = 400
"""Draws for one prompt before a category counts as exhausted."""

SLOT = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d+)-(\d+)")
ARTICLE = re.compile(r"\b([Aa]) (?=(?!one\b|uni|use|eu|U)[aeiouAEIO])")
TITLE = re.compile(r"(?<![\w'])(?!(?:the|of|a|in|and|with)\b)[a-z]")
PRONOUNS = {
    "girl": {"he": "she", "his": "her", "him": "her", "He": "She", "His": "Her"},
    "boy": {"he": "he", "his": "his", "him": "him", "He": "He", "His": "His"},
}


class GrammarError(ValueError):
    """An item that cannot be filled."""


@dataclass(frozen=True)
class Topic:
    """A passage about one thing."""

    setup: str
    openings: tuple[str, ...]
    sentences: tuple[str, ...]
    questions: tuple[str, ...]

    @classmethod
    def parse(cls, lines: list[str]) -> Topic:
        setup = " ".join(line[1:] for line in lines if line[0] == "!").replace("{", "{!")
        openings = tuple(line[2:] for line in lines if line[0] == "+")
        questions = [q for line in lines if line[0] == "?" for q in line[2:].split(" ; ")]
        return cls(setup, openings, tuple(line for line in lines if line[0] not in "!+?"), tuple(questions))


class Grammar:
    """Lists of items by name."""

    def __init__(self, text: str) -> None:
        """`text`: the files, one after another. Raises GrammarError for a list without items or given twice."""
        self.lists: dict[str, list[str]] = {}
        self.topics: dict[str, Topic] = {}
        for part in re.split(r"^\[(?=\w+\]$)", text, flags=re.M)[1:]:
            name, _, body = part.partition("]\n")
            lines = [line.replace("\\n", "\n") for line in body.splitlines() if line.strip() and line[0] != "#"]
            if not lines or name in self.lists or name in self.topics:
                raise GrammarError(f"the list {name!r} is {'there twice' if lines else 'empty'}")
            if name.startswith(("story_", "entry_")):
                self.topics[name] = Topic.parse(lines)
            else:
                self.lists[name] = [item.strip() for line in lines for item in line.split(" ; ")]
        self.genders = {first: gender for gender in PRONOUNS for first in self.lists.get(gender, ())}

    def fill(self, rng: random.Random, item: str, names: dict[str, str] | None = None) -> str:
        """`item` without its slots; `names` is what is remembered, and grows. Raises GrammarError for a slot that
        nothing fills."""
        names = {} if names is None else names
        while "{" in item:
            before, item = item, SLOT.sub(lambda slot: self._slot(rng, slot, names), item)
            if item == before:
                raise GrammarError(f"nothing fills {SLOT.findall(item)} in {item!r}")
        return item

    def _slot(self, rng: random.Random, slot: re.Match[str], names: dict[str, str]) -> str:
        key = slot[1]
        if key in names:
            return names[key]
        if key.startswith("|"):
            return rng.choice(key[1:].split("|"))
        if key.startswith("^"):
            word = self._draw(rng, key[1:], names)
            return word[:1].upper() + word[1:]
        if key.startswith("@"):
            return TITLE.sub(lambda word: word[0].upper(), self._draw(rng, key[1:], names))
        if key.startswith("="):
            return self._compute(key[1:], names) or slot[0]
        name, assigns, source = key.partition("=")
        if not assigns:
            # A pronoun can stand before its name is drawn; the next turn of the loop fills it.
            return slot[0] if "." in key else self._draw(rng, key, names)
        shown, name = not name.startswith("!"), name.removeprefix("!")
        value = self._draw(rng, source, names)
        for _ in range(8):
            if value not in names.values() or RANGE.fullmatch(source):
                break
            value = self._draw(rng, source, names)
        names[name] = value
        pronouns = PRONOUNS.get(self.genders.get(value.split(" ")[0], ""), {})
        names.update({f"{name}.{kind}": word for kind, word in pronouns.items()})
        return value if shown else ""

    def _draw(self, rng: random.Random, source: str, names: dict[str, str]) -> str:
        if source in names:
            return names[source]
        if bounds := RANGE.fullmatch(source):
            low, high = int(bounds[1]), int(bounds[2])
            return str(low + int(rng.random() * (high - low + 1)))
        if source not in self.lists:
            raise GrammarError(f"there is no list {source!r}")
        item = rng.choice(self.lists[source])
        return self.fill(rng, item) if "{" in item else item

    @staticmethod
    def _compute(sum_: str, names: dict[str, str]) -> str:
        """A sum of products; "" while a name is still missing."""
        total = 0
        for product in sum_.split("+"):
            term = 1
            for factor in product.split("*"):
                if not factor.isdigit() and factor not in names:
                    return ""
                term *= int(names.get(factor, factor))
            total += term
        return str(total)


@cache
def grammar() -> Grammar:
    return Grammar("\n".join(path.read_text(encoding="utf-8") for path in sorted(GRAMMAR.glob("*.txt"))))


def passage(rng: random.Random, topic: str, names: dict[str, str], words: int) -> str:
    """About `words` words about one thing; `names` is filled, or taken from an earlier passage about it."""
    g = grammar()
    about = g.topics[topic]
    if not names:
        g.fill(rng, about.setup, names)
    order = list(range(len(about.sentences)))
    if rng.random() < 0.5:
        rng.shuffle(order)
    texts = [about.sentences[i] for i in order if rng.random() < 0.9]
    more = g.lists["more_" + topic[:5]]
    for extra in rng.sample(more, rng.randint(0, 2) + words // 130):
        texts.insert(rng.randint(0, len(texts)), extra)
    out = [g.fill(rng, rng.choice(about.openings), dict(names))]
    count = len(out[0].split())
    for text in texts:
        if count >= words:
            break
        # Each sentence has its own copy: what one sentence remembers must not fill a list's slot in another.
        out.append(g.fill(rng, text, dict(names)))
        count += len(out[-1].split())
    return " ".join(out)


def question(rng: random.Random, topic: str, names: dict[str, str]) -> str:
    return grammar().fill(rng, rng.choice(grammar().topics[topic].questions), dict(names))


def summarization(rng: random.Random) -> str:
    topic = rng.choice(list(grammar().topics))
    return "Summarize: " + passage(rng, topic, {}, rng.randint(120, 450))


def rag(rng: random.Random) -> str:
    """Two to four passages as a retriever gives them, some cut mid-sentence, then a question about one of them."""
    topics = list(grammar().topics)
    topic, names = rng.choice(topics), dict[str, str]()
    many = rng.randint(2, 4)
    size = rng.randint(150, 400) // many
    found = [passage(rng, topic, names, size)]
    for i in range(1, many):
        same = i == 1 and rng.random() < 0.6
        other = topic if same or rng.random() < 0.5 else rng.choice(topics)
        words = passage(rng, other, names if same else {}, size + 20).split(" ")
        start = rng.randint(0, 12) if rng.random() < 0.6 else 0
        found.append(" ".join(words[start : start + size]))
    rng.shuffle(found)
    return rng.choice((" ", "\n")).join(found) + "\n" + question(rng, topic, names)


def one(rng: random.Random, category: str) -> str:
    """A prompt of `category`; it may be too long or one that was there before."""
    if category == "summarization":
        text = summarization(rng)
    elif category == "rag":
        text = rag(rng)
    else:
        text = grammar().fill(rng, f"{{{category}}}")
    if category == "translation":  # half of the sentences with the spaces before punctuation that the corpora have
        return text if rng.random() < 0.5 else re.sub(r" ([.,:?!])", r"\1", re.sub(r'" (.+?) "', r'"\1"', text))
    if category == "qa":  # as typed into a search box
        return text[0] + text[1:].lower()
    if (closing := CLOSINGS.get(category)) and rng.random() < 0.3:
        text += ("\n\n" if "\n" in text else " ") + grammar().fill(rng, f"{{{closing}}}")
    text = ARTICLE.sub(r"\1n ", text)
    return text.replace("⟦", "{").replace("⟧", "}")


def quotas(count: int) -> list[str]:
    """`count` categories by their shares, each within one of its exact share."""
    total = sum(SHARES.values())
    exact = {category: count * share / total for category, share in SHARES.items()}
    out = {category: int(value) for category, value in exact.items()}
    for category in sorted(exact, key=lambda c: out[c] - exact[c])[: count - sum(out.values())]:
        out[category] += 1
    return [category for category, n in out.items() for _ in range(n)]


def generate(count: int, seed: int) -> Iterator[dict[str, str]]:
    """`count` different prompts in random order. Raises ValueError when a category has no new ones."""
    if count < 1:
        raise ValueError(f"--count {count}: at least 1")
    rng = random.Random(seed)
    categories = quotas(count)
    rng.shuffle(categories)
    seen: set[str] = set()
    for category in categories:
        for _ in range(MAX_TRIES):
            prompt = one(rng, category)
            # Two that differ in case or punctuation only are the same.
            key = re.sub(r"\W+", " ", prompt.casefold()).strip()
            if len(prompt) <= MAX_CHARS[category] and key not in seen:
                break
        else:
            raise ValueError(f"--count {count}: the grammar has no more prompts of category {category!r}")
        seen.add(key)
        yield {"prompt": prompt, "category": category}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        for line in generate(args.count, args.seed):
            print(json.dumps(line, ensure_ascii=False))
    except ValueError as error:
        print(f"draft_prompts: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
