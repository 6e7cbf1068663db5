"""The drafter's side of a frame: what it reads, what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from slipstream.draft.tree import DraftTree
from slipstream.sampling.slot_params import SlotLaws, SlotParams
from slipstream.types import Admit


@dataclass(frozen=True, kw_only=True)
class TargetRows:
    """What the target computed: R flat rows of B slots, grid cells [B, W] (kernels/frame.py packs them).

    slot_R (0: padding), pos_R, token_R: where a row stood and what it read. owner_R: its slot as an index into B;
    rows_B: rows of each slot, 0 where it was not active; row_of_BW: the row at each depth. slot_B: slot ids as the
    frame has them, ended ones too.
    taps: the residual stream [R, H] before each layer that the drafter named; hidden_RH: after the final norm, if it
    asked. A row stays in the sequence when its position is below the slot's committed length; the token that the
    target saw it lead to stands one further on in history.
    """

    slot_R: Tensor
    pos_R: Tensor
    token_R: Tensor
    owner_R: Tensor
    slot_B: Tensor
    rows_B: Tensor
    row_of_BW: Tensor
    taps: tuple[Tensor, ...] = ()
    hidden_RH: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class DraftView:
    """The end of a frame, B slots: everything is already committed.

    slot_B: slot ids, 0 where the slot is not live. committed_B: committed length c (the bonus token stands at
    position c of history). drafted_B, accepted_B, emitted_B: this round's verified and accepted drafts, and tokens
    that were kept. rows: the rows that the target verified; of a slot that has just left prefill its last prompt row.
    history_SL [S, L], committed_S, table_SP: slot state, read only.
    len_ub: host bound on c + 1. drafts: no more than that many are of use. sampled, filtered, rejection,
    coupled: as in FramePlan; params: None where nothing is
    sampled, or where `laws` stands for it: there tokens are chosen by kernels that read slot state, and the laws of
    drafts go straight to laws.q_SKV (`draft.choose` does that).
    """

    slot_B: Tensor
    committed_B: Tensor
    drafted_B: Tensor
    accepted_B: Tensor
    emitted_B: Tensor
    rows: TargetRows
    history_SL: Tensor
    committed_S: Tensor
    table_SP: Tensor
    params: SlotParams | None
    laws: SlotLaws | None
    len_ub: int
    first_page: Sequence[int]
    drafts: int
    sampled: bool
    filtered: bool
    rejection: bool
    coupled: bool


@dataclass(frozen=True, kw_only=True)
class PrefillView:
    """One prefill pass over packed prompt rows [R], rows of one slot side by side and in order.

    slot_R, pos_R, token_R: slot, position and token of each row; rows of slot 0 are padding. cache_slot_R: flat
    cache index of each row, by table_SP (padding: in the sink page). last_row_B, last_slot_B [B]: the rows that end a
    prompt and their slots; row 0 and slot 0 where there is none. history_SL: slot state, read only. taps, hidden_RH:
    as in TargetRows.
    spans: (slot, start, length, first_page) of the rows, a host fact that only the CPU has; empty on a GPU, where one
    captured pass serves all chunks of a size.

    The token after a prompt's last row is not sampled yet; what pairs with it comes again in the slot's first
    `DraftView.rows`.
    """

    slot_R: Tensor
    pos_R: Tensor
    token_R: Tensor
    cache_slot_R: Tensor
    table_SP: Tensor
    history_SL: Tensor
    last_row_B: Tensor
    last_slot_B: Tensor
    spans: Sequence[tuple[int, int, int, int]] = ()
    taps: tuple[Tensor, ...] = ()
    hidden_RH: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class FirstDraft:
    """What `extend` learnt: the first draft [B], its probabilities [B, V] when drafts are sampled.

    state_BH: what the next step of the drafter reads besides the token, for drafters that have such a thing.
    logits_BD: of the first draft over the drafter's own vocabulary, for drafters of trees.
    """

    token_B: Tensor
    count_B: Tensor
    q_BV: Tensor | None = None
    state_BH: Tensor | None = None
    logits_BD: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """token_BK [B, k]: drafts in order; the first count_B are offered. q_BKV: their law, None if one-hot.

    tree: what they are nodes of, where they are no chain; token_BK are its nodes after the root.
    confidence_BK: calibrated logits of "accepted if those before it are", float32; of a `ConfidentDrafter`. One may
    depend on the drafts before its own only, else output scheduled by it is biased.
    """

    token_BK: Tensor
    count_B: Tensor
    q_BKV: Tensor | None = None
    tree: DraftTree | None = None
    confidence_BK: Tensor | None = None


@runtime_checkable
class Drafter(Protocol):
    """Proposes up to `max_drafts` tokens per slot at the end of each frame. Never reads a tensor's value.

    taps: target layers whose inputs it reads (Hugging Face's hidden_states[i], below the number of layers).
    reads_hidden: it reads the target's hidden states after the final norm. rereads: positions before the end of a
    prefix hit that the target has to compute again for it, 0 or 1. lookahead: it writes KV rows of its own beyond
    the verified rows. draft_vocab: width of dense q, None when drafts are certain.
    """

    taps: tuple[int, ...]
    reads_hidden: bool
    rereads: int
    lookahead: bool
    max_drafts: int
    draft_vocab: int | None

    def admit(self, admit: Admit) -> None:
        """A slot changes hands: forget its last owner."""
        ...

    def prefill(self, view: PrefillView) -> None:
        """Learn from prompt rows (their KV, for drafters that have one)."""
        ...

    def clear_pages(self, pages_P: Tensor) -> None:
        """Pages [P] change hands; a drafter with KV of its own zeroes them."""
        ...

    def extend(self, view: DraftView) -> FirstDraft:
        """Learn from the verified rows; the result holds the first draft."""
        ...

    def propose(self, first: FirstDraft, view: DraftView) -> Drafts:
        """The remaining drafts."""
        ...

    def weight_bytes(self) -> int:
        """Bytes of weights that one frame's drafting streams."""
        ...


@runtime_checkable
class ConfidentDrafter(Protocol):
    """A drafter that can say how sure it is. confident: its `Drafts` carry confidences. cuts: how many drafts it offers
    depends on which they are."""

    confident: bool
    cuts: bool


@dataclass(frozen=True, kw_only=True)
class DraftSlots:
    """The end of a frame as slot state, for a drafter that writes its drafts there itself. All int64.

    record_BC: the frame's record (kernels/frame.py: accepted and drafted counts; the drafter writes next drafts).
    The drafter writes pending_SW[:, 1:] and draft_count_S of slot_B [B] (ids as the frame has them, active or not);
    the rest it reads.
    """

    record_BC: Tensor
    slot_B: Tensor
    active_S: Tensor
    committed_S: Tensor
    max_len_S: Tensor
    max_drafts_S: Tensor
    history_SL: Tensor
    pending_SW: Tensor
    draft_count_S: Tensor


@runtime_checkable
class InPlaceDrafter(Protocol):
    """A drafter with kernels of its own for a GPU: one call instead of `extend`, `propose` and what follows them."""

    def draft_slots(self, slots: DraftSlots) -> None:
        """Learn from the round, then write the next drafts: never more than max_drafts, nor than fit before max_len."""
        ...
