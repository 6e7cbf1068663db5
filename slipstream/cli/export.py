"""`slipstream export-tokenizer`: the tokenizer of a GGUF model as files that other tools read."""

from __future__ import annotations

import argparse
from pathlib import Path

from slipstream.cli.options import Parser
from slipstream.errors import ConfigError

DESCRIPTION = """\
Writes tokenizer.json, tokenizer_config.json (with the chat template) and generation_config.json of a GGUF model, as
benchmarks and evaluations that count tokens themselves want them."""


def parser() -> Parser:
    p = Parser(
        prog="slipstream export-tokenizer", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("model", nargs="?", metavar="MODEL", help="a .gguf file (default: SmolLM2-135M-Instruct)")
    p.add_argument("--out", required=True, metavar="DIR", help="folder to write; it is made if it is not there")
    p.add_argument("--force", action="store_true", help="replace tokenizer files that are there")
    return p


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    from slipstream.models.loader import resolve_source
    from slipstream.text import Tokenizer
    from slipstream.text.export import FILES

    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {args.out!r} is not a folder")
    there = [name for name in FILES if (out / name).exists()]
    if there and not args.force:
        raise ConfigError(f"--out {args.out!r} has {', '.join(there)} already; --force replaces them")
    source = resolve_source(args.model)
    if source.suffix != ".gguf":
        raise ConfigError(f"{source} is no .gguf file: a folder of Hugging Face's format has its tokenizer in it")
    tokenizer = Tokenizer.from_path(source)
    if not tokenizer.present:
        raise ConfigError(f"{source} holds no tokenizer")
    tokenizer.save(out)
    print(f"wrote {', '.join(FILES)} to {out}")
    return 0
