"""Which drafts a budget of rows goes to: the most likely ones to survive, over all slots of a frame."""

from __future__ import annotations

import torch
from torch import Tensor


def survival(confidence_logit_BK: Tensor, temperature_K: Tensor) -> Tensor:
    """prod_{i<=k} sigmoid(z_i / T_i), float32 [B, K]: the calibrated chance that drafts 0..k are all accepted."""
    return torch.sigmoid(confidence_logit_BK.float() / temperature_K).cumprod(1)


def draft_lengths(survival_BK: Tensor, budget: Tensor | int) -> Tensor:
    """Drafts verified per slot, int64 [B]: the `budget` largest survivals, ties by position, then by slot.

    survival_BK must not increase over a slot's drafts; with that tie rule every slot keeps a prefix, whose length
    depends on survivals up to its last draft only once the budget is given. A draft of survival 0 is never taken.
    budget: an int, or int64 [] on the device; nothing here has a shape that depends on it.
    """
    slots, drafts = survival_BK.shape
    by_position = survival_BK.t().reshape(-1)
    order = torch.sort(by_position, descending=True, stable=True).indices
    place = torch.empty_like(order).scatter_(0, order, torch.arange(slots * drafts, device=order.device))
    taken = (place < budget) & (by_position > 0)
    return taken.view(drafts, slots).to(torch.int64).sum(0)
