"""Values of GGUF blocks (layouts: ggml's ggml-common.h), from uint8 [rows, bytes per row] to rows of K."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import UnsupportedError
from slipstream.models.blocks import Int4Blocks, Int8Blocks
from slipstream.models.gguf import READABLE

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

INT4 = ("Q4_0", "Q4_1", "Q4_K")
"""Types whose values are 4-bit codes with a scale and a minimum per 32."""


def read_int4(raw: Bytes, kind: str) -> Int4Blocks:
    """Codes, scales and minimums of a Q4_0, Q4_1 or Q4_K tensor."""
    rows = raw.shape[0]
    if kind == "Q4_K":
        return _q4_k(raw)
    blocks = raw.reshape(rows, -1, 18 if kind == "Q4_0" else 20)
    scale = _f16(blocks[..., :2])
    # Q4_0 counts from -8.
    minimum = scale * -8.0 if kind == "Q4_0" else _f16(blocks[..., 2:4])
    packed = blocks[..., -16:]
    # The first half of a block sits in the low nibbles, the second half in the high ones.
    codes = np.concatenate((packed & 15, packed >> 4), -1)
    return Int4Blocks(torch.from_numpy(codes.reshape(rows, -1)), torch.from_numpy(scale), torch.from_numpy(minimum))


def _q4_k(raw: Bytes) -> Int4Blocks:
    """Super-blocks of 8 groups; 6-bit scales and minimums, each times a float16 of the super-block."""
    rows = raw.shape[0]
    blocks = raw.reshape(rows, -1, 144)
    scale, minimum = _k_scales(blocks)
    pairs = blocks[..., 16:].reshape(rows, -1, 4, 32)  # 32 bytes hold two groups, low nibbles first
    codes = np.stack((pairs & 15, pairs >> 4), -2)
    return Int4Blocks(
        torch.from_numpy(codes.reshape(rows, -1)),
        torch.from_numpy(scale.reshape(rows, -1)),
        torch.from_numpy(-minimum.reshape(rows, -1)),
    )


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minimums [rows, super-blocks, 8] of Q4_K and Q5_K, from the first 16 bytes of their super-blocks."""
    d, d_min, packed6 = _f16(blocks[..., 0:2]), _f16(blocks[..., 2:4]), blocks[..., 4:16]
    low, mid, high = packed6[..., 0:4], packed6[..., 4:8], packed6[..., 8:12]
    # Groups 0..3 lie open in six bits; groups 4..7 have their upper two bits in the first eight bytes.
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), -1)
    minimums = np.concatenate((mid & 63, (high >> 4) | (mid >> 6 << 4)), -1)
    return d[..., None] * scales.astype(np.float32), d_min[..., None] * minimums.astype(np.float32)


def read_int8(raw: Bytes) -> Int8Blocks:
    """Codes and scales of a Q8_0 tensor."""
    blocks = raw.reshape(raw.shape[0], -1, 34)
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(raw.shape[0], -1)
    return Int8Blocks(torch.from_numpy(codes), torch.from_numpy(_f16(blocks[..., :2])))


def dequantize(raw: Bytes, kind: str) -> Tensor:
    """float32 [rows, K] (bfloat16 and float16 tensors keep their type)."""
    if kind in INT4:
        return read_int4(raw, kind).dequantize()
    if kind == "Q8_0":
        return read_int8(raw).dequantize()
    if kind in _DENSE:
        return _DENSE[kind](raw)
    if kind == "F32":
        return torch.from_numpy(raw.view(np.float32))
    if kind == "F16":
        return torch.from_numpy(raw.view(np.float16))
    if kind == "BF16":
        return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
    raise UnsupportedError(f"GGUF tensors of type {kind} are not supported; the known ones are {', '.join(READABLE)}")


def _q6_k(raw: Bytes) -> Tensor:
    """Super-blocks of 256: 4 low bits, 2 high bits, an int8 scale per 16, one float16."""
    rows = raw.shape[0]
    blocks = raw.reshape(rows, -1, 210)
    # Each half of a super-block: 64 bytes of low bits, 32 of high bits, for four runs of 32 values.
    low = blocks[..., :128].reshape(rows, -1, 2, 2, 32)
    high = blocks[..., 128:192].reshape(rows, -1, 2, 1, 32)
    low4 = np.concatenate((low & 15, low >> 4), -2)
    high2 = high >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & 3
    codes = (low4 | (high2 << 4)).astype(np.float32) - 32.0
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    scales = scales * _f16(blocks[..., 208:210])[..., None]
    values = codes.reshape(rows, -1, 16, 16) * scales[..., None]
    return torch.from_numpy(values.reshape(rows, -1))


def _q5_0(raw: Bytes) -> Tensor:
    """Blocks of 32 that count from -16: a float16, 32 fifth bits, low nibbles."""
    blocks = raw.reshape(raw.shape[0], -1, 22)
    return _values(_five_bits(blocks[..., 2:]) - 16.0, _f16(blocks[..., :2])[..., None])


def _q5_1(raw: Bytes) -> Tensor:
    """As Q5_0, with a minimum instead of a fixed start."""
    blocks = raw.reshape(raw.shape[0], -1, 24)
    return _values(_five_bits(blocks[..., 4:]), _f16(blocks[..., :2])[..., None], _f16(blocks[..., 2:4])[..., None])


def _five_bits(part: Bytes) -> Floats:
    """Codes [..., 32] of 4 bytes of fifth bits and 16 of nibbles; the first half of a block has the low nibbles."""
    fifth = np.unpackbits(part[..., :4], axis=-1, bitorder="little")
    low = np.concatenate((part[..., 4:] & 15, part[..., 4:] >> 4), -1)
    codes: Floats = (low | fifth << 4).astype(np.float32)
    return codes


def _q5_k(raw: Bytes) -> Tensor:
    """Q4_K with a fifth bit: byte i of 32 holds it for value i of each of the 8 groups."""
    rows = raw.shape[0]
    blocks = raw.reshape(rows, -1, 176)
    scale, minimum = _k_scales(blocks)
    fifth = blocks[..., 16:48].reshape(rows, -1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & 1
    pairs = blocks[..., 48:].reshape(rows, -1, 4, 32)
    low = np.stack((pairs & 15, pairs >> 4), -2).reshape(rows, -1, 8, 32)
    return _values((low | fifth << 4).astype(np.float32), scale[..., None], -minimum[..., None])


def _q2_k(raw: Bytes) -> Tensor:
    """Super-blocks of 16 groups of 16: a nibble of scale and one of minimum each, 2-bit codes, two float16."""
    rows = raw.shape[0]
    blocks = raw.reshape(rows, -1, 84)
    d, d_min, packed = _f16(blocks[..., 80:82]), _f16(blocks[..., 82:84]), blocks[..., :16]
    scale = d[..., None] * (packed & 15).astype(np.float32)
    minimum = d_min[..., None] * (packed >> 4).astype(np.float32)
    codes = _two_bits(blocks[..., 16:80])
    return _values(codes.astype(np.float32), scale[..., None], -minimum[..., None])


def _q3_k(raw: Bytes) -> Tensor:
    """Super-blocks of 16 groups of 16: an inverted third bit (32 bytes), 2-bit codes, 6-bit scales, a float16."""
    rows = raw.shape[0]
    blocks = raw.reshape(rows, -1, 110)
    third, packed = blocks[..., :32], blocks[..., 96:108]
    # Byte i of the first eight holds the low nibbles of scales i and i + 8; the last four hold the upper pairs of bits.
    low = np.concatenate((packed[..., :8] & 15, packed[..., :8] >> 4), -1)
    high = packed[..., None, 8:12] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = (low | high.reshape(*low.shape[:-1], 16) << 4).astype(np.float32) - 32.0
    # Bit j of byte i belongs to value i of run j, as `_two_bits` orders runs of 32.
    bit = third.reshape(rows, -1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _two_bits(blocks[..., 32:96]).astype(np.float32) - 4.0 * (1 - bit.reshape(rows, -1, 16, 16))
    return _values(codes, (_f16(blocks[..., 108:110])[..., None] * scales)[..., None])


def _two_bits(packed: Bytes) -> Bytes:
    """Codes [rows, super-blocks, 16, 16] of 64 bytes: each half has four runs of 32, by two bits of its bytes."""
    rows = packed.shape[0]
    halves = packed.reshape(rows, -1, 2, 1, 32)
    runs = (halves >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).astype(np.uint8)
    return runs.reshape(rows, -1, 16, 16)


def _values(codes: Floats, scale: Floats, minimum: Floats | None = None) -> Tensor:
    """codes * scale + minimum, as rows."""
    values = codes * scale if minimum is None else codes * scale + minimum
    return torch.from_numpy(values.astype(np.float32, copy=False).reshape(codes.shape[0], -1))


def _f16(two_bytes: Bytes) -> Floats:
    return np.ascontiguousarray(two_bytes).view(np.float16)[..., 0].astype(np.float32)


_DENSE = {"Q5_0": _q5_0, "Q5_1": _q5_1, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
