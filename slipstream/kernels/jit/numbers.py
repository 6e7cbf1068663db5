# mypy: ignore-errors
# (Triton's device language has no types that mypy could check.)
"""Numbers on which a choice hangs: exp, log and random numbers with the bits that torch and sampling/rng.py give.

Triton's own exp and log are approximate. libdevice has the functions that torch uses on a GPU.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra import libdevice

_INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")  # libdevice does not run there
_M31 = tl.constexpr(2147483647)
# The constants of sampling/rng.py: the same bits on every device.
_GOLDEN31 = tl.constexpr(0x1E3779B9)
_MIX31_A = tl.constexpr(0x6D0F27BD)
_MIX31_B = tl.constexpr(0x2C1B3C6D)
_MIX31_C = tl.constexpr(0x297A2D39)
_SCALE = tl.constexpr(-(2.0**-31) * (1.0 - 2.0**-23))
_GOLDEN64 = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MIX64_A = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX64_B = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_LOW34 = tl.constexpr((1 << 34) - 1)
_LOW37 = tl.constexpr((1 << 37) - 1)
_LOW33 = tl.constexpr((1 << 33) - 1)
_LOW53 = tl.constexpr((1 << 53) - 1)


@triton.jit
def exp(x):
    if _INTERPRET:
        return tl.exp(x)
    return libdevice.exp(x)


@triton.jit
def log(x):
    """Natural logarithm of x > 0, and -inf for x <= 0."""
    positive = tl.where(x > 0, x, 1.0)
    y = tl.log(positive) if _INTERPRET else libdevice.log(positive)
    return tl.where(x > 0, y, float("-inf"))


@triton.jit
def _log1p(x):
    if _INTERPRET:
        # Kahan's form keeps full precision near 0.
        w = 1.0 + x
        return tl.where(w == 1.0, x, tl.log(w) * (x / tl.where(w == 1.0, 1.0, w - 1.0)))
    return libdevice.log1p(x)


@triton.jit
def stream_word(key, child, position, node, PURPOSE: tl.constexpr):
    """64 random bits: `sampling.rng.stream_words`. All arguments int64, or int32 for node."""
    z = key + (position + child * (1 << 32) + node.to(tl.int64) * (1 << 42) + (PURPOSE << 56)) * _GOLDEN64
    z = (z ^ ((z >> 30) & _LOW34)) * _MIX64_A
    z = (z ^ ((z >> 27) & _LOW37)) * _MIX64_B
    return z ^ ((z >> 31) & _LOW33)


@triton.jit
def coin53(word):
    """The coin of `sampling.rng.coin` as a whole number below 2**53."""
    return (word >> 11) & _LOW53


@triton.jit
def exponential(word, ids):
    """Exp(1) variate of each token id: `sampling.rng.noise_from_words` in float32, bit for bit."""
    a = (word & _M31).to(tl.int32)
    b = ((word >> 31) & _M31).to(tl.int32)
    x = (ids * _GOLDEN31 + a) & _M31
    x = ((x ^ (x >> 16)) * _MIX31_A) & _M31
    low = x | 1
    x = x ^ b
    x = ((x ^ (x >> 15)) * _MIX31_B) & _M31
    x = ((x ^ (x >> 16)) * _MIX31_C) & _M31
    x = x ^ (x >> 15)
    u = (x.to(tl.float32) + low.to(tl.float32) * (2.0**-31)) * _SCALE
    return -_log1p(u)
