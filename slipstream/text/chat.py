"""Chat templates: a conversation to a prompt, by the Jinja template that came with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from slipstream.errors import InvalidRequestError
from slipstream.text.sandbox import Budget, LimitError, make_environment

MAX_TEMPLATE_CHARS = 1 << 20


class ChatTemplate:
    """One or several named templates of a model.

    sources: name -> Jinja source, "default" and perhaps "tool_use" among them. special_tokens: "bos_token",
    "eos_token", ... -> text, visible to the template. Compiled on first use: a broken template does not
    keep the model from loading.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        self._sources = dict(sources)
        self._special = dict(special_tokens or {})
        self._compiled: dict[str, jinja2.Template] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sources)

    @property
    def sources(self) -> tuple[str, ...]:
        """What the templates look like, in Jinja."""
        return tuple(self._sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        name: str | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt. continue_final_message: it ends where the content of the last message does, for an answer that
        goes on from there. Raises InvalidRequestError for bad messages, a failing template or a limit."""
        _check_messages(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError("continue_final_message needs add_generation_prompt=false")
            messages = _marked(messages)
        compiled = self._template(name, bool(tools))
        known = {
            **self._special,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            **Budget().variables(),
        }
        try:
            text = compiled.render(known)
            return _cut(text) if continue_final_message else text
        except InvalidRequestError:
            raise
        except LimitError as error:
            raise InvalidRequestError(f"chat template over the limit: {error}") from error
        except Exception as error:  # whatever the template's code ran into is the request's fault
            raise InvalidRequestError(f"chat template: {str(error)[:200] or type(error).__name__}") from error

    def _template(self, name: str | None, tools: bool) -> jinja2.Template:
        if name is None:
            name = "tool_use" if tools and "tool_use" in self._sources else "default"
            if name not in self._sources and len(self._sources) == 1:
                name = next(iter(self._sources))
        source = self._sources.get(name)
        if source is None:
            raise InvalidRequestError(f"no chat template {name!r}; there are: {', '.join(self._sources)}")
        if len(source) > MAX_TEMPLATE_CHARS:
            raise InvalidRequestError(f"chat template has {len(source)} characters; limit {MAX_TEMPLATE_CHARS}")
        if name not in self._compiled:
            try:
                self._compiled[name] = make_environment().from_string(source)
            except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
                raise InvalidRequestError(f"chat template does not compile: {str(error)[:200]}") from error
        return self._compiled[name]


_END = "\ue000end-of-final-message\ue000"


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """With a mark behind the last message's content: a template may write more there than what ends a message."""
    last = messages[-1]
    if not isinstance(last.get("content"), str) or not last["content"]:
        raise InvalidRequestError("continue_final_message needs a last message with text")
    return [*messages[:-1], {**last, "content": last["content"] + _END}]


def _cut(text: str) -> str:
    at = text.rfind(_END)
    if at < 0:
        raise InvalidRequestError("continue_final_message: the chat template does not show the last message as it is")
    return text[:at]


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequestError("messages must be a non-empty list of {'role': ..., 'content': ...}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"messages[{i}] must be an object with a 'role' string")
