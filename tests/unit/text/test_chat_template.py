"""Chat templates: as transformers renders them, and within limits."""

from __future__ import annotations

import time

import pytest

from slipstream.errors import InvalidRequestError
from slipstream.text import ChatTemplate
from tests.support.text_kit import CHATML

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The constructs of the Llama 3 and Qwen families: bos, namespace, slices, trim, tests, macros, tools, dates.
LLAMA_LIKE = """{{- bos_token }}
{%- set ns = namespace(system='none', turns=0) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- macro header(role) %}
<|start_header_id|>{{ role }}<|end_header_id|>

{% endmacro %}
{{- header('system') ~ ns.system ~ '\\nDate: ' ~ strftime_now('%Y') }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for m in messages %}
    {%- if m.role not in ['user', 'assistant', 'tool'] %}{{ raise_exception('no role ' + m.role) }}{% endif %}
    {%- if loop.index0 > 50 %}{% break %}{% endif %}
    {%- if m.tool_calls is defined and m.tool_calls %}
        {%- for call in m.tool_calls %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {%- continue %}
    {%- endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
    {{- header(m['role']) + content | trim + '<|eot_id|>' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{ '%d turns' % ns.turns }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- header('assistant') }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>' }}{% endif %}
{%- endif %}
{{- ["a", 1, none]|join(",") ~ (messages[::-1]|length) ~ "x".replace("x", "yy") ~ "-"*3 }}
"""

CHATS = [
    [{"role": "user", "content": "Hi  "}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "<b>é日'\"&</b>"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>hm</think>\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"x": [1, "<é>"]}}}]},
        {"role": "tool", "content": "{}"},
    ],
]  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "does é & <x>", "parameters": {"type": "object"}},
    }
]


@pytest.mark.parametrize("source", [SMOLLM2, CHATML, LLAMA_LIKE], ids=["smollm2", "chatml", "llama"])
def test_same_text_as_transformers(source):
    module = pytest.importorskip("transformers.utils.chat_template_utils")
    ours = ChatTemplate({"default": source}, {"bos_token": "<s>"})
    for messages in CHATS:
        for tools in (None, TOOLS):
            for prompt in (True, False):
                for extra in ({}, {"enable_thinking": False}):
                    theirs, _ = module.render_jinja_template(
                        conversations=[messages], tools=tools, chat_template=source,
                        add_generation_prompt=prompt, bos_token="<s>", **extra,
                    )  # fmt: skip
                    got = ours.render(messages, tools=tools, add_generation_prompt=prompt, **extra)
                    assert got == theirs[0]


SAY = [{"role": "user", "content": "x"}]

ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "range": "{% for a in range(10**9) %}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "block": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "times": "{{ 'x' * 10**9 }}",
    "times list": "{% set a = [1] * 10**9 %}",
    "power": "{{ 10 ** 10 ** 8 }}",
    "squares": "{% set n = namespace(v=9) %}{% for i in range(60) %}{% set n.v = n.v * n.v %}{% endfor %}",
    "plus": "{% set n = namespace(v='x') %}{% for i in range(60) %}{% set n.v = n.v + n.v %}{% endfor %}",
    "concat": "{% set n = namespace(v='x') %}{% for i in range(60) %}{% set n.v = n.v ~ n.v %}{% endfor %}",
    "capture": "{% set n = namespace(v='x') %}{% for i in range(60) %}"
    "{% set n.v %}{{ n.v }}{{ n.v }}{% endset %}{% endfor %}",
    "width": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "format argument": "{{ '{:>{w}}'.format(1, w=10**9) }}",
    "star": "{{ '%*d' % (10**9, 1) }}",
    "format map": "{{ '{x:>1000000000}'.format_map({'x': 1}) }}",
    "many fields": "{{ ('%9999d' * 9999) % (range(9999)|list) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "replace": "{% set a = 'x' * 100000 %}{{ a.replace('x', a) }}",
    "replace filter": "{% set a = 'x' * 100000 %}{{ a | replace('x', a) }}",
    "join": "{% set a = 'x' * 100000 %}{{ a.join(range(99999)|list) }}",
    "join filter": "{% set a = 'x' * 100000 %}{{ range(99999)|list|join(a) }}",
    "indent": "{{ messages | tojson(indent=100000000) }}",
    "bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "slice": "{{ messages | slice(1000000000) | list }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=list(ENDLESS))
def test_templates_that_would_not_end_are_stopped(source):
    start = time.process_time()
    with pytest.raises(InvalidRequestError, match=r"over the limit|recursion|No filter|Range too big"):
        ChatTemplate({"default": source}).render(SAY)
    assert time.process_time() - start < 10


ESCAPES = {
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "function": "{{ strftime_now.__code__ }}",
    "self": "{{ _slipstream_budget.steps }}",
    "shadow": "{% set _slipstream_budget = 1 %}",
    "shadow macro": "{% macro _slipstream_tick() %}{% endmacro %}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "attr": "{{ raise_exception | attr('__globals__') }}",
    "append": "{{ messages.append(1) }}",
    "set item": "{{ messages[0].update({'role': 'x'}) }}",
    "import": "{% import 'os' as os %}",
}


@pytest.mark.parametrize("source", ESCAPES.values(), ids=list(ESCAPES))
def test_the_sandbox_holds(source):
    messages = [dict(SAY[0])]
    try:
        # What the sandbox does not let through is an error, or undefined, which prints as nothing.
        assert ChatTemplate({"default": source}).render(messages) == ""
    except InvalidRequestError as error:
        assert str(error).startswith("chat template")
    assert messages == SAY


def test_errors_are_short_and_the_requests_fault():
    with pytest.raises(InvalidRequestError, match="chat template: roles must alternate"):
        ChatTemplate({"default": "{{ raise_exception('roles must alternate') }}"}).render(SAY)
    with pytest.raises(InvalidRequestError, match="does not compile"):
        ChatTemplate({"default": "{% if %}"}).render(SAY)
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate({"default": "{{ raise_exception('x' * 5000) }}"}).render(SAY)
    assert len(str(caught.value)) < 300
    with pytest.raises(InvalidRequestError, match="limit 1048576"):
        ChatTemplate({"default": "x" * (1 << 21)}).render(SAY)


CLOSED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</end>\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.mark.parametrize("content", ["Once upon", "e", "n", "two \n", "</end>"])
def test_an_answer_goes_on_from_the_last_message(content: str):
    made = ChatTemplate({"default": CLOSED})
    said = [*SAY, {"role": "assistant", "content": content}]
    text = made.render(said, add_generation_prompt=False, continue_final_message=True)
    assert text == made.render(SAY, add_generation_prompt=False) + f"<assistant>{content}"
    with pytest.raises(InvalidRequestError, match="needs add_generation_prompt=false"):
        made.render(said, continue_final_message=True)
    for last in ({"role": "assistant", "content": ""}, {"role": "assistant", "content": [1]}, {"role": "assistant"}):
        with pytest.raises(InvalidRequestError, match="a last message with text"):
            made.render([*SAY, last], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="does not show the last message"):
        ChatTemplate({"default": "x"}).render(said, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("messages", [[], "hi", [1], [{}], [{"role": 3}], None])
def test_messages_are_checked(messages):
    with pytest.raises(InvalidRequestError, match="messages"):
        ChatTemplate({"default": "x"}).render(messages)


def test_ordinary_numbers_are_no_limit():
    source = "{{ '{} {:>5}'.format(1700000000, 3) }}{{ ' %d %s' % (1700000000, 'x') }}{{ '12345'.split('3') }}"
    assert ChatTemplate({"default": source}).render(SAY) == "1700000000     3 1700000000 x['12', '45']"


def test_a_long_conversation_fits_the_budget():
    messages = [{"role": "user", "content": "word " * 500}] * 2000
    text = ChatTemplate({"default": CHATML}).render(messages)
    assert len(text) > 5_000_000
