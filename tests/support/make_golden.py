"""Makes tests/data: tiny checkpoints in Hugging Face form and what transformers computes with them.

Run: python -m tests.support.make_golden [folder]. Needs transformers. Each case is one folder: config.json,
model.safetensors, expected.safetensors (prompt_ids [P], greedy_ids [G], logits [P + G, V] float32 of prompt and
continuation in one pass) and expected.json (smallest gap between the two best logits of a greedy step, versions).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny import write_tiny_checkpoint

PROMPT, GREEDY = 20, 40
MIN_GAP = 0.02
"""Far above float32 noise (1e-5 here): an engine in float32 or float64 must give every token."""

SIZES = {"vocab_size": 128, "hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 80}
CASES: dict[str, dict[str, object]] = {
    "llama": {
        "rope_theta": 5000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 20, "num_key_value_heads": 4},
}  # fmt: skip


def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], float]:
    """Continuation by recomputation, and the smallest top-2 gap on the way."""
    tokens, gap = list(prompt), float("inf")
    for _ in range(GREEDY):
        top = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        gap = min(gap, float(top.values[0] - top.values[1]))
        tokens.append(int(top.indices[0]))
    return tokens[len(prompt) :], gap


def make(arch: str, folder: Path) -> None:
    """Write one case; seeds are tried until every greedy step is clear and the text is not one loop."""
    import transformers

    for seed in range(200):
        write_tiny_checkpoint(folder, arch, seed=seed, **SIZES, **CASES[arch])
        spread_vectors(folder, seed)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        prompt = torch.randint(3, 128, (PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()
        with torch.no_grad():
            ids, gap = greedy(model, prompt)
            if gap < MIN_GAP or len(set(ids)) < 12:
                continue
            logits = model(torch.tensor([prompt + ids])).logits[0]
            exact = model.double()(torch.tensor([prompt + ids])).logits[0]
        tensors = {"prompt_ids": torch.tensor(prompt), "greedy_ids": torch.tensor(ids), "logits": logits.contiguous()}
        save_file(tensors, folder / "expected.safetensors")
        facts = {
            "arch": arch, "seed": seed, "min_top2_gap": round(gap, 6),
            "max_abs_logit": round(float(logits.abs().max()), 4),
            "float32_off_float64": float((logits - exact).abs().max()),
            "torch": torch.__version__, "transformers": transformers.__version__,
        }  # fmt: skip
        (folder / "expected.json").write_text(json.dumps(facts, indent=1) + "\n")
        return
    raise SystemExit(f"{arch}: no seed gives gaps of {MIN_GAP}")


def spread_vectors(folder: Path, seed: int) -> None:
    """Move norms and biases off their initial values, so that a forgotten one changes the result."""
    generator = torch.Generator().manual_seed(1000 + seed)
    tensors = load_file(folder / "model.safetensors")
    for name, t in sorted(tensors.items()):
        if t.dim() == 1:
            tensors[name] = t + 0.3 * torch.randn(t.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors")


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "data"
    torch.set_num_threads(1)
    for name in CASES:
        make(name, root / f"golden_{name}")
        print(name, (root / f"golden_{name}" / "expected.json").read_text().replace("\n", ""))
