"""Steady decode of a tiny model under the auditor: nothing waits, copies, allocates or compiles, in any cell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.benchmark.audit_cells import SAMPLING, Frames, engine, failures, run_cell
from tests.support.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.gpu

FRAMES = Frames(watched=8, traced=8, timed=16)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "ngram"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    # Wide enough that a frame takes the device longer than the profiler takes the host.
    folder: Path = write_tiny_checkpoint(
        tmp_path_factory.mktemp("cells") / "m", seed=1, hidden_size=256, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, intermediate_size=512, vocab_size=512, num_hidden_layers=4, max_position_embeddings=1024,
    )  # fmt: skip
    with engine(str(folder), (1, 8), FRAMES, draft=request.param, dtype="bfloat16") as built:
        yield built


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("sampling", list(SAMPLING))
def test_a_cell_is_clean(llm: Any, sampling: str, batch: int, tmp_path: Path) -> None:
    cell = run_cell(llm, batch=batch, sampling=sampling, frames=FRAMES, trace=tmp_path / "trace.json")
    # Times of a tiny model say nothing: its frame is shorter than the profiler's own work.
    assert not failures(cell, host_us=None, idle_between=None), cell
    assert cell["traced_frames"] == FRAMES.traced and cell["kernels_per_frame"] > 10
    assert list(cell["allowed"].values()) == [{"event-wait": FRAMES.watched}]
    assert (tmp_path / "trace.json").stat().st_size > 10_000


def test_a_wait_in_the_step_is_seen(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one value read per launch."""
    device = llm._built.device
    launch = device.launch

    def slow(plan: Any) -> None:
        launch(plan)
        int(device.frame.state.committed_S[1])

    monkeypatch.setattr(device, "launch", slow)
    cell = run_cell(llm, batch=1, sampling="greedy", frames=FRAMES)
    assert cell["findings"]["host-read"] == FRAMES.watched and cell["stream_syncs"] == FRAMES.traced
    assert cell["drained_frames"] > 0 and failures(cell, host_us=None, idle_between=None)
