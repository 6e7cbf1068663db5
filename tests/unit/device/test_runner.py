"""Device around replayed frames: what goes up and comes down, inside and outside of inference mode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.device.logits import LogitStages
from slipstream.device.media import GivenRows
from slipstream.device.runner import Device
from slipstream.device.state import SlotState
from slipstream.types import RECORD_COLUMNS, FramePlan, PageAppend, PrefillSpan


class Replays:
    """Stands for captured graphs: records are made in inference mode, as capture makes them."""

    def __init__(self, state: SlotState) -> None:
        self.state, self.modes = state, list[bool]()

    def run(self, plan: FramePlan) -> Tensor:
        self.modes.append(torch.is_inference_mode_enabled())
        return self._record(len(plan.decode), plan.seq)

    def prefill(self, plan: FramePlan, *, last: bool) -> Tensor | None:
        return self._record(plan.prefill_prompts, plan.seq) if last else None

    def _record(self, rows: int, value: int) -> Tensor:
        with torch.inference_mode():
            return torch.full((rows, RECORD_COLUMNS + 1), value)


def make() -> tuple[Device, Replays, SlotState]:
    state = SlotState(max_slots=4, max_len=32, pages_per_slot=8, num_drafts=0, chunk_rows=8, device=torch.device("cpu"))
    frame: Any = SimpleNamespace(
        logit_stages=LogitStages(state, 8, kernels=False),
        state=state,
        model=SimpleNamespace(dtype=torch.float32),
        clears_pages=False,
        given=GivenRows(state, 8, torch.float32, kernels=True),
    )
    graphs: Any = Replays(state)
    return Device(frame, run_ahead=2, graphs=graphs), graphs, state


@pytest.mark.parametrize("built_in_inference_mode", [False, True])
def test_a_replayed_frame_enters_inference_mode_only_where_it_must(built_in_inference_mode: bool) -> None:
    with torch.inference_mode(built_in_inference_mode):
        device, graphs, state = make()
    span = PrefillSpan(slot=2, start=0, length=3, last=True)
    pages = [(), (PageAppend(2, 1, (7, 8)),), (PageAppend(2, 3, (5,)),), (PageAppend(2, 4, (4,)),)]
    for seq, append in enumerate(pages):
        # The first launch reads a prompt too; the ring's views are made in it and written in all the others.
        chunk: dict[str, Any] = {} if seq else {"prefill": (span,), "prefill_rows": 8, "prefill_prompts": 1}
        device.launch(FramePlan(seq=seq, decode=(2,), rows=1, width=1, pages=append, **chunk))
        result = device.collect()
        assert result.records == [[seq] * (RECORD_COLUMNS + 1)] * len(result.slots) and result.decoded == 1
    assert state.table_SP[2, :5].tolist() == [0, 7, 8, 5, 4]
    assert graphs.modes == [True, *[built_in_inference_mode] * 3]


def test_ring_places_made_in_inference_mode_are_written_outside_of_it() -> None:
    device, _, _ = make()
    span = PrefillSpan(slot=2, start=0, length=3, last=True)
    for seq in range(6):
        last = {"prefill": (span,), "prefill_rows": 8, "prefill_prompts": 1} if seq < 3 else {}
        plan = FramePlan(seq=seq, decode=(2, 1) if seq >= 3 else (), rows=2, width=1, **last)  # type: ignore[arg-type]
        device.launch(plan)
        assert device.collect().records[0][0] == seq
    single = FramePlan(seq=9, decode=(2,), rows=1, width=1)
    device.launch(single)  # its place in the ring was made by a prefill
    assert device.collect().records == [[9] * (RECORD_COLUMNS + 1)]
