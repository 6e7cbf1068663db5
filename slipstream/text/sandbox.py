"""The Jinja environment of chat templates: sandboxed, on a budget.

A template comes with a model file, so it is code from a stranger. The sandbox keeps it from Python's
internals; the budget keeps it from running or growing without end: loops and macro calls are counted,
and so are the strings that the template builds.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.filters
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_OUTPUT_CHARS = 1 << 24
MAX_STEPS = 400_000
MAX_SECONDS = 10.0

# Names that the rewritten template calls; a template that uses them itself is refused.
_TICK, _JOIN, _BUDGET = "_slipstream_tick", "_slipstream_join", "_slipstream_budget"


class LimitError(Exception):
    """A limit was reached; deliberately no jinja2 error, so that no template construct handles it."""


class Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.chars = MAX_OUTPUT_CHARS
        self.deadline = time.monotonic() + MAX_SECONDS

    def variables(self) -> dict[str, Any]:
        """What a rendering needs to be counted."""
        return {_BUDGET: self, _TICK: self.tick, _JOIN: self.join}

    def tick(self) -> str:
        self.steps -= 1
        if self.steps < 0:
            raise LimitError(f"more than {MAX_STEPS} steps")
        if self.steps % 256 == 0 and time.monotonic() > self.deadline:
            raise LimitError(f"more than {MAX_SECONDS:g} s")
        return ""

    def spend(self, chars: int) -> None:
        self.chars -= chars
        if self.chars < 0:
            raise LimitError(f"more than {MAX_OUTPUT_CHARS} characters")

    def join(self, *parts: Any) -> str:
        text = [str(p) for p in parts]
        self.spend(sum(map(len, text)))
        return "".join(text)


class _Counted(NodeTransformer):
    """Puts a tick at the head of every loop and macro body, and counts `~`."""

    def _with_tick(self, node: Any) -> Any:
        self.generic_visit(node)
        tick = nodes.ExprStmt(nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None))
        node.body.insert(0, tick)
        return node.set_lineno(node.lineno, override=False)

    visit_For = visit_CallBlock = _with_tick

    def visit_Macro(self, node: nodes.Macro) -> Any:
        _not_reserved(node.name, node.lineno)
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.Name(_JOIN, "load"), node.nodes, [], None, None)
        return call.set_lineno(node.lineno)

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        _not_reserved(node.name, node.lineno)
        return node


def _not_reserved(name: str, line: int) -> None:
    if name in (_TICK, _JOIN, _BUDGET):
        raise jinja2.TemplateSyntaxError(f"the name {name} is reserved", line)


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks the assistant's words; a prompt is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance variable)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@jinja2.pass_context
def _charge(context: Context, value: Any) -> Any:
    """Counts what `{{ }}` writes, into the prompt or into a block that is being captured."""
    budget = context.get(_BUDGET)
    if isinstance(budget, Budget):
        budget.tick()
        value = value if isinstance(value, str) else str(value)
        budget.spend(len(value))
    return value


class _Environment(ImmutableSandboxedEnvironment):
    # Operators with which a short template can ask for a huge value.
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(v) for v in (left, right) if isinstance(v, (str, bytes, list, tuple))]
        numbers = [abs(v) for v in (left, right) if isinstance(v, int)]
        if operator == "**" and (max(numbers, default=0) > 1000):
            raise LimitError("a power of numbers above 1000")
        if operator == "*" and sizes and numbers:
            _spend(context, sizes[0] * numbers[0])
        elif operator in "+%" and sizes:
            _spend(context, sum(sizes))
        if operator == "%" and isinstance(left, str):
            _bound_format(context, left, right if isinstance(right, tuple) else [right])
        if operator in ("*", "**") and len(numbers) == 2 and max(numbers).bit_length() > 4096:
            raise LimitError("a number of more than 4096 bits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = context.get(_BUDGET)
        if isinstance(budget, Budget):
            budget.tick()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format in a function
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str) and getattr(method, "__name__", "") in ("format", "format_map"):
            _bound_format(context, owner, [*args, *kwargs.values()])
        elif isinstance(owner, (str, bytes, int)):
            _bound(context, str(owner), *args, *kwargs.values())
        return super().call(context, obj, *args, **kwargs)


def _spend(context: Context, chars: int) -> None:
    budget = context.get(_BUDGET)
    if isinstance(budget, Budget):
        budget.spend(chars)


def _no_huge_number(text: str) -> None:
    """Refuses format strings with a width or precision of five digits or more."""
    run = 0
    for char in text:
        run = run + 1 if char.isdigit() else 0
        if run >= 5:
            raise LimitError("a format with a width above 9999")


def _bound(context: Context, text: str, *arguments: Any) -> None:
    """Charges the most that a string method or filter can build from `text` and its arguments."""
    worst = len(text)
    for value in arguments:
        if isinstance(value, int) and value > 100_000:
            raise LimitError(f"the argument {value}")
        worst += value if isinstance(value, int) and value > 0 else 0
    strings = [v for v in arguments if isinstance(v, str)]
    if len(strings) == 2:  # replace(old, new)
        worst += text.count(strings[0]) * len(strings[1])
    items = [v for v in arguments if isinstance(v, (list, tuple))]
    worst += sum(len(text) * len(v) + sum(len(str(x)) for x in v) for v in items)  # join
    _spend(context, worst)


def _bound_format(context: Context, text: str, arguments: Sequence[Any]) -> None:
    """As `_bound` for `%` and `format`: widths stand in the text or (`*`, nested braces) are arguments."""
    _no_huge_number(text)
    if "*" in text or re.search(r"\{[^{}]*\{", text):
        for value in arguments:
            _no_huge_number(str(value))
    fields = text.count("{") + text.count("%")
    _spend(context, len(text) + fields * (10_000 + sum(len(str(v)) for v in arguments)))


_FORMAT = jinja2.filters.FILTERS["format"]


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    """A built-in filter on strings whose result is charged beforehand."""

    def limited(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, str) and function is _FORMAT:
            _bound_format(context, value, [*args, *kwargs.values()])
        elif isinstance(value, str):
            _bound(context, value, *args, *kwargs.values())
        else:
            parts = list(value) if isinstance(value, (list, tuple)) else []
            _bound(context, str(args[0]) if args else "", parts)
        passes = getattr(function, "jinja_pass_arg", None)
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        lead = [first[passes.name]] if passes is not None else []
        return function(*lead, value, *args, **kwargs)

    return jinja2.pass_context(limited)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: unlike Jinja's own filter it does not escape HTML, which models have never seen."""
    if isinstance(indent, int) and indent > 16:
        raise LimitError(f"tojson(indent={indent})")
    options: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    _no_huge_number(layout)
    return datetime.now().strftime(layout)


def make_environment() -> jinja2.Environment:
    """An environment with the helpers that chat templates expect. Render with `Budget().variables()`."""
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_charge)
    env.filters["tojson"] = _tojson
    # Helpers whose cost is a number that the template picks, and that no chat template needs.
    for name in ("slice", "batch", "round"):
        del env.filters[name]
    del env.globals["lipsum"]
    for name in ("center", "indent", "join", "replace", "format", "wordwrap"):
        env.filters[name] = _limited(env.filters[name])
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env
