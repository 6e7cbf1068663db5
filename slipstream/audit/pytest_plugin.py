"""`@pytest.mark.no_sync`: the test fails if its body waits for the device.

    @pytest.mark.no_sync                       # the CUDA device
    @pytest.mark.no_sync(device="cpu", only=["step"])

Arguments are those of `slipstream.audit.watch`. Fixtures run outside the watch. Without CUDA a test that watches
"cuda" still reports explicit waits and copies seen by the dispatcher.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "no_sync(**options): the test body must not wait for the device (options of slipstream.audit.watch)"
    )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    marker = pyfuncitem.get_closest_marker("no_sync")
    if marker is None:
        return (yield)
    from slipstream.audit.runtime import watch

    if marker.args:
        raise pytest.UsageError(f"no_sync takes keyword arguments only, got {marker.args!r}")
    watched = watch(name=pyfuncitem.name, **marker.kwargs)
    with watched:
        result = yield
    if not watched.report.ok:
        pytest.fail(watched.report.table(stacks=True), pytrace=False)
    return result
