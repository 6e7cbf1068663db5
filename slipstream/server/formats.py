"""What a body says about its answer's form: response_format, structured outputs, tools; as sampling and as a turn."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.errors import InvalidRequestError, UnsupportedError
from slipstream.server.protocol import ChatBody, Sampling
from slipstream.structured import StructuredOutputsParams
from slipstream.text import Tokenizer
from slipstream.text.tool_calls import tool_parser
from slipstream.text.tools import (
    Tool,
    call_grammar,
    marks_are_special,
    offered,
    read_tools,
    usual_format,
)
from slipstream.text.turns import Reasoning, Turn, reasoning_marks, still_thinking
from slipstream.types import SamplingParams

GUIDED = ("json", "regex", "choice", "grammar")


def structured(body: Sampling) -> StructuredOutputsParams | None:
    """What the answer must look like by response_format, structured_outputs or guided_*, of which one may be given."""
    given: list[tuple[str, StructuredOutputsParams]] = []
    if body.response_format is not None and (form := _response_format(body.response_format)) is not None:
        given.append(("response_format", form))
    for name in ("structured_outputs", "guided_decoding"):
        if (values := getattr(body, name)) is not None:
            given.append((name, StructuredOutputsParams.of(values)))
    for kind in GUIDED:
        if (value := getattr(body, f"guided_{kind}")) is not None:
            given.append((f"guided_{kind}", StructuredOutputsParams.of({kind: value})))
    if len(given) > 1:
        raise InvalidRequestError(f"{given[0][0]} and {given[1][0]} both say what the answer looks like; leave one out")
    return given[0][1] if given else None


def _response_format(values: dict[str, Any]) -> StructuredOutputsParams | None:
    kind = values.get("type")
    known = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
    if not isinstance(kind, str) or kind not in known:
        raise InvalidRequestError(f"response_format: type={kind!r:.64} must be one of {', '.join(known)}")
    if extra := sorted(set(values) - known[kind]):
        raise InvalidRequestError(f"response_format: unknown key {extra[0]!r:.64} with type {kind}")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    inner = values.get("json_schema")
    if not isinstance(inner, dict) or inner.get("schema") is None:
        raise InvalidRequestError("response_format: json_schema needs an object with a schema")
    if extra := sorted(set(inner) - {"name", "description", "schema", "strict"}):
        raise InvalidRequestError(f"response_format: json_schema has an unknown key {extra[0]!r:.64}")
    return StructuredOutputsParams.of({"json": inner["schema"]})


@dataclass(frozen=True, kw_only=True)
class Formats:
    """What the server knows of its model's answers. tools: the format of tool calls, None: by the chat template, else
    hermes. reasoning: the parser that splits reasoning off; None: none."""

    tools: str | None = None
    reasoning: str | None = None

    def __post_init__(self) -> None:
        if self.tools is not None:
            tool_parser(self.tools)
        if self.reasoning is not None:
            reasoning_marks(self.reasoning)


PLAIN = Formats()


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A chat, ready to be answered. turn: a reader for each choice, None where the text is all content."""

    ids: list[int]
    params: SamplingParams
    turn: Callable[[], Turn] | None


def converse(body: ChatBody, params: SamplingParams, tokenizer: Tokenizer, formats: Formats) -> Conversation:
    """Messages to a prompt, tools to what the answer may be. Raises InvalidRequestError, UnsupportedError."""
    tools, choice = _tools(body)
    kind = formats.tools or usual_format(tokenizer)
    messages, shown = offered(tokenizer, [m.plain() for m in body.messages], tools, body.tools, kind)
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=body.add_generation_prompt, tools=shown,
        continue_final_message=body.continue_final_message, **_variables(body, tokenizer),
    )  # fmt: skip
    marks = None if formats.reasoning is None else reasoning_marks(formats.reasoning)
    thinking = None if marks is None else still_thinking(text, marks)
    spec = params.structured_outputs
    if tools:
        spec = _forced(kind, tools, choice, spec, tokenizer, several=body.parallel_tool_calls is not False)
    if spec is not None and marks is not None and thinking is not False:
        spec = replace(spec, after=marks[1])
    if spec is not params.structured_outputs:
        params = replace(params, structured_outputs=spec)
    if (tools and marks_are_special(tokenizer, kind)) or (marks and _special(tokenizer, marks)):
        params = replace(params, skip_special_tokens=False)

    def turn() -> Turn:
        most = 1 if body.parallel_tool_calls is False else None
        return Turn(
            tools=tool_parser(kind)() if tools else None,
            reasoning=None if marks is None else Reasoning(marks, thinking),
            make_id=_mistral_id if kind == "mistral" else _call_id, most_calls=most,
        )  # fmt: skip

    ids = tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
    return Conversation(ids=ids, params=params, turn=turn if tools or marks is not None else None)


def _tools(body: ChatBody) -> tuple[list[Tool], str]:
    """The tools that may be called, and "auto", "required" or "named"; with tool_choice "none" there are no tools."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError(f"tool_choice={choice!r:.64} needs tools")
        return [], "none"
    tools = read_tools(body.tools)
    if isinstance(choice, dict):
        named = choice.get("function")
        wanted = named.get("name") if isinstance(named, dict) and choice.get("type", "function") == "function" else None
        chosen = [t for t in tools if t.name == wanted]
        if not chosen:
            raise InvalidRequestError(f"tool_choice={choice!r:.100} must name one of the tools")
        return chosen, "named"
    if choice not in (None, "none", "auto", "required"):
        raise InvalidRequestError(f"tool_choice={choice!r:.64} must be none, auto, required or name a function")
    return ([], "none") if choice == "none" else (tools, choice or "auto")


def _forced(
    kind: str,
    tools: Sequence[Tool],
    choice: str,
    spec: StructuredOutputsParams | None,
    tokenizer: Tokenizer,
    *,
    several: bool,
) -> StructuredOutputsParams | None:
    """The grammar that the choice asks for; a free answer, or one of `spec`'s form, may call nothing."""
    if choice != "auto":
        if spec is not None:
            raise InvalidRequestError(
                f"tool_choice={choice} and a {spec.kind} both say what the answer is; leave one out"
            )
        several = several and choice == "required"
        grammar = call_grammar(kind, tools, tokenizer, several=several, otherwise=None)
    elif spec is None:
        return None
    elif spec.kind in ("json", "json_object"):
        grammar = call_grammar(kind, tools, tokenizer, several=several, otherwise=spec)
    else:
        raise UnsupportedError(f"tools with a {spec.kind} are not supported; leave one out, or set tool_choice to none")
    return StructuredOutputsParams(grammar=grammar, own=True)


def _variables(body: ChatBody, tokenizer: Tokenizer) -> dict[str, Any]:
    taken = {
        "self", "messages", "tools", "add_generation_prompt", "template", "tokenize", "name", "documents",
        "continue_final_message",
    }  # fmt: skip
    if clash := sorted(taken & set(body.chat_template_kwargs)):
        raise InvalidRequestError(f"chat_template_kwargs: {clash[0]!r} has a field of its own")
    if not body.documents:
        return body.chat_template_kwargs
    template = tokenizer.chat_template
    if template is not None and not any(re.search(r"\bdocuments\b", source) for source in template.sources):
        raise UnsupportedError("documents: the model's chat template knows none; put them into a message")
    return {**body.chat_template_kwargs, "documents": body.documents}


def _special(tokenizer: Tokenizer, marks: Sequence[str]) -> bool:
    vocab = tokenizer.vocab
    return any(vocab.get(mark) in tokenizer.special_ids for mark in marks)


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _mistral_id() -> str:
    """Its templates want nine letters or digits."""
    return uuid.uuid4().hex[:9]
