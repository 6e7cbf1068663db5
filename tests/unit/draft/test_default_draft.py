"""Which draft a command line takes when it names none, and how one gets into the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.ship_draft import main as ship
from slipstream.benchmark.accept import add_arguments, drafting_options
from slipstream.cli.options import Parser, add_engine_options, engine_options
from slipstream.draft import default
from slipstream.draft.default import default_draft, with_default_draft
from slipstream.draft.detect import kind_of
from slipstream.errors import ConfigError
from slipstream.models.default import HUB_ID, packaged_gguf

TRAINING = {
    "kind": "eagle3", "target": "m.gguf", "steps": 5, "batch": 2, "lr": 0.1, "seed": 3, "conversations": 7,
    "answer_tokens": 70, "data": "self-generated", "acceptance": [0.5],
}  # fmt: skip


@pytest.fixture()
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(default, "FOLDER", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "model.safetensors").touch()
    return tmp_path / "shipped"


def options(*argv: str) -> dict[str, Any]:
    parser = Parser(prog="x")
    add_engine_options(parser)
    return engine_options(parser.parse_args(argv))


def test_the_default_model_gets_it(folder: Path) -> None:
    draft = str(folder)
    assert options() == {"draft": draft, "adaptive": True}
    assert options("--num-drafts", "2") == {"draft": draft, "adaptive": True, "num_drafts": 2}
    assert options("--model", HUB_ID) == {"model": HUB_ID, "draft": draft, "adaptive": True}
    packaged = packaged_gguf()
    if packaged is not None:
        assert options("--model", str(packaged))["draft"] == draft
    tree = {"topk": 4, "levels": 3, "total": 8}
    assert options("--draft-tree", "4,3,8") == {"draft": draft, "draft_tree": tree}


def test_whoever_names_a_draft_or_a_model_decides(folder: Path) -> None:
    assert options("--draft", "none") == {"draft": "none"}
    assert options("--draft", "ngram") == {"draft": "ngram"}
    assert options("--num-drafts", "0") == {"num_drafts": 0}
    assert options("--model", "some/other") == {"model": "some/other"}
    assert options("--load-format", "dummy") == {"load_format": "dummy"}
    for argv in (["--num-drafts", "2"], ["--adaptive"], ["--draft-tree", "4,3,8"]):
        with pytest.raises(ConfigError, match="needs a drafter"):
            options("--model", "some/other", *argv)
    with pytest.raises(ConfigError, match="confidence-schedule needs a draft"):
        options("--confidence-schedule")


def test_a_package_without_it_drafts_as_before(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert options() == {} and default_draft(None) is None
    assert with_default_draft({"draft_tree": {}}) == {"draft_tree": {}}


def test_bench_accept(folder: Path) -> None:
    def drafting(*argv: str) -> dict[str, Any]:
        parser = Parser(prog="x")
        add_arguments(parser)
        return drafting_options(parser.parse_args(["--prompts", "p", *argv]))

    assert drafting() == {"draft": str(folder), "adaptive": True}
    assert drafting("--draft", "d", "--num-drafts", "4") == {"draft": "d", "num_drafts": 4}
    assert drafting("--draft", "d", "--adaptive") == {"draft": "d", "adaptive": True}
    with pytest.raises(ConfigError, match="--draft is missing"):
        drafting("--model", "some/other")


def test_shipping_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft, to = tmp_path / "draft", tmp_path / "to"
    draft.mkdir()
    values = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 99, "intermediate_size": 12}
    (draft / "config.json").write_text(json.dumps({**values, "slipstream_training": TRAINING}))
    (draft / "model.safetensors").write_bytes(bytes(1_000_000))
    rows = [
        {"category": c, "prompts": n, "acceptance_length": t, "conditional_acceptance": [t - 1, 0.25]}
        for c, n, t in (("math", 2, 1.75), ("all", 3, 1.5))
    ]
    results = {
        "hardware": "a machine", "versions": {"torch": "2.11"}, "command": "slipstream bench accept",
        "train": ["slipstream train eagle3 --out x", "slipstream train dspark --out y"],
        "runs": {"n-gram k=4": [], "eagle3 k=3": rows, "eagle3 tree": rows},
    }  # fmt: skip
    (tmp_path / "r.json").write_text(json.dumps(results))
    argv = [str(draft), "--results", str(tmp_path / "r.json"), "--folder", str(to)]
    assert ship(argv) == 0
    made = json.loads((to / "config.json").read_text())
    assert made["slipstream_training"]["acceptance"] == [0.5, 0.25], "of all categories, of the first run"
    assert kind_of(made, to) == "eagle3" and (to / "model.safetensors").stat().st_size == 1_000_000
    card = (to / "README.md").read_text()
    assert "| math | 2 | 1.75 | 1.75 |" in card and "train eagle3 --out x" in card and "dspark" not in card
    assert "seed 3" in card and "1.0 MB" in card and "m.gguf" not in (to / "config.json").read_text()
    (draft / "model.safetensors").write_bytes(bytes(20_000_001))
    for bad in (argv, [*argv, "--kind", "dspark"]):
        with pytest.raises(SystemExit):
            ship(bad)
    assert "above 20 MB" in capsys.readouterr().err


def test_what_is_in_the_package_is_whole() -> None:
    folder = default.FOLDER
    if default_draft(None) is None:
        pytest.skip("the package has no draft for the default model")
    values = json.loads((folder / "config.json").read_text())
    assert values["slipstream_training"]["acceptance"] and (folder / "README.md").is_file()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 20_000_000
