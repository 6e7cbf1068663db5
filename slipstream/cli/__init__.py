"""The command line: `slipstream COMMAND ...`. A user's error is one line on stderr and exit code 2."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from slipstream.errors import ConfigError, SlipstreamError, UnsupportedError

EXIT_USER_ERROR = 2
EXIT_NO_OUTPUT = 74
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)


class Command(NamedTuple):
    """home: "module:function", called with the arguments after the command's name; None is not built yet."""

    home: str | None
    about: str


COMMANDS = {
    "generate": Command("slipstream.cli.generate:main", "answer one prompt and print the text as it comes"),
    "chat": Command("slipstream.cli.chat:main", "talk with a model in the terminal"),
    "bench": Command("slipstream.cli.bench:main", "measure: bench decode, bench accept, bench serve"),
    "audit": Command("slipstream.audit.cli:main", "find what makes a PyTorch program wait for its device"),
    "serve": Command("slipstream.cli.serve:main", "serve a model over HTTP, as OpenAI's API"),
    "export-tokenizer": Command("slipstream.cli.export:main", "write a GGUF model's tokenizer as files"),
    "train": Command("slipstream.cli.train:main", "train and calibrate drafts: train eagle3, train dspark"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, or 2 for whatever the user can put right, 74 (EX_IOERR) when the
    output cannot be written."""
    if sys.stdout is None:  # closed before we began, as by `>&-`
        if sys.stderr is not None:
            print("slipstream: error: standard output is closed", file=sys.stderr)
        return EXIT_NO_OUTPUT
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 must not end the program
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except SlipstreamError as error:
        return report(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        _forget_stdout()
        print(f"slipstream: error: cannot write the output: {error.strerror}", file=sys.stderr)
        return EXIT_NO_OUTPUT


def report(error: Exception) -> int:
    """Prints the error as one line on stderr and returns the exit code that goes with it."""
    print(f"slipstream: error: {' '.join(str(error).split())}", file=sys.stderr)
    return EXIT_USER_ERROR


def not_built(name: str) -> UnsupportedError:
    return UnsupportedError(f"{name!r} is not built yet in this version; built are {', '.join(built())}")


def built() -> list[str]:
    """Names of the commands that this version has."""
    return [name for name in COMMANDS if _function_home(name)]


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else EXIT_USER_ERROR
    if argv[0] in ("-V", "--version"):
        from slipstream import __version__

        print(f"slipstream {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    if name.startswith("-"):
        raise ConfigError(f"unknown option {name!r} before the command; see slipstream --help")
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}; choose from {', '.join(COMMANDS)}")
    home = _function_home(name)
    if home is None:
        raise not_built(name)
    module, function = home.split(":")
    return int(getattr(import_module(module), function)(rest) or 0)


def _function_home(name: str) -> str | None:
    """The command's "module:function" when the module is part of this version."""
    home = COMMANDS[name].home
    if home is None:
        return None
    try:
        return home if find_spec(home.split(":")[0]) else None
    except ModuleNotFoundError:  # its parent package is missing
        return None


def _help() -> str:
    lines = [
        "usage: slipstream COMMAND [options]",
        "",
        "Serves language models with speculative decoding.",
        "",
    ]
    for name, command in COMMANDS.items():
        later = "" if _function_home(name) else " (not built yet)"
        lines.append(f"  {name:<18}{command.about}{later}")
    lines += ["", "  --version   print the version", "", "Options of a command: slipstream COMMAND --help"]
    return "\n".join(lines)


def _forget_stdout() -> None:
    """The reader has gone: what is still buffered must not raise again when the interpreter exits."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # not a real file
        sys.stdout = io.StringIO()
