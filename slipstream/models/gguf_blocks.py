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
    d, d_min, packed6, packed = (
        _f16(blocks[..., 0:2]),
        _f16(blocks[..., 2:4]),
        blocks[..., 4:16],
        blocks[..., 16:],
    )
    low, mid, high = packed6[..., 0:4], packed6[..., 4:8], packed6[..., 8:12]
    # Groups 0..3 lie open in six bits; groups 4..7 have their upper two bits in the first eight bytes.
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), -1)
    minimums = np.concatenate((mid & 63, (high >> 4) | (mid >> 6 << 4)), -1)
    pairs = packed.reshape(rows, -1, 4, 32)  # 32 bytes hold two groups, low nibbles first
    codes = np.stack((pairs & 15, pairs >> 4), -2)
    scale = (d[..., None] * scales.astype(np.float32)).reshape(rows, -1)
    minimum = (d_min[..., None] * minimums.astype(np.float32)).reshape(rows, -1)
    return Int4Blocks(torch.from_numpy(codes.reshape(rows, -1)), torch.from_numpy(scale), torch.from_numpy(-minimum))


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
    if kind == "Q6_K":
        return _q6_k(raw)
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


def _f16(two_bytes: Bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.ascontiguousarray(two_bytes).view(np.float16)[..., 0].astype(np.float32)
