"""One optimiser step: eager, or as CUDA graphs of a few fixed shapes.

A small draft's step is some 700 short kernels; launched one by one they take longer than they run, and a draft learns
by steps. The graphs need shapes that do not depend on the data: batches are padded to a multiple of `LENGTHS` tokens
and a full number of sequences, and heads list on the host what counts (`DraftHead.inputs`), where lengths are known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.train.corpus import Corpus
from slipstream.train.layers import DraftHead
from slipstream.train.ranks import Ranks
from slipstream.train.teacher import Teacher

LENGTHS = 64
"""Padded lengths are multiples of it."""


class Seen(NamedTuple):
    """loss [] float32 and acceptance [K], on the device."""

    loss: Tensor
    acceptance: Tensor


class Step(ABC):
    """Forward, backward and the optimiser on one batch."""

    @abstractmethod
    def __call__(self, part: Corpus, lr: float) -> Seen: ...


class EagerStep(Step):
    def __init__(
        self, head: DraftHead, teacher: Teacher, optimizer: torch.optim.Optimizer, clip: float, ranks: Ranks
    ) -> None:
        self.head, self.teacher, self.optimizer, self.clip, self.ranks = head, teacher, optimizer, clip, ranks
        self.parameters = [p for _, p in sorted(head.named_parameters())]

    def __call__(self, part: Corpus, lr: float) -> Seen:
        device = self.teacher.embed_VH.device
        token_BT, answer_BT = part.on(device)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with torch.autocast(device.type, torch.bfloat16, enabled=self.teacher.embed_VH.dtype == torch.bfloat16):
            loss, metrics = self.head.loss(token_BT, answer_BT, self.teacher.features(token_BT))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.ranks.average(self.parameters)
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        return Seen(loss.detach(), metrics["acceptance"])


def padded(part: Corpus, room: int) -> tuple[Tensor, Tensor]:
    """Tokens and answers [B, T] of a batch at its fixed shape, on the host. room: tokens of a batch with padding."""
    length = -(-int(part.length_N.max()) // LENGTHS) * LENGTHS
    sequences = max(len(part), room // length)
    width = min(length, part.token_NT.shape[1])
    token_BT = torch.zeros(sequences, length, dtype=torch.int64)
    answer_BT = torch.zeros(sequences, length, dtype=torch.bool)
    token_BT[: len(part), :width] = part.token_NT[:, :width]
    answer_BT[: len(part), :width] = part.answer_NT[:, :width]
    return token_BT, answer_BT


class _Made(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    seen: Seen


class CapturedStep(Step):
    """For one process on CUDA; the optimiser has to be `capturable`. room: tokens of a batch, padding included."""

    def __init__(
        self, head: DraftHead, teacher: Teacher, optimizer: torch.optim.Optimizer, clip: float, room: int
    ) -> None:
        self.head, self.teacher, self.optimizer, self.clip, self.room = head, teacher, optimizer, clip, room
        self.parameters = [p for _, p in sorted(head.named_parameters())]
        self.device = teacher.embed_VH.device
        sizes = [p.numel() for p in self.parameters]
        self.flat = torch.zeros(sum(sizes), device=self.device)
        self.grads = [part.view_as(p) for p, part in zip(self.parameters, self.flat.split(sizes), strict=True)]
        for p, grad in zip(self.parameters, self.grads, strict=True):
            p.grad = grad
        self.lr = torch.zeros((), device=self.device)
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        self.stream = torch.cuda.Stream(self.device)
        self.graphs: dict[Any, _Made] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.update: torch.cuda.CUDAGraph | None = None

    def __call__(self, part: Corpus, lr: float) -> Seen:
        values = [x.pin_memory() for x in self.head.inputs(*padded(part, self.room))]
        key = (self.head.overlap, *(x.shape for x in values))
        outer = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outer)
        with torch.cuda.stream(self.stream):
            if key not in self.graphs:
                self.graphs[key] = self._capture(values)
            graph, inputs, seen = self.graphs[key]
            for here, there in zip(values, inputs, strict=True):
                there.copy_(here, non_blocking=True)
            self.lr.fill_(lr)
            graph.replay()
            # Read before the update: its graph was captured earlier than most others, in memory that was free then.
            result = Seen(*(x.clone() for x in seen))
            if self.update is None:
                self.update = self._capture_update()
            else:
                self.update.replay()
        outer.wait_stream(self.stream)
        return result

    def _gradients(self, inputs: list[Tensor]) -> Seen:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.teacher.embed_VH.dtype == torch.bfloat16):
            loss, metrics = self.head.loss_of(inputs, self.teacher.features(inputs[0]))
        # Not backward(): its accumulation would belong to the stream of whoever used the parameters first.
        made = torch.autograd.grad(loss, self.parameters)
        torch._foreach_copy_(self.grads, list(made))
        return Seen(loss.detach(), metrics["acceptance"])

    def _capture(self, values: list[Tensor]) -> _Made:
        inputs = [x.to(self.device) for x in values]
        self._gradients(inputs)  # compiles and chooses what is done at the first use of a shape
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            seen = self._gradients(inputs)
        return _Made(graph, inputs, seen)

    def _capture_update(self) -> torch.cuda.CUDAGraph:
        """Clipping and the optimiser. Its first step is made here, eagerly: it creates the optimiser's state."""
        self._apply()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            self._apply()
        return graph

    def _apply(self) -> None:
        norm = self.flat.norm()
        self.flat.mul_((self.clip / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
