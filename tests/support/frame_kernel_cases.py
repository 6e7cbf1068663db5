"""Slot states for the frame's kernels: random, with every edge that a frame can meet, on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.types import SURVIVAL_ONE

T, PER_SLOT_LEN = 16, 40


class State(NamedTuple):
    """Slot state as in device/state.py, S slots; drafts pending, history random below `committed`."""

    generation: Tensor
    active: Tensor
    committed: Tensor
    max_len: Tensor
    stop_ids: Tensor
    history: Tensor
    pending: Tensor
    draft_count: Tensor
    max_drafts: Tensor
    key: Tensor
    child: Tensor

    def copy(self, device: str = "cpu") -> State:
        return State(*(t.clone().to(device) for t in self))

    @property
    def fields(self) -> tuple[Tensor, ...]:
        """What close_round and close_greedy take, in order."""
        return self[:7]


def random_state(slots: int, drafts: int, *, vocab: int = 6, columns: int = PER_SLOT_LEN, seed: int = 0) -> State:
    """Slot 0 is the sink. Few different tokens, so that drafts, stop ids and n-grams meet; some slots near max_len."""
    g = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g)

    s = slots + 1
    max_len = ints(6, columns + 1, s)
    committed = (ints(1, 1 << 30, s) % (max_len - 2)).clamp(min=0)
    near = ints(0, 4, s) == 0
    committed = torch.where(near, max_len - 2, committed)
    stop_ids = torch.full((s, T), -1)
    stop_ids[:, 0] = torch.where(ints(0, 2, s) > 0, ints(0, vocab, s), -1)
    stop_ids[:, 9] = torch.where(ints(0, 4, s) > 0, -1, ints(0, vocab, s))
    state = State(
        generation=ints(1, 1 << 40, s), active=(ints(0, 5, s) > 0).long(), committed=committed, max_len=max_len,
        stop_ids=stop_ids, history=ints(0, vocab, s, columns + drafts + 2), pending=ints(0, vocab, s, drafts + 1),
        draft_count=ints(0, drafts + 1, s), max_drafts=ints(0, drafts + 1, s),
        key=ints(-(2**62), 2**62, s), child=ints(0, 900, s),
    )  # fmt: skip
    for t in (state.active, state.committed, state.draft_count, state.generation):
        t[0] = 0
    return state


def slot_list(slots: int, padding: int, seed: int = 0) -> Tensor:
    """All slots in random order, with `padding` sink slots among them."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.arange(1, slots + 1), torch.zeros(padding, dtype=torch.int64)])
    return ids[torch.randperm(slots + padding, generator=g)]


def same_state(got: State, want: State) -> bool:
    """Equal but for the sink, where the references leave what belongs to nobody."""
    return all(torch.equal(a[1:].cpu(), b[1:].cpu()) for a, b in zip(got, want, strict=True))


def draft_memory(slots: int, max_n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """hits, tries [S, max_n + 1] and matched [S] as after some rounds."""
    g = torch.Generator().manual_seed(seed)
    tries = torch.rand(slots + 1, max_n + 1, generator=g) * 9
    hits = tries * torch.rand(slots + 1, max_n + 1, generator=g)
    return hits, tries, torch.randint(0, max_n + 1, (slots + 1,), generator=g)


def survival_case(slots: int, drafts: int, seed: int = 0) -> Tensor:
    """Survivals [S, drafts] with many ties, never rising over a slot's drafts."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(1, 6, (slots + 1, drafts), generator=g).cummin(1).values * (SURVIVAL_ONE // 5)
