"""Models that end-to-end tests share; a file with models of its own kind overrides them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream import LLM
from tests.support.equality_cells import model_dirs
from tests.support.reference import DenseReference


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny target and its drafts."""
    return model_dirs(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(dirs: dict[str, Path]) -> DenseReference:
    """The target without a cache, in float64."""
    llm = LLM(model=str(dirs["target"]), dtype="float64", max_model_len=256)
    return DenseReference(llm._built.model)
