"""Tiny MTP heads: random ones, their formula in float64, and one that is trained to be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.draft.mtp_model import mtp_shapes, parse_mtp
from slipstream.models.config import ModelConfig, read_hf_config

SPECULATORS = {
    "mtp.fc.": "mtp_layers.0.input_proj.", "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.", "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.layers.0.": "mtp_layers.0.",
}  # fmt: skip


def mtp_tensors(target: Path, *, seed: int = 0, spread: float = 2.0, **changes: Any) -> dict[str, Tensor]:
    """Random float32 tensors of a head for the model in `target`, in the Qwen layout. changes: values of its config."""
    values, config = json.loads((target / "config.json").read_text()), read_hf_config(target)
    g, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in mtp_shapes(parse_mtp({**values, **changes}, config)).items():
        noise = torch.randn(shape, generator=g)
        gain = "norm" in name.split(".")[-2]
        tensors[name] = 1 - config.norm_offset + 0.1 * noise if gain else noise * (spread / shape[-1] ** 0.5)
    return tensors


def add_mtp(target: Path, tensors: dict[str, Tensor] | None = None, **options: Any) -> Path:
    """Put a head into the checkpoint of `target`, where released models have theirs."""
    file = target / "model.safetensors"
    save_file({**load_file(file), **(mtp_tensors(target, **options) if tensors is None else tensors)}, file)
    return target


def write_mtp(
    folder: Path, target: Path, tensors: dict[str, Tensor] | None = None, *, speculators: bool = False, **options: Any
) -> Path:
    """A folder with nothing but a head for the model in `target`."""
    folder.mkdir(parents=True, exist_ok=True)
    values = json.loads((target / "config.json").read_text())
    tensors = mtp_tensors(target, **options) if tensors is None else tensors
    if speculators:
        values = {
            "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "transformer_layer_config": values,
            "num_nextn_predict_layers": 1,
        }  # fmt: skip
        tensors = {_theirs(name): tensor for name, tensor in tensors.items()}
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _theirs(name: str) -> str:
    for ours, theirs in SPECULATORS.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    raise AssertionError(name)


class MTPFormula:
    """The head from its definition, in float64, one sequence without a cache; row r stands at position r.

    tensors: in the Qwen layout. embed_VH, head_VH: the target's tables.
    """

    def __init__(self, tensors: dict[str, Tensor], c: ModelConfig, embed_VH: Tensor, head_VH: Tensor) -> None:
        self.t = {name: tensor.double() for name, tensor in tensors.items()}
        self.c, self.embed_VH, self.head_VH = c, embed_VH.double(), head_VH.double()

    def rms(self, x: Tensor, name: str) -> Tensor:
        return (
            x
            / (x.pow(2).mean(-1, keepdim=True) + self.c.rms_norm_eps).sqrt()
            * (self.c.norm_offset + self.t[name + ".weight"])
        )

    def turn(self, x: Tensor) -> Tensor:
        """RoPE of the half-split form on a head's first part. Frequencies are in float32, as references have them."""
        out, half = x.clone(), int(x.shape[-1] * self.c.rope.partial) // 2
        for i in range(half):
            rate = 1.0 / self.c.rope.theta ** (torch.tensor(2.0 * i) / (2 * half))
            angle = (torch.arange(x.shape[0]) * rate.double())[:, None]
            a, b = x[..., i], x[..., i + half]
            out[..., i], out[..., i + half] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        return out

    def hidden(self, token: Tensor, h: Tensor) -> Tensor:
        """Hidden states [R, H] of rows that read h_r and the embedding of token r, after the head's norm."""
        c, t = self.c, self.t
        e = self.rms(self.embed_VH[token], "mtp.pre_fc_norm_embedding")
        x = torch.cat([e, self.rms(h, "mtp.pre_fc_norm_hidden")], -1) @ t["mtp.fc.weight"].T
        p = "mtp.layers.0."
        y = self.rms(x, p + "input_layernorm")
        q, k, v = (
            (y @ t[p + f"self_attn.{n}_proj.weight"].T).view(len(token), heads, -1)
            for n, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads))
        )
        q, gate = q.chunk(2, -1) if c.output_gate else (q, torch.full_like(q, float("inf")))
        if c.qk_norm:
            q, k = self.rms(q, p + "self_attn.q_norm"), self.rms(k, p + "self_attn.k_norm")
        q, k = self.turn(q), self.turn(k)
        group, out = c.num_heads // c.num_kv_heads, torch.zeros_like(q)
        for r in range(len(token)):
            for n in range(c.num_heads):
                weight = (k[: r + 1, n // group] @ q[r, n] / c.head_dim**0.5).softmax(0)
                out[r, n] = weight @ v[: r + 1, n // group]
        x = x + (out * gate.sigmoid()).flatten(1) @ t[p + "self_attn.o_proj.weight"].T
        y = self.rms(x, p + "post_attention_layernorm")
        return self.rms(x + self.mlp(y, p + "mlp."), "mtp.norm")

    def mlp(self, y: Tensor, p: str) -> Tensor:
        """SwiGLU, or the likeliest experts row by row and the shared one."""

        def swiglu(row: Tensor, at: str) -> Tensor:
            gate, up = (row @ self.t[at + f"{x}_proj.weight"].T for x in ("gate", "up"))
            return (gate * gate.sigmoid() * up) @ self.t[at + "down_proj.weight"].T

        if p + "gate.weight" not in self.t:
            return swiglu(y, p)
        e, out = self.c.experts, []
        assert e is not None
        for row in y:
            law = (self.t[p + "gate.weight"] @ row).softmax(0)
            best = law.argsort(descending=True)[: e.chosen].tolist()
            total = float(law[best].sum()) if e.renormed else 1.0
            mixed = torch.stack([law[i] / total * swiglu(row, p + f"experts.{i}.") for i in best]).sum(0)
            open_ = (self.t[p + "shared_expert_gate.weight"] @ row).sigmoid()
            out.append(mixed + open_ * swiglu(row, p + "shared_expert."))
        return torch.stack(out)

    def drafts(self, tokens: list[int], h: Tensor, count: int) -> tuple[list[int], Tensor]:
        """Greedy drafts after `tokens`, and the hidden state [count, H] behind each.

        h [L - 1, H]: the target's, after its final norm, of every token but the last one, which it has not read.
        """
        rows, states = list(tokens[1:]), []
        for _ in range(count):
            out = self.hidden(torch.tensor(rows), h)
            states.append(out[-1])
            rows.append(int((self.head_VH @ out[-1]).argmax()))
            h = torch.cat([h, out[-1:]])
        return rows[-count:], torch.stack(states)
