"""One optimiser step: eager, or as CUDA graphs of a few fixed shapes.

A small draft's step is some 700 short kernels; launched one by one they take longer than they run, and a draft learns
by steps. The graphs need shapes that do not depend on the data: batches are padded to `LENGTHS` tokens and a full
number of sequences, and the positions that count are listed on the host, where lengths are known.
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
_SHARES = 4
"""The list of positions is padded to a multiple of this part of all positions."""


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
        longest = int(part.length_N.max())
        token_BT = part.token_NT[:, :longest].to(device)
        answer_BT = part.answer_NT[:, :longest].to(device)
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


class _Shape(NamedTuple):
    sequences: int
    length: int
    rows: int


class _Inputs(NamedTuple):
    token_BT: Tensor
    at_R: Tensor
    weight_R: Tensor


def padded(part: Corpus, room: int) -> tuple[_Shape, _Inputs]:
    """The batch at its fixed shape, on the host. room: tokens of a batch, padding included."""
    length = _up(int(part.length_N.max()), LENGTHS)
    sequences = max(len(part), room // length)
    token_BT = torch.zeros(sequences, length, dtype=torch.int64)
    width = min(length, part.token_NT.shape[1])
    token_BT[: len(part), :width] = part.token_NT[:, :width]
    before_BT = torch.zeros(sequences, length, dtype=torch.bool)
    before_BT[: len(part), : width - 1] = part.answer_NT[:, 1:width]
    found_R = before_BT.flatten().nonzero().flatten()
    rows = _up(max(1, len(found_R)), -(-sequences * length // _SHARES))
    at_R, weight_R = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.float32)
    at_R[: len(found_R)], weight_R[: len(found_R)] = found_R, 1.0
    return _Shape(sequences, length, rows), _Inputs(token_BT, at_R, weight_R)


class CapturedStep(Step):
    """For heads with `loss_at`, one process, on CUDA; the optimiser has to be `capturable`. room: tokens of a batch."""

    def __init__(self, head: Any, teacher: Teacher, optimizer: torch.optim.Optimizer, clip: float, room: int) -> None:
        self.head, self.teacher, self.optimizer, self.clip, self.room = head, teacher, optimizer, clip, room
        self.parameters = [p for _, p in sorted(head.named_parameters())]
        self.device = teacher.embed_VH.device
        sizes = [p.numel() for p in self.parameters]
        self.flat = torch.zeros(sum(sizes), device=self.device)
        for p, part in zip(self.parameters, self.flat.split(sizes), strict=True):
            p.grad = part.view_as(p)
        self.lr = torch.zeros((), device=self.device)
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        self.stream = torch.cuda.Stream(self.device)
        self.graphs: dict[_Shape, tuple[torch.cuda.CUDAGraph, _Inputs, Seen]] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.update: torch.cuda.CUDAGraph | None = None

    def __call__(self, part: Corpus, lr: float) -> Seen:
        shape, values = padded(part, self.room)
        values = _Inputs(*(x.pin_memory() for x in values))
        outer = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outer)
        with torch.cuda.stream(self.stream):
            if shape not in self.graphs:
                self.graphs[shape] = self._capture(shape, values)
            graph, inputs, seen = self.graphs[shape]
            for here, there in zip(values, inputs, strict=True):
                there.copy_(here, non_blocking=True)
            self.lr.fill_(lr)
            graph.replay()
            if self.update is None:
                self.update = self._capture_update()
            else:
                self.update.replay()
            result = Seen(*(x.clone() for x in seen))
        outer.wait_stream(self.stream)
        return result

    def _gradients(self, inputs: _Inputs) -> Seen:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.teacher.embed_VH.dtype == torch.bfloat16):
            features = self.teacher.features(inputs.token_BT)
            loss, metrics = self.head.loss_at(*inputs, features)
        # Not backward(): its accumulation would belong to the stream of whoever used the parameters first.
        grads = torch.autograd.grad(loss, self.parameters)
        torch._foreach_copy_([p.grad for p in self.parameters], list(grads))
        return Seen(loss.detach(), metrics["acceptance"])

    def _capture(self, shape: _Shape, values: _Inputs) -> tuple[torch.cuda.CUDAGraph, _Inputs, Seen]:
        inputs = _Inputs(*(x.to(self.device) for x in values))
        self._gradients(inputs)  # compiles and chooses what is done at the first use of a shape
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            seen = self._gradients(inputs)
        return graph, inputs, seen

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


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
