"""What is deployed beside the code: dashboard, image, promises about security. They name only what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def test_the_dashboard_asks_for_every_documented_metric_and_no_other() -> None:
    board = json.loads((REPO / "deploy" / "grafana.json").read_text())
    asked = set()
    for panel in board["panels"]:
        assert panel["targets"] and panel["title"]
        for target in panel["targets"]:
            asked |= {re.sub("_bucket$", "", name) for name in re.findall(r"slipstream_\w+", target["expr"])}
    documented = set(re.findall(r"`(slipstream_\w+)`", (REPO / "docs" / "serving.md").read_text()))
    assert asked == documented


def test_the_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in json.loads((REPO / "deploy" / "grafana.json").read_text())["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, (panel["title"], taken.get((x, y)))
                taken[x, y] = panel["title"]


def test_the_image_copies_what_there_is_and_serves_with_options_that_exist() -> None:
    pytest.importorskip("tomllib")
    import tomllib

    from slipstream.cli.serve import parser

    text = (REPO / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.*)", text, re.M):
        for source in line.split()[:-1]:
            assert (REPO / source).exists(), source
    assert re.search(r"^USER (?!root)", text, re.M)
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)", text, re.M)[1])
    assert entry[:2] == ["slipstream", "serve"]
    assert parser().parse_args(entry[2:]).host == "0.0.0.0"
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.search(r"'\.\[(.*)\]'", text)[1].split(",")) <= set(extras)


def test_the_promises_about_caps_are_the_real_ones() -> None:
    pytest.importorskip("fastapi")
    from slipstream.server.guard import BODY_SECONDS, MAX_BODY_BYTES
    from slipstream.server.serve import MAX_HEADER_BYTES

    text = (REPO / "SECURITY.md").read_text()
    said = f"bodies {MAX_BODY_BYTES >> 20} MiB and {BODY_SECONDS:.0f} s, headers {MAX_HEADER_BYTES >> 10} KiB"
    assert said in text
