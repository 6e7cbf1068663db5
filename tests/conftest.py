"""Shared by all tests: the golden folder, the GPU mark, hypothesis profiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPO = Path(__file__).resolve().parent.parent

# Wall-clock limits of hypothesis are noise on a shared machine; pytest-timeout guards against hangs.
settings.register_profile(
    "default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("soak", parent=settings.get_profile("default"), max_examples=2000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def golden_root() -> Path | None:
    """$SLIPSTREAM_GOLDEN, else ../shared/golden beside the repository; None when that is no folder."""
    named = os.environ.get("SLIPSTREAM_GOLDEN")
    folder = Path(named) if named else REPO.parent / "shared" / "golden"
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Folder of the golden cases; the test is skipped where there is none."""
    folder = golden_root()
    if folder is None:
        pytest.skip("no golden folder: set SLIPSTREAM_GOLDEN")
    return folder


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured in tests stays out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """tests/data: small files that the project made itself."""
    return REPO / "tests" / "data"


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def is_golden(item: pytest.Item) -> bool:
    return "golden_dir" in getattr(item, "fixturenames", ()) or "golden" in Path(item.nodeid).parts


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """On CI a golden test that skips although the folder is there has lost its meaning: it fails."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        needs_gpu = item.get_closest_marker("gpu") is not None and not _cuda()
        if is_golden(item) and not needs_gpu and golden_root() is not None:
            report.outcome = "failed"
            report.longrepr = f"golden test skipped on CI although {golden_root()} is there: {report.longrepr}"
    return report
