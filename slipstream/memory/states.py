"""States of recurrent layers: one per slot on the device, and saved ones that a prefix cache can go back to.

What a slot keeps is a state and the last inputs of its layers (kernels/delta.py says how a frame uses them). A commit
moves nothing: how many of a round's drafts were accepted stands in slot state, and the next frame replays that many
from the inputs. Slot 0 and saved state 0 are sinks: padding goes there, and nobody reads it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.memory.kv import lazy_zeros


class DeltaMemory(NamedTuple):
    """One layer's part of a pool of states (memory/states.py), and which of its numbers all layers share.

    state_SNKV: the state of each slot, in float32 or wider. recent_SMX: the last inputs of each slot, that of position
    p at p % M; M = replays + history + widest frame. saved_ZNKV, saved_ZHX: saved states and the inputs before them.
    absorbed_S: tokens that a slot's state includes. saved_SC: where the states after every `interval` tokens are to
    be saved, 0 for nowhere: a state that includes c tokens, c + early a multiple of interval, at
    saved_SC[slot, (c + early) / interval]. interval 0: none ever is.
    """

    state_SNKV: Tensor
    recent_SMX: Tensor
    saved_ZNKV: Tensor
    saved_ZHX: Tensor
    absorbed_S: Tensor
    saved_SC: Tensor
    interval: int
    early: int


class StateShape(NamedTuple):
    """Sizes of one layer's state: heads, and keys and values of a head; inputs: numbers of an input row; history:
    inputs before a token that its convolution reads."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    inputs: int
    history: int


class Snapshot(NamedTuple):
    """A copy of one slot's state in all layers: state [layers, N, dk, dv], its last inputs [layers, history, X]."""

    state: Tensor
    inputs: Tensor


class StatePool:
    """States of max_slots slots and `saved` saved ones.

    rows: the widest frame, bonus token included. interval: tokens between saved states, 0 for none; early: so many
    tokens before a multiple of it they are taken (a drafter may have to read the last cached positions again).
    absorbed_S, saved_SC: of slot state, see DeltaMemory.
    """

    def __init__(
        self,
        shape: StateShape,
        *,
        max_slots: int,
        saved: int,
        rows: int,
        absorbed_S: Tensor,
        saved_SC: Tensor,
        interval: int = 0,
        early: int = 0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """dtype: of the model. Raises ConfigError when there is no memory for it."""
        self.shape, self.saved, self.interval, self.early = shape, saved, interval, early
        self.absorbed_S, self.saved_SC = absorbed_S, saved_SC
        slots, wide = max_slots + 1, torch.float64 if dtype == torch.float64 else torch.float32
        ring = shape.history + 2 * rows - 1
        state = (shape.heads, shape.key_dim, shape.value_dim)
        try:
            history, inputs = shape.history, shape.inputs
            self.state = _zeros((shape.layers, slots, *state), wide, device)
            self.recent = _zeros((shape.layers, slots, ring, inputs), dtype, device)
            self.saved_state = _zeros((shape.layers, saved + 1, *state), wide, device)
            self.saved_inputs = _zeros((shape.layers, saved + 1, history, inputs), dtype, device)
        except (RuntimeError, MemoryError) as e:
            raise ConfigError(
                f"no memory for {max_slots} slots' recurrent states and {saved} saved ones "
                f"({self.bytes_for(shape, 1, 0, rows, dtype) / 2**20:.1f} MiB a slot); lower max_slots"
            ) from e
        self.layers = [
            DeltaMemory(
                state_SNKV=self.state[i], recent_SMX=self.recent[i], saved_ZNKV=self.saved_state[i],
                saved_ZHX=self.saved_inputs[i], absorbed_S=absorbed_S, saved_SC=saved_SC, interval=interval,
                early=early,
            )
            for i in range(shape.layers)
        ]  # fmt: skip

    @staticmethod
    def bytes_for(shape: StateShape, slots: int, saved: int, rows: int, dtype: torch.dtype) -> int:
        state = shape.heads * shape.key_dim * shape.value_dim * (8 if dtype == torch.float64 else 4)
        row = shape.inputs * dtype.itemsize
        ring = shape.history + 2 * rows - 1
        return shape.layers * (slots * (state + ring * row) + saved * (state + shape.history * row))

    @property
    def nbytes(self) -> int:
        tensors = (self.state, self.recent, self.saved_state, self.saved_inputs)
        return sum(t.numel() * t.element_size() for t in tensors)

    def snapshot(self, saved: int) -> Snapshot:
        """A copy of saved state `saved`."""
        self._check(saved)
        return Snapshot(self.saved_state[:, saved].clone(), self.saved_inputs[:, saved].clone())

    def save(self, saved: int, snapshot: Snapshot) -> None:
        """Put a snapshot into place `saved`. ConfigError where it is another model's: of another shape or type."""
        self._check(saved)
        for name, mine, other in (
            ("state", self.saved_state[:, saved], snapshot.state),
            ("inputs", self.saved_inputs[:, saved], snapshot.inputs),
        ):
            if mine.shape != other.shape or mine.dtype != other.dtype:
                raise ConfigError(
                    f"a snapshot's {name} is {list(other.shape)} {str(other.dtype).removeprefix('torch.')}; this model "
                    f"needs {list(mine.shape)} {str(mine.dtype).removeprefix('torch.')}"
                )
            mine.copy_(other)

    def restore(self, slot: int, saved: int, tokens: int) -> None:
        """`slot` goes on from saved state `saved`, which includes its first `tokens` tokens.

        Copies on the device, of places that the host knows; what says how many tokens are included is slot state.
        """
        self._check(saved)
        self.state[:, slot].copy_(self.saved_state[:, saved])
        ring = self.recent.shape[2]
        for i in range(self.shape.history):
            self.recent[:, slot, (tokens - self.shape.history + i) % ring].copy_(self.saved_inputs[:, saved, i])

    def _check(self, saved: int) -> None:
        assert 0 < saved <= self.saved, f"saved state {saved} of {self.saved}"


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
