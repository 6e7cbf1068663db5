"""Tool calls and reasoning in text: what is read does not depend on how the text was cut (S45)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import UnsupportedError
from slipstream.text import Tokenizer
from slipstream.text.tool_calls import PARSERS, tool_parser
from slipstream.text.tools import offered, read_tools, usual_format
from slipstream.text.turns import Reasoning, Turn, reasoning_marks, still_thinking
from tests.support.grammar_kit import write_characters

MARKS = ("<think>", "</think>")


def read(kind: str, text: str, cuts: list[int], *, thinking: bool | str | None = "off", most: int | None = None) -> Any:
    """content, reasoning and [name, arguments] of each call."""
    ids = iter(range(100))
    turn = Turn(
        tools=tool_parser(kind)() if kind else None,
        reasoning=None if isinstance(thinking, str) else Reasoning(MARKS, thinking),
        make_id=lambda: f"id{next(ids)}", most_calls=most,
    )  # fmt: skip
    parts = [turn.feed(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)] + [turn.finish()]
    calls: list[list[str]] = []
    for delta in (c for p in parts for c in p.calls):
        assert delta.call == len(calls) - (delta.name is None), "calls come one after the other"
        if delta.name is not None:
            assert delta.id == f"id{delta.call}"
            calls.append([delta.name, ""])
        calls[-1][1] += delta.arguments
    assert len(calls) == turn.calls
    return "".join(p.content for p in parts), "".join(p.reasoning for p in parts), calls


def cuts_of(text: str, rng: random.Random) -> list[int]:
    return sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1 + min(30, len(text)))))


def written(kind: str, calls: list[tuple[str, Any]], space: str = "") -> str:
    """Calls as a model of that kind writes them."""
    key = "parameters" if kind == "llama3_json" else "arguments"
    objects = [json.dumps({"name": n, key: a}, ensure_ascii=False) for n, a in calls]
    if kind == "hermes":
        return "\n".join(f"<tool_call>\n{space}{o}{space}\n</tool_call>" for o in objects)
    if kind == "llama3_json":
        return f"{space};{space}".join(objects)
    return f"[TOOL_CALLS]{space}[{', '.join(objects)}]"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=8)
    | st.sampled_from(['"}', "{[", "</tool_call>", "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["f", "get_weather", "a.b-c"]), st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
        ),
        min_size=1, max_size=3,
    ),
    content=st.sampled_from(["", "Let me look. ", "a < b, [x] {y} "]),
    space=st.sampled_from(["", " ", "\n  "]),
    seed=st.integers(0, 10_000),
)  # fmt: skip
def test_calls_are_read_however_they_are_cut(
    kind: str, calls: list[tuple[str, Any]], content: str, space: str, seed: int
) -> None:
    content = "" if kind == "llama3_json" else content
    text = content + written(kind, calls, space)
    rng = random.Random(seed)
    for cuts in ([], list(range(len(text) + 1)), cuts_of(text, rng), cuts_of(text, rng)):
        said, reasoning, found = read(kind, text, cuts)
        assert said == content.rstrip() and reasoning == ""
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool_", '{"name": "f", ', '"arguments": {"a": [1, "}"]}', '"parameters": "{}"',
    "}", "{", '"', "\\", "[TOOL_CALLS]", "[", "]", "[ARGS]", ";", ",", "<|python_tag|>", "<think>", "</think>",
    "hello", " \n", '{"name": "g", "arguments": {}}', "é",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["", *PARSERS])
def test_any_text_gives_the_same_however_it_is_cut(kind: str) -> None:
    """Broken calls too: nothing raises, and text without a call comes back as it was."""
    for seed in range(250):
        rng = random.Random(seed)
        text = "".join(rng.choice(FRAGMENTS) for _ in range(rng.randrange(12)))
        thinking = rng.choice(["off", None, True, False])
        whole = read(kind, text, [], thinking=thinking)
        for cuts in (list(range(len(text) + 1)), cuts_of(text, rng)):
            assert read(kind, text, cuts, thinking=thinking) == whole, text
        if thinking == "off" and not whole[2]:
            assert whole[0] == text or kind == "llama3_json" and whole[0] == text.replace("<|python_tag|>", "", 1)


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("hermes", 'Hi\n<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>', "Hi", [["g", '{"x": 1}']]),
        ("hermes", '<tool_call>\n{"name": "f"}\n</tool_call>', "", [["f", "{}"]]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [["f", '{"a": 1}']]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "", [["f", '{"a": ']]),
        ("hermes", '<tool_call>{"nome": 1}</tool_call>', '<tool_call>{"nome": 1}</tool_call>', []),
        ("hermes", "<tool_call>\nnone</tool_call>", "<tool_call>\nnone</tool_call>", []),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [["f", "{}"]]),
        ("llama3_json", '{"answer": 3} and more', '{"answer": 3} and more', []),
        ("llama3_json", 'It is {"name": "f"}', 'It is {"name": "f"}', []),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "}"}[TOOL_CALLS]g{}', "", [["f", '{"a": "}"}'], ["g", "{}"]]),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [["f", "{}"]]),
        ("mistral", "[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] [1, 2]", []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}] ok', "ok", [["f", "{}"]]),
        ("mistral", "[TOOL_CALLS", "[TOOL_CALLS", []),
    ],
)  # fmt: skip
def test_cases(kind: str, text: str, content: str, calls: list[list[str]]) -> None:
    said, _, found = read(kind, text, list(range(len(text))))
    assert (said.strip(), found) == (content, calls)


def test_arguments_come_out_as_they_come_in() -> None:
    turn = Turn(tools=tool_parser("hermes")())
    turn.feed('<tool_call>{"name": "f", "arguments": ')
    for c in '{"a": [1, 2]}':
        assert [d.arguments for d in turn.feed(c).calls] == [c]
    assert not turn.feed("}\n</tool_call>").calls and not turn.finish()


def test_one_call_where_only_one_is_wanted() -> None:
    text = written("hermes", [("f", {}), ("g", {"a": 1}), ("h", {})])
    assert read("hermes", text, [], most=1) == ("", "", [["f", "{}"]])


@pytest.mark.parametrize(
    ("thinking", "text", "reasoning", "content"),
    [
        (True, "\nso\nit is </think>\n\nyes", "so\nit is", "yes"),
        (True, "never ends", "never ends", ""),
        (None, "<think>hm</think>yes </think>", "hm", "yes </think>"),
        (None, " no <think>x</think>", "", " no <think>x</think>"),
        (None, "<thin", "", "<thin"),
        (False, "<think>x", "", "<think>x"),
        (True, "a </thin> b</think>", "a </thin> b", ""),
    ],
)
def test_reasoning(thinking: bool | None, text: str, reasoning: str, content: str) -> None:
    for cuts in ([], list(range(len(text)))):
        assert read("", text, cuts, thinking=thinking) == (content, reasoning, [])


def test_calls_in_the_reasoning_are_none() -> None:
    call = written("hermes", [("f", {})])
    assert read("hermes", f"{call}</think>{call}", [], thinking=True) == ("", call, [["f", "{}"]])


def test_whether_a_prompt_ends_in_reasoning() -> None:
    assert still_thinking("hello", MARKS) is None
    assert still_thinking("a<think>", MARKS) is True
    assert still_thinking("a<think>b</think>", MARKS) is False


@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder", ""])
def test_other_parsers_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"hermes, llama3_json, mistral"):
        tool_parser(name)
    with pytest.raises(UnsupportedError, match="qwen3, deepseek_r1"):
        reasoning_marks(name)


def test_tools_for_templates_that_know_them_and_for_others(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    said = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    for template, kind in (("{{ messages[0].content }}", "hermes"), ("{{ tools }} [TOOL_CALLS]", "mistral")):
        write_characters(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        tokenizer = Tokenizer.from_dir(tmp_path)
        assert usual_format(tokenizer) == kind
        messages, shown = offered(tokenizer, said, read_tools(tools), tools, kind)
        if kind == "mistral":
            assert (messages, shown) == (said, tools)
        else:
            assert shown is None and messages[1:] == said[1:] and messages[0]["content"].startswith("Be kind.\n")
            assert '"name": "f"' in messages[0]["content"] and "<tool_call>" in messages[0]["content"]
    assert offered(tokenizer, said, [], [], "hermes") == (said, None)
    assert offered(tokenizer, said[1:], read_tools(tools), tools, "hermes")[1] == tools
