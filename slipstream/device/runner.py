"""The eager device: runs each launch when it is enqueued and hands its result out when it is collected.

The same frame on any torch device. Results wait in a queue, so run-ahead, stale frames and late page release
behave on a CPU as they do on a GPU.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.device.frame import Frame, Record
from slipstream.types import FramePlan, FrameResult, IntArray


@dataclass(frozen=True, kw_only=True)
class _Launched:
    plan: FramePlan
    records: tuple[Record, ...]
    slots: tuple[int, ...]
    is_prefill: tuple[bool, ...]


class EagerDevice:
    """`launch` runs a plan; `collect` returns the oldest uncollected result."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.launched: deque[_Launched] = deque()
        self.device_seconds = 0.0

    def launch(self, plan: FramePlan) -> None:
        began = time.perf_counter()
        with torch.inference_mode():
            self.launched.append(self._run(plan))
        self.device_seconds += time.perf_counter() - began

    def _run(self, plan: FramePlan) -> _Launched:
        frame, state = self.frame, self.frame.state
        state.drop(plan.drops)
        state.admit(plan.admits)
        state.append_pages(plan.pages)
        fresh = [p for a in plan.admits for p in a.pages[a.start // frame.kv.page_size :]]
        fresh += [p for append in plan.pages for p in append.pages]
        if fresh:
            fresh_P = torch.tensor(fresh, dtype=torch.int64, device=state.device)
            frame.kv.clear(fresh_P)
            if frame.drafter is not None:
                frame.drafter.clear_pages(fresh_P)
        if frame.drafter is not None:
            for a in plan.admits:
                frame.drafter.admit(a)
        records: list[Record] = []
        slots: list[int] = []
        is_prefill: list[bool] = []
        if plan.decode:
            records.append(frame.decode(plan, torch.tensor(plan.decode, dtype=torch.int64, device=state.device)))
            slots += plan.decode
            is_prefill += [False] * len(plan.decode)
        if plan.prefill:
            last = [s.slot for s in plan.prefill if s.last]
            last_B = torch.tensor(last, dtype=torch.int64, device=state.device) if last else None
            record = frame.prefill(plan, plan.prefill, last_B)
            if record is not None:
                records.append(record)
                slots += last
                is_prefill += [True] * len(last)
        return _Launched(plan=plan, records=tuple(records), slots=tuple(slots), is_prefill=tuple(is_prefill))

    def collect(self) -> FrameResult:
        done = self.launched.popleft()
        width = max((r.token_BW.shape[1] for r in done.records), default=1)
        tokens_np = np.zeros((len(done.slots), width), dtype=np.int64)
        at = 0
        for r in done.records:
            n, w = r.token_BW.shape
            tokens_np[at : at + n, :w] = r.token_BW.cpu().numpy()
            at += n

        def column(name: str) -> IntArray:
            parts: list[Tensor] = [getattr(r, name) for r in done.records]
            return torch.cat(parts).cpu().numpy() if parts else np.zeros(0, dtype=np.int64)

        return FrameResult(
            seq=done.plan.seq,
            slots=done.slots,
            generation_np=column("generation_B"),
            tokens_np=tokens_np,
            n_emitted_np=column("n_emitted_B"),
            accepted_np=column("accepted_B"),
            drafted_np=column("drafted_B"),
            finish_np=column("finish_B"),
            next_drafts_np=column("next_drafts_B"),
            is_prefill=done.is_prefill,
        )
