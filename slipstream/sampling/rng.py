"""Counter-based random numbers: a pure function of (request key, child, position, node, purpose, token id).

There is no generator state, so a number does not depend on the batch, the row or the run-ahead it is
computed in. Two levels:

* `stream_words`: the 64-bit finaliser of SplitMix64 (Steele, Lea, Flood 2014) over an injective packing of
  the counters; int64 with wrap-around.
* `noise_from_words`: per token id, an xorshift-multiply hash on a 31-bit state. 31 bits, because then
  logical shifts are plain shifts on int32 and products never overflow an int64: the same bits on every
  device, and in int32 at half the memory traffic.
"""

from __future__ import annotations

import hashlib
import os
import random

import torch
from torch import Tensor

_M31 = (1 << 31) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX64 = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_GOLDEN31 = 0x1E3779B9
# Odd multipliers below 2**31; tests/unit/sampling checks uniformity, avalanche and independence.
_MIX31 = (0x6D0F27BD, 0x2C1B3C6D, 0x297A2D39)


# What a random number decides. Numbers of different purposes are independent; all are below 2**7.
PURPOSE_COUPLED = 1  # the target's token at a position (coupled verification; the drafter uses it too)
PURPOSE_ACCEPT = 2  # the coin that judges one draft (rejection)
PURPOSE_EMIT = 3  # the race for the token that ends a round (rejection)
PURPOSE_DRAFT = 4  # the drafter's own sampling (rejection)
PURPOSE_SYNTHETIC = 5  # the forced acceptance count of a round (benchmarks)


def request_key(seed: int | None, rng: random.Random | None = None) -> int:
    """64-bit noise key of a request, as a signed int64.

    seed: with one, the key is a hash of it (neighbouring seeds share nothing). Without, the key comes
    from the system's entropy, or from `rng` where a test wants to repeat itself.
    """
    if seed is not None:
        data = int(seed).to_bytes(16, "little", signed=True)
        raw = hashlib.blake2b(data, digest_size=8, person=b"slipstream-seed").digest()
    elif rng is not None:
        raw = rng.randbytes(8)
    else:
        raw = os.urandom(8)
    return int.from_bytes(raw, "little", signed=True)


def stream_words(key: Tensor, child: Tensor, position: Tensor, node: Tensor | int, purpose: int) -> Tensor:
    """64 random bits (int64) for each broadcast element of the int64 counters.

    position < 2**32, child < 2**10, node < 2**14, purpose < 2**7: the packing below is injective there, and
    so is the finaliser, hence one request never sees the same word twice for different counters.
    """
    word = torch.add(position, child, alpha=1 << 32)
    if isinstance(node, Tensor):
        word = torch.add(word, node, alpha=1 << 42)
        word = word + (purpose << 56)
    else:
        word = word + ((node << 42) + (purpose << 56))
    z = torch.add(key, word, alpha=_GOLDEN64)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX64[0]
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX64[1]
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def token_bits(words_R: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Two int32 tensors [R, vocab] of 31 random bits each: the hash, and an intermediate state of it.

    Within a row the hash is a bijection of the token id; the second tensor only serves as extra low bits,
    and is odd, so that the variates made of both are above zero.
    """
    a_R1 = (words_R & _M31).to(torch.int32).unsqueeze(1)
    b_R1 = ((words_R >> 31) & _M31).to(torch.int32).unsqueeze(1)
    ids_V = torch.arange(vocab, dtype=torch.int32, device=words_R.device) * _GOLDEN31
    x = torch.add(ids_V, a_R1).bitwise_and_(_M31)
    t = torch.empty_like(x)  # one scratch tensor: fresh memory costs more here than the arithmetic
    x.bitwise_xor_(_shift(x, 16, t)).mul_(_MIX31[0]).bitwise_and_(_M31)
    low = x | 1  # taken before b comes in: what follows is a bijection, so a later state would repeat the hash
    x.bitwise_xor_(b_R1)
    x.bitwise_xor_(_shift(x, 15, t)).mul_(_MIX31[1]).bitwise_and_(_M31)
    x.bitwise_xor_(_shift(x, 16, t)).mul_(_MIX31[2]).bitwise_and_(_M31)
    return x.bitwise_xor_(_shift(x, 15, t)), low


def _shift(x: Tensor, count: int, out: Tensor) -> Tensor:
    return torch.bitwise_right_shift(x, count, out=out)  # x >= 0: the sign never comes in


def noise_from_words(words_R: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """Exp(1) variates [R, vocab], strictly positive and finite, one row per 64-bit word of `stream_words`.

    u is built so that floating point has its fine end at 0 (steps down to 2**-62), where the winner of
    argmin(E / p) lies, also among 152k tokens. The coarse end only rounds variates that cannot win.
    """
    high, low = token_bits(words_R, vocab)
    # The factor keeps u below 1 after rounding; it scales all variates alike, which no race can see.
    u = high.to(dtype).add_(low.to(dtype), alpha=2.0**-31).mul_(-(2.0**-31) * (1.0 - torch.finfo(dtype).eps))
    return u.log1p_().neg_()


def race_noise(
    key_R: Tensor,
    child_R: Tensor,
    position_R: Tensor,
    purpose: int,
    vocab: int,
    dtype: torch.dtype,
    node_R: Tensor | int = 0,
) -> Tensor:
    """Exp(1) variates [R, vocab] keyed by (key, child, position, node, purpose, token id).

    argmin(E / p) is a draw from p, the same as argmax(log p + Gumbel) with Gumbel = -log E.
    All counters are int64 [R]; dtype float32 or float64.
    """
    return noise_from_words(stream_words(key_R, child_R, position_R, node_R, purpose), vocab, dtype)


def race(weights_RV: Tensor, noise_RV: Tensor) -> Tensor:
    """Winner of the exponential race, int64 [R]: argmin(E / w), lowest index on ties.

    weights need not be normalised; a zero weight never wins against a positive one. Overwrites noise_RV.
    """
    return torch.div(weights_RV, noise_RV, out=noise_RV).argmax(dim=-1)


def coin(key: Tensor, child: Tensor, base: Tensor, node: Tensor | int, purpose: int) -> Tensor:
    """Uniform float64 in [0, 1), broadcast over the int64 counters.

    base: committed length at the start of the round. It grows with every round, so no coin that an earlier
    round has examined comes up again.
    """
    words = stream_words(key, child, base, node, purpose)
    return ((words >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53
