"""Slots that penalize, bias and ask for log-probabilities in every way, and rows of a frame over chains or trees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.frame_kernel_cases import State, random_state

BIAS_WIDTH = 300


@dataclass(frozen=True, kw_only=True)
class Adjusting:
    """Slot 0, the sink, and every third slot ask for nothing. seen: None where drafts are chains."""

    state: State
    logits: Tensor
    slot: Tensor
    cell: Tensor
    seen: Tensor | None
    tally: Tensor
    prompt_len: Tensor
    penalties: tuple[Tensor, Tensor, Tensor]
    biases: tuple[Tensor, Tensor, Tensor]

    def to(self, device: str) -> Adjusting:
        def moved(x: object) -> object:
            return x.clone().to(device) if isinstance(x, Tensor) else x

        fields = {k: tuple(map(moved, v)) if isinstance(v, tuple) else moved(v) for k, v in vars(self).items()}
        return Adjusting(**{**fields, "state": self.state.copy(device)})  # type: ignore[arg-type]

    @property
    def rows(self) -> tuple[Tensor | None, ...]:
        """Arguments of `adjust_rows` after the logits, but the two promises."""
        return (
            self.slot, self.cell, self.state.committed, self.state.pending, self.seen, self.tally, *self.penalties,
            *self.biases,
        )  # fmt: skip

    @property
    def history(self) -> tuple[Tensor, ...]:
        return self.state.history, self.prompt_len, self.state.committed


def random_adjusting(*, slots: int, vocab: int, drafts: int, tree: bool = False, seed: int = 0) -> Adjusting:
    g = torch.Generator().manual_seed(seed)

    def pick(values: list[float]) -> Tensor:
        chosen = torch.tensor(values, dtype=torch.float64)[torch.randint(0, len(values), (slots + 1,), generator=g)]
        return torch.where(torch.arange(slots + 1) % 3 == 0, values[0], chosen)

    # Few different tokens, the last one among them: repeated drafts, and both ends of a tile.
    state = random_state(slots, drafts, vocab=6, columns=40, seed=seed)
    few = torch.tensor([0, 1, vocab // 2, vocab // 2 + 1, vocab - 2, vocab - 1])
    state = state._replace(history=few[state.history], pending=few[state.pending])
    seen = None
    if tree:
        seen = torch.ones(slots + 1, drafts + 1, dtype=torch.int64)
        for n in range(1, drafts + 1):  # a node sees itself and what its parent sees
            parent = torch.randint(0, n, (slots + 1, 1), generator=g)
            seen[:, n] = seen.gather(1, parent)[:, 0] | 1 << n
    rows = slots * (drafts + 1)
    slot = torch.arange(1, slots + 1).repeat_interleave(drafts + 1)
    cell = state.committed[slot] + torch.arange(drafts + 1).repeat(slots)
    padding = torch.zeros(3, dtype=torch.int64)
    count = torch.randint(0, 40, (slots + 1,), generator=g) * (torch.arange(slots + 1) % 3 > 0)
    count[max(s for s in range(slots + 1) if s % 3)] = BIAS_WIDTH if vocab >= BIAS_WIDTH else 3
    ids = torch.stack([torch.randperm(max(vocab, BIAS_WIDTH), generator=g)[:BIAS_WIDTH] for _ in range(slots + 1)])
    tally = torch.randint(0, 9, (slots + 1, vocab), generator=g, dtype=torch.int32)
    tally *= torch.randint(0, 2, (slots + 1, vocab), generator=g, dtype=torch.int32)
    return Adjusting(
        state=state, logits=torch.randn(rows + 3, vocab, generator=g) * 4, slot=torch.cat([slot, padding]),
        cell=torch.cat([cell, padding]), seen=seen, tally=tally,
        prompt_len=(state.committed + 1 - torch.randint(0, 9, (slots + 1,), generator=g)).clamp(min=1),
        penalties=(pick([1.0, 1.3, 0.6, 1.0]), pick([0.0, 0.7, -2.0, 0.0]), pick([0.0, 0.3, -1.1, 2.0])),
        biases=(count, ids, torch.randn(slots + 1, BIAS_WIDTH, generator=g, dtype=torch.float64) * 30),
    )  # fmt: skip


def by_hand(case: Adjusting) -> Tensor:
    """`adjust_rows` one row and one token at a time."""
    out = case.logits.double().clone()
    repetition, presence, frequency = case.penalties
    count, ids, values = case.biases
    for r, (s, cell) in enumerate(zip(case.slot.tolist(), case.cell.tolist(), strict=True)):
        node = cell - int(case.state.committed[s])
        said = [
            int(case.state.pending[s, j])
            for j in range(1, case.state.pending.shape[1])
            if (j <= node if case.seen is None else int(case.seen[s, node]) >> j & 1)
        ]
        for t in range(out.shape[1]):
            times = int(case.tally[s, t]) // 2 + said.count(t)
            if times or int(case.tally[s, t]) % 2:
                out[r, t] = out[r, t] / repetition[s] if out[r, t] > 0 else out[r, t] * repetition[s]
            out[r, t] -= frequency[s] * times + (presence[s] if times else 0)
        for i in range(int(count[s])):
            out[r, int(ids[s, i])] += values[s, i]
    return out


def tally_by_hand(case: Adjusting, slot: int) -> list[int]:
    """The slot's tally from its history."""
    known = case.state.history[slot, : int(case.state.committed[slot]) + 1].tolist()
    prompt, output = known[: int(case.prompt_len[slot])], known[int(case.prompt_len[slot]) :]
    return [2 * output.count(t) + (t in prompt) for t in range(case.tally.shape[1])]
