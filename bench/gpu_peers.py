"""vLLM and SGLang on this GPU, with the shapes and the method of our own figures.

    python bench/gpu_peers.py [--engines vllm,sglang] [--shapes llama-3.1-8b,llama-3.2-1b] [--methods plain,eagle3]
    python bench/gpu_peers.py --peer-python /venvs/vllm/bin/python --engines vllm --json FILE

Random weights in bf16 from bench/configs, greedy, prompts of 128 random tokens. Time per output token is the difference
of a 544-token and a 32-token run over 512 tokens, the minimum of three pairs, so start-up and prefill cancel. A step is
one frame: time per token x acceptance length. EAGLE-3 drafts 3 tokens with synthetic acceptance, length 3.0, which
both engines offer for benchmarks; the length that they report is the one that counts.

Each engine, shape and method is a process of its own, so that nobody's memory or graphs stand in another's way. Both
run as they are by default (overlapped scheduling, CUDA graphs). The environment is passed on, and its VLLM_USE* and
SGLANG_* are written down; VLLM_USE_V2_MODEL_RUNNER=1 picks vLLM's newer runner where it is not the default. This file
needs Python alone; the engines are imported by the interpreter given with --peer-python.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).resolve().parent / "configs"
SHAPES = ("llama-3.1-8b", "llama-3.2-1b")
METHODS = ("plain", "eagle3")
PROMPT, SHORT, LONG, PAIRS = 128, 32, 544, 3
DRAFTS, LENGTH, DRAFT_VOCAB = 3, 3.0, 32_000
WORKER_LIMIT_S = 1800.0

_clock = time.perf_counter


def draft_config(target: dict[str, Any]) -> dict[str, Any]:
    """config.json of an EAGLE-3 drafter for a target: one Llama layer and a vocabulary of 32,000 of its own."""
    kept = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
        "rope_theta", "rope_scaling", "vocab_size", "max_position_embeddings", "hidden_act", "bos_token_id",
        "eos_token_id",
    )  # fmt: skip
    return {
        **{key: target[key] for key in kept if key in target},
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "draft_vocab_size": min(DRAFT_VOCAB, target["vocab_size"]), "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }  # fmt: skip


class VLLM:
    """vLLM's offline engine. Synthetic acceptance is an option of its rejection sampler."""

    package = "vllm"

    def __init__(self, model: Path, draft: Path | None, slots: int) -> None:
        vllm = importlib.import_module("vllm")
        self._params = vllm.SamplingParams
        options: dict[str, Any] = {}
        if draft is not None:
            options["speculative_config"] = {
                "method": "eagle3",
                "model": str(draft),
                "num_speculative_tokens": DRAFTS,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": LENGTH,
            }
        self._llm = vllm.LLM(
            model=str(model), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=slots,
            max_model_len=PROMPT + LONG + 32, gpu_memory_utilization=0.7, seed=0, disable_log_stats=False, **options,
        )  # fmt: skip
        self._drafting = draft is not None
        self._seen = self._counters()

    def generate(self, prompts: list[list[int]], tokens: int) -> int:
        params = self._params(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def acceptance_length(self) -> float:
        """1 + accepted drafts ÷ rounds since the last call; 1 without drafts."""
        before, self._seen = self._seen, self._counters()
        rounds, accepted = (now - then for now, then in zip(self._seen, before, strict=True))
        return 1.0 + accepted / rounds if rounds else 1.0

    def _counters(self) -> tuple[float, float]:
        if not self._drafting:
            return 0.0, 0.0
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        values = {m.name: float(m.value) for m in self._llm.get_metrics() if m.name in names}
        return values.get(names[0], 0.0), values.get(names[1], 0.0)

    def close(self) -> None:
        """Its processes end with this one."""


class SGLang:
    """SGLang's offline engine. Synthetic acceptance is a pair of environment variables, read at import."""

    package = "sglang"

    def __init__(self, model: Path, draft: Path | None, slots: int) -> None:
        options: dict[str, Any] = {}
        if draft is not None:
            os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(LENGTH)
            os.environ["SGLANG_SIMULATE_ACC_METHOD"] = "match-expected"
            options = {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": str(draft),
                "speculative_num_steps": DRAFTS,
                "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": DRAFTS + 1,
            }
        self._engine = importlib.import_module("sglang").Engine(
            model_path=str(model), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True,
            max_running_requests=slots, context_length=PROMPT + LONG + 32, mem_fraction_static=0.7, random_seed=0,
            **options,
        )  # fmt: skip
        self._tokens = self._rounds = 0

    def generate(self, prompts: list[list[int]], tokens: int) -> int:
        params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        outputs = self._engine.generate(input_ids=prompts, sampling_params=params)
        facts = [output["meta_info"] for output in outputs]
        rounds = [fact.get("spec_verify_ct") for fact in facts]
        if all(rounds):
            self._rounds += sum(rounds)
            self._tokens += sum(fact["completion_tokens"] - 1 for fact in facts)  # the first one is prefill's
        return sum(fact["completion_tokens"] for fact in facts)

    def acceptance_length(self) -> float:
        """Tokens per verification since the last call; 1 without drafts."""
        length = self._tokens / self._rounds if self._rounds else 1.0
        self._tokens = self._rounds = 0
        return length

    def close(self) -> None:
        self._engine.shutdown()


ENGINES: dict[str, type[VLLM] | type[SGLang]] = {"vllm": VLLM, "sglang": SGLang}


def random_prompts(count: int, vocab: int) -> list[list[int]]:
    """Seeded, uniform over the vocabulary without its last ids (controls), another set for each batch size."""
    rng = random.Random(count)
    return [[rng.randrange(min(256, vocab // 2), max(2, vocab - 512)) for _ in range(PROMPT)] for _ in range(count)]


def measure(engine: Any, batch: int, vocab: int) -> dict[str, Any]:
    """One batch size. Raises RuntimeError when the engine did not emit the tokens that it was asked for."""
    prompts = random_prompts(batch, vocab)
    engine.generate(prompts, SHORT)  # warm: graphs, prefix cache
    engine.acceptance_length()
    spans = []
    for _ in range(PAIRS):
        seconds = []
        for tokens in (SHORT, LONG):
            began = _clock()
            got = engine.generate(prompts, tokens)
            seconds.append(_clock() - began)
            if got != batch * tokens:
                raise RuntimeError(f"asked for {batch * tokens} tokens, got {got}: the times mean nothing")
        spans.append(seconds[1] - seconds[0])
    tpot = min(spans) / (LONG - SHORT)
    length = engine.acceptance_length()
    return {
        "batch": batch,
        "tpot_ms": round(tpot * 1e3, 4),
        "step_ms": round(tpot * length * 1e3, 4),
        "tok_s": round(batch / tpot, 1),
        "acceptance_length": round(length, 3),
        "spread": round((max(spans) - min(spans)) / min(spans), 4),
    }


def worker(job: dict[str, Any]) -> dict[str, Any]:
    """One engine, shape and method, in this process."""
    kind = ENGINES[job["engine"]]
    shape = CONFIGS / job["shape"]
    target = json.loads((shape / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        draft = None
        if job["method"] == "eagle3":
            draft = Path(folder)
            (draft / "config.json").write_text(json.dumps(draft_config(target)))
        engine = kind(shape, draft, max(job["batches"]))
        try:
            rows = [measure(engine, batch, target["vocab_size"]) for batch in job["batches"]]
        finally:
            engine.close()
    return {"rows": rows, "versions": versions(kind.package)}


def versions(package: str) -> dict[str, str]:
    out = {"python": sys.version.split()[0]}
    for name in (package, "torch"):
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "unknown"
    return out


# -- the driver -------------------------------------------------------------------------------------------------


def importable(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Why each package cannot be found by an interpreter, "" where it can. Nothing is imported."""
    code = "import importlib.util, json, sys; " \
           "print(json.dumps({n: importlib.util.find_spec(n) is not None for n in sys.argv[1:]}))"  # fmt: skip
    try:
        done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True, timeout=60)
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return dict.fromkeys(packages, f"{python} did not run: {error}")
    return {name: "" if found[name] else f"no package {name!r} for {python}" for name in packages}


def run_worker(python: str, job: dict[str, Any]) -> dict[str, Any]:
    """The worker's result, or {"error": its last lines}."""
    command = [python, str(Path(__file__).resolve()), "--worker", json.dumps(job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WORKER_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {WORKER_LIMIT_S:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1].removeprefix("RESULT "))  # type: ignore[no-any-return]
    tail = (done.stderr.strip() or done.stdout.strip()).splitlines()[-12:]
    return {"error": f"exit {done.returncode}: " + " | ".join(tail)}


def drive(given: argparse.Namespace, run: Callable[[str, dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
    """All combinations, one after the other; a combination that fails is listed with its error."""
    out = []
    for engine in given.engines:
        for shape in given.shapes:
            for method in given.methods:
                job = {"engine": engine, "shape": shape, "method": method, "batches": given.batches}
                print(f"gpu_peers: {engine}, {shape}, {method}", file=sys.stderr, flush=True)
                out.append({**job, **run(given.peer_python, job)})
    return out


def table(results: list[dict[str, Any]], batches: Sequence[int]) -> str:
    """ms per step by engine, in the order of the batch sizes; the acceptance length where tokens were drafted."""
    head = f"{'ms per step at batch ' + ' / '.join(map(str, batches)):34}"
    lines = []
    for result in results:
        name = f"{result['engine']}  {result['shape']}  {result['method']}"
        if "error" in result:
            lines.append(f"{name:34}  failed: {result['error'][:300]}")
            continue
        steps = " / ".join(f"{row['step_ms']:.2f}" for row in result["rows"])
        length = result["rows"][0]["acceptance_length"]
        lines.append(f"{name:34}  {steps}" + (f"   (length {length:.2f})" if result["method"] != "plain" else ""))
    return "\n".join([head, *lines])


def gpu_name() -> str | None:
    """From nvidia-smi; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _one_of(known: Sequence[str], option: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{option}: {name!r} is none of {', '.join(known)}")
        return names

    return parse


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--engines", type=_one_of(tuple(ENGINES), "--engines"), help="default: those that are installed")
    p.add_argument("--shapes", type=_one_of(SHAPES, "--shapes"), default=list(SHAPES))
    p.add_argument("--methods", type=_one_of(METHODS, "--methods"), default=list(METHODS))
    p.add_argument("--batches", type=lambda t: [int(n) for n in t.split(",")], default=[1, 8, 32])
    p.add_argument("--peer-python", default=sys.executable, metavar="PATH", help="interpreter that has the engine")
    p.add_argument("--json", metavar="FILE", help="write the results here, in the style of bench/results")
    p.add_argument("--worker", metavar="JOB", help=argparse.SUPPRESS)
    return p


def main(argv: list[str] | None = None) -> int:
    given = parser().parse_args(argv)
    if given.worker:
        print("RESULT " + json.dumps(worker(json.loads(given.worker))), flush=True)
        return 0
    reasons = importable(given.peer_python, [ENGINES[e].package for e in given.engines or ENGINES])
    missing = {name: why for name, why in reasons.items() if why}
    if len(missing) == len(reasons) or (given.engines and missing):
        print(f"gpu_peers: {'; '.join(missing.values())}. Install one in an environment of its own (pip install vllm, "
              "or pip install sglang) and name its interpreter with --peer-python", file=sys.stderr)  # fmt: skip
        return 2
    given.engines = given.engines or [e for e in ENGINES if not reasons[ENGINES[e].package]]
    results = drive(given, run_worker)
    print(table(results, given.batches))
    if given.json:
        facts = {
            "date": datetime.date.today().isoformat(),
            "command": "python bench/gpu_peers.py " + " ".join(argv if argv is not None else sys.argv[1:]),
            "hardware": gpu_name(),
            "environment": {k: v for k, v in os.environ.items() if k.startswith(("VLLM_USE", "SGLANG_"))},
            "method": {"prompt": PROMPT, "short": SHORT, "long": LONG, "pairs": PAIRS, "drafts": DRAFTS,
                       "synthetic_length": LENGTH},
        }  # fmt: skip
        Path(given.json).write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
