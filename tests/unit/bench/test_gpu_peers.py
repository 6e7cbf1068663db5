"""bench/gpu_peers.py with stand-ins for the engines: options, method, figures, table, errors."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_peers

STEP = 0.004
PREFILL = 0.1


class Clock:
    now = 0.0


class Fake:
    """Both engines' surface, as far as the driver uses it, on a clock of its own. tau tokens per round."""

    made: list[Any] = []
    tau = 1.0
    short_by = 0

    def __init__(self, **options: Any) -> None:
        self.options, self.drafts, self.accepted, self.calls = options, 0, 0, []
        Fake.made.append(self)

    def _run(self, count: int, tokens: int) -> int:
        self.calls.append((count, tokens))
        rounds = round((tokens - 1) / self.tau)
        Clock.now += PREFILL + rounds * STEP
        self.drafts += rounds * count
        self.accepted += round(rounds * (self.tau - 1)) * count
        return rounds


class FakeVLLM(Fake):
    def generate(self, prompts: list[dict[str, list[int]]], params: Any, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm and params.temperature == 0.0 and params.ignore_eos and not params.detokenize
        assert all(len(p["prompt_token_ids"]) == 128 for p in prompts)
        self._run(len(prompts), params.max_tokens)
        ids = [0] * (params.max_tokens - self.short_by)
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=ids)]) for _ in prompts]

    def get_metrics(self) -> list[Any]:
        return [
            types.SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.drafts),
            types.SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=self.accepted),
            types.SimpleNamespace(name="vllm:other", values=[1]),
        ]


class FakeSGLang(Fake):
    def generate(self, *, input_ids: list[list[int]], sampling_params: dict[str, Any]) -> list[dict[str, Any]]:
        assert sampling_params["temperature"] == 0.0 and sampling_params["ignore_eos"]
        tokens = sampling_params["max_new_tokens"]
        rounds = self._run(len(input_ids), tokens)
        fact = {"completion_tokens": tokens - self.short_by}
        if "speculative_algorithm" in self.options:
            fact["spec_verify_ct"] = rounds
        return [{"meta_info": fact} for _ in input_ids]

    def shutdown(self) -> None:
        self.options["closed"] = True


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    vllm, sglang = types.ModuleType("vllm"), types.ModuleType("sglang")
    vllm.LLM, vllm.SamplingParams = FakeVLLM, types.SimpleNamespace  # type: ignore[attr-defined]
    sglang.Engine = FakeSGLang  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "sglang", sglang)
    monkeypatch.setattr(gpu_peers, "_clock", lambda: Clock.now)
    for name in ("SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD"):
        monkeypatch.setenv(name, "unset")
    monkeypatch.setattr(Fake, "made", [])
    return Fake


def job(engine: str, method: str, shape: str = "llama-3.2-1b") -> dict[str, Any]:
    return {"engine": engine, "shape": shape, "method": method, "batches": [1, 8]}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("shape", gpu_peers.SHAPES)
def test_plain_time_is_that_of_a_step_without_prefill(engines: type[Fake], engine: str, shape: str) -> None:
    rows = gpu_peers.worker(job(engine, "plain", shape))["rows"]
    assert [row["batch"] for row in rows] == [1, 8]
    for row in rows:
        assert row["tpot_ms"] == row["step_ms"] == pytest.approx(STEP * 1e3)
        assert row["acceptance_length"] == 1.0 and row["spread"] == pytest.approx(0, abs=1e-9)
    [made] = engines.made
    assert made.options["load_format"] == "dummy" and made.options["dtype"] == "bfloat16"
    assert not [key for key in made.options if key.startswith("speculative")]
    pair = [(8, 32), (8, 544)]
    assert made.calls[-6:] == pair * 3 and made.calls[-7] == (8, 32)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_eagle3_steps_use_the_length_that_the_engine_reports(
    engines: type[Fake], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fake, "tau", 3.0)
    [first, _] = gpu_peers.worker(job(engine, "eagle3"))["rows"]
    assert first["acceptance_length"] == pytest.approx(3.0, rel=0.02)
    assert first["step_ms"] == pytest.approx(STEP * 1e3, rel=0.03)
    assert first["tpot_ms"] == pytest.approx(STEP * 1e3 / 3, rel=0.03)
    options = engines.made[0].options
    if engine == "vllm":
        spec = options["speculative_config"]
        assert spec["method"] == "eagle3" and spec["num_speculative_tokens"] == 3
        assert spec["rejection_sample_method"] == "synthetic" and spec["synthetic_acceptance_length"] == 3.0
    else:
        import os

        assert options["speculative_algorithm"] == "EAGLE3" and options["speculative_num_draft_tokens"] == 4
        assert os.environ["SGLANG_SIMULATE_ACC_LEN"] == "3.0" and options["closed"]


def test_an_engine_that_stops_early_is_no_measurement(engines: type[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "short_by", 1)
    with pytest.raises(RuntimeError, match="asked for 32 tokens, got 31"):
        gpu_peers.worker(job("vllm", "plain"))


def test_the_draft_is_one_layer_with_a_vocabulary_of_its_own() -> None:
    target = json.loads((gpu_peers.CONFIGS / "llama-3.1-8b" / "config.json").read_text())
    draft = gpu_peers.draft_config(target)
    assert draft["num_hidden_layers"] == 1 and draft["draft_vocab_size"] == 32_000
    assert draft["hidden_size"] == target["hidden_size"] and draft["vocab_size"] == target["vocab_size"]
    assert draft["architectures"] == ["LlamaForCausalLMEagle3"]


def test_prompts_are_seeded_and_inside_the_vocabulary() -> None:
    prompts = gpu_peers.random_prompts(4, 1000)
    assert prompts == gpu_peers.random_prompts(4, 1000)
    assert len({tuple(p) for p in prompts}) == 4 and all(len(p) == 128 and max(p) < 1000 for p in prompts)


def test_nothing_installed_names_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu_peers.main(["--peer-python", str(tmp_path / "none")]) == 2
    assert "did not run" in capsys.readouterr().err
    assert gpu_peers.importable(sys.executable, ["json", "no_such_engine"]) == {
        "json": "",
        "no_such_engine": f"no package 'no_such_engine' for {sys.executable}",
    }


def test_an_engine_that_is_asked_for_and_missing_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_peers, "importable", lambda python, names: {n: f"no package {n!r}" for n in names})
    assert gpu_peers.main(["--engines", "vllm"]) == 2
    assert "no package 'vllm'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu_peers.main(["--engines", "other"])
    assert "'other' is none of vllm, sglang" in capsys.readouterr().err


def test_the_whole_program_with_a_package_that_stands_in(tmp_path: Path) -> None:
    """Driver, worker process, table, JSON; the second method fails and is listed."""
    (tmp_path / "sglang.py").write_text(
        textwrap.dedent(
            """
            import time
            class Engine:
                def __init__(self, **options):
                    if "speculative_algorithm" in options:
                        raise ValueError("no drafter here")
                def generate(self, *, input_ids, sampling_params):
                    n = sampling_params["max_new_tokens"]
                    time.sleep(n * 1e-4)
                    return [{"meta_info": {"completion_tokens": n}} for _ in input_ids]
                def shutdown(self):
                    print("noise on stdout")
            """
        )
    )
    out = tmp_path / "peers.json"
    done = subprocess.run(
        [sys.executable, gpu_peers.__file__, "--engines", "sglang", "--shapes", "llama-3.2-1b", "--batches", "1,2",
         "--json", str(out)],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    plain, eagle = json.loads(out.read_text())["results"]
    assert [row["batch"] for row in plain["rows"]] == [1, 2] and plain["rows"][0]["step_ms"] > 0
    assert "no drafter here" in eagle["error"]
    head, one, two = done.stdout.splitlines()
    assert "1 / 2" in head and "sglang  llama-3.2-1b  plain" in one and "failed" in two
