"""bench/draft_prompts.py: the same prompts for the same seed, in the stated shares, all different, none too long."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from bench import draft_prompts
from bench.draft_prompts import GRAMMAR, MAX_CHARS, SHARES, Grammar, GrammarError, generate, grammar, main

COUNT = 3000


@pytest.fixture(scope="module")
def lines() -> list[dict[str, str]]:
    return list(generate(COUNT, seed=3))


def normal(prompt: str) -> str:
    return " ".join(re.sub(r"\W+", " ", prompt.casefold()).split())


def test_the_seed_decides(lines: list[dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "200", "--seed", "5"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == list(generate(200, seed=5))
    other = {line["prompt"] for line in generate(200, seed=6)}
    assert sum(line["prompt"] in other for line in printed) < 10
    assert list(generate(COUNT, seed=3)) == lines


def test_shares_are_kept_at_every_size(lines: list[dict[str, str]]) -> None:
    assert sum(SHARES.values()) == 100
    for some in (lines, list(generate(137, seed=0))):
        counts = Counter(line["category"] for line in some)
        assert sum(counts.values()) == len(some)
        for category, share in SHARES.items():
            assert abs(counts[category] - share * len(some) / 100) < 1, category
    first = Counter(line["category"] for line in lines[:500])
    assert min(first.get(category, 0) for category in SHARES) > 0, "the categories are not mixed"


def test_no_two_are_equal(lines: list[dict[str, str]]) -> None:
    assert len({normal(line["prompt"]) for line in lines}) == COUNT


def test_lengths(lines: list[dict[str, str]]) -> None:
    by_category: dict[str, list[str]] = {}
    for line in lines:
        assert 10 <= len(line["prompt"]) <= MAX_CHARS[line["category"]] <= 2600, line
        by_category.setdefault(line["category"], []).append(line["prompt"])
    words = sorted(len(prompt.split()) for prompt in by_category["summarization"])
    assert words[0] >= 100 and words[-1] <= 480 and words[-1] - words[0] > 200
    assert all(prompt.splitlines()[-1].endswith("?") for prompt in by_category["rag"])
    assert all(prompt.startswith("Translate German to English: ") for prompt in by_category["translation"])


def test_nothing_of_the_grammar_shows(lines: list[dict[str, str]]) -> None:
    for line in lines:
        if line["category"] != "coding":
            assert not re.search(r"[{}⟦⟧|]{2}|[{}⟦⟧]| ;|\\n|  ", line["prompt"]), line


def test_words_are_broad(lines: list[dict[str, str]]) -> None:
    """No sentence of a passage and no form of a question makes up much of its category."""
    assert len({word for line in lines for word in normal(line["prompt"]).split() if word.isalpha()}) > 5000
    for category in ("translation", "math_reasoning", "qa"):
        forms = Counter(
            " ".join(re.sub(r"\d+", "0", line["prompt"]).split()[4 if category == "translation" else 0 :][-3:])
            for line in lines
            if line["category"] == category
        )
        assert forms.most_common(1)[0][1] < 0.08 * forms.total(), (category, forms.most_common(1))


def test_every_item_can_be_filled() -> None:
    g, rng = grammar(), random.Random(0)
    for name, items in g.lists.items():
        assert len(set(items)) == len(items), f"{name} says something twice"
        for item in items:
            assert "{" not in g.fill(rng, item)
    for topic in g.topics.values():
        names: dict[str, str] = {}
        assert g.fill(rng, topic.setup, names).strip() == ""
        assert len(topic.openings) >= 2 and len(topic.sentences) >= 10 and len(topic.questions) >= 3
        for item in (*topic.openings, *topic.sentences, *topic.questions):
            assert "{" not in g.fill(rng, item, dict(names))


def test_slots() -> None:
    g = Grammar("[girl]\nAda\n[boy]\nBob\n[one]\nred fox\n[two]\n{girl} and {|you|you}\n")
    rng = random.Random(0)
    assert g.fill(rng, "{a=girl} has {x=3-3}; {a.he} and {b=boy} ({b.him}) have {=x*2+1}.") == (
        "Ada has 3; she and Bob (him) have 7."
    )
    assert (
        g.fill(rng, "{=x*x} before {x=4-4}{!y=one}, {^y}, {@one}, {two}")
        == "16 before 4, Red fox, Red Fox, Ada and you"
    )


@pytest.mark.parametrize(
    "item, error", [("{none}", "no list 'none'"), ("{=x+1}", "nothing fills"), ("{a.he}", "nothing")]
)
def test_a_slot_that_nothing_fills(item: str, error: str) -> None:
    with pytest.raises(GrammarError, match=error):
        Grammar("[girl]\nAda\n").fill(random.Random(0), item)


@pytest.mark.parametrize("text, error", [("[a]\nx\n[a]\ny\n", "twice"), ("[a]\n# x\n", "empty")])
def test_a_list_that_is_wrong(text: str, error: str) -> None:
    with pytest.raises(GrammarError, match=error):
        Grammar(text)


def test_what_cannot_be_had(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "0"]) == 2
    assert "--count 0" in capsys.readouterr().err
    monkeypatch.setattr(draft_prompts, "SHARES", {"qa": 100})
    monkeypatch.setattr(draft_prompts, "grammar", lambda: Grammar("[qa]\nwho ; where\n"))
    assert main(["--count", "3"]) == 2
    assert "no more prompts of category 'qa'" in capsys.readouterr().err


def test_files_stay_short() -> None:
    files = [*GRAMMAR.glob("*.txt"), Path(draft_prompts.__file__)]
    assert len(files) > 5
    assert {f.name: n for f in files if (n := len(f.read_text(encoding="utf-8").splitlines())) > 500} == {}
