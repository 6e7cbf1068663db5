"""Audit cells with pictures, as far as a CPU can show them: the model's folder, the batch, what fails a cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM
from slipstream.benchmark import audit_cells
from slipstream.models.config import parse_hf_config
from tests.support.pictures import axes
from tests.support.tiny import write_tiny_checkpoint


def test_a_model_without_pictures_gets_three_axes() -> None:
    """The shape that is audited: the sections of its release, a third of the pairs each."""
    source = Path(__file__).parents[3] / "bench" / "configs" / "qwen3.5-9b"
    before = parse_hf_config(json.loads((source / "config.json").read_text()))
    with audit_cells.with_pictures(str(source)) as folder:
        config = parse_hf_config(json.loads((Path(folder) / "config.json").read_text()))
        assert Path(folder).name == source.name
    assert not Path(folder).exists()
    assert config.vision is not None and config.rope.sections == (11, 11, 10) and config.rope.interleaved
    assert (config.rope.theta, config.rope.partial) == (before.rope.theta, before.rope.partial)
    assert config.layer_types == before.layer_types and config.hidden_size == before.hidden_size


def test_a_model_with_pictures_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = str(write_tiny_checkpoint(tmp_path / "m", **axes(2, 1, 1)))
    with audit_cells.with_pictures(folder) as same:
        assert same == folder


@pytest.mark.parametrize("batch", [1, 4])
def test_half_of_a_batch_has_pictures(tmp_path: Path, batch: int) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", "qwen3_5_text", seed=6)
    with audit_cells.with_pictures(str(folder)) as seeing, LLM(
        model=seeing, device="cpu", max_slots=4, max_model_len=256
    ) as llm:  # fmt: skip
        embeds = llm._built.device.embeds
        for turn in (0, 1):
            requests = audit_cells._start(llm, batch, "greedy", pictures=True, turn=turn)
            media = [s.request.media is not None for s in llm._engine.scheduler.running.values()]
            assert len(requests) == len(media) == batch and sum(media) == (batch + 1) // 2
            audit_cells._end(llm, requests)
            assert embeds.rows == (turn + 1) * sum(media) * 64, "nothing came from the prefix cache"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"findings": {"host-read": 2}}, "host-read x2 while prompts are read"),
        ({"pageable_copies": 3}, "pageable_copies 3 while"),
        ({"stream_syncs": 1}, "stream_syncs 1 while"),
        ({"embeddings": 0}, "no embedding went up"),
    ],
)
def test_what_fails_a_cell_while_its_prompts_are_read(change: dict[str, Any], message: str | None) -> None:
    counts = dict.fromkeys(
        ("stream_syncs", "device_syncs", "pageable_copies", "allocations", "pinned_allocations", "driver_allocations"),
        0,
    )
    reading = {"findings": {}, "embeddings": 64, **counts, **change}
    cell = {
        "findings": {}, **counts, "recompiles": 0, "event_waits_per_frame": 1, "graph_launches_per_frame": 1,
        "reading": reading,
    }  # fmt: skip
    found = audit_cells.failures(cell, host_us=None, idle_between=None)
    assert (found == []) if message is None else (len(found) == 1 and message in found[0])
