"""bench/text_prompts.py: the same prompts for the same texts and seed, none with eight words of a benchmark."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from bench.draft_prompts import grammar
from bench.draft_prompts import main as grammar_main
from bench.text_prompts import (
    KINDS,
    Document,
    TextError,
    documents,
    functions,
    generate,
    german_sentences,
    main,
    pieces,
    runs,
    spaced,
)

WORDS = [
    "amber", "birch", "cloud", "drift", "ember", "field", "grove", "heath", "inlet", "jetty", "knoll", "ledge",
    "marsh", "north", "ochre", "plain", "quarry", "ridge", "shore", "thorn", "upland", "valley", "willow", "yard",
]  # fmt: skip


def prose(rng: random.Random, sentences: int) -> str:
    return " ".join(" ".join(rng.choices(WORDS, k=12)).capitalize() + "." for _ in range(sentences))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small folder as gather_texts.py writes it."""
    folder, rng = tmp_path_factory.mktemp("texts"), random.Random(1)
    for kind in KINDS:
        (folder / kind).mkdir()
    subjects = [
        f"# {field[0]}{n} Place{n} | {what} | {field}\n\n{field[0]}{n} Place{n} was founded by nobody in 1{n:03}. "
        f"{prose(rng, 14)}\n\n{prose(rng, 9)}\n\n"
        for field, what in (
            ("People", "Painter (1801–1850)"),
            ("Geography", "City in Nowhere"),
            ("Mathematics", "Idea"),
        )
        for n in range(30)
    ]
    (folder / "articles/facts.txt").write_text("".join(subjects))
    (folder / "stories/tale.txt").write_text("".join(f"# {n}\n\n{prose(rng, 30)}\n\n" for n in range(40)))
    (folder / "reviews/goods.txt").write_text("".join(f"# {n}\n\n{prose(rng, 2)}\n\n" for n in range(200)))
    german = "".join(f"Das {w} ist mit dem {v} und der Brücke von {u} nicht zu sehen.\n\n"
                     for w in WORDS[:9] for v in WORDS[:9] for u in WORDS[:3])  # fmt: skip
    (folder / "german/satz.txt").write_text(german)
    code = "".join(
        f'def job_{n}(a, b):\n    """Add {n}."""\n    a += {n}\n    b -= a\n    return a * b\n\n\n' for n in range(9)
    )
    (folder / "code/jobs.py").write_text(code)
    return folder


def test_the_seed_decides(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--texts", str(texts), "--count", "300", "--seed", "5"]) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert all(set(line) == {"prompt", "category"} for line in lines) and len(lines) == 300
    again = [{"prompt": x["prompt"], "category": x["category"]} for x in generate(texts, 300, 5)]
    assert lines == again
    assert len({line["prompt"] for line in lines} & {x["prompt"] for x in generate(texts, 300, 6)}) < 30
    assert "translation     texts" in err


def test_texts_and_grammar_are_mixed(texts: Path) -> None:
    lines = list(generate(texts, 600, 0))
    keys = {re.sub(r"\W+", " ", line["prompt"].casefold()).strip() for line in lines}
    assert len(keys) == 600
    made = Counter((line["category"], line["source"]) for line in lines)
    assert made["math_reasoning", "texts"] == made["math", "texts"] == 0
    for category in ("translation", "qa", "rag", "summarization"):
        of_texts, of_grammar = made[category, "texts"], made[category, "grammar"]
        assert min(of_texts, of_grammar) > 0.3 * (of_texts + of_grammar), category
    for line in lines:
        if line["source"] == "texts":
            assert "$" not in line["prompt"] and "{|" not in line["prompt"], line
            if line["category"] == "rag":
                assert line["prompt"].splitlines()[-1].endswith("?")
            if line["category"] == "translation":
                assert line["prompt"].startswith("Translate German to English: Das ")


def test_the_grammar_goes_on_where_texts_run_out(texts: Path) -> None:
    lines = [line for line in generate(texts, 1600, 0, share=1.0) if line["category"] == "translation"]
    made = Counter(line["source"] for line in lines)
    assert len(lines) == 288 and 200 < made["texts"] <= 243 and made["grammar"] == 288 - made["texts"]
    assert {line["source"] for line in lines[-40:]} == {"grammar"}


def test_nothing_of_the_benchmark(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every prompt of one run becomes the benchmark of the next, which must then avoid all of them."""
    first = list(generate(texts, 300, 3))
    file = tmp_path / "bench.jsonl"
    file.write_text("".join(json.dumps({"turns": [x["prompt"]]}) + "\n" for x in first if x["category"] != "rag"))
    banned = {run for x in first if x["category"] != "rag" for run in runs(x["prompt"])}
    assert sum(bool(runs(x["prompt"]) & banned) for x in generate(texts, 120, 3)) > 20, "the control shares nothing"
    assert main(["--texts", str(texts), "--count", "120", "--seed", "3", "--unlike", str(file)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 120 and not any(runs(line["prompt"]) & banned for line in lines)


def test_runs() -> None:
    assert runs("a b c d e f g") == set()
    assert runs('A, b c d "e" f g h i') == {tuple("abcdefgh"), tuple("bcdefghi")}


def test_documents_and_pieces() -> None:
    found = list(documents("# Rome | City in Italy | Geography\n\nRome is old.\nIt is.\n\nMore.\n\n# Two\n\nText.\n"))
    assert found == [
        Document("Rome", "City in Italy", "Geography", ("Rome is old. It is.", "More.")),
        Document("Two", "", "", ("Text.",)),
    ]
    assert list(documents("No title.\n\nEnd.\n")) == [Document("", "", "", ("No title.", "End."))]
    assert (found[0].form, found[1].form) == ("place", "")
    rng = random.Random(0)
    cut = list(pieces(Document("", "", "", (prose(rng, 30),)), rng, 20, 50))
    assert len(cut) >= 5 and all(20 <= len(p.split()) <= 50 and p.endswith(".") for p in cut)


def test_german() -> None:
    text = (
        "Der Zug nach Ulm hat am 3. Mai wegen z. B. der Kälte eine Stunde gewartet. Das ist kurz. "
        "The train to Ulm has waited for an hour and it was cold on that day. "
        "Die Datei /etc/x ist für den Nutzer nicht mehr zu lesen und zu schreiben."
    )
    (sentence,) = german_sentences([Document("", "", "", (text,))])
    assert sentence.startswith("Der Zug") and sentence.endswith("gewartet.")
    assert spaced("Er sagt: „Nein, 1,5 m.“") == "Er sagt : „ Nein , 1,5 m . “"


def test_functions() -> None:
    source = (
        'class A:\n    def f(self):\n        """Say so.\n\n        More."""\n        return 1\n\n    def g(self): ...\n'
    )
    assert [(name, code.splitlines()[0], doc) for name, code, doc in functions([source, "def ("])] == [
        ("f", "def f(self):", "Say so.")
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_is_missing(texts: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    for other in set(KINDS) - {kind}:
        (tmp_path / other).symlink_to(texts / other)
    assert main(["--texts", str(tmp_path), "--count", "3"]) == 2
    assert f"in {kind}/*" in capsys.readouterr().err.replace("functions ", "documents ")


def test_bad_input(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TextError, match="--count 0"):
        list(generate(texts, 0, 0))
    with pytest.raises(TextError, match="--longest 601: 100 to 600"):
        list(generate(texts, 1, 0, longest=601))
    (tmp_path / "b.jsonl").write_text('{"turns": ["x"]}\n{}\n')
    for file, error in ((tmp_path / "b.jsonl", 'line 2 needs a list "turns"'), (tmp_path / "none", "cannot be read")):
        assert main(["--texts", str(texts), "--count", "3", "--unlike", str(file)]) == 2
        assert error in capsys.readouterr().err


def test_the_lists_do_not_change_the_grammars_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    assert grammar_main(["--count", "50"]) == 0
    assert "$title" not in capsys.readouterr().out
    names = {name for name in grammar().lists if name.startswith(("ask_", "text_"))}
    values = {v for name in names for item in grammar().lists[name] for v in re.findall(r"\$(\w+)", item)}
    known = {
        "title",
        "other",
        "person",
        "text",
        "scene",
        "sentence",
        "review",
        "review2",
        "review3",
        "code",
        "name",
        "doc",
    }
    assert values == known
