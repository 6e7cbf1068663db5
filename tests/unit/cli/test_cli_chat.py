"""`slipstream chat`: turns, Ctrl-C, Ctrl-D."""

from __future__ import annotations

import io
import os
import signal
import sys

import pytest

from slipstream.cli import main
from slipstream.errors import InvalidRequestError


@pytest.fixture
def say(monkeypatch):
    def prepare(text: str | bytes) -> None:
        data = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return prepare


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_conversation_grows(engine, say, capsys):
    say("hi\n\n  and?  \n")
    assert main(["chat", "--system", "s"]) == 0
    assert engine.prompts == [
        list(b"<system>s<user>hi"),
        list(b"<system>s<user>hi<assistant>Hello!<user>and?"),
    ]
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "Hello!" and "acceptance length 2.00" in out[1] and len(out) == 4
    assert engine.closed == 1


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(engine, say, capsys):
    def press(n):
        if n == 1 and len(engine.prompts) == 1:
            press_ctrl_c()

    engine.on_chunk = press
    say("hi\ngo on\n")
    handler = signal.getsignal(signal.SIGINT)
    assert main(["chat"]) == 0
    assert engine.prompts[1] == list(b"<user>hi<assistant>Hello<user>go on")
    assert engine.aborted == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "Hello" and out[1].endswith("(stopped)")
    assert out[2] == "Hello!" and not out[3].endswith("(stopped)")
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_pressed_twice_is_no_more_than_once(engine, say):
    def press(n):
        if n == 0 and len(engine.prompts) == 1:
            press_ctrl_c()
            press_ctrl_c()

    engine.on_chunk = press
    say("hi\ngo on\n")
    assert main(["chat"]) == 0
    assert len(engine.prompts) == 2


def test_an_engine_that_is_stuck_can_be_left(engine, say):
    def press(n):
        for _ in range(3):
            press_ctrl_c()

    engine.on_chunk = press
    say("hi\ngo on\n")
    assert main(["chat"]) == 130
    assert engine.closed == 1 and len(engine.prompts) == 1


def test_ctrl_c_while_typing_drops_the_line(engine, monkeypatch, capsys):
    lines = iter([KeyboardInterrupt, "hi", EOFError])

    def typed(prompt):
        line = next(lines)
        if isinstance(line, type):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)
    assert main(["chat"]) == 0
    assert engine.prompts == [list(b"<user>hi")]


def test_a_refused_turn_leaves_the_conversation_as_it_was(engine, say, capsys):
    refuse = InvalidRequestError("prompt of 99 tokens is longer than max_model_len=64")
    answers = iter([None, refuse, None])
    stream = engine.stream

    def one(prompt, params):
        engine.error = next(answers)
        return stream(prompt, params)

    engine.stream = one
    say("a\nb\nc\n")
    assert main(["chat"]) == 0
    assert engine.prompts[2] == list(b"<user>a<assistant>Hello!<user>c")
    assert capsys.readouterr().err.startswith("slipstream: error: prompt of 99 tokens")


def test_reset_and_exit(engine, say):
    say("a\n/reset\nb\n/exit\nc\n")
    assert main(["chat"]) == 0
    assert engine.prompts == [list(b"<user>a"), list(b"<user>b")]


def test_a_model_without_template_cannot_chat(engine, say, capsys):
    engine.tokenizer.chat_template = None
    say("a\n")
    assert main(["chat"]) == 2
    assert "no chat template" in capsys.readouterr().err and engine.closed == 1


def test_input_that_is_not_utf8(engine, say, capsys):
    say(b"\xff\n")
    assert main(["chat"]) == 2
    assert "UTF-8" in capsys.readouterr().err
