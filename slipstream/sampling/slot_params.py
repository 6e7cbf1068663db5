"""Sampling state gathered per slot or per row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SlotParams:
    """One entry per slot ([B], or [S]: slot state itself) or row [R].

    mode is a VerifyMode, key the 64-bit noise key, child the index among n.
    """

    mode: Tensor
    key: Tensor
    child: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def take(self, index: Tensor) -> SlotParams:
        """Gather entries by `index` (slots to rows)."""
        return SlotParams(
            mode=self.mode[index],
            key=self.key[index],
            child=self.child[index],
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
        )


@dataclass(frozen=True, kw_only=True)
class SlotLaws:
    """Slot state that a drafter's choice reads and writes by slot id.

    params: of all slots [S]; real numbers are float64. stop_ids_ST, min_len_S: what is banned until when.
    q_SKV: where the laws of drafts go, None while drafts are certain.
    """

    params: SlotParams
    stop_ids_ST: Tensor
    min_len_S: Tensor
    q_SKV: Tensor | None
