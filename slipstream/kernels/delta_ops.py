"""The ops of recurrent layers: what kernels/delta.py defines, one launch each on a GPU.

The memory is that of `memory.states.DeltaMemory`, tensor by tensor, as ops take tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels import delta
from slipstream.kernels.delta import DeltaWeights
from slipstream.memory.states import DeltaMemory

OP = "slipstream::"
STATE = ("state_SNKV", "recent_SMX", "saved_ZNKV", "saved_ZHX")
PROMPT_TILE = 16
"""Rows of `delta_tiles` that `delta_prompt` takes."""


@torch.library.custom_op(OP + "delta_rows", mutates_args=STATE)
def delta_rows(
    x_RX: Tensor, state_SNKV: Tensor, recent_SMX: Tensor, saved_ZNKV: Tensor, saved_ZHX: Tensor, absorbed_S: Tensor,
    saved_SC: Tensor, interval: int, early: int, conv_CT: Tensor, decay_N: Tensor, dt_N: Tensor, key_heads: int,
    key_dim: int, committed_S: Tensor, slot_B: Tensor, rows_B: Tensor, owner_R: Tensor, row_of_BW: Tensor,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    """`delta.delta_rows` in one launch."""
    memory = DeltaMemory(state_SNKV, recent_SMX, saved_ZNKV, saved_ZHX, absorbed_S, saved_SC, interval, early)
    weights = DeltaWeights(conv_CT, decay_N, dt_N, key_heads, key_dim)
    return delta.delta_rows(x_RX, memory, weights, committed_S, slot_B, rows_B, owner_R, row_of_BW)


@torch.library.custom_op(OP + "delta_absorb", mutates_args=("absorbed_S",))
def delta_absorb(absorbed_S: Tensor, committed_S: Tensor, slot_B: Tensor, rows_B: Tensor) -> None:
    """`delta.absorbed_rows` in one launch."""
    delta.absorbed_rows(absorbed_S, committed_S, slot_B, rows_B)


@torch.library.custom_op(OP + "delta_prompt", mutates_args=STATE)
def delta_prompt(
    x_RX: Tensor, state_SNKV: Tensor, recent_SMX: Tensor, saved_ZNKV: Tensor, saved_ZHX: Tensor, saved_SC: Tensor,
    interval: int, early: int, conv_CT: Tensor, decay_N: Tensor, dt_N: Tensor, key_heads: int, key_dim: int,
    slot_R: Tensor, pos_R: Tensor, tile_3T: Tensor,
) -> Tensor:  # fmt: skip
    """`delta.delta_spans` of packed rows, in three launches. tile_3T: `delta_tiles` of them by PROMPT_TILE rows."""
    memory = DeltaMemory(state_SNKV, recent_SMX, saved_ZNKV, saved_ZHX, saved_SC, saved_SC, interval, early)
    weights = DeltaWeights(conv_CT, decay_N, dt_N, key_heads, key_dim)
    return delta.delta_spans(x_RX, memory, weights, delta.spans_of(slot_R, pos_R))


@delta_rows.register_fake
def _(
    x_RX: Tensor, state_SNKV: Tensor, recent_SMX: Tensor, saved_ZNKV: Tensor, saved_ZHX: Tensor, absorbed_S: Tensor,
    saved_SC: Tensor, interval: int, early: int, conv_CT: Tensor, decay_N: Tensor, dt_N: Tensor, key_heads: int,
    key_dim: int, committed_S: Tensor, slot_B: Tensor, rows_B: Tensor, owner_R: Tensor, row_of_BW: Tensor,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    return x_RX.new_empty(x_RX.shape[0], state_SNKV.shape[1], state_SNKV.shape[3])


@delta_absorb.register_fake
def _(absorbed_S: Tensor, committed_S: Tensor, slot_B: Tensor, rows_B: Tensor) -> None:
    return None


@delta_prompt.register_fake
def _(
    x_RX: Tensor, state_SNKV: Tensor, recent_SMX: Tensor, saved_ZNKV: Tensor, saved_ZHX: Tensor, saved_SC: Tensor,
    interval: int, early: int, conv_CT: Tensor, decay_N: Tensor, dt_N: Tensor, key_heads: int, key_dim: int,
    slot_R: Tensor, pos_R: Tensor, tile_3T: Tensor,
) -> Tensor:  # fmt: skip
    return x_RX.new_empty(x_RX.shape[0], state_SNKV.shape[1], state_SNKV.shape[3])


@delta_rows.register_kernel("cuda")
def _(
    x_RX: Tensor, state_SNKV: Tensor, recent_SMX: Tensor, saved_ZNKV: Tensor, saved_ZHX: Tensor, absorbed_S: Tensor,
    saved_SC: Tensor, interval: int, early: int, conv_CT: Tensor, decay_N: Tensor, dt_N: Tensor, key_heads: int,
    key_dim: int, committed_S: Tensor, slot_B: Tensor, rows_B: Tensor, owner_R: Tensor, row_of_BW: Tensor,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    from slipstream.kernels.jit import delta as jit

    out_RNV = x_RX.new_empty(x_RX.shape[0], state_SNKV.shape[1], state_SNKV.shape[3])
    # Slots and row counts are read before the launch in front has ended, which must not be a copy of them.
    pdl = pdl and slot_B.is_contiguous() and rows_B.is_contiguous()
    jit.launch_delta_rows(
        x_RX, state_SNKV, recent_SMX, saved_ZNKV, saved_ZHX, absorbed_S, saved_SC, conv_CT, decay_N, dt_N, committed_S,
        slot_B.contiguous(), rows_B.contiguous(), row_of_BW, out_RNV, key_heads=key_heads, key_dim=key_dim,
        interval=interval, early=early, pdl=pdl,
    )  # fmt: skip
    return out_RNV


@delta_absorb.register_kernel("cuda")
def _(absorbed_S: Tensor, committed_S: Tensor, slot_B: Tensor, rows_B: Tensor) -> None:
    from slipstream.kernels.jit import delta as jit

    jit.launch_absorb(absorbed_S, committed_S, slot_B.contiguous(), rows_B.contiguous())


@delta_prompt.register_kernel("cuda")
def _(
    x_RX: Tensor, state_SNKV: Tensor, recent_SMX: Tensor, saved_ZNKV: Tensor, saved_ZHX: Tensor, saved_SC: Tensor,
    interval: int, early: int, conv_CT: Tensor, decay_N: Tensor, dt_N: Tensor, key_heads: int, key_dim: int,
    slot_R: Tensor, pos_R: Tensor, tile_3T: Tensor,
) -> Tensor:  # fmt: skip
    from slipstream.kernels.jit import delta as jit

    out_RNV = x_RX.new_zeros(x_RX.shape[0], state_SNKV.shape[1], state_SNKV.shape[3])
    jit.launch_delta_prompt(
        x_RX, state_SNKV, recent_SMX, saved_ZNKV, saved_ZHX, saved_SC, conv_CT, decay_N, dt_N, slot_R.contiguous(),
        pos_R.contiguous(), tile_3T, out_RNV, key_heads=key_heads, key_dim=key_dim, interval=interval, early=early,
        precision="ieee" if x_RX.dtype == torch.float32 else "tf32x3",
    )  # fmt: skip
    return out_RNV
