"""Slots that sample in every way, their rows and logits; and what the torch code of a CPU frame makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels import frame as ops_frame
from slipstream.kernels import sample
from slipstream.sampling.processors import process_logits
from slipstream.types import MIN_TEMPERATURE, VerifyMode
from slipstream.verify import DenseQ, OneHot, VerifyRows, verify
from tests.support.frame_kernel_cases import State, random_state, slot_list

GREEDY, COUPLED, REJECTION = (int(m) for m in VerifyMode)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Per slot [S]: mode and child int64, the rest as in device/state.py. Slot 0 is greedy, without filters."""

    mode: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    min_len: Tensor

    def to(self, device: str) -> Sampling:
        return Sampling(**{name: t.to(device) for name, t in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Case:
    """A frame's slots and packed rows after the target's pass. q: drafters' law [S, K, V] or None."""

    state: State
    sampling: Sampling
    slot: Tensor
    packed: tuple[Tensor, ...]
    logits: Tensor
    q: Tensor | None

    def to(self, device: str) -> Case:
        return Case(
            state=self.state.copy(device), sampling=self.sampling.to(device), slot=self.slot.to(device),
            packed=tuple(t.to(device) for t in self.packed), logits=self.logits.clone().to(device),
            q=None if self.q is None else self.q.to(device),
        )  # fmt: skip

    @property
    def wanted(self) -> tuple[Tensor, ...]:
        """Temperature, top-k, top-p, min-p."""
        s = self.sampling
        return s.temperature, s.top_k, s.top_p, s.min_p


def random_sampling(slots: int, vocab: int, state: State, *, filtered: bool, seed: int) -> Sampling:
    g = torch.Generator().manual_seed(seed)

    def pick(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(0, len(values), (slots + 1,), generator=g)]

    real, whole = torch.float64, torch.int64
    mode = torch.randint(0, 3, (slots + 1,), generator=g)
    temperature = torch.where(mode == GREEDY, 0.0, pick([1.0, 0.7, 0.3, 1.9, MIN_TEMPERATURE, 1e-3, 100.0], real))
    ban = torch.randint(0, 3, (slots + 1,), generator=g) == 0
    sampling = Sampling(
        mode=mode, temperature=temperature, top_k=pick([-1, 0, 1, 2, 7, 40, vocab // 2, vocab, vocab + 9], whole),
        top_p=pick([1.0, 1.0, 0.9, 0.5, 1e-6, 0.999, 0.97], real), min_p=pick([0.0, 0.0, 0.1, 0.01, 1.0, 1e-5], real),
        min_len=torch.where(ban, state.committed + 3, 0),
    )  # fmt: skip
    if not filtered:
        sampling.top_k.zero_(), sampling.top_p.fill_(1.0), sampling.min_p.zero_()
    for t in (sampling.mode, sampling.temperature, sampling.min_len):
        t[0] = 0
    return sampling


def random_case(
    *, slots: int, vocab: int, width: int, seed: int, filtered: bool = True, dense: bool = False, padding: int = 1,
    rows: int | None = None,
) -> Case:  # fmt: skip
    """Rows of several kinds: flat, peaked, with ties, with masked tokens. Drafts are often the likely token."""
    g = torch.Generator().manual_seed(seed)
    drafts = width - 1
    state, slot = random_state(slots, drafts, vocab=vocab, seed=seed), slot_list(slots, padding, seed)
    sampling = random_sampling(slots, vocab, state, filtered=filtered, seed=seed)
    total = rows or (slots + padding) * width
    packed = ops_frame.packed_rows(
        state.active, state.committed, state.draft_count, state.pending, slot, total, width
    )  # fmt: skip
    logits = torch.randn(total, vocab, generator=g)
    kind = torch.arange(total) % 5
    logits[kind == 1] *= 6
    logits[kind == 2] = (logits[kind == 2] * 4).round() / 4  # ties
    logits[kind == 3] = torch.where(torch.rand(vocab, generator=g) < 0.6, float("-inf"), logits[kind == 3] * 3)
    logits[kind == 4] = logits[kind == 4] * 0.02 - 7
    logits[:, vocab // 2] = 0.5  # one token is never masked
    place = packed[1] - state.committed[packed[0]]
    judging = (packed[0] > 0) & (place < drafts) & (torch.rand(total, generator=g) < 0.7)
    rows_in = judging.nonzero()[:, 0]
    state.pending[packed[0][rows_in], place[rows_in] + 1] = logits[rows_in].argmax(1)
    packed[2][:] = torch.where(packed[0] > 0, state.pending[packed[0], place.clamp(min=0)], 0)
    stops = torch.randint(0, vocab, state.stop_ids.shape, generator=g)
    state.stop_ids[:] = torch.where(state.stop_ids >= 0, stops, -1)
    rows_in = (packed[0] > 0).nonzero()[:, 0]
    state.stop_ids[packed[0][rows_in], 2] = logits[rows_in].argmax(1)  # a ban that matters
    q = None
    if dense and drafts:
        law = torch.softmax(torch.randn(slots + 1, drafts, vocab, generator=g) * 2, -1)
        index = state.pending[:, 1:, None]
        q = law.scatter(2, index, law.gather(2, index) + 0.3)
        q /= q.sum(2, keepdim=True)
    return Case(state=state, sampling=sampling, slot=slot, packed=packed, logits=logits, q=q)


def op_frame(case: Case, *, filtered: bool, synthetic: float | None = None) -> tuple[Tensor, Tensor]:
    """Processed logits and record by the ops; closes the round in `case`."""
    state, s = case.state, case.sampling
    slot, pos, _, _, rows_B, row_of = case.packed
    logits = case.logits.clone()
    peak, threshold, greedy = sample.row_threshold(
        logits, slot, pos, *case.wanted, state.stop_ids, s.min_len, filtered
    )  # fmt: skip
    rows = sample.race_rows(
        logits, peak, threshold, greedy, slot, pos, s.temperature, s.mode, state.key, state.child, state.committed,
        state.pending, case.q,
    )  # fmt: skip
    record = ops_frame.close_sampled(
        *rows, row_of, rows_B, case.slot, *state.fields, s.mode, state.key, state.child, case.q, synthetic
    )
    temperature = s.temperature[slot].to(torch.float32)
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    return torch.where(scaled >= threshold[:, None], scaled, float("-inf")), record


def torch_frame(case: Case, *, filtered: bool, synthetic: float | None = None) -> tuple[Tensor, Tensor]:
    """Processed logits [R, V] and the record, by sampling/processors.py, verify/ and closed_round. Closes the round."""
    state, s, slot = case.state, case.sampling, case.slot
    slot_R, pos_R, *_, rows_B, row_of_BW = case.packed
    top_p, min_p, temperature = (t.to(torch.float32)[slot_R] for t in (s.top_p, s.min_p, s.temperature))
    ban = (state.stop_ids[slot_R], pos_R + 1 < s.min_len[slot_R])
    processed = process_logits(
        case.logits.clone(), temperature, s.top_k[slot_R], top_p, min_p, ban, filtered=filtered
    )  # fmt: skip
    verdict = verify(
        processed,
        VerifyRows(
            mode_B=s.mode[slot], key_B=state.key[slot], child_B=state.child[slot], base_B=state.committed[slot],
            row_of_BW=row_of_BW, rows_B=rows_B, draft_BK=state.pending[slot, 1:],
            q=OneHot() if case.q is None else DenseQ(case.q[slot]),
        ),
        sampled=True, coupled=True, rejection=True, synthetic=synthetic,
    )  # fmt: skip
    record = ops_frame.closed_round(
        verdict.tokens_BW, verdict.accepted_B, verdict.n_emitted_B, rows_B, slot, *state.fields
    )
    return processed, record
