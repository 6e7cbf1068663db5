"""Models some of whose layers have a sliding window: which context and which cache a layer's rows go to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.attention.protocol import AttentionContext
from slipstream.memory.kv import KVPages

Maker = Callable[[KVPages, Tensor, int], AttentionContext]
"""(cache, page table, window; 0: none) to the context of a pass."""


@dataclass(frozen=True, kw_only=True)
class WindowLayers:
    """Of a model's layers with keys and values: where each is kept, and how far those with a window see.

    size: positions that a row sees there, its own included. place: per layer whether it has the window, and its index
    in its own cache. kv: the cache of those that have it; None: they share one with the others.
    """

    size: int
    place: tuple[tuple[bool, int], ...]
    kv: KVPages | None = None

    @staticmethod
    def counts(windows: Sequence[int]) -> tuple[int, int]:
        """Layers without and with a window."""
        windowed = sum(w > 0 for w in windows)
        return len(windows) - windowed, windowed

    @classmethod
    def of(cls, windows: Sequence[int], kv: KVPages | None = None) -> WindowLayers | None:
        """windows: of each layer, 0 for none (`ModelConfig.windows`). None where no layer has one."""
        if not any(windows):
            return None
        place, taken = [], [0, 0]
        for i, w in enumerate(windows):
            place.append((w > 0, i if kv is None else taken[w > 0]))
            taken[w > 0] += 1
        return cls(size=max(windows), place=tuple(place), kv=kv)


class ByLayer:
    """AttentionContext that hands each layer to the context of its kind."""

    def __init__(self, full: AttentionContext, windowed: AttentionContext, layers: WindowLayers) -> None:
        self.contexts, self.place = (full, windowed), layers.place

    def attend(self, layer: int, q_RND: Tensor, k_RKD: Tensor, v_RKD: Tensor) -> Tensor:
        windowed, at = self.place[layer]
        return self.contexts[windowed].attend(at, q_RND, k_RKD, v_RKD)


def by_layer(
    make: Maker,
    kv: KVPages,
    table_SP: Tensor,
    layers: WindowLayers | None,
    window_table_SP: Tensor | None = None,
) -> AttentionContext:
    """The context of a pass over both kinds of layers. window_table_SP: the pages of layers.kv, where there is one."""
    if layers is None:
        return make(kv, table_SP, 0)
    if layers.kv is None:
        windowed = make(kv, table_SP, layers.size)
    else:
        assert window_table_SP is not None, "pages of the window layers are named by a table of their own"
        windowed = make(layers.kv, window_table_SP, layers.size)
    if all(has for has, _ in layers.place):
        return windowed
    return ByLayer(make(kv, table_SP, 0), windowed, layers)
