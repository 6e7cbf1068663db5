"""An EAGLE-3 head with gradients, and its loss: training-time test (arXiv 2503.01840, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.models.config import ModelConfig
from slipstream.train.layers import MLP, DraftHead, Norm, Projections, later
from slipstream.train.soft_ce import soft_cross_entropy
from slipstream.train.teacher import Features, Teacher
from slipstream.train.unrolled import unrolled_attention, unrolled_attention_reference

_SHARES = 4  # see Eagle3Head.inputs
_ROWS = 16_384  # of logits at a time: [rows, Vd] float32 is the largest temporary


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """hs[2], hs[L // 2], hs[L - 3]."""
    return 2, num_layers // 2, num_layers - 3


class _Made(NamedTuple):
    """The target's predictions: logits_RD over the draft vocabulary, best_R int64 over its own."""

    logits_RD: Tensor
    best_R: Tensor


def _flash(x: Tensor) -> bool:
    """Whether torch's flash attention takes x."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig, inner: int) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(h, eps)
        self.hidden_norm = Norm(h, eps)
        self.self_attn = Projections(config, 2 * h, qk_norm=False)
        self.post_attention_layernorm = Norm(h, eps)
        self.mlp = MLP(h, inner)


class Eagle3Head(DraftHead):
    """One layer over (embedding, feature); logits over a draft vocabulary whose rows are the target's own.

    draft_ids_D int64 [Vd]: the target ids of the draft vocabulary, ascending. inner: width of the MLP, the target's if
    None.
    """

    kind = "eagle3"

    def __init__(
        self, teacher: Teacher, draft_ids_D: Tensor, *, steps: int = 7, decay: float = 0.8, inner: int | None = None
    ) -> None:
        super().__init__()
        c = teacher.model_config
        self.inner = inner or c.intermediate_size
        self.config, self.steps, self.decay = c, steps, decay
        self.fc = nn.Linear(len(teacher.taps) * c.hidden_size, c.hidden_size, bias=False)
        self.midlayer = _Layer(c, self.inner)
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.taps = teacher.taps
        device = teacher.embed_VH.device
        draft_ids_D = draft_ids_D.to(device)
        # Not saved: they are the target's.
        self.embed_VH, self.head_DH = teacher.embed_VH, teacher.head_VH[draft_ids_D]
        self.target_head_VH, self.rope_table = teacher.head_VH, teacher.rope_table
        self.draft_ids_D = draft_ids_D
        self.in_draft_V = torch.zeros(c.vocab_size, dtype=torch.bool, device=device)
        self.in_draft_V[draft_ids_D] = True
        self._begin(teacher)

    def _begin(self, teacher: Teacher) -> None:
        """Start in the target's own basis, which its frozen head reads: the last tap goes straight through, and norm
        and MLP are those of the target's end."""
        h = self.config.hidden_size
        with torch.no_grad():
            self.fc.weight.mul_(0.1)
            self.fc.weight[:, -h:] += torch.eye(h, device=self.fc.weight.device)
            self.norm.weight.copy_(teacher.final_norm_H)
            end = teacher.last_block
            if end is not None:
                self.midlayer.post_attention_layernorm.weight.copy_(end.post_norm_H)
                mlp, n = self.midlayer.mlp, min(self.inner, len(end.gate_FH))
                mlp.gate_proj.weight[:n] = end.gate_FH[:n].to(mlp.gate_proj.weight.dtype)
                mlp.up_proj.weight[:n] = end.up_FH[:n].to(mlp.up_proj.weight.dtype)
                mlp.down_proj.weight[:, n:] *= 0.1  # columns of its own speak up as they learn
                mlp.down_proj.weight[:, :n] = end.down_HF[:, :n].to(mlp.down_proj.weight.dtype)

    def loss(self, token_BT: Tensor, answer_BT: Tensor, features: Features) -> tuple[Tensor, dict[str, Any]]:
        """Mean over positions of soft cross entropy to the target, weighted decay^s over `steps` unrolled steps.

        Step s at index i has read token i + 1 + s and predicts what the target predicts after it. Queries see step
        0's keys up to i and the keys that index i made in later steps: what a chain drafted from i will see.
        Metrics: per step, the share of positions whose most likely draft is the target's (acceptance, if all before
        were accepted).
        """
        at_R = later(answer_BT, 1).flatten().nonzero().flatten()
        return self.loss_of((token_BT, at_R, at_R.new_ones(len(at_R), dtype=torch.float32)), features)

    def inputs(self, token_BT: Tensor, answer_BT: Tensor) -> list[Tensor]:
        """Tokens; at_R int64: flat positions b * T + j whose next token is an answer's; weight_R float32: 1, and 0 for
        rows that fill the list up to a multiple of a quarter of all positions."""
        found_R = later(answer_BT, 1).flatten().nonzero().flatten()
        part = -(-token_BT.numel() // _SHARES)
        rows = -(-max(1, len(found_R)) // part) * part
        at_R, weight_R = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.float32)
        at_R[: len(found_R)], weight_R[: len(found_R)] = found_R, 1.0
        return [token_BT, at_R, weight_R]

    def loss_of(self, inputs: Sequence[Tensor], features: Features) -> tuple[Tensor, dict[str, Any]]:
        token_BT, at_R, weight_R = inputs
        length = token_BT.shape[1]
        attn, layer = self.midlayer.self_attn, self.midlayer
        h = self.fc(features.tap_BTF)
        attend = unrolled_attention if _flash(h) else unrolled_attention_reference
        keys: list[Tensor] = []
        values: list[Tensor] = []
        made = self._teacher(features.hidden_BTH.flatten(0, 1)[at_R])
        total = token_BT.new_zeros((), dtype=torch.float32)
        accuracy = []
        for s in range(self.steps):
            embedded = self.embed_VH[later(token_BT, 1 + s)]
            x = torch.cat((layer.input_layernorm(embedded.to(h.dtype)), layer.hidden_norm(h)), -1)
            rope = self.rope_table[s : s + length]
            q = attn.queries(x, rope)
            keys.append(attn.keys(x, rope))
            values.append(attn.values(x))
            h = h + attn.o_proj(attend(q, keys, values).flatten(-2))
            h = h + layer.mlp(layer.post_attention_layernorm(h))
            # The target predicted after position j, index j - 1 - s drafts the same now; the first ones have no such.
            valid_R = weight_R * (at_R % length > s)
            from_R = (at_R - (1 + s)).clamp(min=0)
            step_loss, hits = self._step_loss(self.norm(h.flatten(0, 1)[from_R]), made, valid_R)
            total = total + self.decay**s * step_loss
            accuracy.append(hits / valid_R.sum().clamp(min=1))
        return total, {"acceptance": torch.stack(accuracy)}

    @torch.no_grad()
    def _teacher(self, hidden_RH: Tensor) -> _Made:
        """What the target predicts there."""
        best = [(x @ self.target_head_VH.T).argmax(-1) for x in hidden_RH.split(_ROWS)]
        best_R = torch.cat(best) if best else self.draft_ids_D.new_zeros(0)
        return _Made(hidden_RH @ self.head_DH.T, best_R)

    def _step_loss(self, h_RH: Tensor, made: _Made, weight_R: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross entropy over the rows whose best token the draft vocabulary has; how many rows agree."""
        if h_RH.is_cuda:  # the fused kernels leave nothing behind but the logits themselves
            loss, hits, covered = self._chunk_loss(h_RH, *made, weight_R)
            return loss / covered.clamp(min=1), hits
        loss = h_RH.new_zeros((), dtype=torch.float32)
        hits, covered = loss.detach().clone(), loss.detach().clone()
        for part in zip(*(x.split(_ROWS) for x in (h_RH, *made, weight_R)), strict=True):
            one: tuple[Tensor, Tensor, Tensor] = checkpoint(self._chunk_loss, *part, use_reentrant=False)
            loss, hits, covered = loss + one[0], hits + one[1], covered + one[2]
        return loss / covered.clamp(min=1), hits.detach()

    def _chunk_loss(
        self, h_RH: Tensor, teacher_RD: Tensor, best_R: Tensor, weight_R: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        covered_R = self.in_draft_V[best_R] * weight_R
        row_R = torch.arange(len(best_R), device=best_R.device)
        ce_R, draft_R = soft_cross_entropy(h_RH @ self.head_DH.T.to(h_RH.dtype), teacher_RD, row_R)
        hit_R = (self.draft_ids_D[draft_R] == best_R) * weight_R
        return (ce_R * covered_R).sum(), hit_R.sum(), covered_R.sum()

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and config.json of the released format. Embedding and head are the target's and are left out."""
        c = self.config
        tensors = {n: p.detach().to(torch.bfloat16).cpu().contiguous() for n, p in self.named_parameters()}
        ids = self.draft_ids_D.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        in_draft: Tensor = self.in_draft_V.cpu()
        tensors["t2d"] = in_draft
        values = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": c.hidden_size,
            "intermediate_size": self.inner,
            "num_hidden_layers": 1,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": c.rms_norm_eps,
            "rope_theta": c.rope.theta,
            "max_position_embeddings": c.max_position_embeddings,
            "vocab_size": c.vocab_size,
            "draft_vocab_size": len(ids),
            "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "torch_dtype": "bfloat16",
        }
        return tensors, values


def frequent_ids(token_NT: Tensor, answer_NT: Tensor, vocab: int, size: int) -> Tensor:
    """The `size` ids that answers use most, ascending; ties and unused ids by id."""
    counts_V = torch.bincount(token_NT[answer_NT], minlength=vocab)
    order_V = torch.argsort(counts_V, descending=True, stable=True)
    return order_V[: min(size, vocab)].sort().values
