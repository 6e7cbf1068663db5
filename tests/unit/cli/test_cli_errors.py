"""Whatever a user can get wrong: one line on stderr, exit code 2, no traceback."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.cli import COMMANDS, main
from slipstream.errors import InvalidRequestError, SlipstreamError

REPO = Path(__file__).resolve().parents[3]

WRONG = {
    "no command": ([], None),
    "unknown command": (["generat"], "'generat'"),
    "option before the command": (["--model", "x", "generate"], "'--model'"),
    "nothing to do": (["generate"], "PROMPT"),
    "unknown option": (["generate", "hi", "--nope"], "--nope"),
    "abbreviated option": (["generate", "hi", "--temp", "1"], "--temp"),
    "two prompts": (["generate", "hi", "--prompt-ids", "1"], "--prompt-ids"),
    "ids that are words": (["generate", "--prompt-ids", "1,two"], "'two'"),
    "no ids": (["generate", "--prompt-ids", ""], "--prompt-ids"),
    "a negative id": (["generate", "--prompt-ids=-1,2"], "'-1'"),
    "an id beyond all vocabularies": (["generate", "--prompt-ids", "9" * 40], "99999"),
    "other digits": (["generate", "--prompt-ids", "²"], "'²'"),
    "negative temperature": (["generate", "hi", "--temperature", "-1"], "temperature=-1.0"),
    "temperature nan": (["generate", "hi", "--temperature", "nan"], "temperature=nan"),
    "temperature infinite": (["generate", "hi", "--temperature", "1e999"], "temperature=inf"),
    "temperature a word": (["generate", "hi", "--temperature", "hot"], "'hot'"),
    "top-p of 0": (["generate", "hi", "--top-p", "0"], "top_p=0.0"),
    "max-tokens of 0": (["generate", "hi", "--max-tokens", "0"], "max_tokens=0"),
    "max-tokens negative": (["generate", "hi", "--max-tokens", "-5"], "max_tokens=-5"),
    "min above max": (["generate", "hi", "--min-tokens", "9", "--max-tokens", "8"], "min_tokens=9"),
    "repetition penalty of 0": (["generate", "hi", "--repetition-penalty", "0"], "repetition_penalty=0.0"),
    "presence penalty nan": (["generate", "hi", "--presence-penalty", "nan"], "presence_penalty=nan"),
    "frequency penalty of 3": (["generate", "hi", "--frequency-penalty", "3"], "frequency_penalty=3.0"),
    "empty stop": (["generate", "hi", "--stop", ""], "stop="),
    "too many drafts": (["generate", "hi", "--draft", "ngram", "--num-drafts", "1000"], "1000"),
    "negative drafts": (["generate", "hi", "--draft", "ngram", "--num-drafts", "-1"], "-1"),
    "drafts by nobody": (["generate", "hi", "--num-drafts", "3"], "--draft"),
    "a tree of words": (["generate", "hi", "--draft", "x", "--draft-tree", "4,x"], "--draft-tree '4,x'"),
    "a tree by nobody": (["generate", "hi", "--draft-tree", "4,4,16"], "--draft "),
    "a device that is none": (["generate", "hi", "--device", "tpu"], "'tpu'"),
    "run-ahead of 0": (["generate", "hi", "--run-ahead", "0"], "--run-ahead 0"),
    "system text without template": (["generate", "hi", "--raw", "--system", "x"], "--raw"),
    "model that is not there": (["generate", "hi", "--model", "missing"], "no such directory"),
    "bytes that are no text": (["generate", "caf\udce9"], "UTF-8"),
    "chat with a bad value": (["chat", "--temperature", "-1"], "temperature=-1.0"),
    "unknown benchmark": (["bench", "encode"], "'encode'"),
    "benchmark option": (["bench", "decode", "--nope"], "--nope"),
}


@pytest.mark.parametrize("argv, says", WRONG.values(), ids=WRONG.keys())
def test_user_error(argv, says, engine, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    if says is None:
        assert "usage" in out
        return
    assert err.startswith("slipstream: error: ") and err.count("\n") == 1
    assert says in err
    assert out == "" and engine.prompts == []


def test_a_value_is_judged_before_the_model_is_loaded(engine):
    assert main(["generate", "hi", "--top-p", "2"]) == 2
    assert engine.options == {} and engine.closed == 0


def test_an_error_of_the_engine_closes_it(engine, capsys):
    engine.error = InvalidRequestError("prompt of 9 tokens is longer than max_model_len=8")
    assert main(["generate", "hi"]) == 2
    assert engine.closed == 1
    assert "max_model_len=8" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(engine):
    engine.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        main(["generate", "hi"])


def test_audit_is_delegated_when_it_is_there(monkeypatch, capsys):
    import slipstream.cli as cli

    monkeypatch.setitem(cli.COMMANDS, "audit", cli.Command("slipstream.no_such_room.cli:main", "x"))
    assert main(["audit", "run"]) == 2
    assert "'audit' is not built yet" in capsys.readouterr().err
    monkeypatch.setitem(cli.COMMANDS, "audit", cli.Command(f"{__name__}:seen", "x"))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.setattr(cli, "find_spec", lambda name: name)
    assert main(["audit", "run", "--json"]) == 7
    assert SEEN == [["run", "--json"]]


SEEN: list[list[str]] = []


def seen(argv: list[str]) -> int:
    SEEN.append(argv)
    return 7


def stdin_of(data: bytes, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_stdin_is_the_prompt(engine, monkeypatch, capsys):
    stdin_of("grüße\n".encode(), monkeypatch)
    assert main(["generate", "-", "--raw"]) == 0
    assert engine.prompts == [list("grüße\n".encode())]


def test_stdin_that_is_not_utf8(engine, monkeypatch, capsys):
    stdin_of(b"abc\xff", monkeypatch)
    assert main(["generate", "-"]) == 2
    assert "0xff at offset 3" in capsys.readouterr().err


def test_stdin_without_end(engine, monkeypatch, capsys):
    monkeypatch.setattr("slipstream.cli.prompt.MAX_STDIN_BYTES", 10)
    stdin_of(b"x" * 11, monkeypatch)
    assert main(["generate", "-"]) == 2
    assert "longer than 10 bytes" in capsys.readouterr().err


def test_help_names_every_command_and_exits_0(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS) and "not built yet" not in text
    assert main(["--version"]) == 0
    for command in ("generate", "chat", "serve"):
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0
    assert "--raw" in capsys.readouterr().out


def test_every_named_error_becomes_one_line(engine, capsys):
    def kinds(base):
        return [base, *(k for sub in base.__subclasses__() for k in kinds(sub))]

    for kind in kinds(SlipstreamError):
        engine.error = kind("two\nlines")
        assert main(["generate", "hi"]) == 2
        assert capsys.readouterr().err == "slipstream: error: two lines\n"


FAKE_PROGRAM = """
import sys
from types import ModuleType, SimpleNamespace as N
class LLM:
    tokenizer = N(chat_template=None, present=True, encode=lambda text: [1])
    notes, resolved = [], {"max_model_len": 64}
    def __init__(self, **options): pass
    def stream(self, prompt, params):
        for n in range(100_000):
            yield N(text="x" * 80 + "\\n", token_ids=[1], accepted=0, finish_reason=None, output=None)
    def close(self): pass
module = ModuleType("slipstream.llm")
module.LLM = LLM
sys.modules["slipstream.llm"] = module
from slipstream.cli import main
sys.exit(main(["generate", "hi"]))
"""


def test_a_reader_that_leaves_ends_the_program_quietly():
    program = subprocess.Popen(
        [sys.executable, "-c", FAKE_PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPO
    )
    assert program.stdout is not None and program.stderr is not None
    assert program.stdout.read(5) == b"xxxxx"
    program.stdout.close()
    err = program.stderr.read()
    program.stderr.close()
    assert program.wait(timeout=60) == 141
    assert err == b""


def test_help_needs_no_torch():
    script = (
        "import sys; from slipstream.cli import main; main(['--help'])\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPO,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
