"""Request bodies: known fields with their types and caps; whatever else a body holds is refused by name."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from slipstream.errors import InvalidRequestError, UnsupportedError
from slipstream.params import MAX_ALLOWED, MAX_BAD_WORDS
from slipstream.structured import MAX_CHOICES, StructuredOutputsParams
from slipstream.types import SamplingParams

MAX_PROMPTS = 128
MAX_MESSAGES = 1024
MAX_PARTS = 256
MAX_STOP_CHARS = 256
MAX_IDS = 1 << 20
MAX_TOOLS = 128
MAX_CALLS = 128
MAX_DOCUMENTS = 256

NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "audio": (), "chat_template": (), "detokenize": (True,), "early_stopping": (False,), "echo": (False,),
    "function_call": ("none",), "functions": ([],), "guided_decoding_backend": (), "guided_whitespace_pattern": (),
    "include_reasoning": (True,), "kv_transfer_params": (), "length_penalty": (1, 1.0), "mm_processor_kwargs": (),
    "modalities": (["text"],), "prediction": (), "prompt_embeds": (), "reasoning_effort": (), "request_id": (),
    "return_tokens_as_token_ids": (False,), "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (False,), "store": (False,), "suffix": ("",),
    "chat_template_kwargs": ({},), "parallel_tool_calls": (True, False), "tool_choice": ("none",), "tools": ([],),
    "top_logprobs": (0,), "use_beam_search": (False,), "verbosity": (), "vllm_xargs": (), "web_search_options": (),
}  # fmt: skip
"""Fields that other servers have: refused by name unless they say what is done anyway, one of these or null."""

INSTEAD = {
    "chat_template": "a template is code, and only the model's own is run; chat_template_kwargs reach it",
    "echo": "the chat route has no prompt text; /v1/completions has echo",
    "function_call": "give tool_choice", "functions": "give tools",
    "guided_decoding_backend": "grammars are llguidance's",
    "guided_whitespace_pattern": "structured_outputs has disable_any_whitespace",
    "prompt_embeds": "embeddings are taken by LLM only, not by a server",
    "reasoning_effort": "what the template takes goes into chat_template_kwargs",
    "request_id": "send it as the header x-request-id",
    "spaces_between_special_tokens": "the text is that of the tokens, and nothing is put between them",
    "store": "nothing is kept once it is answered", "suffix": "the model only continues a prompt",
}  # fmt: skip
"""Why, and what to do about it."""

Text = str
Ids = list[int]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """include_usage: a last chunk with the usage; continuous_usage_stats: also the tokens so far in every other one."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampling(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both routes; ranges are those of `SamplingParams`.

    user, safety_identifier, prompt_cache_key and metadata say who asks and for what: they have no effect on an answer.
    truncate_prompt_tokens: only so many of the prompt's last tokens are read, -1: as many as leave room for max_tokens.
    best_of: how many answers are made, which must be n.
    """

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] = {}
    prompt_logprobs: int | None = None
    logits_processors: dict[str, float] = {}
    allowed_token_ids: Annotated[list[int], Meta(max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[str], Meta(max_length=MAX_BAD_WORDS)] = []
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_decoding: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(max_length=MAX_CHOICES)] | None = None
    guided_grammar: str | None = None
    n: int = 1
    stop: str | Annotated[list[Annotated[str, Meta(max_length=MAX_STOP_CHARS)]], Meta(max_length=16)] = []
    stop_token_ids: Annotated[list[int], Meta(max_length=1024)] = []
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    speculative: int | str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    priority: int = 0
    cache_salt: str = ""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    best_of: int | None = None
    truncate_prompt_tokens: int | None = None


class CompletionBody(Sampling, kw_only=True):
    """prompt: text, token ids, or a list of either. echo: the prompt stands before the answer, with its
    log-probabilities where logprobs are asked for; max_tokens may then be 0."""

    logprobs: int | bool | None = None
    echo: bool = False
    add_special_tokens: bool = True
    prompt: str | Annotated[list[str | int | Annotated[list[int], Meta(max_length=MAX_IDS)]], Meta(max_length=MAX_IDS)]

    def prompts(self) -> list[str | list[int]]:
        """Raises InvalidRequestError for an empty list, a mixed one, or too many prompts."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and all(isinstance(p, int) for p in given):
            return [[p for p in given if isinstance(p, int)]]
        prompts = [p for p in given if not isinstance(p, int)]
        if not prompts or len(prompts) != len(given):
            raise InvalidRequestError("prompt must be text, token ids, or a non-empty list of either")
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequestError(f"prompt has {len(prompts)} entries; the limit is {MAX_PROMPTS}")
        return prompts


class TextPart(Struct, forbid_unknown_fields=True):
    text: str
    type: str = "text"


class CalledFunction(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    arguments: str = "{}"


class Call(Struct, forbid_unknown_fields=True):
    """A tool call of an earlier answer."""

    function: CalledFunction
    id: Annotated[str, Meta(max_length=256)] = ""
    type: str = "function"
    index: int | None = None

    def plain(self) -> dict[str, Any]:
        """Templates want arguments as what they say, where they are JSON."""
        try:
            arguments = msgspec.json.decode(self.function.arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = self.function.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class Message(Struct, forbid_unknown_fields=True, omit_defaults=True):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: Annotated[list[Call], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None

    def plain(self) -> dict[str, Any]:
        """For the template: parts joined, fields that are not given left out."""
        if self.content is None:
            if not self.tool_calls:
                raise InvalidRequestError(f"messages: content of a {self.role[:40]!r} message is missing")
            text = ""
        elif isinstance(self.content, str):
            text = self.content
        else:
            for part in self.content:
                if part.type != "text":
                    raise UnsupportedError(
                        f"messages content of type {part.type[:40]!r} is not supported; only text is"
                    )
            text = "".join(part.text for part in self.content)
        more = {
            "name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content,
            "tool_calls": [c.plain() for c in self.tool_calls or ()],
        }  # fmt: skip
        return {"role": self.role, "content": text, **{k: v for k, v in more.items() if v}}


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatBody(Sampling):
    """continue_final_message: the answer goes on with the last message's text; it needs add_generation_prompt=false.
    add_special_tokens: those of the tokenizer around the template's text, which has its own as a rule. documents: for
    templates that know them."""

    messages: Messages
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Annotated[list[dict[str, str]], Meta(max_length=MAX_DOCUMENTS)] = []
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def limit(self) -> int | None:
        """max_completion_tokens, or its older name."""
        new, old = self.max_completion_tokens, self.max_tokens
        if new is not None and old is not None and new != old:
            raise InvalidRequestError(f"max_completion_tokens={new} and max_tokens={old} differ; leave one out")
        return old if new is None else new


class TokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: Annotated[list[int], Meta(max_length=MAX_IDS)]


Body = TypeVar("Body", bound=Struct)


def read_body(data: bytes, kind: type[Body]) -> Body:
    """Raises InvalidRequestError or UnsupportedError that names the field."""
    try:
        values = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequestError(f"the body is not valid JSON: {why}") from None
    if not isinstance(values, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {type(values).__name__}")
    known = {f.name for f in msgspec.structs.fields(kind)}
    given = {}
    for name, value in values.items():
        if value is None:
            continue
        if name in known:
            given[name] = value
        elif name not in NOT_BUILT:
            raise InvalidRequestError(f"unknown field {name[:64]!r}")
        elif not any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in NOT_BUILT[name]):
            why = f": {INSTEAD[name]}" if name in INSTEAD else ""
            raise UnsupportedError(f"{name} is not supported by this version; leave it out{why}")
    try:
        return msgspec.convert(given, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidRequestError(_readable(str(error))) from None


def _readable(error: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.n`" with the field first."""
    match = re.fullmatch(r"(.*) - at `\$\.?(.*)`", error, re.S)
    return f"{match[2]}: {match[1]}" if match and match[2] else error


def sampling(
    body: Sampling, defaults: SamplingParams, max_tokens: int | None, form: StructuredOutputsParams | None = None
) -> SamplingParams:
    """Fields that the body leaves out are `defaults`', the model's own. Raises InvalidRequestError."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream=true")
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "speculative", "repetition_penalty")
    chosen: dict[str, Any] = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    if any(len(s) > MAX_STOP_CHARS for s in stop):
        raise InvalidRequestError(f"stop has a string of more than {MAX_STOP_CHARS} characters")
    logprobs, of_prompt = _logprobs(body), body.prompt_logprobs
    if isinstance(body, CompletionBody) and body.echo:
        of_prompt = logprobs if of_prompt is None else of_prompt
        max_tokens = 1 if max_tokens == 0 and not body.stream else max_tokens
    if body.best_of is not None and body.best_of != body.n:
        raise UnsupportedError(f"best_of={body.best_of} is not supported by this version where it is not n={body.n}")
    if body.stream and of_prompt is not None:
        raise InvalidRequestError("prompt_logprobs, or echo with logprobs, needs stream=false")
    return replace(
        defaults, logprobs=logprobs, prompt_logprobs=of_prompt, n=body.n, stop=tuple(stop), max_tokens=max_tokens,
        stop_token_ids=tuple(body.stop_token_ids), min_tokens=body.min_tokens, ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens, include_stop_str_in_output=body.include_stop_str_in_output,
        presence_penalty=body.presence_penalty, frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias, structured_outputs=form,
        logits_processors=body.logits_processors, allowed_token_ids=body.allowed_token_ids,
        bad_words=body.bad_words, **chosen,
    )  # fmt: skip


def _logprobs(body: Sampling) -> int | None:
    """Alternatives per output token; None: no log-probabilities."""
    if isinstance(body, CompletionBody):
        return None if body.logprobs is False else body.logprobs
    assert isinstance(body, ChatBody)
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequestError(f"top_logprobs={body.top_logprobs} needs logprobs=true")
    return None
