"""The references of recurrent layers against the formulas token by token, tiles by hand, schemas and fakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.library import opcheck

from slipstream.errors import ConfigError
from slipstream.kernels import delta, delta_ops, gated
from slipstream.memory.states import Snapshot, StatePool, StateShape
from slipstream.models import load_model
from slipstream.models.delta_net import GatedNorm
from tests.support.delta_cases import delta_case, prompt_rows
from tests.support.kernel_cases import relative_error
from tests.support.tiny import write_tiny_checkpoint


def by_hand(x_LX: torch.Tensor, w: delta.DeltaWeights, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One head and token at a time (arXiv 2412.06464, equation 10); the first rows only feed the convolution."""
    channels, heads = len(w.conv_CT), len(w.decay_N)
    dk, dv, share = w.key_dim, state.shape[2], heads // w.key_heads
    state, outs = state.clone(), []
    for t in range(w.history, len(x_LX)):
        mixed = (x_LX[t - w.history : t + 1, :channels].T * w.conv_CT).sum(1)
        mixed = mixed * torch.sigmoid(mixed)
        for n in range(heads):
            q, k = (mixed[(part * w.key_heads + n // share) * dk :][:dk] for part in (0, 1))
            v = mixed[2 * w.key_heads * dk + n * dv :][:dv]
            q, k = (y / (y.square().sum() + 1e-6).sqrt() for y in (q, k))
            a, b = x_LX[t, channels + n], x_LX[t, channels + heads + n]
            alpha = torch.exp(w.decay_N[n] * torch.log1p(torch.exp(a + w.dt_N[n])))
            beta = torch.sigmoid(b)
            s = state[n].T  # [dv, dk], as in the paper
            s = s @ (alpha * (torch.eye(dk, dtype=s.dtype) - beta * torch.outer(k, k))) + beta * torch.outer(v, k)
            state[n] = s.T
            outs.append(s @ q * dk**-0.5)
    return torch.stack(outs).view(-1, heads, dv), state


@pytest.mark.parametrize("key_heads", [1, 2])
def test_scan_and_steps_are_the_formula(key_heads: int) -> None:
    w = delta_case([1], lengths=[1], lacks=[0], heads=4, key_heads=key_heads).weights
    w = delta.DeltaWeights(*(x.double() for x in w[:3]), *w[3:])
    channels = len(w.conv_CT)
    x = torch.randn(w.history + 150, channels + 8, dtype=torch.float64)
    start = torch.randn(4, 8, (channels - 16 * key_heads) // 4, dtype=torch.float64)
    want, end = by_hand(x, w, start)
    inputs = delta.DeltaInputs(*(y[0] for y in delta.delta_inputs(x[None], w)))
    state, out = delta.delta_scan(start, inputs)
    assert relative_error(out, want) < 1e-12 and relative_error(state, end) < 1e-12
    state, outs = start[None], []
    for t in range(150):
        state, out = delta.delta_step(state, delta.DeltaInputs(*(y[t][None] for y in inputs)))
        outs.append(out)
    assert relative_error(torch.cat(outs), want) < 1e-12 and relative_error(state[0], end) < 1e-12


def test_tiles() -> None:
    slot = torch.tensor([2] * 7 + [1] * 3 + [0] * 4)
    pos = torch.tensor([3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 0, 0, 0, 0])
    tile = delta.delta_tiles(slot, pos, 4, 3)
    assert tile[:, :4].tolist() == [[0, 1, 5, 7], [0, 0, 0, 7], [1, 4, 2, 3]]
    assert not tile[:, 4:].any()
    early = delta.delta_tiles(slot, pos, 4, 3, 1)
    assert early[:, :4].tolist() == [[0, 4, 7, 0], [0, 0, 7, 0], [4, 3, 3, 0]]


def test_schemas_and_fakes() -> None:
    checks = ("test_schema", "test_faketensor")
    library = torch.ops.slipstream
    c = delta_case([1, 4, 0], lengths=[1, 9, 6], lacks=[0, 3, 1], interval=5)
    rows = (c.committed_S, c.slot_B, c.rows_B, c.owner_R, c.row_of_BW)
    clean = [x.nan_to_num() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in c.memory]
    opcheck(library.delta_rows.default, (c.x_RX, *clean, *c.weights, *rows), test_utils=checks)
    opcheck(library.delta_absorb.default, (clean[4], c.committed_S, c.slot_B, c.rows_B), test_utils=checks)
    x_RX, slot_R, pos_R = prompt_rows(c, [(2, 0, 20), (1, 0, 3)], padding=2)
    tile = delta.delta_tiles(slot_R, pos_R, delta_ops.PROMPT_TILE, 4)
    args = (x_RX, *clean[:4], *clean[5:], *c.weights, slot_R, pos_R, tile)
    opcheck(library.delta_prompt.default, args, test_utils=checks)
    o, p, gain = torch.randn(3, 4, 6), torch.randn(3, 80), torch.rand(6)
    opcheck(library.gated_norm.default, (o, p[:, :24], gain, 1e-6), test_utils=checks)
    opcheck(library.gate_mul.default, (o, p), test_utils=checks)
    k, v, cos, where = torch.zeros(3, 4, 2, 6), torch.zeros(3, 4, 2, 6), torch.rand(9, 2), torch.zeros(3).long()
    at = (torch.zeros(1, 2).long(), where, where, where)
    rope = (p[:, :72], k, v, cos, cos, gain, gain, *at, 4, 1e-6, True)
    opcheck(library.gated_rope_write.default, rope, test_utils=checks)


def test_the_ops_between_products_are_the_plain_layers(tmp_path: Path) -> None:
    """The gated norm, and gated attention's rotation and gate, against the modules of the plain pass."""
    o, z = torch.randn(3, 4, 6, dtype=torch.float64), torch.randn(3, 24, dtype=torch.float64)
    gain = torch.rand(6, dtype=torch.float64)
    want = GatedNorm(gain, 1e-6)(o, z.view(3, 4, 6)).flatten(1)
    assert relative_error(gated.gated_norm(o, z, gain, 1e-6), want) < 1e-14

    loaded = load_model(write_tiny_checkpoint(tmp_path, "qwen3_5_text"), dtype="float64")
    c, layer = loaded.config, loaded.model.blocks[1].attention  # type: ignore[attr-defined]
    x, pos = torch.randn(5, 32, dtype=torch.float64), torch.arange(3, 8)
    seen: list[torch.Tensor] = []

    class Keeps:
        def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            seen.extend((q, k, v))
            return q * 2.0

    with torch.inference_mode():
        rotary = loaded.model.rotary  # type: ignore[attr-defined]
        want = layer.forward(x, rotary, *rotary.at(pos), Keeps())
        k, v = torch.zeros(2, 3, 4, c.num_kv_heads, c.head_dim, dtype=torch.float64).unbind(0)
        cos, sin = rotary.table[:, 0, 0, :2], rotary.table[:, 1, 0, 2:4]
        table, slot = torch.tensor([[0, 0], [1, 2]]), torch.ones(5, dtype=torch.int64)
        qkv = layer.qkv(x)
        gains = (layer.q_norm.weight, layer.k_norm.weight)
        q = gated.gated_rope_write(qkv, k, v, cos, sin, *gains, table, slot, pos, pos, c.num_heads, 1e-5, True)
        got = layer.o(gated.gate_mul(q * 2.0, qkv))
    assert relative_error(q, seen[0]) < 1e-7 and relative_error(got, want) < 1e-7
    cells = (1 + torch.div(pos, 4, rounding_mode="floor"), pos % 4)
    assert relative_error(k[cells], seen[1]) < 1e-7 and torch.equal(v[cells], seen[2])


def pool(**changes: int) -> StatePool:
    shape = StateShape(**{"layers": 2, "heads": 2, "key_dim": 4, "value_dim": 3, "inputs": 18, "history": 3, **changes})
    return StatePool(
        shape, max_slots=2, saved=3, rows=2, absorbed_S=torch.zeros(3, dtype=torch.int64),
        saved_SC=torch.zeros(3, 4, dtype=torch.int64), dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip


def test_a_snapshot_goes_to_another_pool_of_the_same_model_only() -> None:
    one, other = pool(), pool()
    one.saved_state.normal_()
    one.saved_inputs.normal_()
    other.save(3, one.snapshot(2))
    assert torch.equal(other.saved_state[:, 3], one.saved_state[:, 2])
    other.restore(1, 3, 10)
    assert torch.equal(other.state[:, 1], one.saved_state[:, 2])
    ring = other.recent.shape[2]
    for i in range(3):
        assert torch.equal(other.recent[:, 1, (7 + i) % ring], one.saved_inputs[:, 2, i])
    with pytest.raises(ConfigError, match=r"snapshot's state is \[2, 2, 4, 5\] float32; .* \[2, 2, 4, 3\] float32"):
        one.save(1, pool(value_dim=5).snapshot(1))
    with pytest.raises(ConfigError, match=r"snapshot's inputs is \[2, 3, 20\]"):
        one.save(1, pool(inputs=20).snapshot(1))
    mine = one.snapshot(1)
    with pytest.raises(ConfigError, match="float64"):
        one.save(1, Snapshot(mine.state.double(), mine.inputs))


def test_bytes_are_counted_before_anything_is_allocated() -> None:
    p = pool()
    assert StatePool.bytes_for(p.shape, 3, 4, 2, torch.float32) == p.nbytes
