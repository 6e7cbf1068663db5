"""A DSpark drafter with gradients, and its loss (formats and formulas: docs of the DSpark paper and DeepSpec)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.errors import ConfigError
from slipstream.models.config import ModelConfig
from slipstream.train.block_loss import block_terms, draft_logits, teacher_laws
from slipstream.train.layers import MLP, DraftHead, Norm, Projections
from slipstream.train.teacher import Features, Teacher

_TABLE = 3 << 29  # entries of a table of logits; where slots need several, each is computed again in backward
_HOST_TABLE = 1 << 27  # the same where laws are written down beside it, in float32
_FADE = 4.0  # positions: the weight of slot k is exp(-k / _FADE)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Hidden states spread over the layers: hs[v + 1] of round(1 + i (L - 4) / 2), i = 0..2."""
    return tuple(round(1 + i * (num_layers - 4) / 2) + 1 for i in range(3))


def draft_config(target: ModelConfig, heads: int | None = None, kv_heads: int | None = None) -> ModelConfig:
    """The target's config with the draft's head counts; None: the target's, at most as many key heads as heads.

    A slot meets the target's features through attention values only, kv_heads * head_dim numbers a layer, so a draft
    of a target with few key heads wants more of its own. Raises ConfigError where kv_heads does not divide heads.
    """
    heads = target.num_heads if heads is None else heads
    if kv_heads is None:
        kv_heads = min(target.num_kv_heads, heads)
    for name, value in (("heads", heads), ("kv-heads", kv_heads)):
        if value < 1:
            raise ConfigError(f"--{name} {value} must be at least 1")
    if heads % kv_heads:
        raise ConfigError(f"--kv-heads {kv_heads} must divide the draft's heads, {heads} (--heads)")
    return replace(target, num_heads=heads, num_kv_heads=kv_heads)


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig, inner: int) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(h, eps)
        self.self_attn = Projections(config, h, qk_norm=True)
        self.post_attention_layernorm = Norm(h, eps)
        self.mlp = MLP(h, inner)


class _Markov(nn.Module):
    """The vanilla head: bias of the next token given the one before, of rank r."""

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        nn.init.zeros_(self.markov_w2.weight)


class _Confidence(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class DSparkHead(DraftHead):
    """A parallel backbone over [anchor, mask, ...] with the target's features in its keys and values, a vanilla
    Markov head and a confidence head. Slot k of a block at anchor a predicts token a + k + 1.

    heads, kv_heads: of its attention, see `draft_config`. anchors: blocks per sequence and step.
    """

    kind = "dspark"

    def __init__(
        self,
        teacher: Teacher,
        *,
        mask_token_id: int,
        block: int = 7,
        layers: int = 2,
        rank: int = 32,
        inner: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        anchors: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        c = draft_config(teacher.model_config, heads, kv_heads)
        self.config, self.taps = c, teacher.taps
        self.block, self.anchors, self.mask_token_id, self.rank = block, anchors, mask_token_id, rank
        self.inner = inner or c.intermediate_size
        self.fc = nn.Linear(len(teacher.taps) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList([_Layer(c, self.inner) for _ in range(layers)])
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.markov_head = _Markov(c.vocab_size, rank)
        self.confidence_head = _Confidence(c.hidden_size + rank)
        self.embed_VH, self.head_VH, self.rope_table = teacher.embed_VH, teacher.head_VH, teacher.rope_table
        with torch.no_grad():  # the target's basis, which its frozen head reads
            self.fc.weight.mul_(0.1)
            self.fc.weight[:, -c.hidden_size :] += torch.eye(c.hidden_size)
            self.norm.weight.copy_(teacher.final_norm_H)
            self._pass_through()

    def _pass_through(self) -> None:
        """Values begin as the features themselves and come out of the attention as they are, so that a slot has the
        target's features, in its basis, from the first step. Values of few heads take another part in each layer."""
        hidden, count = self.config.hidden_size, len(self.layers)
        for n, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            attn = layer.self_attn
            value = torch.arange(min(attn.kv_heads * attn.dim, hidden))
            feature, groups = (value + n * len(value)) % hidden, attn.heads // attn.kv_heads
            attn.v_proj.weight.mul_(0.1)
            attn.v_proj.weight[value, feature] += 1.0
            attn.o_proj.weight.mul_(0.1)
            for g in range(groups):
                place = (value // attn.dim * groups + g) * attn.dim + value % attn.dim
                attn.o_proj.weight[feature, place] += min(1.0, hidden / (count * len(value))) / groups

    def loss(self, token_BT: Tensor, answer_BT: Tensor, features: Features) -> tuple[Tensor, dict[str, Any]]:
        """0.1 cross entropy + 0.9 L1 + confidence BCE over random anchors; before `overlap`, soft CE + BCE.

        Total variation has hardly a slope where two laws do not meet, so it comes second.
        """
        return self.loss_of((token_BT, answer_BT, self.pick_anchors(answer_BT)), features)

    def inputs(self, token_BT: Tensor, answer_BT: Tensor) -> list[Tensor]:
        """Tokens, answers and anchors."""
        return [token_BT, answer_BT, self.pick_anchors(answer_BT)]

    def loss_of(self, inputs: Sequence[Tensor], features: Features) -> tuple[Tensor, dict[str, Any]]:
        token_BT, answer_BT, anchor_BA = inputs
        hidden_BAKH = self.backbone(token_BT, features.tap_BTF, anchor_BA)
        k = torch.arange(self.block, device=token_BT.device)
        at_BAK = (anchor_BA[..., None] + k).clamp(max=token_BT.shape[1] - 1)
        next_BAK = (at_BAK + 1).clamp(max=token_BT.shape[1] - 1)
        rows = torch.arange(token_BT.shape[0], device=token_BT.device)[:, None, None]
        inside = anchor_BA[..., None] + k + 1 < token_BT.shape[1]
        # A slot counts only if every earlier one of its block is supervised.
        valid_BAK = (answer_BT[rows, next_BAK] & inside).cumprod(-1).bool()
        weight_BAK = valid_BAK * torch.exp(-k / _FADE)
        args = (hidden_BAKH, features.hidden_BTH, token_BT[rows, at_BAK], token_BT[rows, next_BAK], at_BAK)
        most = _TABLE if token_BT.is_cuda else _HOST_TABLE
        size = max(1, most // (anchor_BA.shape[1] * self.block * self.head_VH.shape[0]))  # sequences
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in zip(*(x.split(size) for x in args), strict=True):
            if size >= len(token_BT):
                parts.append(self._part_loss(*part))
            else:
                parts.append(checkpoint(self._part_loss, *part, use_reentrant=False, preserve_rng_state=False))
        draft_R, distance_R, hit_R = (torch.cat(x) for x in zip(*parts, strict=True))
        kept_R = (1 - distance_R / 2).clamp(0, 1)
        z_R = self.confidence(hidden_BAKH.flatten(0, 2), args[2].flatten())
        sure_R = F.binary_cross_entropy_with_logits(z_R, kept_R, reduction="none")
        total = ((draft_R + sure_R) * weight_BAK.flatten()).sum() / weight_BAK.sum().clamp(min=1e-6)
        hits = hit_R.view_as(valid_BAK) & valid_BAK
        acceptance_K = hits.sum((0, 1)) / valid_BAK.sum((0, 1)).clamp(min=1)
        return total, {"acceptance": acceptance_K.detach()}

    def pick_anchors(self, answer_BT: Tensor) -> Tensor:
        """[B, A] random positions whose next token the model wrote; any position where a sequence has none left."""
        ok = answer_BT.roll(-1, 1)
        ok[:, -1] = False
        noise = torch.rand(answer_BT.shape, generator=self.generator).to(answer_BT.device)
        anchor_BA: Tensor = (noise + ok).topk(min(self.anchors, answer_BT.shape[1] - 1), -1).indices
        return anchor_BA

    def backbone(self, token_BT: Tensor, tap_BTF: Tensor, anchor_BA: Tensor) -> Tensor:
        """Hidden states [B, A, K, H] after the final norm."""
        batch, length = token_BT.shape
        count, block = anchor_BA.shape[1], self.block
        device = token_BT.device
        context = self.hidden_norm(self.fc(tap_BTF))
        first = torch.gather(token_BT, 1, anchor_BA)
        ids = torch.full((batch, count, block), self.mask_token_id, device=device)
        ids[..., 0] = first
        x = self.embed_VH[ids].to(context.dtype).flatten(1, 2)
        position = (anchor_BA[..., None] + torch.arange(block, device=device)).flatten(1)
        rope = self.rope_table[position.clamp(max=self.rope_table.shape[0] - 1)]
        rope_context = self.rope_table[torch.arange(length, device=device)]
        owner = torch.arange(count, device=device).repeat_interleave(block)
        sees_context = torch.arange(length, device=device) < anchor_BA.repeat_interleave(block, 1)[..., None]
        sees_block = (owner[:, None] == owner).expand(batch, -1, -1)
        mask = torch.cat((sees_context, sees_block), -1).unsqueeze(1)
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            attn = layer.self_attn
            y = layer.input_layernorm(x)
            q = attn.queries(y, rope)
            keys = torch.cat((attn.keys(context, rope_context), attn.keys(y, rope)), 1)
            values = torch.cat((attn.values(context), attn.values(y)), 1)
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), _repeat(keys, q), _repeat(values, q), attn_mask=mask
            )
            x = x + attn.o_proj(out.transpose(1, 2).flatten(-2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        hidden: Tensor = self.norm(x).unflatten(1, (count, block))
        return hidden

    def logits(self, hidden_RH: Tensor, before_R: Tensor) -> Tensor:
        """Corrected logits [R, V] in hidden's dtype, given the token before each row."""
        markov = self.markov_head
        return draft_logits(hidden_RH, markov.markov_w1(before_R), self.head_VH, markov.markov_w2.weight)

    def confidence(self, hidden_RH: Tensor, before_R: Tensor) -> Tensor:
        """Confidence logits [R], at least float32."""
        seen = torch.cat((hidden_RH, self.markov_head.markov_w1(before_R).to(hidden_RH.dtype)), -1)
        z: Tensor = self.confidence_head.proj(seen).squeeze(-1)
        return z.to(torch.promote_types(z.dtype, torch.float32))

    def _part_loss(
        self, hidden_BAKH: Tensor, final_BTH: Tensor, before_BAK: Tensor, target_BAK: Tensor, at_BAK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of the draft, L1 distance and agreement, [B A K] each. final_BTH: what the target's head reads."""
        length = final_BTH.shape[1]
        row_R = (at_BAK + length * torch.arange(len(final_BTH), device=at_BAK.device)[:, None, None]).flatten()
        final_NH = final_BTH.flatten(0, 1)
        if len(row_R) < len(final_NH):  # the teacher's table has a row per position, or per slot where that is less
            final_NH, row_R = final_NH[row_R], torch.arange(len(row_R), device=row_R.device)
        with torch.no_grad():
            teacher = teacher_laws(final_NH @ self.head_VH.T)
        logits_RV = self.logits(hidden_BAKH.flatten(0, 2), before_BAK.flatten())
        terms = block_terms(logits_RV, teacher, row_R, target_BAK.flatten())
        draft_R = 0.1 * terms.hard_R + 0.9 * terms.distance_R if self.overlap else terms.soft_R
        return draft_R, terms.distance_R.detach(), terms.best_R == teacher.best_N[row_R]

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and config.json of the released format. Embedding and head are the target's and are left out."""
        c = self.config
        tensors = {n: p.detach().to(torch.bfloat16).cpu().contiguous() for n, p in self.named_parameters()}
        values = {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "hidden_size": c.hidden_size,
            "intermediate_size": self.inner,
            "num_hidden_layers": len(self.layers),
            "layer_types": ["full_attention"] * len(self.layers),
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": c.rms_norm_eps,
            "rope_theta": c.rope.theta,
            "max_position_embeddings": c.max_position_embeddings,
            "vocab_size": c.vocab_size,
            "tie_word_embeddings": False,
            "block_size": self.block,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": [t - 1 for t in self.taps],
            "num_target_layers": c.num_layers,
            "num_anchors": self.anchors,
            "markov_rank": self.rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "torch_dtype": "bfloat16",
        }
        return tensors, values


def _repeat(x_BLKD: Tensor, q_BLND: Tensor) -> Tensor:
    """Key or value heads repeated to the number of query heads, [B, N, L, D]."""
    groups = q_BLND.shape[2] // x_BLKD.shape[2]
    return (x_BLKD if groups == 1 else x_BLKD.repeat_interleave(groups, 2)).transpose(1, 2)
