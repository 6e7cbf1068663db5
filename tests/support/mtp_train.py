"""An MTP head with gradients, for tests: trained as released ones are, on the target's own text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.train.layers import MLP, DraftHead, Norm, Projections, later
from slipstream.train.teacher import Features, Teacher


class HiddenTeacher(Teacher):
    """Its feature is the hidden state after the final norm, which the targets of a loss are made from, too.

    shuffled: the feature of another sequence of the batch instead; the targets stay.
    """

    def __init__(self, teacher: Teacher, *, shuffled: bool = False) -> None:
        self.__dict__.update(teacher.__dict__)
        self.shuffled = shuffled

    def features(self, token_BT: Tensor) -> Features:
        hidden_BTH = super().features(token_BT).hidden_BTH
        return Features(tap_BTF=hidden_BTH.roll(1, 0) if self.shuffled else hidden_BTH, hidden_BTH=hidden_BTH)


class MTPHead(DraftHead):
    """Steps of one layer, each fed with the last one's output (FastMTP, arXiv 2509.18362): cross entropy to what the
    target chooses."""

    kind = "mtp"

    def __init__(self, teacher: Teacher, *, steps: int = 2) -> None:
        super().__init__()
        c = teacher.model_config
        h, eps = c.hidden_size, c.rms_norm_eps
        self.config, self.steps = c, steps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(h, eps), Norm(h, eps)
        self.fc = nn.Linear(2 * h, h, bias=False)
        self.input_layernorm, self.post_attention_layernorm, self.norm = Norm(h, eps), Norm(h, eps), Norm(h, eps)
        self.self_attn, self.mlp = Projections(c, h, qk_norm=c.qk_norm), MLP(h, c.intermediate_size)
        self.embed_VH, self.head_VH, self.rope_table = teacher.embed_VH, teacher.head_VH, teacher.rope_table
        with torch.no_grad():
            self.norm.weight.copy_(teacher.final_norm_H)

    def loss(self, token_BT: Tensor, answer_BT: Tensor, features: Features) -> tuple[Tensor, dict[str, Any]]:
        with torch.no_grad():
            best_BT = (features.hidden_BTH @ self.head_VH.T).argmax(-1)
        h, total, shares = features.tap_BTF, token_BT.new_zeros((), dtype=torch.float32), []
        rope = self.rope_table[torch.arange(token_BT.shape[1])]
        for step in range(self.steps):
            e = self.pre_fc_norm_embedding(self.embed_VH[later(token_BT, 1 + step)])
            x = self.fc(torch.cat([e, self.pre_fc_norm_hidden(h)], -1))
            y, attn = self.input_layernorm(x), self.self_attn
            q, k, v = (t.transpose(1, 2) for t in (attn.queries(y, rope), attn.keys(y, rope), attn.values(y)))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + attn.o_proj(out.transpose(1, 2).flatten(2))
            h = self.norm(x + self.mlp(self.post_attention_layernorm(x)))
            wanted = later(answer_BT, 2 + step)
            logits, best = h[wanted] @ self.head_VH.T, later(best_BT, 1 + step)[wanted]
            total = total + F.cross_entropy(logits, best)
            shares.append((logits.argmax(-1) == best).float().mean())
        return total, {"acceptance": torch.stack(shares)}

    def inputs(self, token_BT: Tensor, answer_BT: Tensor) -> list[Tensor]:
        return [token_BT, answer_BT]

    def loss_of(self, inputs: Sequence[Tensor], features: Features) -> tuple[Tensor, dict[str, Any]]:
        """Not for a graph: it picks rows by a mask. The tests train on a CPU."""
        token_BT, answer_BT = inputs
        return self.loss(token_BT, answer_BT, features)

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        outer = ("fc.", "norm.", "pre_fc_")
        return {
            ("mtp." if name.startswith(outer) else "mtp.layers.0.") + name: tensor.detach().clone()
            for name, tensor in self.named_parameters()
        }, {}
