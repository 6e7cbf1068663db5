"""The fused pass, on the kernels' torch references, is the plain pass: hidden states, taps, logits, argmax, cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.attention.dense import DenseCausal
from slipstream.kernels.tuning import PassConfig
from slipstream.kernels.workspace import Workspace
from slipstream.memory.kv import KVPages
from slipstream.models.decoder import Decoder
from slipstream.models.dummy import DummyWeights
from slipstream.models.fused import FusedDecoder
from slipstream.models.registry import model_class
from slipstream.models.weights import WeightBuilder
from tests.support.kernel_cases import relative_error
from tests.support.pictures import axes
from tests.support.tiny import tiny_config

CPU, PAGE = torch.device("cpu"), 16


def decoder(arch: str, **changes: Any) -> Decoder:
    config = tiny_config(arch, num_hidden_layers=3, head_dim=16, **changes)
    weights = WeightBuilder(DummyWeights(config, seed=3, device=CPU), device=CPU, dtype=torch.float32)
    model = model_class(config.architecture)(config, weights)
    assert isinstance(model, Decoder)
    return model


def pages(model: Decoder, num: int) -> KVPages:
    c = model.config
    return KVPages(
        num_layers=c.num_layers, num_pages=num, page_size=PAGE, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim,
        dtype=torch.float32, device=CPU,
    )  # fmt: skip


CUTS = {
    "streamed": PassConfig(),
    "library": PassConfig(rope=0, residual=0, silu=0, head=0),
    "mixed": PassConfig(rope=0, silu=0),
    "mixed the other way": PassConfig(residual=0, head=0),
}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("cut", list(CUTS))
@pytest.mark.parametrize("rows", [9, 70])
def test_it_is_the_plain_pass(arch: str, rows: int, cut: str) -> None:
    """One slot's first `rows` tokens in one pass, three padding rows behind them."""
    model = decoder(arch)
    token_R, pos_R = torch.randint(0, 96, (rows,)), torch.arange(rows)
    table_SP = torch.zeros(3, 6, dtype=torch.int64)
    table_SP[2] = torch.randperm(6) + 1
    fused = FusedDecoder(model, pages(model, 6), Workspace(CPU, floats=1, counters=1), config=CUTS[cut])
    pad = torch.zeros(3, dtype=torch.int64)
    slot_R = torch.cat([torch.full_like(token_R, 2), pad])
    out = fused.run(
        torch.cat([token_R, pad]), slot_R, torch.cat([pos_R, pad]), table_SP, logits=True, taps=(2, 0), hidden=True
    )  # fmt: skip
    want_RH, taps = model.forward(token_R, pos_R, DenseCausal(pos_R), taps=(2, 0))
    logits_RV = model.logits(want_RH)
    assert out.hidden_RH is not None
    for got, want in zip([out.hidden_RH, *out.taps, out.logits_RV], [want_RH, *taps, logits_RV], strict=True):
        assert relative_error(got[:rows], want) < 1e-5
    assert torch.equal(out.target_R[:rows], logits_RV.argmax(-1))
    hidden_RH, tapped = fused.forward(token_R, slot_R[:rows], pos_R, table_SP, taps=(1,))
    assert (
        torch.equal(hidden_RH, out.hidden_RH[:rows])
        and relative_error(tapped[0], model.forward(token_R, pos_R, DenseCausal(pos_R), taps=(1,))[1][0]) < 1e-5
    )


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("cut", list(CUTS))
@pytest.mark.parametrize("rows", [9, 70])
def test_rows_on_three_axes_and_given_embeddings(arch: str, rows: int, cut: str) -> None:
    """A chunk whose rows turn by time, height and width, some past the table's end; a third have embeddings given."""
    model = decoder(arch, **axes(3, 3, 2), max_position_embeddings=100)
    token_R, pos_R, rope_3R = torch.randint(0, 96, (rows,)), torch.arange(rows), torch.randint(0, 120, (3, rows))
    given = (torch.randn(rows, model.config.hidden_size), torch.arange(rows) % 3 == 0)
    table_SP = torch.zeros(3, 6, dtype=torch.int64)
    table_SP[2] = torch.randperm(6) + 1
    fused = FusedDecoder(model, pages(model, 6), Workspace(CPU, floats=1, counters=1), config=CUTS[cut])
    where = (torch.full_like(token_R, 2), pos_R, table_SP)
    hidden_RH, (tap_RH,) = fused.forward(token_R, *where, taps=(1,), rope_3R=rope_3R, given=given)
    want_RH, (want_tap_RH,) = model.forward(token_R, rope_3R, DenseCausal(pos_R), taps=(1,), given=given)
    assert relative_error(hidden_RH, want_RH) < 1e-5 and relative_error(tap_RH, want_tap_RH) < 1e-5
    for change in ({"rope_3R": rope_3R.flip(0), "given": given}, {"rope_3R": rope_3R}):
        assert relative_error(fused.forward(token_R, *where, **change)[0], want_RH) > 1e-3
