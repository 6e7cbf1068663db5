"""The auditor's naive forms, each as it stands in real decode loops, beside its fix. Same tokens, same state after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.clinic import pair
from bench.clinic.loop import RING, Loop


@pair("finish test by bool()", rule="host-read", about="the loop asks each step whether a sequence has ended")
class FinishTest:
    @staticmethod
    def before(loop: Loop, t: int) -> Any:
        next_B = loop.advance()
        if bool((next_B == loop.eos).any()):
            loop.finished_B |= next_B == loop.eos
        return next_B, loop.finished_B

    @staticmethod
    def after(loop: Loop, t: int) -> Any:
        next_B = loop.advance()
        loop.finished_B |= next_B == loop.eos
        return next_B, loop.finished_B


@pair("accepted count by .item()", rule="host-read", about="the step reads how many drafts held, once per slot")
class AcceptedCount:
    @staticmethod
    def before(loop: Loop, t: int) -> Any:
        next_B = loop.advance()
        for slot in range(loop.slots):
            loop.lengths[slot] += int(loop.accepted_B[slot].item())
        return next_B

    @staticmethod
    def after(loop: Loop, t: int) -> Any:
        next_B = loop.advance()
        loop.down_B[t % RING].copy_(loop.accepted_B, non_blocking=True)  # the host adds it up D steps later
        return next_B


@pair("tokens read at once by .cpu()", rule="host-copy", about="the tokens of a step are read before the next")
class TokensAtOnce:
    @staticmethod
    def before(loop: Loop, t: int) -> Any:
        next_B = loop.advance()
        loop.seen.append([int(x) for x in next_B.cpu().numpy()])
        return next_B

    @staticmethod
    def after(loop: Loop, t: int) -> Any:
        next_B = loop.advance()
        loop.down_B[t % RING].copy_(next_B, non_blocking=True)
        if t >= RING - 1:  # the loop has waited for step t - D already: that record is there
            loop.seen.append([int(x) for x in loop.down_B_np[(t + 1) % RING]])
        return next_B


@pair("positions from a Python list", rule="tensor-literal", about="torch.tensor(lengths, device=...) each step")
class PositionsFromList:
    @staticmethod
    def before(loop: Loop, t: int) -> Any:
        pos_B = torch.tensor(loop.host_lengths(), device=loop.device) - 1
        next_B = loop.forward(loop.token_B, pos_B)
        loop.token_B.copy_(next_B)
        return next_B

    @staticmethod
    def after(loop: Loop, t: int) -> Any:
        loop.host_lengths()
        return loop.advance()


@pair("tensor from device scalars", rule="tensor-from-scalars", about="torch.tensor([x[0], x[1], ...], device=...)")
class TensorFromScalars:
    @staticmethod
    def before(loop: Loop, t: int) -> Any:
        next_B = loop.advance()
        index_B = torch.tensor([loop.accepted_B[i] for i in range(loop.slots)], device=loop.device)
        return next_B, index_B

    @staticmethod
    def after(loop: Loop, t: int) -> Any:
        next_B = loop.advance()
        index_B = torch.stack([loop.accepted_B[i] for i in range(loop.slots)])
        return next_B, index_B


@pair("pageable copy, non_blocking", rule="pageable-copy", about="the page table from ordinary memory each step")
class PageableCopy:
    @staticmethod
    def before(loop: Loop, t: int) -> Any:
        host_BP = torch.empty(loop.slots, loop.pages, dtype=torch.int64)
        host_BP.numpy()[:] = loop.host_table(t)
        loop.table_BP.copy_(host_BP, non_blocking=True)
        return loop.advance(), loop.table_BP

    @staticmethod
    def after(loop: Loop, t: int) -> Any:
        loop.up_BP_np[t % RING] = loop.host_table(t)
        loop.table_BP.copy_(loop.up_BP[t % RING], non_blocking=True)
        return loop.advance(), loop.table_BP


@pair("strided pinned source", rule="strided-copy", about="a transposed pinned table: staged in a pageable temporary")
class StridedSource:
    @staticmethod
    def before(loop: Loop, t: int) -> Any:
        loop.up_PB_np[t % RING] = loop.host_table(t).T
        loop.table_BP.copy_(loop.up_PB[t % RING].t(), non_blocking=True)
        return loop.advance(), loop.table_BP

    @staticmethod
    def after(loop: Loop, t: int) -> Any:
        loop.up_PB_np[t % RING] = loop.host_table(t).T
        loop.landing_PB.copy_(loop.up_PB[t % RING], non_blocking=True)
        loop.table_BP.copy_(loop.landing_PB.t())  # transposed on the device
        return loop.advance(), loop.table_BP


@pair("pin_memory() per step", rule="pin-memory", about="each step pins a new buffer for its lengths")
class PinPerStep:
    @staticmethod
    def before(loop: Loop, t: int) -> Any:
        lengths_B = torch.tensor(loop.host_lengths(), dtype=torch.int64)
        pinned_B = lengths_B.pin_memory() if loop.device.type == "cuda" else lengths_B
        pos_B = pinned_B.to(loop.device, non_blocking=True) - 1
        next_B = loop.forward(loop.token_B, pos_B)
        loop.token_B.copy_(next_B)
        return next_B

    @staticmethod
    def after(loop: Loop, t: int) -> Any:
        loop.up_B_np[t % RING] = loop.host_lengths()
        pos_B = loop.up_B[t % RING].to(loop.device, non_blocking=True) - 1
        next_B = loop.forward(loop.token_B, pos_B)
        loop.token_B.copy_(next_B)
        return next_B


@pair("boolean index", rule="boolean-index", about="the tokens of active slots are picked by a mask")
class BooleanIndex:
    @staticmethod
    def before(loop: Loop, t: int) -> Any:
        next_B = loop.forward(loop.token_B, loop.pos_B)
        loop.token_B[loop.active_B] = next_B[loop.active_B]
        return loop.token_B

    @staticmethod
    def after(loop: Loop, t: int) -> Any:
        next_B = loop.forward(loop.token_B, loop.pos_B)
        loop.token_B.copy_(torch.where(loop.active_B, next_B, loop.token_B))
        return loop.token_B


@pair("nonzero() to compact the batch", rule="nonzero", about="only active rows run, at the price of a wait")
class Compact:
    @staticmethod
    def before(loop: Loop, t: int) -> Any:
        live_R = loop.active_B.nonzero().squeeze(1)
        loop.token_B[live_R] = loop.forward(loop.token_B[live_R], loop.pos_B[live_R])
        return loop.token_B

    @staticmethod
    def after(loop: Loop, t: int) -> Any:
        next_B = loop.forward(loop.token_B, loop.pos_B)  # idle rows ride along: the weights are read once either way
        loop.token_B.copy_(torch.where(loop.active_B, next_B, loop.token_B))
        return loop.token_B


@pair("repeat_interleave without output_size", rule="repeat-interleave", about="rows to slots; the sum is read back")
class RowsOfSlots:
    @staticmethod
    def before(loop: Loop, t: int) -> Any:
        owner_R = torch.repeat_interleave(loop.slot_B, loop.rows_B)
        return loop.advance(), owner_R

    @staticmethod
    def after(loop: Loop, t: int) -> Any:
        owner_R = torch.repeat_interleave(loop.slot_B, loop.rows_B, output_size=loop.total_rows)
        return loop.advance(), owner_R


@pair("index by a Python list", rule="host-index", about="table[[0, 2, 4]]: the list is copied to the device each step")
class ListIndex:
    @staticmethod
    def before(loop: Loop, t: int) -> Any:
        return loop.advance(), loop.table_BP[loop.live_list]

    @staticmethod
    def after(loop: Loop, t: int) -> Any:
        return loop.advance(), loop.table_BP[loop.live_B]


@pair("synchronize() per step", rule="explicit-sync", about="the loop waits for the device before it goes on")
class Synchronize:
    @staticmethod
    def before(loop: Loop, t: int) -> Any:
        next_B = loop.advance()
        if loop.device.type == "cuda":
            torch.cuda.synchronize()
        return next_B

    @staticmethod
    def after(loop: Loop, t: int) -> Any:
        return loop.advance()


@pair(
    "KV grown by cat", rule="allocation-growth", cold=True, provable=False,
    about="the cache is longer by one row per slot and layer each step, in new memory",
)  # fmt: skip
class GrownCache:
    @staticmethod
    def before(loop: Loop, t: int) -> Any:
        if loop.grown_LH is None:
            loop.grown_LH = torch.zeros_like(loop.kv_LH[: loop.kv_rows])
        next_B = loop.advance()
        new_LH = loop.embed_VH[next_B].repeat(loop.kv_step // loop.slots, 1)
        loop.grown_LH = torch.cat([loop.grown_LH, new_LH])
        return next_B, loop.grown_LH[-loop.kv_step :]

    @staticmethod
    def after(loop: Loop, t: int) -> Any:
        next_B = loop.advance()
        new_LH = loop.embed_VH[next_B].repeat(loop.kv_step // loop.slots, 1)
        at = loop.kv_rows + t * loop.kv_step % (len(loop.kv_LH) - loop.kv_rows)
        loop.kv_LH[at : at + loop.kv_step] = new_LH
        return next_B, loop.kv_LH[at : at + loop.kv_step]


def draft_step(hidden_BH: Tensor, step: int) -> Tensor:
    """One function for the first drafting step and the later ones, as drafters used to be written."""
    if step == 0:
        return hidden_BH * 2.0
    return hidden_BH + float(step)


def first_step(hidden_BH: Tensor) -> Tensor:
    return hidden_BH * 2.0


def later_step(hidden_BH: Tensor, step_1: Tensor) -> Tensor:
    return hidden_BH + step_1


_compiled: dict[str, Any] = {}


def _compile(function: Any) -> Any:
    """torch.compile without a code generator: what is measured is how often it compiles."""
    name = function.__name__
    if name not in _compiled:
        _compiled[name] = torch.compile(function, backend="eager", dynamic=False)
    return _compiled[name]


@pair(
    "founding case 3: one compiled draft step with a step branch", rule="recompile", cold=True, provable=False,
    about="torch.compile of step(hidden, step) while the batch shrinks: a compilation per step number and batch size",
)  # fmt: skip
class StepBranch:
    @staticmethod
    def before(loop: Loop, t: int) -> Any:
        next_B = loop.advance()
        batch = loop.slots - t % 3
        hidden_BH = loop.embed_VH[next_B[:batch]].float()
        for step in range(2):
            hidden_BH = _compile(draft_step)(hidden_BH, step)
        return next_B, hidden_BH[:5]

    @staticmethod
    def after(loop: Loop, t: int) -> Any:
        next_B = loop.advance()
        hidden_BH = loop.embed_VH[next_B].float()  # padded to the bucket: one shape
        hidden_BH = first_step(hidden_BH)
        for _ in range(1, 2):
            hidden_BH = _compile(later_step)(hidden_BH, loop.accepted_B[:1].float())
        return next_B, hidden_BH[:5]
