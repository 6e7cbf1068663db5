"""The kernels of recurrent layers in Triton's interpreter, against the references.

Collected by test_kernels_interpreted.py only, in a process of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.kernels import delta, gated
from slipstream.kernels.jit import delta as jit
from slipstream.kernels.jit import gated as jit_gated
from slipstream.kernels.tuning import DeltaConfig
from tests.support.delta_cases import Case, delta_case, prompt_rows
from tests.support.kernel_cases import paged_case, relative_error, rope_tables

LIMIT = 2e-5


def memory_args(c: Case) -> tuple[torch.Tensor, ...]:
    m = c.memory
    return m.state_SNKV, m.recent_SMX, m.saved_ZNKV, m.saved_ZHX


def options(c: Case) -> dict[str, Any]:
    return {
        "key_heads": c.weights.key_heads, "key_dim": c.weights.key_dim, "interval": c.memory.interval,
        "early": c.memory.early,
    }  # fmt: skip


def same_memory(mine: Case, theirs: Case) -> None:
    """But for the sinks, and rows that only slots without rows have: NaN on both sides."""
    for got, want in zip(memory_args(mine), memory_args(theirs), strict=True):
        assert torch.equal(got[1:].isnan(), want[1:].isnan())
        assert relative_error(got[1:].nan_to_num(), want[1:].nan_to_num()) < LIMIT


@pytest.mark.parametrize(
    ("rows", "block", "interval", "early", "heads", "padding"),
    [([1, 4, 0, 2], 4, 5, 0, (4, 2), 2), ([1, 4, 0, 2], 8, 5, 1, (2, 1), 0), ([1, 1], 16, 0, 0, (2, 2), 3)],
)
def test_decode_rows(
    rows: list[int], block: int, interval: int, early: int, heads: tuple[int, int], padding: int
) -> None:
    c = delta_case(
        rows, lengths=[1, 9, 6, 12][: len(rows)], lacks=[0, 3, 1, 2], heads=heads[0], key_heads=heads[1],
        interval=interval, early=early, padding=padding,
    )  # fmt: skip
    want_case = c.clone()
    want = delta.delta_rows(
        want_case.x_RX, want_case.memory, c.weights, c.committed_S, c.slot_B, c.rows_B, c.owner_R, c.row_of_BW
    )
    out = torch.full_like(want, float("nan"))
    jit.launch_delta_rows(
        c.x_RX, *memory_args(c), c.memory.absorbed_S, c.memory.saved_SC, *c.weights[:3], c.committed_S, c.slot_B,
        c.rows_B, c.row_of_BW, out, **options(c), config=DeltaConfig(columns=block, by_slot=block != 8),
    )  # fmt: skip
    assert relative_error(out, want) < LIMIT
    same_memory(c, want_case)
    jit.launch_absorb(c.memory.absorbed_S, c.committed_S, c.slot_B, c.rows_B)
    delta.absorbed_rows(want_case.memory.absorbed_S, c.committed_S, c.slot_B, c.rows_B)
    assert torch.equal(c.memory.absorbed_S[1:], want_case.memory.absorbed_S[1:])


@pytest.mark.parametrize(
    ("spans", "interval", "early"),
    [([(2, 0, 37), (1, 5, 2), (3, 15, 20)], 16, 0), ([(2, 0, 37), (1, 5, 2)], 16, 1), ([(1, 30, 3)], 0, 0)],
)
def test_prompt_rows(spans: list[delta.Span], interval: int, early: int) -> None:
    c = delta_case([1, 1, 1], lengths=[5, 0, 15], lacks=[0, 0, 0], dv=24, interval=interval, early=early)
    x_RX, slot_R, pos_R = prompt_rows(c, spans, padding=7)
    want_case = c.clone()
    want = delta.delta_spans(x_RX, want_case.memory, c.weights, spans)
    out = torch.zeros_like(want)
    tile = delta.delta_tiles(slot_R, pos_R, jit.TILE, 4, early)
    jit.launch_delta_prompt(
        x_RX, *memory_args(c), c.memory.saved_SC, *c.weights[:3], slot_R, pos_R, tile, out, precision="ieee",
        value_block=16, **options(c),
    )  # fmt: skip
    assert relative_error(out, want) < LIMIT
    same_memory(c, want_case)


def test_equal_keys_without_decay() -> None:
    """The worst case of a tile's triangular inverse: every token writes to the same key."""
    c = delta_case([1, 1, 1], lengths=[5, 0, 15], lacks=[0, 0, 0])
    x_RX, slot_R, pos_R = prompt_rows(c, [(2, 0, 48)], padding=0)
    keys = c.weights.key_heads * c.weights.key_dim
    x_RX[:, : 2 * keys] = x_RX[:1, : 2 * keys]
    x_RX[:, -2 * c.weights.decay_N.shape[0] :] = 9.0
    c.weights.decay_N.fill_(-1e-4)
    want_case = c.clone()
    want = delta.delta_spans(x_RX, want_case.memory, c.weights, [(2, 0, 48)])
    out = torch.zeros_like(want)
    tile = delta.delta_tiles(slot_R, pos_R, jit.TILE, 4)
    jit.launch_delta_prompt(
        x_RX, *memory_args(c), c.memory.saved_SC, *c.weights[:3], slot_R, pos_R, tile, out, precision="ieee",
        value_block=16, **options(c),
    )  # fmt: skip
    assert relative_error(out, want) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [(6, 24), (2, 16)])
def test_gated_norm_and_gate(heads: int, dim: int, dtype: torch.dtype) -> None:
    o, p = torch.randn(3, heads, dim).to(dtype), torch.randn(3, 2 * heads * dim + 7).to(dtype)
    z, gain, out = p[:, 7 : 7 + heads * dim], torch.rand(dim).to(dtype), torch.full((3, heads * dim), float("nan"))
    limit = LIMIT if dtype == torch.float32 else 3e-3
    jit_gated.launch_gated_norm(o, z, gain, out := out.to(dtype), eps=1e-5)
    assert relative_error(out, gated.gated_norm(o, z, gain, 1e-5)) < limit
    jit_gated.launch_gate_mul(o, p, out.fill_(float("nan")))
    assert relative_error(out, gated.gate_mul(o, p)) < limit


@pytest.mark.parametrize(("turned", "has_gate", "heads"), [(8, True, 4), (24, False, 2), (12, True, 6)])
def test_gated_rope_write(turned: int, has_gate: bool, heads: int) -> None:
    case, dim = paged_case([5, 9], [3, 2], kv_heads=2, dim=24), 24
    rows = len(case.slot)
    qkv = torch.randn(rows, (heads * (2 if has_gate else 1) + 4) * dim)
    cos, sin = (t[:, : turned // 2].contiguous() for t in rope_tables(40, 24))
    gains = (torch.rand(dim), torch.rand(dim))
    where = (case.table, case.slot, case.pos, case.pos)
    got_k, got_v = case.k.clone(), case.v.clone()
    want = gated.gated_rope_write(qkv, case.k, case.v, cos, sin, *gains, *where, heads, 1e-5, has_gate)
    out = torch.full_like(want, float("nan"))
    jit_gated.launch_gated_rope_write(
        qkv, out, got_k, got_v, cos, sin, *gains, *where, heads=heads, eps=1e-5, gated=has_gate
    )
    assert relative_error(out, want) < LIMIT
    for got, ref in ((got_k, case.k), (got_v, case.v)):
        assert relative_error(got[1:].nan_to_num(), ref[1:].nan_to_num()) < LIMIT
        assert torch.equal(got[1:].isnan(), ref[1:].isnan())
