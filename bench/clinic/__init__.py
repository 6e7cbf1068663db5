"""Before/after pairs: what each slow form costs on a GPU, and what its fix gives back.

    python -m bench.clinic [--json FILE] [--model DIR] [--only NAME,NAME]
    python -m bench.clinic --readme FILE.json

`CASES` is the registry. A pair that runs in the small decode loop of `loop.py` is added with `@pair` (`forms.py`), one
that puts a slow form back into a production function of the engine with `engine_case` (`founding.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.clinic.loop import Loop

Step = Callable[["Loop", int], Any]
"""One step of the decode loop: (loop, step number) -> tensors that before and after must agree on."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A slow form and its fix in the small decode loop. rule: what the auditor must call `before`.

    cold: the cost is paid while something is new (compilation, growth), so each measurement starts from a reset loop.
    provable: the proof without a GPU can see it.
    """

    name: str
    about: str
    rule: str
    before: Step
    after: Step
    cold: bool = False
    provable: bool = True


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """A slow form put back into a production function of the engine.

    before: a context manager that patches the function and puts it back. options: for `LLM`, besides the model;
    after_options: those of the fixed engine, where they differ. sampling: fields of the requests, which are greedy.
    """

    name: str
    about: str
    rule: str
    before: Callable[[], AbstractContextManager[None]]
    options: dict[str, Any] = field(default_factory=dict)
    after_options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Pair | EngineCase] = {}


def add(case: Pair | EngineCase) -> None:
    """Register a case. A name can be taken once."""
    if case.name in CASES:
        raise ValueError(f"clinic case {case.name!r} is there already")
    CASES[case.name] = case


def pair(name: str, *, rule: str, about: str, cold: bool = False, provable: bool = True) -> Callable[[type], type]:
    """Register a class whose static methods `before` and `after` are the two forms of one step."""

    def register(forms: Any) -> Any:
        add(
            Pair(
                name=name, about=about, rule=rule, before=forms.before, after=forms.after, cold=cold, provable=provable
            )
        )
        return forms

    return register


def engine_case(
    name: str,
    *,
    rule: str,
    about: str,
    options: dict[str, Any] | None = None,
    after_options: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
) -> Callable[[Callable[[], AbstractContextManager[None]]], Callable[[], AbstractContextManager[None]]]:
    """Register a context manager that puts a slow form back into a production function while it is open."""

    def register(before: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
        given = dict(options or {})
        add(
            EngineCase(
                name=name,
                about=about,
                rule=rule,
                before=before,
                options=given,
                after_options=given if after_options is None else dict(after_options),
                sampling=dict(sampling or {}),
            )
        )
        return before

    return register


def cases(only: list[str] | None = None) -> Iterator[Pair | EngineCase]:
    """All registered cases, engine cases first, or those named. Raises ValueError for a name that is not there."""
    from bench.clinic import forms, founding  # noqa: F401  (they fill the registry)

    for name in only or ():
        if name not in CASES:
            raise ValueError(f"no clinic case {name!r}; there are {', '.join(CASES)}")
    chosen = [c for c in CASES.values() if not only or c.name in only]
    yield from sorted(chosen, key=lambda c: isinstance(c, Pair))
