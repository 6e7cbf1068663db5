"""What the documents name exists: links, paths, make targets, commands, API names."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
DOCS = [REPO / "README.md", REPO / "CHANGELOG.md", REPO / "SECURITY.md", *sorted((REPO / "docs").rglob("*.md"))]

PATH = re.compile(r"`((?:slipstream|tests|docs|bench|\.ci)/[\w./-]+|[\w.-]+\.(?:txt|toml|md))`")
LINK = re.compile(r"\]\(([^)#\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
MAKE = re.compile(r"`make ([\w-]+)`|^make ([\w-]+)", re.M)


def missing(text: str, folder: Path, repo: Path = REPO) -> list[str]:
    """Links and paths in `text` that lead nowhere; links start at `folder`, paths at the repository."""
    links = [link for link in LINK.findall(text) if "://" not in link and not (folder / link).exists()]
    return links + [path for path in PATH.findall(text) if not (repo / path).exists()]


def blocks(text: str, language: str) -> list[str]:
    return [body for name, body in BLOCK.findall(text) if name == language]


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("doc", DOCS, ids=lambda d: d.name)
def test_paths_exist(doc):
    assert missing(doc.read_text(), doc.parent) == []


def test_a_path_that_is_missing_is_found():
    assert missing("see [x](docs/none.md), `slipstream/none.py` and [y](https://a.b/c.md)", REPO) == [
        "docs/none.md",
        "slipstream/none.py",
    ]


@pytest.mark.parametrize("doc", DOCS, ids=lambda d: d.name)
def test_make_targets_exist(doc):
    named = {a or b for a, b in MAKE.findall(doc.read_text())}
    assert named <= targets()


def test_the_readme_has_two_set_up_commands_and_links_the_loop_first():
    text = (REPO / "README.md").read_text()
    setup = blocks(text, "sh")[0]
    assert [line.split("#")[0].strip() for line in setup.strip().splitlines()] == ["make run", "make test"]
    assert LINK.findall(text)[0] == "slipstream/engine/loop.py"


def commands() -> list[list[str]]:
    found = []
    for doc in DOCS:
        for body in blocks(doc.read_text(), "sh"):
            found += [shlex.split(line, comments=True) for line in body.splitlines() if line.startswith("slipstream ")]
    return found


def check_command(words: list[str]) -> argparse.Namespace:
    """Parses a documented command without running it; raises ConfigError for an unknown option."""
    from slipstream.benchmark import accept, decode
    from slipstream.benchmark import serve as load
    from slipstream.cli import chat, export, generate, serve, train
    from slipstream.cli.options import Parser

    parsers = {"generate": generate.parser(), "chat": chat.parser(), "serve": serve.parser()}
    parsers["export-tokenizer"] = export.parser()
    if words[0] == "bench":
        bench = Parser(prog=f"slipstream bench {words[1]}")
        {"decode": decode, "accept": accept, "serve": load}[words[1]].add_arguments(bench)
        return bench.parse_args(words[2:])
    if words[0] == "train":
        return train.parser(words[1]).parse_args(words[2:])
    return parsers[words[0]].parse_args(words[1:])


def test_documented_commands_parse():
    from slipstream.errors import ConfigError

    found = commands()
    assert len(found) >= 4
    for words in found:
        check_command(words[1:])
    with pytest.raises(ConfigError, match="--nope"):
        check_command(["generate", "x", "--nope"])


def test_documented_python_names_the_real_api():
    import slipstream
    from slipstream.config import LLMConfig
    from slipstream.types import SamplingParams

    known = {
        "LLM": {f.name for f in fields(LLMConfig)},
        "SamplingParams": {f.name for f in fields(SamplingParams)},
    }
    seen = set()
    for doc in DOCS:
        for body in blocks(doc.read_text(), "python"):
            for node in ast.walk(ast.parse(body)):
                if isinstance(node, ast.ImportFrom) and node.module == "slipstream":
                    assert {alias.name for alias in node.names} <= set(slipstream.__all__)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
                    assert {k.arg for k in node.keywords} <= known[node.func.id]
                    seen.add(node.func.id)
    assert seen == set(known)


def test_the_map_shows_every_room():
    text = (REPO / "docs" / "rooms.md").read_text()
    package = REPO / "slipstream"
    rooms = {p.name for p in package.iterdir() if p.is_dir() and any(p.rglob("*.py"))}
    rooms |= {p.name for p in package.glob("*.py") if not p.name.startswith("__")}
    assert len(rooms) > 10
    assert [room for room in sorted(rooms) if f"`slipstream/{room}`" not in text] == []
