"""Masks on the device: the ring, and which tokens a row keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.device.masks import MaskRing, MaskTable
from slipstream.device.state import SlotState
from slipstream.kernels.grammar import mask_rows, masked_rows
from slipstream.structured import Masks

SLOTS, DRAFTS = 3, 2


def state() -> SlotState:
    return SlotState(
        max_slots=SLOTS, max_len=32, pages_per_slot=8, num_drafts=DRAFTS, chunk_rows=8, device=torch.device("cpu")
    )


def pack(allowed: np.ndarray) -> np.ndarray:
    """[n, V] bool as words, by the definition: bit t % 32 of word t // 32."""
    rows, vocab = allowed.shape
    words = np.zeros((rows, -(-vocab // 32)), dtype=np.int64)
    for t in range(vocab):
        words[:, t // 32] |= allowed[:, t].astype(np.int64) << (t % 32)
    return words.astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("vocab", [64, 70, 96])
@pytest.mark.parametrize("apply", [masked_rows, mask_rows])
def test_rows_keep_what_their_mask_allows(apply: object, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    s = state()
    table = MaskTable(s, vocab)
    ring = MaskRing(table, slots=2)
    s.committed_S[:] = torch.tensor([0, 4, 7, 9])
    s.masked_S[:] = torch.tensor([0, 1, 0, 1])
    allowed = {slot: rng.random((n, vocab)) < 0.5 for slot, n in ((1, 3), (3, 1))}
    ring.send([Masks(2, pack(rng.random((3, vocab)) < 0.5))])  # an older launch; slot 2 has no grammar any more
    ring.send([Masks(slot, pack(rows)) for slot, rows in allowed.items()])
    slot_R, cell_R = torch.tensor([1, 2, 1, 3, 1, 0]), torch.tensor([4, 7, 5, 9, 6, 0])
    logits = torch.randn(6, vocab, dtype=torch.float64)
    out = logits.clone()
    apply(out, slot_R, cell_R, s.committed_S, s.masked_S, table.mask_SWN)  # type: ignore[operator]
    for i, (slot, place) in enumerate([(1, 0), (2, 0), (1, 1), (3, 0), (1, 2), (0, 0)]):
        keep = torch.from_numpy(allowed[slot][place]) if slot in allowed else torch.ones(vocab, dtype=torch.bool)
        assert torch.equal(out[i], torch.where(keep, logits[i], float("-inf")))


def test_the_ring_holds_masks_until_its_slot_comes_round_again() -> None:
    s = state()
    table = MaskTable(s, 64)
    ring = MaskRing(table, slots=2)
    for i in range(5):
        ring.send([Masks(1, np.full((1, 2), i, dtype=np.int32))])
        assert table.mask_SWN[1, 0].tolist() == [i, i]
    assert table.mask_SWN[1, 1].tolist() == [-1, -1] and table.mask_SWN[2].eq(-1).all()
    ring.send([Masks(2, np.zeros((9, 2), dtype=np.int32))])
    assert table.mask_SWN[2].eq(0).all() and table.mask_SWN[3].eq(-1).all(), "no more rows than the slot has"
