"""What a model needs from attention: one call per layer."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from slipstream.kernels.delta import DeltaWeights


class TreeSight(NamedTuple):
    """What rows of trees see instead of every position up to their own; int64 [R].

    Cache positions 0..past_R, and past + 1 + j where bit j of seen_R is set. kernels/attention.py has the same terms.
    """

    past_R: Tensor
    seen_R: Tensor


class AttentionContext(Protocol):
    """Holds a pass's rows and cache; built once per pass, called once per layer."""

    def attend(self, layer: int, q_RND: Tensor, k_RKD: Tensor, v_RKD: Tensor) -> Tensor:
        """Write k and v of all rows to the cache, then attend causally.

        q_RND [R, N, D]: rotated queries; k_RKD, v_RKD [R, K, D]: rotated keys and values (K kv heads).
        Returns o_RND [R, N, D] in q's dtype. Row r sees cache positions 0..position[r] of its own slot.
        """
        ...


@runtime_checkable
class DeltaContext(AttentionContext, Protocol):
    """What a model with recurrent layers needs beside attention."""

    def delta(self, layer: int, x_RX: Tensor, weights: DeltaWeights) -> Tensor:
        """Inputs [R, X] of all rows through a recurrent layer, from the state of each row's own slot.

        Returns o_RNV [R, N, dv] in x's dtype (N value heads). See kernels/delta.py.
        """
        ...
