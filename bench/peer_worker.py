"""One engine in one process, asked by `cpu_peers.py` over stdin and stdout (JSON lines).

Every worker gets the same token ids, emits exactly `max_tokens` tokens per prompt greedily (end of
sequence ignored) and reports, per request, the seconds from its first output token to its last: model
load and prefill are outside. The process is its own, so `peak_rss_mb` is the engine's memory alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import sys
import time
import traceback
from typing import Any, Protocol


class Engine(Protocol):
    """What a worker needs: constructed from the GGUF path and the number of threads."""

    packages: tuple[str, ...]

    def tokenize(self, messages: list[dict[str, str]]) -> list[int]: ...

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]: ...


def _one_by_one(seconds: list[float], totals: list[float], tokens: list[list[int]], **more: Any) -> dict[str, Any]:
    """Answer of an engine that serves prompts one after the other. The first token belongs to the prefill."""
    counted = sum(len(t) - 1 for t in tokens)
    return {
        "tokens": tokens,
        "decode_s": sum(seconds),
        "decode_tokens": counted,
        "total_s": sum(totals),
        **more,
    }


class LlamaCpp:
    """`Llama.generate` of llama-cpp-python, the call its users make."""

    packages = ("llama_cpp_python",)
    lookup = 0

    def __init__(self, model: str, threads: int) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding(num_pred_tokens=self.lookup) if self.lookup else None
        self.lib = llama_cpp
        self.llama = llama_cpp.Llama(
            model_path=model,
            n_ctx=2048,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
            draft_model=draft,
            # Its buffer of logits is too short for a prompt above n_batch with a draft model otherwise.
            logits_all=draft is not None,
        )

    def tokenize(self, messages: list[dict[str, str]]) -> list[int]:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = ImmutableSandboxedEnvironment().from_string(self.llama.metadata["tokenizer.chat_template"])
        text = template.render(messages=messages, add_generation_prompt=True)
        return [int(i) for i in self.llama.tokenize(text.encode(), add_bos=False, special=True)]

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        runs = [self._one(prompt, max_tokens) for prompt in prompts]
        return _one_by_one([r[0] for r in runs], [r[1] for r in runs], [r[2] for r in runs])

    def _one(self, prompt: list[int], max_tokens: int) -> tuple[float, float, list[int]]:
        self.llama.reset()  # no reuse of the last prompt's KV
        out: list[int] = []
        start = first = time.perf_counter()
        for token in self.llama.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True):
            if not out:
                first = time.perf_counter()
            out.append(int(token))
            if len(out) == max_tokens:
                break
        end = time.perf_counter()
        return end - first, end - start, out


class LlamaCppLookup(LlamaCpp):
    """The same with its prompt lookup; two tokens per guess, which its documentation advises for a CPU."""

    lookup = 2


class LlamaCppLookup10(LlamaCpp):
    """The same with its default guess of ten tokens."""

    lookup = 10


class LlamaCppRaw(LlamaCpp):
    """The C library's own loop: decode, greedy sampler, decode; without its Python layer."""

    def _one(self, prompt: list[int], max_tokens: int) -> tuple[float, float, list[int]]:
        lib, ctx = self.lib, self.llama.ctx
        lib.llama_memory_clear(lib.llama_get_memory(ctx), True)
        sampler = lib.llama_sampler_init_greedy()
        out: list[int] = []
        start = first = time.perf_counter()
        size = self.llama.n_batch
        chunks = [prompt[i : i + size] for i in range(0, len(prompt), size)]
        for chunk in chunks:
            self._decode(chunk)
        while True:
            token = int(lib.llama_sampler_sample(sampler, ctx, -1))
            if not out:
                first = time.perf_counter()
            out.append(token)
            if len(out) == max_tokens:
                break
            self._decode([token])
        end = time.perf_counter()
        lib.llama_sampler_free(sampler)
        return end - first, end - start, out

    def _decode(self, tokens: list[int]) -> None:
        array = (self.lib.llama_token * len(tokens))(*tokens)
        code = self.lib.llama_decode(self.llama.ctx, self.lib.llama_batch_get_one(array, len(tokens)))
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")


class Transformers:
    """`model.generate` of transformers, float32, the weights dequantised from the same GGUF."""

    packages = ("transformers", "torch")

    def __init__(self, model: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        folder, name = os.path.split(os.path.abspath(model))
        self.torch = torch
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        self.model.eval()
        self.model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    def tokenize(self, messages: list[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        runs = [self._one(prompt, max_tokens) for prompt in prompts]
        return _one_by_one([r[0] for r in runs], [r[1] for r in runs], [r[2] for r in runs])

    def _one(self, prompt: list[int], max_tokens: int) -> tuple[float, float, list[int]]:
        clock = _TokenClock()
        ids = self.torch.tensor([prompt])
        start = time.perf_counter()
        with self.torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=self.torch.ones_like(ids), max_new_tokens=max_tokens, streamer=clock
            )
        return clock.last - clock.first, time.perf_counter() - start, out[0, len(prompt) :].tolist()


class _TokenClock:
    """A transformers streamer that only looks at the clock. Its first `put` is the prompt."""

    def __init__(self) -> None:
        self.puts = 0
        self.first = self.last = 0.0

    def put(self, value: object) -> None:
        self.puts += 1
        self.last = time.perf_counter()
        if self.puts == 2:
            self.first = self.last

    def end(self) -> None:
        pass


class Slipstream:
    """`LLM.stream` for one prompt, `LLM.generate` for several; prefix cache off, everything else at its default.

    The decode time of a batch is that of N tokens less that of one token, so prefill is outside there too.
    """

    packages = ("slipstream", "torch")
    draft: str | None = None

    def __init__(self, model: str, threads: int) -> None:
        from slipstream import LLM

        self.llm = LLM(
            model=model, draft=self.draft, threads=threads, max_slots=8, max_model_len=2048, prefix_cache=False
        )

    def tokenize(self, messages: list[dict[str, str]]) -> list[int]:
        return self.llm.chat_prompt(messages)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        return self._stream(prompts[0], max_tokens) if len(prompts) == 1 else self._batch(prompts, max_tokens)

    def _stream(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        tokens: list[int] = []
        early, last = 0, None
        start = first = time.perf_counter()
        for chunk in self.llm.stream(prompt, _greedy(max_tokens)):
            if chunk.token_ids and not tokens:
                first, early = time.perf_counter(), len(chunk.token_ids)
            tokens += chunk.token_ids
            last = chunk.output or last
        end = time.perf_counter()
        return {
            "tokens": [tokens],
            "decode_s": end - first,
            "decode_tokens": len(tokens) - early,
            "total_s": end - start,
            "acceptance_length": last.spec.acceptance_length if last else 0.0,
        }

    def _batch(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        first_s, _ = self._run(prompts, 1)
        total_s, outputs = self._run(prompts, max_tokens)
        rounds = sum(o.spec.rounds for o in outputs)
        return {
            "tokens": [list(o.outputs[0].token_ids) for o in outputs],
            "decode_s": total_s - first_s,
            "decode_tokens": len(prompts) * (max_tokens - 1),
            "total_s": total_s,
            "acceptance_length": sum(o.spec.emitted for o in outputs) / rounds if rounds else 1.0,
        }

    def _run(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[Any]]:
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, _greedy(max_tokens), use_tqdm=False)
        return time.perf_counter() - start, outputs


def _greedy(max_tokens: int) -> Any:
    from slipstream import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


class SlipstreamNgram(Slipstream):
    """The same with n-gram drafts, at their defaults."""

    draft = "ngram"


ENGINES: dict[str, type] = {
    "slipstream": Slipstream,
    "slipstream+ngram": SlipstreamNgram,
    "llama.cpp": LlamaCpp,
    "llama.cpp raw": LlamaCppRaw,
    "llama.cpp+lookup": LlamaCppLookup,
    "llama.cpp+lookup10": LlamaCppLookup10,
    "transformers": Transformers,
}


def peak_rss_mb() -> float:
    """Largest resident set of this process so far, in 10^6 bytes (Linux counts ru_maxrss in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "source tree"
    return found


def serve(kind: type, model: str, threads: int, requests: Any, answer: Any) -> None:
    """Loads the engine, says so, then answers one request per line until the input ends."""
    start = time.perf_counter()
    try:
        engine: Engine = kind(model, threads)
    except ImportError as e:
        answer({"missing": str(e)})
        return
    answer({"ready": True, "load_s": time.perf_counter() - start, "versions": _versions(engine.packages)})
    for line in requests:
        ask = json.loads(line)
        try:
            if ask["op"] == "tokenize":
                answer({"ids": engine.tokenize(ask["messages"])})
            else:
                reply = engine.generate(ask["prompts"], ask["max_tokens"])
                answer({**reply, "peak_rss_mb": peak_rss_mb()})
        except Exception as e:  # the driver reports it as this engine's row
            traceback.print_exc()
            answer({"error": f"{type(e).__name__}: {e}"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True, choices=list(ENGINES))
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cores", default="", help="core numbers to stay on, before any thread is started")
    args = parser.parse_args()
    if args.cores:
        os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    # Libraries print to stdout: keep the real one for answers, and send whatever they say to stderr.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(reply: dict[str, Any]) -> None:
        channel.write(json.dumps(reply) + "\n")
        channel.flush()

    serve(ENGINES[args.engine], args.model, args.threads, sys.stdin, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
