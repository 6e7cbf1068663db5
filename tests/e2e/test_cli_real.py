"""The command line on real (tiny) models: its JSON, and one short line for whatever a user gets wrong."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.cli import main
from tests.support.kit import VOCAB, tiny_model_dir
from tests.support.tiny import write_tiny_checkpoint
from tests.support.tiny_gguf import write_tiny_gguf

REPO = Path(__file__).resolve().parents[2]
CONTEXT = 512


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models, good and broken, each named for what it is."""
    root = tmp_path_factory.mktemp("models")
    good = tiny_model_dir(root / "good", seed=1)
    config, weights = (good / "config.json").read_text(), (good / "model.safetensors").read_bytes()

    def variant(name: str, *, config: str = config, weights: bytes | None = weights) -> None:
        (root / name).mkdir()
        (root / name / "config.json").write_text(config)
        if weights is not None:
            (root / name / "model.safetensors").write_bytes(weights)

    variant("empty-config", config="")
    variant("empty-object", config="{}")
    variant("list-config", config="[1]")
    variant("no-weights", weights=None)
    variant("truncated", weights=weights[: len(weights) // 2])
    variant("header-cut", weights=weights[:100])
    variant("empty-weights", weights=b"")
    variant("garbage", weights=bytes(range(256)) * 8)
    variant("huge-header", weights=struct.pack("<Q", 1 << 60) + weights[8:])
    variant("unknown-architecture", config=json.dumps({**json.loads(config), "architectures": ["MambaForCausalLM"]}))
    variant("gptq", config=json.dumps({**json.loads(config), "quantization_config": {"quant_method": "gptq"}}))
    variant("zero-heads", config=json.dumps({**json.loads(config), "num_attention_heads": 0}))
    write_tiny_checkpoint(root / "wide", seed=1, vocab_size=VOCAB + 32)
    (root / "folder-of-nothing").mkdir()

    write_tiny_gguf(root / "good.gguf")
    data = (root / "good.gguf").read_bytes()
    (root / "truncated.gguf").write_bytes(data[: len(data) // 2])
    (root / "cut-in-header.gguf").write_bytes(data[:40])
    (root / "empty.gguf").write_bytes(b"")
    (root / "garbage.gguf").write_bytes(b"GGUF" + bytes(range(200)))
    (root / "not-a-gguf.gguf").write_bytes(b"hello world, this is not a model" * 4)
    return root


IDS = ["--prompt-ids", "1,2,3"]
BAD_MODELS = {
    "nowhere": "nowhere",
    "folder-of-nothing": "config.json",
    "empty-config": "config.json",
    "empty-object": "config.json|architectures",
    "list-config": "config.json",
    "no-weights": "safetensors",
    "truncated": "model.safetensors",
    "header-cut": "model.safetensors",
    "empty-weights": "model.safetensors",
    "garbage": "model.safetensors",
    "huge-header": "model.safetensors",
    "unknown-architecture": "MambaForCausalLM",
    "gptq": "gptq",
    "zero-heads": "heads=0",
    "truncated.gguf": "truncated.gguf",
    "cut-in-header.gguf": "cut-in-header.gguf",
    "empty.gguf": "empty.gguf",
    "garbage.gguf": "garbage.gguf",
    "not-a-gguf.gguf": "not-a-gguf.gguf",
    "nowhere.gguf": "nowhere.gguf",
}
BAD_OPTIONS: dict[str, tuple[list[str], list[str]]] = {
    "prompt longer than the context": (["--prompt-ids", ",".join(["1"] * CONTEXT)], [f"{CONTEXT}", f"{CONTEXT - 1}"]),
    "id out of range": (["--prompt-ids", f"1,{VOCAB}"], [f"{VOCAB}", f"{VOCAB - 1}"]),
    "max_tokens beyond the context": ([*IDS, "--max-tokens", "510"], ["max_tokens=510", "509"]),
    "max_tokens negative": ([*IDS, "--max-tokens", "-1"], ["max_tokens=-1"]),
    "max_tokens huge": ([*IDS, "--max-tokens", "9" * 30], ["max_tokens=99", "2147483647"]),
    "temperature negative": ([*IDS, "--temperature", "-1"], ["temperature=-1"]),
    "temperature nan": ([*IDS, "--temperature", "nan"], ["temperature=nan"]),
    "top-p nan": ([*IDS, "--top-p", "nan"], ["top_p=nan"]),
    "min-p above 1": ([*IDS, "--min-p", "1.5"], ["min_p=1.5", "1"]),
    "top-k below -1": ([*IDS, "--top-k", "-7"], ["top_k=-7"]),
    "unknown drafter": ([*IDS, "--draft", "medusa"], ["draft='medusa'", '"ngram"']),
    "absurd num_drafts": ([*IDS, "--draft", "ngram", "--num-drafts", "100000"], ["100000", "31"]),
    "run-ahead of 0": ([*IDS, "--run-ahead", "0"], ["run-ahead 0", "1"]),
    "run-ahead absurd": ([*IDS, "--run-ahead", "65"], ["run_ahead=65", "64"]),
    "context too long": ([*IDS, "--max-model-len", "513"], ["513", "512"]),
    "unknown option": ([*IDS, "--nope"], ["--nope"]),
    "stop without a tokenizer's text": ([*IDS, "--stop", ""], ["stop="]),
    "chat without a template": (["hello", "--system", "x"], ["chat template"]),
}


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def assert_one_line(code: int, out: str, err: str) -> None:
    assert code == 2, err
    assert out == ""
    assert err.startswith("slipstream: error: ") and err.count("\n") == 1
    assert "Traceback" not in err and len(err) < 500


@pytest.mark.parametrize("name, says", BAD_MODELS.items(), ids=BAD_MODELS.keys())
@pytest.mark.parametrize("role", ["model", "draft"])
def test_bad_models(models: Path, name: str, says: str, role: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(models / name)
    argv = ["--model", path] if role == "model" else ["--model", str(models / "good"), "--draft", path]
    code, out, err = run(["generate", *IDS, *argv, "--max-tokens", "2"], capsys)
    assert_one_line(code, out, err)
    assert any(word in err for word in says.split("|")), err
    assert role == "model" or "draft=" in err or name in ("gptq", "unknown-architecture"), err


@pytest.mark.parametrize("argv, says", BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_options(models: Path, argv: list[str], says: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["generate", *argv, "--model", str(models / "good")], capsys)
    assert_one_line(code, out, err)
    assert all(word in err for word in says), err


def test_a_draft_with_another_vocabulary(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", *IDS, "--model", str(models / "good"), "--draft", str(models / "wide")]
    code, out, err = run(argv, capsys)
    assert_one_line(code, out, err)
    assert f"{VOCAB + 32}" in err and f"{VOCAB}" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("command", [["generate", *IDS], ["bench", "decode"]])
def test_no_gpu(models: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run([*command, "--model", str(models / "good"), "--device", "cuda"], capsys)
    assert_one_line(code, out, err)
    assert "cuda" in err and "cpu" in err


def test_stdin_that_is_not_utf8(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w1 \xff"), encoding="utf-8"))
    code, out, err = run(["generate", "-", "--model", str(models / "good")], capsys)
    assert_one_line(code, out, err)
    assert "UTF-8" in err and "0xff" in err


BENCH = ["bench", "decode", "--load-format", "dummy"]


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--batch", "0"], "--batch 0"),
        (["--batch", "1,x"], "'1,x'"),
        (["--prompt-len", "-3"], "--prompt-len -3"),
        (["--output-len", "100000"], "100"),
        (["--draft", "ngram", "--synthetic-acceptance", "nan"], "nan"),
        (["--draft", "ngram", "--synthetic-acceptance", "9"], "synthetic_acceptance=9"),
        (["--draft", "ngram", "--num-drafts", "1000"], "num_drafts=1000"),
        (["--run-ahead", "0"], "run_ahead=0"),
    ],
    ids=str,
)
def test_bad_bench_options(models: Path, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run([*BENCH, "--model", str(models / "good"), "--json", *argv], capsys)
    assert_one_line(code, out, err)
    assert says in err


# -- what comes out when all is well ---------------------------------------------------------------------------


def generate_json(models: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    code, out, err = run(["generate", "--json", "--model", str(models / "good"), *argv], capsys)
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert out.count("\n") == 1
    return result


def test_json_is_complete(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = generate_json(models, capsys, "w1 w2 w3", "--max-tokens", "20", "--ignore-eos", "--dtype", "float64")
    assert set(plain) == {"text", "token_ids", "prompt_token_ids", "finish_reason", "usage", "spec"}
    assert plain["prompt_token_ids"] == [1, 2, 3] and len(plain["token_ids"]) == 20
    assert plain["text"].split() == [f"w{i}" for i in plain["token_ids"]]
    assert plain["finish_reason"] == "length"
    assert plain["usage"] == {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}
    spec = {"rounds", "drafted", "accepted", "acceptance_length", "accepted_per_position"}
    assert spec <= set(plain["spec"]) and plain["spec"]["drafted"] == 0 and plain["spec"]["acceptance_length"] == 1
    drafted = generate_json(
        models,
        capsys,
        *IDS,
        "--max-tokens",
        "20",
        "--ignore-eos",
        "--dtype",
        "float64",
        "--draft",
        str(models / "good"),
    )
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["spec"]["accepted"] > 0 and drafted["spec"]["acceptance_length"] > 2


def test_seeds(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    law = [*IDS, "--temperature", "1", "--max-tokens", "20", "--dtype", "float64", "--ignore-eos"]
    first, second, other, ngram = (
        generate_json(models, capsys, *law, *more)["token_ids"]
        for more in (["--seed", "7"], ["--seed", "7"], ["--seed", "8"], ["--seed", "7", "--draft", "ngram"])
    )
    assert first == second == ngram != other


def test_the_stream_says_what_the_json_says(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["w4 w5", "--max-tokens", "12", "--ignore-eos", "--draft", "ngram"]
    want = generate_json(models, capsys, *argv)
    code, out, err = run(["generate", "--model", str(models / "good"), "--color", "never", *argv], capsys)
    assert (code, err) == (0, "")
    *text, last = out.rstrip("\n").split("\n")
    assert "\n".join(text).split() == want["text"].split()
    assert last.startswith("12 tokens, ") and "tok/s" in last and "acceptance length" in last
    colored = run(["generate", "--model", str(models / "good"), "--color", "always", *argv], capsys)[1]
    assert ("\x1b[" in colored) == (want["spec"]["accepted"] > 0)


def test_a_gguf_and_a_model_without_tokenizer(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("good.gguf", "wide"):
        argv = ["generate", "--json", *IDS, "--model", str(models / name), "--max-tokens", "5", "--ignore-eos"]
        code, out, err = run(argv, capsys)
        assert code == 0, err
        assert len(json.loads(out)["token_ids"]) == 5
    code, out, err = run(["generate", "w1", "--model", str(models / "wide")], capsys)
    assert_one_line(code, out, err)
    assert "tokenizer" in err


@pytest.mark.serial
def test_bench_decode_on_dummy_weights(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """config.json alone is enough; one valid JSON line per batch size."""
    (tmp_path / "config.json").write_text((models / "good" / "config.json").read_text())
    argv = [*BENCH, "--model", str(tmp_path), "--json", "--batch", "1,3", "--prompt-len", "8", "--output-len", "200",
            "--repeats", "1", "--threads", str(torch.get_num_threads())]  # fmt: skip
    for more, tau in (([], 1.0), (["--draft", str(tmp_path), "--synthetic-acceptance", "2.5"], 2.5)):
        for _ in range(3):  # its own refusal of a measurement that is all noise is allowed on a loaded machine
            code, out, err = run([*argv, *more], capsys)
            if code == 0:
                break
            assert "too little to measure" in err
        lines = [json.loads(line) for line in out.splitlines()]
        assert code == 0 and [line["batch"] for line in lines] == [1, 3]
        for line in lines:
            names = ("tpot_ms", "step_ms", "tok_s", "acceptance_length", "host_us_per_frame", "floor_ms")
            assert all(line[name] > 0 for name in names) and 0 < line["share_of_floor"] < 1
            assert line["acceptance_length"] == pytest.approx(tau, rel=0.1)
            assert line["load_format"] == "dummy" and line["dtype"]


def program(argv: list[str], data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    return subprocess.run(
        [sys.executable, "-m", "slipstream", *argv], input=data, capture_output=True, env=env, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "argv, data, says",
    [
        (["generate", "hi", "--model", "GOOD", "--temperature", "nan"], b"", b"temperature=nan"),
        (["generate", "-", "--model", "GOOD"], b"caf\xe9", b"0xe9"),
        (["generate", "w1", "--model", "TRUNCATED"], b"", b"model.safetensors"),
        (["generate", "w1", "--nope"], b"", b"--nope"),
        (["bench", "decode", "--model", "GOOD", "--draft", "ngram", "--num-drafts", "99"], b"", b"num_drafts=99"),
    ],
    ids=["nan", "stdin", "truncated", "option", "bench"],
)
def test_as_a_program(models: Path, argv: list[str], data: bytes, says: bytes) -> None:
    place = {"GOOD": str(models / "good"), "TRUNCATED": str(models / "truncated")}
    done = program([place.get(a, a) for a in argv], data)
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.count(b"\n") == 1 and b"Traceback" not in done.stderr and says in done.stderr


def test_a_whole_program_run(models: Path) -> None:
    done = program(["generate", "-", "--model", str(models / "good"), "--json", "--max-tokens", "4"], b"w1 w2\n")
    assert done.returncode == 0 and done.stderr == b""
    assert json.loads(done.stdout)["prompt_token_ids"] == [1, 2]
