"""Functions that a chat offers: how a prompt shows them where its template does not, and grammars that force calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from slipstream.errors import InvalidRequestError, UnsupportedError
from slipstream.structured import StructuredOutputsParams
from slipstream.text.tokenizer import Tokenizer
from slipstream.text.tool_calls import HermesParser, Llama3JsonParser, MistralParser

NAME = r"[a-zA-Z0-9_.-]{1,64}"
_CLUES = (("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3_json"))


class Tool(NamedTuple):
    name: str
    description: str
    parameters: Mapping[str, Any]


class _Format(NamedTuple):
    """mark: what begins calls; between, close: what stands between calls and behind the last; arguments: their key."""

    mark: str
    open: str
    between: str
    close: str
    arguments: str


FORMATS = {
    "hermes": _Format(
        HermesParser.mark, "\n", "\n" + HermesParser.close + "\n" + HermesParser.mark + "\n",
        "\n" + HermesParser.close, "arguments",
    ),
    "llama3_json": _Format("", "", "; ", "", "parameters"),
    "mistral": _Format(MistralParser.mark, "[", ", ", "]", "arguments"),
}  # fmt: skip


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Tools as OpenAI's API has them. Raises InvalidRequestError, UnsupportedError."""
    found: list[Tool] = []
    for i, given in enumerate(tools):
        if given.get("type", "function") != "function" or not isinstance(given.get("function"), dict):
            raise UnsupportedError(f"tools[{i}] is not supported; it must be of type function, with a function")
        f = given["function"]
        name, about, parameters = f.get("name"), f.get("description") or "", f.get("parameters") or {}
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise InvalidRequestError(f"tools[{i}]: name {name!r:.80} must be 1 to 64 letters, digits, '_', '-' or '.'")
        if not isinstance(about, str) or not isinstance(parameters, dict):
            raise InvalidRequestError(f"tools[{i}]: description must be text and parameters a JSON schema")
        if any(t.name == name for t in found):
            raise InvalidRequestError(f"tools: two functions are called {name!r}")
        found.append(Tool(name, about, parameters))
    return found


def usual_format(tokenizer: Tokenizer) -> str:
    """The format that the model's chat template writes calls in, by what it mentions; else hermes."""
    text = "".join(_templates(tokenizer))
    return next((name for clue, name in _CLUES if clue in text), "hermes")


def offered(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], tools: Sequence[Tool], given: Sequence[Any], kind: str
) -> tuple[list[dict[str, Any]], Sequence[Any] | None]:
    """Messages and tools for the chat template; one that knows no tools gets them in the system message.

    given: the tools as they came.
    """
    if not tools:
        return [*messages], None
    if any(re.search(r"\btools\b", source) for source in _templates(tokenizer)):
        return [*messages], given
    return _instructed(messages, instructions(kind, tools)), None


def _templates(tokenizer: Tokenizer) -> tuple[str, ...]:
    return () if tokenizer.chat_template is None else tokenizer.chat_template.sources


def _instructed(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The text at the end of the system message, which is made if there is none."""
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def marks_are_special(tokenizer: Tokenizer, name: str) -> bool:
    """Whether a mark of the format is a special token, which texts leave out unless they are told not to."""
    marks = (HermesParser.mark, HermesParser.close, Llama3JsonParser.mark, MistralParser.mark)
    used = {"hermes": marks[:2], "llama3_json": marks[2:3], "mistral": marks[3:]}[name]
    vocab = tokenizer.vocab
    return any(vocab.get(mark) in tokenizer.special_ids for mark in used)


def instructions(name: str, tools: Sequence[Tool]) -> str:
    """For the system message, where the chat template knows nothing of tools."""
    made = FORMATS[name]
    call = json.dumps({"name": "NAME", made.arguments: {"ARGUMENT": "VALUE"}})
    shown = f"{made.mark}{made.open}{call}{made.close}"
    lines = [json.dumps({"name": t.name, "description": t.description, "parameters": t.parameters}) for t in tools]
    return "You may call these functions:\n" + "\n".join(lines) + f"\nA call is written like this:\n{shown}"


def call_grammar(
    name: str, tools: Sequence[Tool], tokenizer: Tokenizer, *, several: bool, otherwise: StructuredOutputsParams | None
) -> str:
    """A grammar (Lark) of answers that call one of `tools`, or more than one; otherwise: or are such JSON instead."""
    made = FORMATS[name]
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        rules.append(f"call_{i}: %json {json.dumps(_call_schema(tool, made.arguments))}")
    middle = "call"
    if several:
        middle += f" ({_between(made, tokenizer)} call)*"
    first = f"{_terminal(made.mark, tokenizer)} {_quoted(made.open)} {middle} {_close(made, tokenizer)}"
    start = f"start: {first}"
    if otherwise is not None:
        start += " | answer"
        rules.append(f"answer: %json {otherwise.json or json.dumps({'type': 'object'})}")
    return "\n".join([start, *rules])


def _between(made: _Format, tokenizer: Tokenizer) -> str:
    if made.mark and made.mark in made.between:
        before, after = made.between.split(made.mark)
        return f"{_text(before, tokenizer)} {_terminal(made.mark, tokenizer)} {_quoted(after)}"
    return _quoted(made.between)


def _close(made: _Format, tokenizer: Tokenizer) -> str:
    return _text(made.close, tokenizer)


def _text(text: str, tokenizer: Tokenizer) -> str:
    """Text with tags in it, each of which may be a special token."""
    parts = [p for p in re.split(r"(</?[a-z_]+>)", text) if p]
    return " ".join(_terminal(p, tokenizer) if p.startswith("<") else _quoted(p) for p in parts)


def _terminal(mark: str, tokenizer: Tokenizer) -> str:
    token = tokenizer.vocab.get(mark)
    return f"<[{token}]>" if token is not None and token in tokenizer.special_ids else _quoted(mark)


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _call_schema(tool: Tool, arguments: str) -> dict[str, Any]:
    inner = _moved(dict(tool.parameters) or {"type": "object"}, f"#/properties/{arguments}")
    return {
        "type": "object", "properties": {"name": {"const": tool.name}, arguments: inner},
        "required": ["name", arguments], "additionalProperties": False,
    }  # fmt: skip


def _moved(schema: Any, root: str) -> Any:
    """References from the schema's own root, which is now at `root`."""
    if isinstance(schema, dict):
        moved = {k: _moved(v, root) for k, v in schema.items() if k != "$schema"}
        ref = moved.get("$ref")
        if isinstance(ref, str) and ref.startswith("#"):
            moved["$ref"] = root + ref[1:]
        return moved
    return [_moved(v, root) for v in schema] if isinstance(schema, list) else schema
