"""Prompt sets for `cpu_peers.py`: extractive, chat and code, a few of each, written for this project.

Extractive prompts ask for text that mostly stands in the prompt, where n-gram drafts pay. Chat prompts
ask for new text, where they hardly do. Code stands between.
"""

from __future__ import annotations

import json
from pathlib import Path

_LIGHTHOUSE = (
    "The lighthouse on Harrow Point was finished in the spring of 1871 after four years of work. Its "
    "tower is thirty-one metres tall and stands on a base of grey granite that was cut on the mainland "
    "and carried across the sound in flat barges. The first keeper, Anna Whitlow, lived in the cottage "
    "beside the tower for twenty-six years. She wrote down the weather every morning and every evening,"
    " and her nineteen notebooks are now kept in the museum of the harbour town. The lamp burned oil "
    "until 1924, when the keeper's cottage and the tower were connected to a small generator. Since "
    "1988 the light has run without a keeper; an engineer visits it twice a year to clean the lens and "
    "to test the batteries."
)
_BAKERY = (
    "Order 1: Mrs. Ortega, two rye loaves and one plum cake, to be collected on Tuesday at nine. Order "
    "2: Mr. Lindqvist, six poppy seed rolls and one wheat loaf, to be collected on Tuesday at ten. "
    "Order 3: the primary school, forty butter rolls and forty apples, to be delivered on Wednesday at "
    "eight. Order 4: Mrs. Ortega, one lemon tart and two wheat loaves, to be collected on Friday at "
    "nine. Order 5: the river hotel, thirty croissants and ten rye loaves, to be delivered on Saturday "
    "at six. Order 6: Mr. Abara, one plum cake and twelve poppy seed rolls, to be collected on Saturday"
    " at ten."
)
_MEETING = (
    "The committee met on the third of March in the reading room. Present were Ms. Teller, Mr. Boyd, "
    "Dr. Nakamura and Ms. Haile. Mr. Boyd reported that the roof of the east wing had been repaired in "
    "February and that the repair had cost less than planned. Dr. Nakamura proposed that the money left"
    " over be spent on new shelves for the children's section. Ms. Haile said that the heating should "
    "come first, because two of the five radiators in the reading room no longer work. After some "
    "discussion the committee decided to repair the radiators in April and to buy the shelves in the "
    "summer, if enough money is left. The next meeting is on the seventh of April."
)
_FERRY = (
    "A ferry leaves the northern pier every forty minutes between six in the morning and ten at night. "
    "The crossing takes twenty-five minutes. A single ticket costs three crowns for adults and one "
    "crown for children; a bicycle costs one crown more. Tickets can be bought on board, in coins only,"
    " or at the kiosk on the southern pier. In strong wind the ferry does not run, and a bus takes "
    "passengers around the bay instead. The bus takes an hour and ten minutes, and ferry tickets are "
    "valid on it. Dogs travel free of charge on both, but must be on a lead."
)
_CART = """class Cart:
    def __init__(self, owner):
        self.owner = owner
        self.items = []

    def add(self, name, price, count):
        if price < 0:
            raise ValueError("price must not be negative")
        if count < 1:
            raise ValueError("count must be at least one")
        self.items.append({"name": name, "price": price, "count": count})

    def remove(self, name):
        self.items = [item for item in self.items if item["name"] != name]

    def total(self):
        result = 0
        for item in self.items:
            result += item["price"] * item["count"]
        return result
"""
_PARSER = """def parse_line(line):
    line = line.strip()
    if not line or line.startswith("#"):
        return None
    key, _, value = line.partition("=")
    key = key.strip()
    value = value.strip()
    if value.isdigit():
        return key, int(value)
    if value in ("true", "false"):
        return key, value == "true"
    return key, value


def parse_file(path):
    settings = {}
    with open(path) as handle:
        for line in handle:
            pair = parse_line(line)
            if pair is not None:
                key, value = pair
                settings[key] = value
    return settings
"""

BUILT_IN: dict[str, list[str]] = {
    "extractive": [
        f"Repeat the following text exactly, word for word.\n\n{_LIGHTHOUSE}",
        f"Copy out all the orders below, one per line, in the same words.\n\n{_BAKERY}",
        f"Summarize the minutes below in sentences taken from the text.\n\n{_MEETING}",
        f"{_FERRY}\n\nQuote every sentence of the text above that mentions a price or a ticket.",
    ],
    "chat": [
        "Write a short story about a clockmaker who finds a letter inside an old clock.",
        "What should I think about before adopting a dog? Please explain in a few paragraphs.",
        "Explain to a ten-year-old why the sky is blue and why sunsets are red.",
        "Give me advice for a first week in a new job, in a friendly tone.",
    ],
    "code": [
        f"Rename the class to Basket and print the whole program again.\n\n```python\n{_CART}```",
        f"Add a docstring to each function and print the whole program.\n\n```python\n{_PARSER}```",
        "Write a Python function that returns the prime numbers below n, and a loop that prints them.",
        "Write a Python class for a stack with push, pop, peek and is_empty, then show how it is used.",
    ],
}

_FILE_SETS = {
    "extractive": ("summarization", "rag"),
    "chat": ("writing", "roleplay", "humanities", "stem", "qa"),
    "code": ("coding",),
}


def load(path: Path | None, per_set: int) -> dict[str, list[str]]:
    """Set name -> at most `per_set` user messages.

    With a file (JSON lines with `category` and `turns`, the Spec-Bench form) the first turns of its
    categories are used, taken evenly over the file; a set that the file does not have stays built-in.
    """
    sets = dict(BUILT_IN)
    if path is not None:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        for name, categories in _FILE_SETS.items():
            kinds = [[r["turns"][0] for r in rows if r["category"] == c] for c in categories]
            kinds = [kind for kind in kinds if kind]
            share = -(-per_set // len(kinds)) if kinds else 0
            found = [text for kind in kinds for text in _evenly(kind, share)]
            if found:
                sets[name] = found
    return {name: _evenly(texts, per_set) for name, texts in sets.items()}


def _evenly(texts: list[str], count: int) -> list[str]:
    if len(texts) <= count:
        return list(texts)
    return [texts[i * len(texts) // count] for i in range(count)]
