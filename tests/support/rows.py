"""Records what the target computed for every row, so that two engines can be compared bit by bit."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slipstream import LLM

Tokens = tuple[int, ...]


@contextmanager
def recorded_rows(llm: LLM) -> Iterator[dict[Tokens, Tensor]]:
    """Raw logits [V] by the tokens up to and including the row's own; later rows of the same tokens overwrite.

    Rows of rejected drafts are there, too, under the tokens they were computed for.
    """
    frame = llm._built.device.frame
    rows: dict[Tokens, Tensor] = {}
    finish = frame._finish
    names = inspect.signature(finish)

    def record(*args: Any, **more: Any) -> Any:
        given = names.bind(*args, **more).arguments
        state, logits_RV, rows_in = frame.state, given["logits_RV"], given["rows"]
        for b, slot in enumerate(rows_in.slot_B.tolist()):
            base = int(state.committed_S[slot])
            known = state.history_SL[slot, : base + 1].tolist()
            drafts = state.pending_SW[slot, 1:].tolist()
            for depth in range(int(rows_in.rows_B[b])):
                row = int(rows_in.row_of_BW[b, depth])
                assert int(rows_in.pos_R[row]) == base + depth
                rows[(*known, *drafts[:depth])] = logits_RV[row].clone()
        return finish(*args, **more)

    frame._finish = record  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del frame._finish


def differing(
    rows: dict[Tokens, Tensor], plain: dict[Tokens, Tensor], sequences: Sequence[tuple[Tokens, Sequence[int]]]
) -> list[tuple[int, int, float]]:
    """(sequence, output index, largest difference) of every row that chose an output token and is not bit-equal."""
    found = []
    for i, (prompt, output) in enumerate(sequences):
        for n in range(len(output)):
            key = (*prompt, *output[:n])
            if key not in rows:  # the outputs parted before
                found.append((i, n, float("inf")))
                break
            if not torch.equal(rows[key], plain[key]):
                found.append((i, n, float((rows[key] - plain[key]).abs().max())))
    return found
