"""`slipstream generate`: what reaches the engine, and what is printed."""

from __future__ import annotations

import json
import re

import pytest

from slipstream.cli import main
from slipstream.cli.console import DRAFTED, RESET

GREEN = re.compile(re.escape(DRAFTED) + "(.*?)" + re.escape(RESET), re.S)


def colored(text: str) -> str:
    """The characters that are shown as drafted."""
    return "".join(GREEN.findall(text))


def plain(text: str) -> str:
    return re.sub("\x1b\\[[0-9]*m", "", text)


def test_text_comes_first_and_the_numbers_last(engine, capsys):
    assert main(["generate", "hi", "--draft", "ngram", "--num-drafts", "3"]) == 0
    out, err = capsys.readouterr()
    text, last = out.splitlines()
    assert text == "Hello!" and err == ""
    assert re.fullmatch(r"6 tokens, [\d.]+ tok/s, first after [\d.]+ s, acceptance length 2\.00", last)
    assert engine.options == {"draft": "ngram", "num_drafts": 3} and engine.closed == 1


def test_options_reach_the_engine_and_no_others(engine):
    argv = [
        "--model",
        "m",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--run-ahead",
        "2",
        "--load-format",
        "dummy",
    ]
    assert main(["generate", "hi", *argv, "--threads", "2", "--max-model-len", "64"]) == 0
    assert engine.options == {
        "model": "m",
        "device": "cpu",
        "dtype": "float32",
        "run_ahead": 2,
        "load_format": "dummy",
        "threads": 2,
        "max_model_len": 64,
    }


def test_sampling_defaults_and_values(engine):
    assert main(["generate", "hi"]) == 0
    assert (
        main(
            [
                "generate",
                "hi",
                "--temperature",
                "0.7",
                "--seed",
                "5",
                "--stop",
                "a",
                "--stop",
                "b",
                "--max-tokens",
                "9",
            ]
        )
        == 0
    )
    greedy, sampled = engine.params
    assert greedy.temperature == 0.0 and greedy.max_tokens == 256 and greedy.seed is None
    assert (sampled.temperature, sampled.seed, sampled.stop, sampled.max_tokens) == (0.7, 5, ("a", "b"), 9)


def test_the_default_length_ends_with_the_context_but_a_wish_is_the_engines_to_judge(engine):
    engine.resolved["max_model_len"] = 100
    for argv in ([], ["--max-tokens", "150"], ["--min-tokens", "95"]):
        assert main(["generate", "hi", "--raw", *argv]) == 0
    assert [p.max_tokens for p in engine.params] == [98, 150, 98]


def test_notes_of_the_loader_go_to_stderr(engine, capsys):
    engine.notes.append("FP8 blocks were\n dequantised")
    assert main(["generate", "hi", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "slipstream: note: FP8 blocks were dequantised\n" and json.loads(out)


def test_the_chat_template_is_applied_unless_raw(engine):
    assert main(["generate", "hi"]) == 0
    assert main(["generate", "hi", "--raw"]) == 0
    assert main(["generate", "hi", "--system", "be brief"]) == 0
    engine.tokenizer.chat_template = None
    assert main(["generate", "hi"]) == 0
    assert engine.prompts == [list(b"<user>hi"), list(b"hi"), list(b"<system>be brief<user>hi"), list(b"hi")]


def test_system_text_needs_a_template(engine, capsys):
    engine.tokenizer.chat_template = None
    assert main(["generate", "hi", "--system", "x"]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_prompt_ids_go_through_as_they_are(engine):
    assert main(["generate", "--prompt-ids", "1, 2,3"]) == 0
    assert engine.prompts == [[1, 2, 3]]


def test_a_prompt_may_begin_with_a_dash(engine):
    assert main(["generate", "--raw", "--", "-5 degrees"]) == 0
    assert engine.prompts == [list(b"-5 degrees")]


def test_json_is_one_object_with_these_keys(engine, capsys):
    assert main(["generate", "hi", "--json", "--color", "always"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert err == "" and out.count("\n") == 1
    assert answer == {
        "text": "Hello!",
        "token_ids": list(b"Hello!"),
        "prompt_token_ids": list(b"<user>hi"),
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 8, "completion_tokens": 6, "total_tokens": 14},
        "spec": {
            "rounds": 2,
            "drafted": 3,
            "accepted": 2,
            "acceptance_length": 2.0,
            "accepted_per_position": [1, 1],
            "drafted_per_position": [2, 1],
        },
    }


def test_accepted_tokens_are_colored(engine, capsys):
    assert main(["generate", "hi", "--color", "always"]) == 0
    out = capsys.readouterr().out
    assert colored(out) == "ll"
    assert plain(out).splitlines()[0] == "Hello!"


@pytest.mark.parametrize(
    "chunks, drafted",
    [
        # The engine holds "b" back (it might begin a stop string) and brings it with the next chunk.
        ([("a", b"ab", 2), ("bc", b"c", 0)], "ab"),
        # A character of two bytes: its second byte is a draft, and completes it.
        ([("", "é".encode()[:1], 0), ("éx", "é".encode()[1:] + b"x", 1)], "é"),
        # A stop string cuts text that was measured.
        ([("a", b"a", 0), ("b", b"bcd", 3)], "b"),
        # More text than tokens explain is never shown as drafted.
        ([("abc", b"a", 1)], "a"),
        # An accepted count beyond the tokens is a bug elsewhere, not a reason to lose text.
        ([("ab", b"ab", 5)], "ab"),
    ],
)
def test_colors_go_by_position(engine, capsys, chunks, drafted):
    engine.chunks = chunks
    assert main(["generate", "hi", "--color", "always"]) == 0
    out = capsys.readouterr().out
    assert colored(out) == drafted
    assert plain(out).splitlines()[0] == "".join(text for text, _, _ in chunks)


class Terminal:
    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def isatty(self):
        return True


@pytest.mark.parametrize(
    "tty, environment, argv, expect",
    [
        (False, {}, [], False),
        (True, {}, [], True),
        (True, {"NO_COLOR": "1"}, [], False),
        (True, {"NO_COLOR": ""}, [], True),
        (True, {"TERM": "dumb"}, [], False),
        (True, {"NO_COLOR": "1"}, ["--color", "always"], True),
        (True, {}, ["--color", "never"], False),
    ],
)
def test_when_colors_are_used(engine, capsys, monkeypatch, tty, environment, argv, expect):
    import sys

    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if tty:
        monkeypatch.setattr(sys, "stdout", Terminal(sys.stdout))
    assert main(["generate", "hi", *argv]) == 0
    assert ("\x1b" in capsys.readouterr().out) is expect


def test_a_model_cannot_steer_the_terminal(engine, capsys):
    engine.chunks = [("\x1b[2Jgone", b"\x1b[2Jgone", 0)]
    assert main(["generate", "hi", "--color", "always"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_without_a_tokenizer_the_ids_are_printed(engine, capsys):
    engine.tokenizer = type(engine.tokenizer)(template=False, present=False)
    engine.chunks = [("", bytes([7, 8]), 1), ("", bytes([9]), 0)]
    assert main(["generate", "--prompt-ids", "1", "--color", "always"]) == 0
    out = capsys.readouterr().out
    assert plain(out).splitlines()[0].split() == ["7", "8", "9"]
    assert colored(out).split() == ["7"]


def test_ctrl_c_ends_generate_with_130(engine, capsys):
    def interrupt(n):
        if n == 2:
            raise KeyboardInterrupt

    engine.on_chunk = interrupt
    assert main(["generate", "hi"]) == 130
    assert capsys.readouterr().out == "Hello\n"
    assert engine.closed == 1
