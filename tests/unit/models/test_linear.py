"""Packed products against their dequantised weights, and row invariance bit by bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slipstream.models.blocks import Int4Blocks, Int8Blocks
from slipstream.models.layers import RMSNorm, swiglu
from slipstream.models.linear import Columns, Dense, Int8Rows, Linear, PackedInt4, PackedInt8

ROW_COUNTS = (2, 3, 4, 5, 6, 7, 8, 16, 31, 64, 200)
BF16_EPS = 2.0**-8


def int4_blocks(rows: int, columns: int, seed: int = 0) -> Int4Blocks:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=g)
    scale = torch.rand((rows, columns // 32), generator=g) * 0.02 + 0.001
    return Int4Blocks(codes, scale, -7.3 * scale)


def int8_blocks(rows: int, columns: int, seed: int = 0) -> Int8Blocks:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=g)
    return Int8Blocks(codes, torch.rand((rows, columns // 32), generator=g) * 0.002 + 0.0001)


def inputs(rows: int, columns: int) -> torch.Tensor:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(9)).bfloat16()


def packed8(blocks: Int8Blocks) -> PackedInt8:
    layer = PackedInt8.pack(blocks)
    if layer is None:
        pytest.skip("this CPU lays packed rows out in another way; the loader keeps such heads in bf16")
    return layer


def test_dequantize_by_hand() -> None:
    codes = torch.zeros((1, 64), dtype=torch.uint8)
    codes[0, 3], codes[0, 40] = 5, 15
    w = Int4Blocks(codes, torch.tensor([[2.0, 4.0]]), torch.tensor([[1.0, -3.0]])).dequantize()
    assert (w[0, 0], w[0, 3], w[0, 32], w[0, 40]) == (1.0, 11.0, -3.0, 57.0)
    w = Int8Blocks(codes.view(torch.int8) - 9, torch.tensor([[2.0, 4.0]])).dequantize()
    assert (w[0, 0], w[0, 3], w[0, 40]) == (-18.0, -8.0, 24.0)


@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (192, 576), (4160, 64)])
def test_int4_product(shape: tuple[int, int]) -> None:
    blocks = int4_blocks(*shape)
    x = inputs(5, shape[1])
    bias = torch.randn(shape[0]).bfloat16()
    exact = x.double() @ blocks.dequantize().double().T + bias.double()
    got = PackedInt4.pack(blocks, bias)(x)
    assert got.dtype == torch.bfloat16
    # Two roundings of the result, and one of each scale and zero point.
    size = x.double().abs() @ blocks.dequantize().double().abs().T + bias.double().abs()
    assert ((got.double() - exact).abs() <= 2 * BF16_EPS * size).all()
    assert (got.double() - exact).abs().mean() < 0.01 * exact.abs().mean()


@pytest.mark.parametrize("shape", [(64, 32), (192, 576), (8256, 64)])
def test_int8_product_and_rows(shape: tuple[int, int]) -> None:
    blocks = int8_blocks(*shape)
    layer = packed8(blocks)
    x = inputs(5, shape[1])
    exact = x.double() @ blocks.dequantize().double().T
    got = layer(x)
    assert got.dtype == torch.float32
    size = x.double().abs() @ blocks.dequantize().double().abs().T
    assert ((got.double() - exact).abs() <= 2 * BF16_EPS * size).all()
    tokens = torch.tensor([0, 1, 31, 32, 33, 63, shape[0] - 1, shape[0] - 33, 5])
    rows = layer.rows(tokens)
    want = Int8Blocks(blocks.codes_NK, blocks.scale_NG.bfloat16().float()).dequantize()[tokens]
    assert torch.equal(rows, want.bfloat16())


def test_int8_refuses_shapes_it_cannot_hold() -> None:
    assert PackedInt8.pack(int8_blocks(48, 64)) is None
    assert not PackedInt4.fits(50, 64)
    assert not PackedInt4.fits(64, 48)
    assert PackedInt4.fits(48, 96)


@pytest.mark.parametrize("shape", [(64, 64), (320, 576), (576, 1536), (256, 3072)])
@pytest.mark.parametrize("kind", ["int4", "int8", "bf16"])
def test_rows_do_not_depend_on_their_neighbours(shape: tuple[int, int], kind: str) -> None:
    layer: Linear
    if kind == "int4":
        layer = PackedInt4.pack(int4_blocks(*shape))
    elif kind == "int8":
        layer = packed8(int8_blocks(*shape))
    else:
        layer = Dense(inputs(*shape), inputs(1, shape[0])[0])
    x = inputs(max(ROW_COUNTS), shape[1])
    one = torch.cat([layer(row) for row in x.split(1)])
    for rows in ROW_COUNTS:
        assert torch.equal(layer(x[:rows]), one[:rows]), rows
        assert torch.equal(layer(x[3 : 3 + rows]), one[3 : 3 + rows]), rows


def test_pack_order_and_columns() -> None:
    a, b = int4_blocks(32, 64, 1), int4_blocks(64, 64, 2)
    x = inputs(3, 64)
    apart = Columns([PackedInt4.pack(a), PackedInt4.pack(b)])
    together = PackedInt4.pack(Int4Blocks.concat([a, b]))
    assert torch.equal(apart(x), together(x))
    assert apart.bytes() == together.bytes() == 96 * 64 // 2 + 96 * 2 * 2 * 2


def test_dense_bytes() -> None:
    assert Dense(torch.zeros(6, 4), torch.zeros(6)).bytes() == 6 * 4 * 4 + 6 * 4


@pytest.mark.parametrize("size", [12, 64, 576])
def test_rms_norm(size: int) -> None:
    x = torch.randn((4, size)) * 3 + 1
    w = torch.rand(size) + 0.5
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w.double()
    torch.testing.assert_close(RMSNorm(w, 1e-5)(x).double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(RMSNorm(w.double(), 1e-5)(x.double()), exact, atol=1e-12, rtol=1e-12)
    xb, wb = x.bfloat16(), w.bfloat16()
    exact = xb.double() * (xb.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * wb.double()
    got = RMSNorm(wb, 1e-5)(xb)
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), exact, atol=1e-6, rtol=BF16_EPS)


@pytest.mark.parametrize("shape", [(5, 32), (48, 96), (4100, 64)])
def test_rows_rounded_to_8_bits(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    weight[2] = 0
    x, bias = inputs(5, shape[1]), torch.randn(shape[0]).bfloat16()
    layer = Int8Rows.round(weight, bias)
    got, exact = layer(x), x.double() @ weight.double().T + bias.double()
    assert got.dtype == torch.bfloat16 and torch.equal(got[:, 2], bias[2].expand(5))
    # Half a step per weight, the scale's own rounding, and two roundings of the result.
    step_N = weight.double().abs().amax(1) / 127
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    bound = 0.5 * step_N * x.double().abs().sum(1, keepdim=True) + 3 * BF16_EPS * size
    assert ((got.double() - exact).abs() <= bound).all()
    assert layer.bytes() == weight.numel() + 4 * shape[0]
    assert not Int8Rows.fits(33) and Int8Rows.fits(96)


def test_rms_norm_of_heads_and_small_values() -> None:
    """Per head, as Qwen3 uses it; and where eps decides."""
    x = (torch.randn((5, 3, 24)) * 1e-3).bfloat16()
    norm = RMSNorm(torch.ones(24).bfloat16(), 1e-5)
    want = F.rms_norm(x.float(), (24,), None, 1e-5)
    torch.testing.assert_close(norm(x).float(), want, atol=1e-6, rtol=BF16_EPS)


def test_norm_and_swiglu_rows_do_not_depend_on_their_neighbours() -> None:
    x = inputs(200, 576) * 4
    norm = RMSNorm(torch.rand(576).bfloat16(), 1e-5)
    for f in (norm, swiglu):
        one = torch.cat([f(row) for row in x.split(1)])
        for rows in ROW_COUNTS:
            assert torch.equal(f(x[:rows]), one[:rows])
