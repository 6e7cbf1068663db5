"""User turns about real texts, mixed with those of draft_prompts.py.

    python bench/text_prompts.py --texts DIR --count 4000 --seed 0 --unlike spec_bench.jsonl > prompts.jsonl

DIR has the folders that gather_texts.py writes: articles, stories, reviews, german and code. In a .txt file a line
"# Title | what it is | field" begins a document and an empty line ends a paragraph. The lines printed are those of
draft_prompts.py and the same for the same texts, count and seed. Sums and word problems are the grammar's alone; where
the texts run out, the grammar goes on. --unlike FILE: no prompt shares eight words in a row with its "turns", so that a
benchmark stays unseen. A table of what was made goes to standard error.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.draft_prompts import MAX_CHARS as GRAMMAR_CHARS
from bench.draft_prompts import MAX_TRIES, grammar, one, quotas

KINDS = ("articles", "stories", "reviews", "german", "code")
RUN = 8
"""Words in a row that no prompt shares with the benchmark."""
MAX_CHARS = 3400
"""About 800 tokens: an answer must fit into 1,024 too."""
LONGEST = 540
"""Words of a document or of all passages together."""
SHARE = 0.5
"""Of the prompts that texts can give, those that they do."""
GERMAN_WORDS = frozenset(
    "der die das den dem des ein eine einen einem einer und oder aber nicht ist sind war wird werden wurde hat haben "
    "mit von zu auf für im in an als auch sich sie er es ich wir wenn dass daß so nur noch nach bei aus um".split()
)
STEM = re.compile("science|math|biolog|physic|tech|health|medic", re.I)
WORK = re.compile(r"\b(film|novel|book|album|song|painting|play|poem|series|opera|symphony|magazine|game|sculpture)\b")
PLACE = re.compile(
    r"\b(city|country|capital|river|mountains?|lake|island|region|state|sea|desert|continent|town|province|peninsula)\b"
)
EVENT = re.compile(r"\b(war|battle|revolution|treaty|event|empire|dynasty|massacre|disaster|conflict|siege|crisis)\b")
PERSON = re.compile(r"\(born|\bborn \d{4}|\(.{0,40}\d{3,4} ?[–-] ?.{0,30}\d{2,4}\)")
SENTENCE = re.compile(r'(?<=[a-z0-9)][.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.)["”]? (?=["“„A-ZÄÖÜ])')
GERMAN_SENTENCE = re.compile(
    r"(?<=[a-zäöüß\d%“\"»)][.!?])(?<! [a-z]\.)(?<! [A-Z]\.)(?<!\d\.)(?<!bzw\.)(?<!usw\.) (?=\W?[A-ZÄÖÜ])"
)
BY = re.compile(r"\b(directed|written|composed|painted|designed|founded|discovered|invented|built|created) by\b")
IN_YEAR = re.compile(
    r"\b(founded|established|discovered|invented|built|published|released|formed|signed|completed|opened|introduced)"
    r"(?: \w+){0,3} in (?:\w+ )?\d{4}"
)
CAPITAL = re.compile(r"\bcapital (?:and \w+ city )?of ((?:[A-Z][\w-]+ ?){1,3})")


class TextError(ValueError):
    """A folder of texts that cannot be used."""


@dataclass(frozen=True)
class Document:
    title: str
    what: str
    field: str
    paragraphs: tuple[str, ...]

    @cached_property
    def name(self) -> str:
        """The title as it stands within a sentence."""
        start = self.paragraphs[0][: len(self.title) + 4].casefold()
        title = re.sub(r" \([^)]*\)$", "", self.title)
        return f"the {title}" if start.startswith(f"the {title.casefold()}") else title

    @cached_property
    def form(self) -> str:
        """person, work, place, event or thing; "" for what is no subject (a chapter, a review)."""
        if not self.what:
            return ""
        if self.field == "People":
            return "person"
        head = self.paragraphs[0][:160]
        if PERSON.search(self.what) or (PERSON.search(head) and " was a" in head):
            return "person"
        for form, pattern in (("work", WORK), ("event", EVENT), ("place", PLACE)):
            if pattern.search(self.what.casefold()):
                return form
        return "thing"


def documents(text: str) -> Iterator[Document]:
    for part in re.split(r"^# ", text, flags=re.M):
        head, _, body = part.partition("\n")
        if not text.startswith("# ") and part == text.partition("\n# ")[0]:
            head, body = "", part  # a plain book without a title line
        title, what, field = [word.strip() for word in (head + " | | ").split("|")[:3]]
        paragraphs = tuple(" ".join(p.split()) for p in body.split("\n\n") if p.strip())
        if paragraphs:
            yield Document(title, what, field, paragraphs)


def pieces(document: Document, rng: random.Random, low: int, high: int) -> Iterator[str]:
    """The document cut at ends of sentences into texts of `low` to `high` words."""
    out: list[str] = []
    count, want = 0, rng.randint(low, high)
    for sentence in (s for p in document.paragraphs for s in SENTENCE.split(p)):
        words = len(sentence.split())
        if count + words > high:
            if count >= low:
                yield " ".join(out)
            out, count = [], 0
        if words <= high:
            out.append(sentence)
            count += words
        if count >= max(want, low):
            yield " ".join(out)
            out, count, want = [], 0, rng.randint(low, high)
    if count >= low:
        yield " ".join(out)


def german_sentences(documents: Iterable[Document]) -> Iterator[str]:
    """Sentences of 8 to 38 words that are German prose."""
    for paragraph in (p for document in documents for p in document.paragraphs):
        for sentence in GERMAN_SENTENCE.split(paragraph):
            words = sentence.split()
            if not 8 <= len(words) <= 38 or not re.fullmatch(r'["„»(]?[A-ZÄÖÜ].*[.!?]["“«)]?', sentence):
                continue
            if re.search(r"[<>{}|\\=_/@#~$*\[\]^+]|--|\.\w|\w{30}|^\S+:", sentence) or sentence.count(":") > 1:
                continue
            if sum(word.strip('.,;:„“"»«') in GERMAN_WORDS for word in words) >= max(2, len(words) // 6):
                yield sentence


def spaced(sentence: str) -> str:
    """With the spaces around punctuation that the translation corpora have."""
    return " ".join(re.sub(r'([,:;](?!\d)|[?!„“”"()»«]|\.$|\.(?=["“«)]))', r" \1 ", sentence).split())


def functions(sources: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Name, code and first line of the docstring of functions of 4 to 30 lines."""
    for source in sources:
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                if 4 <= code.count("\n") <= 30 and len(code) < 1400:
                    yield node.name, code, " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())


class Pool:
    """Items by source, each given once; a source's weight is its size to a power, so that none drowns the others."""

    def __init__(self, rng: random.Random, sources: dict[str, list[str]], power: float = 0.5) -> None:
        self.rng, self.sources = rng, {name: items for name, items in sources.items() if items}
        self.weights = {name: len(items) ** power for name, items in self.sources.items()}
        for items in self.sources.values():
            rng.shuffle(items)

    def take(self) -> str | None:
        """None when all are taken."""
        if not self.sources:
            return None
        (name,) = self.rng.choices(list(self.sources), [self.weights[name] for name in self.sources])
        item = self.sources[name].pop()
        if not self.sources[name]:
            del self.sources[name]
        return item


class Texts:
    """What the folder holds, and prompts about it."""

    def __init__(self, folder: Path, rng: random.Random, longest: int = LONGEST) -> None:
        """`longest`: most words of a document. Raises TextError for a kind that is missing or holds nothing."""
        self.rng, self.longest = rng, longest
        self.found: dict[str, dict[str, list[Document]]] = {}
        for kind in KINDS[:4]:
            files = {
                path.stem: list(documents(path.read_text("utf-8"))) for path in sorted((folder / kind).glob("*.txt"))
            }
            if not any(files.values()):
                raise TextError(f"--texts {str(folder)!r} needs documents in {kind}/*.txt")
            self.found[kind] = files
        self.code = list(functions(path.read_text("utf-8") for path in sorted((folder / "code").glob("*.py"))))
        if not self.code:
            raise TextError(f"--texts {str(folder)!r} needs functions in code/*.py")
        articles = self.found["articles"]
        self.subjects = [d for docs in articles.values() for d in docs if d.form]
        self.people = [d for d in self.subjects if d.form == "person"]
        self.asked = [d for docs in articles.values() for d in docs if d.title.endswith("?")]
        if not self.people or not self.subjects:
            raise TextError(f"--texts {str(folder)!r} needs articles with a title line that says what they are about")
        german = {name: sorted(set(german_sentences(docs))) for name, docs in self.found["german"].items()}
        for name, sentences in german.items():  # few short ones: the benchmarks' have some twenty words
            german[name] = [s for s in sentences if len(s.split()) > 12 or rng.random() < 0.3]
        self.german = Pool(rng, german, power=1.0)
        self.long = self._pool(("articles", "stories"), min(110, longest // 2), longest)
        self.short = self._pool(("articles",), 50, 220)
        self.scenes = self._pool(("stories",), 60, 260)
        self.reviews = self._pool(("reviews",), 6, 120)
        self._index()

    def _pool(self, kinds: tuple[str, ...], low: int, high: int) -> Pool:
        return Pool(
            self.rng,
            {
                f"{kind}/{name}": [piece for d in docs for piece in pieces(d, self.rng, low, high)]
                for kind in kinds
                for name, docs in self.found[kind].items()
            },
        )

    def _index(self) -> None:
        """Which articles speak of a subject, and in which order they lie."""
        titles = {d.title.casefold(): d.title for d in self.subjects}
        first = {title.split()[0] for title in titles} - {"a", "the", "in", "of", "and", "to", "i"}
        longest = min(5, max(len(title.split()) for title in titles))
        self.all = [d for docs in self.found["articles"].values() for d in docs]
        self.mentions: dict[str, list[int]] = defaultdict(list)
        for i, d in enumerate(self.all):
            words = re.findall(r"[\w'’-]+", " ".join(d.paragraphs).casefold())
            starts = [j for j, word in enumerate(words) if word in first]
            phrases = {" ".join(words[j : j + n]) for n in range(1, longest + 1) for j in starts}
            for title in phrases & titles.keys():
                self.mentions[titles[title]].append(i)
        self.place = {id(d): i for i, d in enumerate(self.all)}

    def wish(self, list_: str, **values: str) -> str:
        """An item of a list of the grammar, with its $names put in."""
        item = grammar().fill(self.rng, self.rng.choice(grammar().lists[list_]))
        return re.sub(r"\$([a-z]+\d?)", lambda m: values[m[1]] if m[1] in values else self.value(m[1]), item)

    def value(self, name: str) -> str:
        pools = {"text": self.short, "scene": self.scenes, "sentence": self.scenes}
        if name == "title":
            return self.rng.choice(self.subjects).name
        if name == "person":
            return self.rng.choice(self.people).name
        text = self.need(self.reviews if name.startswith("review") else pools[name])
        return SENTENCE.split(text)[0] if name == "sentence" else text

    def like(self, d: Document) -> str:
        """Another subject of the same field and form, if there is one."""
        others = [o for o in self.rng.sample(self.subjects, min(60, len(self.subjects))) if o is not d]
        return min(others or [d], key=lambda o: (o.field != d.field) + (o.form != d.form)).name

    def need(self, pool: Pool) -> str:
        if (item := pool.take()) is None:
            raise LookupError("the texts are used up")
        return item

    def question(self, d: Document) -> str:
        """As typed into a search box."""
        text, name = " ".join(d.paragraphs)[:500], d.name
        made = [f"who {m[1]} {name}".replace("written", "wrote") for m in BY.finditer(text)]
        made += [f"{self.rng.choice(('when', 'in what year'))} was {name} {m[1]}" for m in IN_YEAR.finditer(text)]
        made += [f"what is the capital of {m[1].strip()}" for m in CAPITAL.finditer(text)]
        if d.title.endswith("?"):
            return d.title
        if made and self.rng.random() < 0.4:
            asked = self.rng.choice(made)
        else:
            asked = self.wish(f"ask_{d.form}", title=name, other=self.like(d))
        asked = asked.casefold().removesuffix("?")
        return asked[0].upper() + asked[1:] + "?"

    def translation(self) -> str:
        sentence = self.need(self.german)
        return "Translate German to English: " + (spaced(sentence) if self.rng.random() < 0.6 else sentence)

    def summarization(self) -> str:
        return "Summarize: " + self.need(self.long)

    def qa(self) -> str:
        return self.question(self.rng.choice(self.asked if self.asked and self.rng.random() < 0.04 else self.subjects))

    def rag(self) -> str:
        """Passages about a subject, as a retriever cuts them, and a question about it."""
        rng = self.rng
        d = rng.choice(self.asked) if self.asked and rng.random() < 0.08 else rng.choice(self.subjects)
        at, many = self.place[id(d)], rng.randint(2, 5)
        speak = [i for i in self.mentions.get(d.title, ()) if i != at]
        near = [i for i in range(max(0, at - 12), min(len(self.all), at + 13)) if i != at]
        others = rng.sample(speak, min(many, len(speak))) + rng.sample(near, min(many, len(near)))
        chosen = list(dict.fromkeys([at, *others]))[:many]
        total = self.longest * 9 // 11
        size = total // many if many > 3 else rng.randint(total * 2 // 9, total * 4 // 11)
        found = []
        for i in chosen:
            words = " ".join(self.all[i].paragraphs).split()
            head = " ".join(words).casefold().find(d.title.casefold())
            start = (
                max(0, len(" ".join(words)[: max(head, 0)].split()) - rng.randint(0, size // 2)) if head > 400 else 0
            )
            title = re.sub(r" \(\d+\)$", "", self.all[i].title) + " " if start == 0 and rng.random() < 0.7 else ""
            found.append(title + " ".join(words[start : start + size]))
        if rng.random() < 0.6:
            rng.shuffle(found)
        return rng.choice(("\n", "\n", " ")).join(found) + "\n" + self.question(d)

    def coding(self) -> str:
        name, code, doc = self.rng.choice(self.code)
        return self.wish("text_coding" if doc else "text_code", name=name, code=code, doc=doc)

    def open(self, category: str) -> str:
        list_ = "text_explain" if category in ("stem", "humanities") else f"text_{category}"
        fits = [
            d
            for d in self.rng.sample(self.subjects, min(40, len(self.subjects)))
            if list_ != "text_explain" or bool(STEM.search(d.field)) == (category == "stem")
        ]
        d = (fits or self.subjects)[0]
        return self.wish(list_, title=d.name, other=self.like(d))

    def prompt(self, category: str) -> str:
        """Raises LookupError when the texts of this category are used up."""
        if category in ("translation", "summarization", "qa", "rag", "coding"):
            return str(getattr(self, category)())
        return self.open(category)


FROM_TEXTS = ("translation", "summarization", "qa", "rag", "coding", "writing", "roleplay", "reasoning", "extraction",
              "stem", "humanities")  # fmt: skip


def runs(text: str) -> set[tuple[str, ...]]:
    """All runs of `RUN` words."""
    words = re.findall(r"\w+", text.casefold())
    return set(zip(*(words[i:] for i in range(RUN)), strict=False))


def turns_of(path: Path) -> Iterator[str]:
    try:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            try:
                yield from map(str, json.loads(line)["turns"])
            except (ValueError, KeyError, TypeError):
                raise TextError(f'--unlike {path} line {number} needs a list "turns"') from None
    except OSError as error:
        raise TextError(f"--unlike {str(path)!r} cannot be read: {error}") from None


def generate(
    texts: Path, count: int, seed: int, unlike: Iterable[str] = (), share: float = SHARE, longest: int = LONGEST
) -> Iterator[dict[str, str]]:
    """`count` different prompts in random order, {"prompt", "category", "source"} with "texts" or "grammar" as source.

    Raises TextError for texts that cannot be used, ValueError when a category has no new prompts."""
    if count < 1:
        raise TextError(f"--count {count}: at least 1")
    if not 100 <= longest <= 600:
        raise TextError(f"--longest {longest}: 100 to 600 words")
    rng = random.Random(seed)
    made = Texts(texts, rng, longest)
    banned = {run for text in unlike for run in runs(text)}
    categories = quotas(count)
    rng.shuffle(categories)
    seen: set[str] = set()
    empty: set[str] = set()
    for category in categories:
        real = category in FROM_TEXTS and rng.random() < share
        for attempt in range(2 * MAX_TRIES):
            if attempt == MAX_TRIES // 2:
                real = category in FROM_TEXTS and not real
            source = "texts" if real and category not in empty else "grammar"
            try:
                prompt = made.prompt(category) if source == "texts" else one(rng, category)
            except LookupError:
                empty.add(category)
                continue
            key = re.sub(r"\W+", " ", prompt.casefold()).strip()
            most = MAX_CHARS if source == "texts" else GRAMMAR_CHARS[category]
            if 10 <= len(prompt) <= most and key not in seen and not (banned and runs(prompt) & banned):
                break
        else:
            raise ValueError(f"--count {count}: no more prompts of category {category!r}")
        seen.add(key)
        yield {"prompt": prompt, "category": category, "source": source}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unlike", type=Path)
    parser.add_argument("--longest", type=int, default=LONGEST, help="most words of a document or of all passages")
    args = parser.parse_args(argv)
    table: Counter[tuple[str, str]] = Counter()
    words: Counter[tuple[str, str]] = Counter()
    try:
        unlike = list(turns_of(args.unlike)) if args.unlike else []
        for line in generate(args.texts, args.count, args.seed, unlike, longest=args.longest):
            kind = line["category"], line.pop("source")
            table[kind] += 1
            words[kind] += len(line["prompt"].split())
            print(json.dumps(line, ensure_ascii=False))
    except ValueError as error:
        print(f"text_prompts: {error}", file=sys.stderr)
        return 2
    for kind in sorted(table):
        print(
            f"{kind[0]:15} {kind[1]:8} {table[kind]:6} prompts, {words[kind] / table[kind]:5.0f} words", file=sys.stderr
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
