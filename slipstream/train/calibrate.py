"""Sequential temperature scaling of a confidence head (DSpark paper): one temperature per draft position."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.train.corpus import Corpus, write_text
from slipstream.train.dspark import DSparkHead
from slipstream.train.teacher import Teacher

GRID = tuple(round(0.5 * 1.05**i, 4) for i in range(48))
"""Temperatures tried, 0.5 to about 5."""


def expected_calibration_error(predicted_N: Tensor, happened_N: Tensor, bins: int = 20) -> float:
    """Mean distance of predicted from observed frequency, over equal bins of the prediction, by their share."""
    edge_N = (predicted_N * bins).long().clamp(0, bins - 1)
    error = 0.0
    for b in range(bins):
        inside = edge_N == b
        if inside.any():
            gap = predicted_N[inside].mean() - happened_N[inside].double().mean()
            error += float(gap.abs()) * float(inside.double().mean())
    return error


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """temperatures: one per draft position. ece_before, ece_after: of the survival of each prefix, per position."""

    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    num_samples: int

    def save(self, path: Path, dataset: str) -> None:
        values: dict[str, Any] = {
            "temperatures": list(self.temperatures),
            "dataset": dataset,
            "num_samples": self.num_samples,
            "ece_before": list(self.ece_before),
            "ece_after": list(self.ece_after),
        }
        write_text(json.dumps(values, indent=2) + "\n", path)


def fit_temperatures(logit_NK: Tensor, accepted_N: Tensor) -> Calibration:
    """For k = 1..K the temperature that calibrates prod sigmoid(z_i / T_i), i <= k, with the earlier ones fixed.

    logit_NK: confidence logits of untruncated blocks. accepted_N int: how many drafts of each block held.
    """
    if logit_NK.shape[0] == 0:
        raise ConfigError("calibration has no blocks; give it more held-out sequences")
    z_NK = logit_NK.double()
    survival_N = torch.ones(z_NK.shape[0], dtype=torch.float64)
    raw_N = survival_N.clone()
    temperatures, before, after = [], [], []
    for k in range(z_NK.shape[1]):
        held_N = accepted_N > k
        raw_N = raw_N * z_NK[:, k].sigmoid()
        before.append(expected_calibration_error(raw_N, held_N))
        errors = [expected_calibration_error(survival_N * (z_NK[:, k] / t).sigmoid(), held_N) for t in GRID]
        best = min(range(len(GRID)), key=lambda i: (errors[i], abs(GRID[i] - 1.0)))
        temperatures.append(GRID[best])
        after.append(errors[best])
        survival_N = survival_N * (z_NK[:, k] / GRID[best]).sigmoid()
    return Calibration(
        temperatures=tuple(temperatures), ece_before=tuple(before), ece_after=tuple(after),
        num_samples=z_NK.shape[0],
    )  # fmt: skip


@torch.no_grad()
def held_out_blocks(head: DSparkHead, teacher: Teacher, corpus: Corpus, batch: int = 16) -> tuple[Tensor, Tensor]:
    """Confidence logits [N, K] and accepted counts [N] of greedy blocks at random anchors of held-out sequences.

    Drafts follow the head's own path (slot k sees the token it drafted before); a draft holds while it is the
    target's most likely token and all before it held, so the target's law given the text is the right one as long
    as the text itself follows that path: slots count up to the first that leaves it.
    """
    logits, accepted = [], []
    device = teacher.embed_VH.device
    amp = teacher.embed_VH.dtype == torch.bfloat16
    for at in range(0, len(corpus), batch):
        part = corpus.take(torch.arange(at, min(at + batch, len(corpus))))
        token_BT, answer_BT = part.on(device)
        longest = token_BT.shape[1]
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            features = teacher.features(token_BT)
            anchor_BA = head.pick_anchors(answer_BT)
            hidden = head.backbone(token_BT, features.tap_BTF, anchor_BA)
            rows = torch.arange(token_BT.shape[0], device=device)[:, None]
            before = token_BT.gather(1, anchor_BA)
            z, hold, whole = [], [], torch.ones_like(anchor_BA, dtype=torch.bool)
            for k in range(head.block):
                place = anchor_BA + k
                whole &= (place + 1 < longest) & answer_BT[rows, (place + 1).clamp(max=longest - 1)]
                flat = hidden[:, :, k].flatten(0, 1)
                z.append(head.confidence(flat, before.flatten()).view_as(before))
                draft = head.logits(flat, before.flatten()).argmax(-1).view_as(before)
                seen = features.hidden_BTH[rows, place.clamp(max=longest - 1)]
                hold.append(draft == (seen @ teacher.head_VH.T).argmax(-1))
                before = draft
        keep = whole.flatten()
        logits.append(torch.stack(z, -1).flatten(0, 1)[keep].float().cpu())
        accepted.append(torch.stack(hold, -1).flatten(0, 1)[keep].long().cumprod(-1).sum(-1).cpu())
    return torch.cat(logits), torch.cat(accepted)
