"""Draft checkpoints, corpora and training runs that are damaged: every one is an error that names its place."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM
from slipstream.benchmark.accept import read_prompts as accept_prompts
from slipstream.cli import main
from slipstream.errors import ConfigError, ModelLoadError, SlipstreamError
from slipstream.train.corpus import Corpus
from slipstream.train.eagle3 import Eagle3Head
from slipstream.train.generate import read_prompts
from slipstream.train.loop import History, TrainOptions, export, train
from slipstream.train.teacher import Teacher
from tests.support.block_draft import write_block_draft
from tests.support.eagle import write_eagle3
from tests.support.kit import tiny_model_dir


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("damaged") / "target", seed=1)


@pytest.mark.parametrize(
    ("key", "value"), [("architectures", -1), ("architectures", {"a": 1}), ("layer_types", -1), ("layer_types", True)]
)
def test_block_config_of_wrong_types(target: Path, tmp_path: Path, key: str, value: Any) -> None:
    draft = write_block_draft(tmp_path / "d", target, "dspark", head="gated")
    values = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**values, key: value}))
    try:
        LLM(str(target), draft=str(draft)).close()  # a dspark config is known by other keys too
    except SlipstreamError as error:
        assert key in str(error)


def test_mask_of_ids_in_a_narrow_type(target: Path, tmp_path: Path) -> None:
    draft = write_eagle3(tmp_path / "d", target, draft_vocab=24)
    tensors = load_file(draft / "model.safetensors")
    tensors["t2d"] = tensors["t2d"].float().to(torch.float8_e4m3fn)
    save_file(tensors, draft / "model.safetensors")
    LLM(str(target), draft=str(draft)).close()


@pytest.mark.parametrize(
    "options",
    [{"gate": "x"}, {"gate": -1}, {"min_n": "2"}, {"row_cost": []}, {"row_cost": 3}, {"row_cost": ["a", "b"]}],
)
def test_ngram_options_of_wrong_types(target: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        LLM(str(target), draft="ngram", draft_options=options)


@pytest.mark.parametrize("read", [lambda p: read_prompts(p), lambda p: accept_prompts(p, None)])
def test_prompt_files_that_are_no_text(tmp_path: Path, read: Any) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe"}\n')
    with pytest.raises(ConfigError, match="cannot be read"):
        read(path)
    path.write_text('{"prompt": ' + "[" * 100_000 + "\n")
    with pytest.raises(ConfigError, match="line 1"):
        read(path)
    with pytest.raises(ConfigError, match="gone"):
        read(tmp_path / "gone")


def corpus() -> Corpus:
    return Corpus.pack([([1, 2], [3, 4, 5, 6]), ([5], [6, 7, 8])], 16)


def test_damaged_corpora(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    corpus().save(path)
    assert len(Corpus.load(path)) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]
    whole, tensors = path.read_bytes(), load_file(path)
    for size in (0, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"c\.safetensors"):
            Corpus.load(path)
    for changes in (
        {"length": tensors["length"] + 1},
        {"length": tensors["length"][:1].clone()},
        {"prompt_length": tensors["prompt_length"] + 100},
        {"prompt_length": tensors["prompt_length"] - 100},
        {name: value[:0].clone() for name, value in tensors.items()},
    ):
        save_file({**tensors, **changes}, path)
        with pytest.raises(ConfigError, match=r"c\.safetensors"):
            Corpus.load(path)
    with pytest.raises(ConfigError, match="no answer is left"):
        Corpus.pack([], 16).save(path)


@pytest.mark.parametrize(
    "options", [{"time_limit": 0.0}, {"time_limit": float("nan")}, {"checkpoint_every": -1}, {"steps": 0}]
)
def test_training_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        TrainOptions(**options)


def test_train_command_says_what_is_wrong(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "file", tmp_path / "out"
    file.write_text("x")
    common = ["train", "dspark", "--model", str(target), "--out"]
    cases = [
        ([*common, str(file)], "--out"),
        ([*common, str(out), "--block-size", "0"], "--block-size 0"),
        ([*common, str(out), "--markov-rank", "0"], "--markov-rank 0"),
        ([*common, str(out), "--kv-heads", "0"], "--kv-heads 0 must be at least 1"),
        ([*common, str(out), "--heads", "6", "--kv-heads", "4"], "--kv-heads 4 must divide the draft's heads, 6"),
        ([*common, str(out), "--held-out", "0"], "--held-out 0"),
        ([*common, str(out), "--corpus", str(file)], "not a readable safetensors file"),
    ]
    for argv, message in cases:
        assert main(argv) == 2
        assert message in capsys.readouterr().err
    Corpus.pack([([1, 2], [3, 4, 100_000])] * 3, 16).save(out / "corpus.safetensors")
    assert main([*common, str(out), "--held-out", "1", "--taps", "0", "--device", "cpu"]) == 2
    assert "another model" in capsys.readouterr().err


def test_a_full_disk_ends_training_in_one_line(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    corpus().save(out / "corpus.safetensors")
    argv = [sys.executable, "-m", "slipstream.cli", "train", "eagle3", "--model", str(target), "--out", str(out)]
    argv += [
        "--held-out",
        "1",
        "--taps",
        "0,1",
        "--steps",
        "1",
        "--batch",
        "1",
        "--device",
        "cpu",
        "--draft-vocab",
        "8",
    ]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = subprocess.run(argv, preexec_fn=limit, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 74, done.stderr
    assert "Traceback" not in done.stderr and "cannot write the output" in done.stderr
    assert not list(out.rglob("state-*")), "half of a checkpoint was left"
    shutil.rmtree(out / "state", ignore_errors=True)


def test_a_damaged_state_is_named(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    (out / "state").mkdir(parents=True)
    corpus().save(out / "corpus.safetensors")
    argv = ["train", "eagle3", "--model", str(target), "--out", str(out), "--held-out", "1", "--taps", "0,1"]
    whole = {"step": 0, "tensors": "state-0.safetensors", "identity": {}, "history": asdict(History())}
    changes: list[dict[str, Any]] = [
        {"step": "0"}, {"step": -1}, {"tensors": 3}, {"tensors": "../state-0.safetensors"}, {"identity": []},
        {"history": {}}, {"history": {**whole["history"], "more": 1}}, {"history": {**whole["history"], "loss": 1}},
    ]  # fmt: skip
    texts = [json.dumps({**whole, **change}) for change in changes]
    texts += [json.dumps({n: v for n, v in whole.items() if n != name}) for name in whole]
    for text in ("", "{", "[]", "{}", '"step"', *texts):
        (out / "state" / "state.json").write_text(text)
        assert main([*argv, "--steps", "1", "--device", "cpu", "--draft-vocab", "8"]) == 2
        assert "is damaged" in capsys.readouterr().err


def test_tensors_of_a_state_that_are_not_the_drafts(target: Path, tmp_path: Path) -> None:
    teacher = Teacher.load(str(target), taps=(0,), device="cpu", dtype="float32")
    options, folder = TrainOptions(steps=2, batch=2, checkpoint_every=1), tmp_path / "state"

    def run() -> None:
        train(Eagle3Head(teacher, torch.arange(8), steps=1), teacher, corpus(), options, folder=folder)

    run()
    (path,) = folder.glob("state-*.safetensors")
    tensors = load_file(path)
    for name, message in (
        ("param.fc.weight", "param.fc.weight is missing"),
        ("exp_avg.fc.weight", "exp_avg.fc.weight is missing"),
        ("generator", "lacks 'generator'"),
    ):
        save_file({n: t for n, t in tensors.items() if n != name}, path)
        with pytest.raises(ConfigError, match=message):
            run()
    save_file({**tensors, "param.fc.weight": tensors["param.fc.weight"][:1].clone()}, path)
    with pytest.raises(ConfigError, match=r"param.fc.weight has shape \[1, 32\], not \[32, 32\]"):
        run()
    save_file(tensors, path)
    run()


def test_an_export_that_is_stopped_leaves_the_last_config(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = Eagle3Head(Teacher.load(str(target), taps=(0,), device="cpu", dtype="float32"), torch.arange(8), steps=1)
    config = export(head, tmp_path / "d") / "config.json"
    before = config.read_text()
    real = Path.write_text

    def full(self: Path, text: str, **options: Any) -> int:
        real(self, text[: len(text) // 2], **options)
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        export(head, tmp_path / "d", {"more": 1})
    monkeypatch.undo()
    assert config.read_text() == before
    assert sorted(p.name for p in config.parent.iterdir()) == ["config.json", "model.safetensors"]


def test_matplotlib_is_missed_before_anything_runs(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slipstream.train.plot.find_spec", lambda name: None)
    monkeypatch.setattr("slipstream.benchmark.accept.find_spec", lambda name: None)
    assert main(["train", "eagle3", "--model", str(target), "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'slipstream[train]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "one two"}\n')
    plot = ["--plot", str(tmp_path / "x.png")]
    argv = ["bench", "accept", "--model", str(target), "--draft", "ngram", "--prompts", str(prompts), *plot]
    assert main(argv) == 2
    assert "pip install 'slipstream[bench]'" in capsys.readouterr().err


def test_a_cut_draft_is_an_error(target: Path, tmp_path: Path) -> None:
    eagle = write_eagle3(tmp_path / "e", target, draft_vocab=24)
    for draft in (eagle, write_block_draft(tmp_path / "f", target, "dflash")):
        path = draft / "model.safetensors"
        whole = path.read_bytes()
        for size in (0, 7, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:size])
            with pytest.raises(ModelLoadError, match="safetensors") as caught:
                LLM(str(target), draft=str(draft))
            assert str(caught.value).startswith(f"draft={str(draft)!r}: "), "nobody misspelt ngram here"
    with pytest.raises(ModelLoadError, match=r"draft='ngrams' is neither \"ngram\", \"suffix\", \"mtp\" nor a draft: "):
        LLM(str(target), draft="ngrams")
