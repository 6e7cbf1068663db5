"""Registration of custom processors: tensor code is taken, everything else is refused with the reason."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.params import MAX_PROCESSORS
from slipstream.sampling.custom import GROUP, load_processors

VOCAB = 50


def softer(logits: Any, rows: Any) -> Any:
    return logits / (1 + rows.argument_R[:, None].to(logits.dtype))


def in_place(logits: Any, rows: Any) -> Any:
    return logits.scatter_(1, rows.token_R[:, None], float("-inf"))


def late_only(logits: Any, rows: Any) -> Any:
    late = rows.position_R - rows.prompt_len_R >= 5
    return torch.where(late[:, None], logits.softmax(-1).log(), logits)


@pytest.mark.parametrize("function", [softer, in_place, late_only])
def test_tensor_code_is_taken(function: Any) -> None:
    assert load_processors({"mine": function}, VOCAB) == {"mine": function}


REFUSED: dict[str, tuple[Any, str]] = {
    "reads a value": (lambda x, rows: x * float(x[0, 0].item()), "reads a tensor's value|item"),
    "branches": (lambda x, rows: x if bool((x > 0).any()) else -x, "reads a tensor's value|bool|branch"),
    "a list": (lambda x, rows: x + sum(x[0].tolist()), "reads a tensor's value|tolist"),
    "numpy": (lambda x, rows: torch.from_numpy(np.tanh(x.numpy())), "numpy|Fake"),
    "a literal": (lambda x, rows: x + torch.tensor([1.0] * VOCAB), "from Python values"),
    "random": (lambda x, rows: x + torch.rand_like(x), "global generator"),
    "nonzero": (lambda x, rows: x.index_fill(1, (x[0] > 0).nonzero()[:, 0], 0.0), "depends on data"),
    "a mask as index": (lambda x, rows: x.index_put((x > 0,), x.new_zeros(())) + x[x > 1].sum(), "depend"),
    "another shape": (lambda x, rows: x[:, :-1], "it returns"),
    "another type": (lambda x, rows: x.double(), "float64"),
    "nothing": (lambda x, rows: None, "it returns a NoneType"),
    "its neighbours": (lambda x, rows: x - x.mean(0), "rows beside it"),
    "no function": ("len", "it is a str"),
    "another signature": (lambda x: x, "TypeError"),
    "an error of its own": (lambda x, rows: x + rows.nothing, "AttributeError"),
}


@pytest.mark.parametrize(("function", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_everything_else_is_refused(function: Any, says: str) -> None:
    with pytest.raises(ConfigError, match="processor 'mine' cannot be captured") as error:
        load_processors({"mine": function}, VOCAB)
    assert re.search(says, str(error.value)) and "structured_outputs" in str(error.value)


def test_names_and_numbers_of_processors() -> None:
    for given in ("softer", 5, None):
        with pytest.raises(ConfigError, match="must be a list of names"):
            load_processors(given, VOCAB)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="named like a variable"):
        load_processors({"a b": softer}, VOCAB)
    with pytest.raises(ConfigError, match=f"the limit is {MAX_PROCESSORS}"):
        load_processors({f"p{i}": softer for i in range(MAX_PROCESSORS + 1)}, VOCAB)


class Point:
    name = "soft"

    def load(self) -> Any:
        return softer


class Broken(Point):
    name = "broken"

    def load(self) -> Any:
        raise ImportError("no such module")


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(*, group: str) -> list[Any]:
        assert group == GROUP
        return [Point(), Broken()]

    monkeypatch.setattr(importlib.metadata, "entry_points", points)
    assert load_processors(["soft"], VOCAB) == {"soft": softer}
    with pytest.raises(ConfigError, match=r"no processor 'hard' .* known: broken, soft"):
        load_processors(["hard"], VOCAB)
    with pytest.raises(ConfigError, match="does not load: ImportError"):
        load_processors(["broken"], VOCAB)
