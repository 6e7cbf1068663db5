"""Several processes that train one draft, a GPU each: `torchrun --nproc-per-node N -m slipstream train ...`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is. Batches go round in turn; gradients are averaged; rank 0 writes."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: str) -> Ranks:
        """From torchrun's environment; a single process without it. On CUDA each local rank takes a GPU."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        return cls(dist.get_rank(), size)

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def average(self, parameters: Iterable[Tensor]) -> None:
        """Replace gradients by their mean over all processes."""
        if self.size == 1:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        for g, mean in zip(grads, flat.div_(self.size).split([g.numel() for g in grads]), strict=True):
            g.copy_(mean.view_as(g))

    def furthest(self, done: float, device: torch.device) -> float:
        """The largest share of the run that any process counts as done: all have to stop at the same step."""
        if self.size == 1:
            return done
        shared = torch.tensor([done], dtype=torch.float64, device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return float(shared)
