"""`slipstream chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slipstream.cli import report
from slipstream.cli.console import Printer, show_notes, wants_color
from slipstream.cli.options import (
    Parser,
    add_color_option,
    add_engine_options,
    add_sampling_options,
    engine_options,
    fit,
    sampling_params,
    utf8,
)
from slipstream.cli.prompt import room_after
from slipstream.errors import InvalidRequestError, RequestFailedError

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.types import SamplingParams

DESCRIPTION = """\
Talks with a model that has a chat template. Ctrl-C stops the answer and keeps what was said,
Ctrl-D ends the program. /reset forgets the conversation, /exit ends."""

PATIENCE = 3
"""So many presses of Ctrl-C during one answer end the program: the engine may be stuck."""


def parser() -> Parser:
    p = Parser(
        prog="slipstream chat",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--system", metavar="TEXT", help="system message")
    add_color_option(p)
    add_engine_options(p)
    add_sampling_options(p)
    return p


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    system: list[dict[str, str]] = []
    if args.system is not None:
        system = [{"role": "system", "content": utf8(args.system, "--system")}]
    params, options = sampling_params(args), engine_options(args)

    from slipstream.llm import LLM

    llm = LLM(**options)
    try:
        show_notes(llm)
        # A model without a template is refused before the first turn.
        llm.chat_prompt([*system, {"role": "user", "content": "?"}])
        _converse(llm, params, system, color=wants_color(args.color, sys.stdout))
    finally:
        llm.close()
    return 0


def _converse(llm: LLM, params: SamplingParams, system: list[dict[str, str]], *, color: bool) -> None:
    messages = list(system)
    while (line := _read_line()) is not None:
        text = line.strip()
        if not text:
            continue
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(system)
            continue
        messages.append({"role": "user", "content": text})
        try:
            utf8(text, "the message")
            said = _answer(llm, llm.chat_prompt(messages), params, color=color)
        except (InvalidRequestError, RequestFailedError) as error:
            # Nothing was said: the conversation is as before, and /reset makes room if it grew too long.
            messages.pop()
            report(error)
            continue
        messages.append({"role": "assistant", "content": said})


def _read_line() -> str | None:
    """The next line; None at the end of the input. Ctrl-C drops the line that is being typed."""
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        try:
            import readline  # noqa: F401  line editing and history for input()
        except ImportError:
            pass
    while True:
        try:
            return input(prompt)
        except EOFError:
            if prompt:
                print()
            return None
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"standard input is not valid UTF-8 at byte {error.start}") from None
        except KeyboardInterrupt:
            print()


def _answer(llm: LLM, prompt: list[int], params: SamplingParams, *, color: bool) -> str:
    """Streams one answer and returns what was said; stops early on Ctrl-C."""
    params = fit(params, room_after(llm, prompt))
    printer = Printer(sys.stdout, llm.tokenizer, color=color)
    output = None
    with _stop_on_interrupt() as interrupted:
        stream = iter(llm.stream(prompt, params))
        try:
            for chunk in stream:
                printer.show(chunk)
                output = chunk.output or output
                if interrupted():
                    break
        finally:
            # Closing the iterator aborts the request, so that its slot and pages come back now.
            close: Callable[[], Any] | None = getattr(stream, "close", None)
            if close is not None:
                close()
            printer.end_line()
    stopped = " (stopped)" if interrupted() and (output is None or not output.finished) else ""
    print(f"[{printer.summary(output)}]{stopped}")
    return printer.text


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C only sets a flag: a KeyboardInterrupt inside the engine could leave a frame half collected."""
    presses = 0

    def on_press(signum: int, frame: object) -> None:
        nonlocal presses
        presses += 1
        if presses >= PATIENCE:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_press)
    try:
        yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, before)
