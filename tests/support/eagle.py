"""Tiny EAGLE-3 heads of every variant, and a target that is nothing but sizes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.models.layers import Embedding
from slipstream.models.linear import Dense

HEADS, KV_HEADS, DIM, INNER = 4, 2, 16, 64


def stand_in_target(
    *, hidden: int, vocab: int, layers: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Any:
    """What a head looks at when it is loaded. Its embedding and head are NaN: whoever uses them by mistake shows."""
    nan = torch.full((vocab, hidden), float("nan"), dtype=dtype, device=device)
    return SimpleNamespace(
        config=SimpleNamespace(hidden_size=hidden, vocab_size=vocab, num_layers=layers), dtype=dtype,
        device=torch.device(device), embed=Embedding(nan), head=Dense(nan),
    )  # fmt: skip


def head_tensors(
    *,
    hidden: int,
    vocab: int,
    draft_vocab: int | None = None,
    taps: int = 2,
    wide: Sequence[bool] = (True,),
    qk_norm: bool = False,
    tap_norms: bool = False,
    input_norm: bool = False,
    fc_bias: bool = False,
    own_embedding: bool = False,
    seed: int = 0,
    spread: float = 2.0,
) -> dict[str, Tensor]:
    """Random float32 tensors. draft_vocab: that many random ids. wide: which layers read the embedding, too."""
    g, h = torch.Generator().manual_seed(seed), hidden

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) * (spread / shape[-1] ** 0.5)

    def norm(size: int = h) -> Tensor:
        return 1 + 0.1 * torch.randn(size, generator=g)

    small = vocab if draft_vocab is None else draft_vocab
    tensors = {"fc.weight": rand(h, taps * h), "norm.weight": norm(), "lm_head.weight": rand(small, h)}
    for i, reads_embedding in enumerate(wide):
        p, columns = f"layers.{i}.", h * (2 if reads_embedding else 1)
        tensors |= {p + f"{name}.weight": norm() for name in ("input_layernorm", "post_attention_layernorm")}
        if reads_embedding:
            tensors[p + "hidden_norm.weight"] = norm()
        for x, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[p + f"self_attn.{x}_proj.weight"] = rand(heads * DIM, columns)
            if qk_norm and x != "v":
                tensors[p + f"self_attn.{x}_norm.weight"] = norm(DIM)
        tensors[p + "self_attn.o_proj.weight"] = rand(h, HEADS * DIM)
        tensors |= {p + f"mlp.{x}_proj.weight": rand(INNER, h) for x in ("gate", "up")}
        tensors[p + "mlp.down_proj.weight"] = rand(h, INNER)
    if tap_norms:
        tensors |= {f"fc_norm.{i}.weight": norm() for i in range(taps)}
    if input_norm:
        tensors["input_norm.weight"] = norm(taps * h)
    if fc_bias:
        tensors["fc.bias"] = rand(h)
    if own_embedding:
        tensors["embed_tokens.weight"] = rand(vocab, h)
    if small < vocab:
        ids = torch.randperm(vocab, generator=g)[:small].sort().values
        tensors["d2t"] = ids - torch.arange(small)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def head_values(*, hidden: int, vocab: int, draft_vocab: int | None = None, **changes: Any) -> dict[str, Any]:
    """Values of an official config.json; features are the inputs of layers 0 and 1."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden, "vocab_size": vocab,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "intermediate_size": INNER,
        "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        "draft_vocab_size": vocab if draft_vocab is None else draft_vocab,
        "eagle_aux_hidden_state_layer_ids": [0, 1], **changes,
    }  # fmt: skip


def write_eagle3(folder: Path, target: Path, *, seed: int = 0, draft_vocab: int | None = None, **changes: Any) -> Path:
    """A random head for the model in `target` whose embedding is the target's. changes: values of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    base = json.loads((target / "config.json").read_text())
    sizes = {"hidden": base["hidden_size"], "vocab": base["vocab_size"], "draft_vocab": draft_vocab}
    values = head_values(**sizes, **changes)
    taps = len(values["eagle_aux_hidden_state_layer_ids"])
    (folder / "config.json").write_text(json.dumps(values))
    tensors = head_tensors(**sizes, taps=taps, seed=seed)
    save_file({n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def rounds_of_the_reference(golden: Path, kind: str, **options: Any) -> None:
    """Output and acceptance of every prompt of e2e_eagle3, alone, in a batch, and from the prefix cache.

    kind: "chain" or "tree", the reference's own shape.
    """
    case = json.loads((golden / "e2e_eagle3" / "expected.json").read_text())
    shape = {"chain": {"num_drafts": case["chain_steps"]}, "tree": {"draft_tree": case["tree"]}}[kind]
    with LLM(
        model=str(golden / "e2e_target"), draft=str(golden / "e2e_eagle3"), dtype="float32", max_slots=4,
        max_model_len=128, **shape, **options,
    ) as llm:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        prompts = [p["prompt_ids"] for p in case["prompts"]]
        for outs in ([llm.generate(p, params)[0] for p in prompts], llm.generate(prompts, params)):
            for out, prompt in zip(outs, case["prompts"], strict=True):
                assert out.outputs[0].token_ids == prompt["output_ids"]
                assert abs(out.spec.rounds - len(prompt[kind]["rounds"])) <= 1
        llm.check_idle()
