"""The counter-based generator: exact bits, uniformity, independence, and the fine end of the variates."""

from __future__ import annotations

import random

import torch
from scipy.stats import chi2, kstest
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slipstream.sampling.rng import (
    PURPOSE_ACCEPT,
    PURPOSE_COUPLED,
    PURPOSE_DRAFT,
    coin,
    noise_from_words,
    race,
    race_noise,
    request_key,
    stream_words,
    token_bits,
)

M31, M64 = 2**31 - 1, 2**64 - 1


def words_by_integers(key: int, child: int, position: int, node: int, purpose: int) -> int:
    z = key + (position + (child << 32) + (node << 42) + (purpose << 56)) * 0x9E3779B97F4A7C15 & M64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def bits_by_integers(word: int, token: int) -> tuple[int, int]:
    x = token * 0x1E3779B9 + (word & M31) & M31
    x = (x ^ x >> 16) * 0x6D0F27BD & M31
    low = x | 1
    x ^= (word >> 31) & M31
    x = (x ^ x >> 15) * 0x2C1B3C6D & M31
    x = (x ^ x >> 16) * 0x297A2D39 & M31
    return x ^ x >> 15, low


def i64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_bits_are_those_of_plain_integer_arithmetic() -> None:
    """So they are the same on every device and in every integer width that holds them."""
    rng = random.Random(0)
    for _ in range(50):
        key, child, position = rng.randrange(-(2**63), 2**63), rng.randrange(128), rng.randrange(2**24)
        node, purpose = rng.randrange(64), rng.randrange(1, 6)
        want = words_by_integers(key, child, position, node, purpose)
        got = stream_words(i64(key), i64(child), i64(position), node, purpose)
        assert got.item() & M64 == want
        assert torch.equal(got, stream_words(i64(key), i64(child), i64(position), i64(node), purpose))
        high, low = token_bits(got, 1001)
        for token in (0, 1, 500, 1000):
            assert (high[0, token].item(), low[0, token].item()) == bits_by_integers(want, token)


FROZEN_KEY = -824325167217542743
FROZEN_NOISE = [1.7785042778703386, 1.1929380015252589, 0.16704575212121706]


def test_seeded_output_is_frozen() -> None:
    """These numbers are part of what a seed means; changing them changes everybody's seeded output."""
    assert request_key(0) == FROZEN_KEY
    noise = race_noise(i64(FROZEN_KEY), i64(0), i64(7), PURPOSE_COUPLED, 3, torch.float64)
    torch.testing.assert_close(noise[0], torch.tensor(FROZEN_NOISE, dtype=torch.float64), atol=1e-12, rtol=1e-12)


def test_request_keys() -> None:
    seeds = [*range(-50, 50), 2**63, 2**64 - 1, -(2**63)]
    keys = [request_key(s) for s in seeds]
    assert len(set(keys)) == len(seeds)
    assert keys == [request_key(s) for s in seeds]
    assert all(-(2**63) <= k < 2**63 for k in keys)
    assert len({request_key(None) for _ in range(100)}) == 100
    assert request_key(None, random.Random(4)) == request_key(None, random.Random(4))


def test_one_request_never_sees_a_word_twice() -> None:
    axes = torch.meshgrid(torch.arange(500), torch.arange(4), torch.arange(32), indexing="ij")
    position, child, node = (a.flatten() for a in axes)
    words = torch.cat([stream_words(i64(-12345), child, position, node, p) for p in range(1, 6)])
    assert len(words.unique()) == len(words)
    high, _ = token_bits(words[:3], 152_064)
    assert all(len(row.unique()) == 152_064 for row in high)


def uniform_p(cells: Tensor, bins: int) -> float:
    counts = torch.bincount(cells.flatten().long(), minlength=bins).double()
    expected = counts.sum() / bins
    return float(chi2.sf(float(((counts - expected) ** 2 / expected).sum()), bins - 1))


def word_grid(count: int) -> Tensor:
    return stream_words(i64(99), i64(0), torch.arange(count), 0, PURPOSE_COUPLED)


def test_token_bits_are_uniform() -> None:
    high, low = token_bits(word_grid(40), 30_000)
    for shift in (0, 7, 15, 23):
        assert uniform_p((high >> shift) & 255, 256) > 1e-4, shift
    for shift in (1, 9, 23):
        assert uniform_p((low >> shift) & 255, 256) > 1e-4, shift


def pair_p(a: Tensor, b: Tensor) -> float:
    """Chi-square of the joint law of the top 5 bits of each."""
    return uniform_p((a >> 26) * 32 + (b >> 26), 1024)


def test_neighbouring_counters_are_independent() -> None:
    def bits(child: int = 0, position: int = 0, node: int = 0, purpose: int = 1, key: int = 99) -> Tensor:
        where = torch.arange(60) * 2 + position
        return token_bits(stream_words(i64(key), i64(child), where, node, purpose), 20_000)[0]

    base = bits()
    others = {
        "token": (base[:, 1:], base[:, :-1]),
        "token + 2": (base[:, 2:], base[:, :-2]),
        "position": (base, bits(position=1)),
        "child": (base, bits(child=1)),
        "node": (base, bits(node=1)),
        "purpose": (base, bits(purpose=2)),
        "key": (base, bits(key=100)),
        "high and low": token_bits(word_grid(60), 20_000),
    }
    for name, (a, b) in others.items():
        assert pair_p(a, b) > 1e-4, name
    # Control: the counter without the mixing is uniform, but its neighbours are not independent.
    weyl = (torch.arange(1_000_000) * 0x1E3779B9) & M31
    assert uniform_p(weyl >> 23, 256) > 1e-4
    assert pair_p(weyl[1:], weyl[:-1]) < 1e-12


def test_every_input_bit_flips_half_of_the_output() -> None:
    words = word_grid(400)
    for bit in range(62):
        flipped = token_bits(words ^ (1 << bit), 16)[0] ^ token_bits(words, 16)[0]
        share = torch.stack([((flipped >> k) & 1).double().mean() for k in range(31)])
        # 6400 pairs: standard deviation .00625 for independent bits; tokens of one row share the flip.
        assert share.min() > 0.4 and share.max() < 0.6, (bit, share)


def test_variates_are_exponential() -> None:
    for dtype in (torch.float32, torch.float64):
        noise = noise_from_words(word_grid(30), 5000, dtype)
        assert noise.dtype == dtype
        assert torch.isfinite(noise).all() and (noise > 0).all()
        assert kstest(noise.flatten().double().numpy(), "expon").pvalue > 1e-4
    small, exact = noise_from_words(word_grid(3), 5000, torch.float32), noise[:3]
    # float32 is exact to rounding at the small end, where races are won, and coarse above.
    low = exact < 1
    torch.testing.assert_close(small.double()[low], exact[low], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(small.double(), exact, rtol=1e-2, atol=0.0)


def test_fine_end_is_on_the_winning_side() -> None:
    """Among 152k tokens the winner is near 1 / 152k: the smallest variates must neither tie nor be coarse."""
    vocab, count = 152_064, 96
    noise = noise_from_words(word_grid(count), vocab, torch.float32)
    least = noise.amin(1).double() * vocab
    assert kstest(least.numpy(), "expon").pvalue > 1e-4
    lowest = noise.flatten().topk(4000, largest=False).values  # 4000 of 14.6 million
    assert len(lowest.unique()) >= 3998  # 31 bits alone would give about 13 ties, 24 bits far more
    assert kstest((lowest.double() / float(lowest.max())).numpy(), "uniform").pvalue > 1e-4
    # Control: 24-bit uniforms put through -log(u) have their fine end on the losing side.
    coarse = torch.rand(count * vocab, generator=torch.Generator().manual_seed(0)).log_().neg_()
    assert len(coarse.topk(4000, largest=False).values.unique()) < 3900


def test_extreme_words_stay_positive_and_finite() -> None:
    words = i64(0, -1, 2**62 - 1, -(2**63), M31, M31 << 31)
    for dtype in (torch.float32, torch.float64):
        noise = noise_from_words(words, 4096, dtype)
        assert torch.isfinite(noise).all() and (noise > 0).all()


def test_a_race_draws_from_its_weights() -> None:
    count, vocab = 60_000, 40
    weights = torch.rand(vocab, generator=torch.Generator().manual_seed(2)) ** 2
    weights[::7] = 0
    for dtype in (torch.float32, torch.float64):
        noise = race_noise(i64(5), i64(0), torch.arange(count), PURPOSE_DRAFT, vocab, dtype)
        counts = torch.bincount(race(weights.to(dtype).expand(count, -1), noise.clone()), minlength=vocab).double()
        expected = weights.double() / weights.double().sum() * count
        live = expected > 0
        assert counts[~live].sum() == 0
        stat = ((counts - expected)[live] ** 2 / expected[live]).sum()
        assert chi2.sf(float(stat), int(live.sum()) - 1) > 1e-4
        # Control: a law 2 % off in one cell of mass is seen with this many draws.
        wrong = expected.clone()
        wrong[live.nonzero()[0]] += 0.02 * count
        wrong *= count / wrong.sum()
        assert chi2.sf(float(((counts - wrong)[live] ** 2 / wrong[live]).sum()), int(live.sum()) - 1) < 1e-9


def test_coins() -> None:
    base_B1 = torch.arange(2000).unsqueeze(1)
    u = coin(i64(7), i64(0), base_B1, torch.arange(8), PURPOSE_ACCEPT)
    assert u.shape == (2000, 8) and u.dtype == torch.float64
    assert (u >= 0).all() and (u < 1).all()
    assert kstest(u.flatten().numpy(), "uniform").pvalue > 1e-4
    assert uniform_p((u[1:] * 16).floor() * 16 + (u[:-1] * 16).floor(), 256) > 1e-4
    assert uniform_p((u[:, 1:] * 16).floor() * 16 + (u[:, :-1] * 16).floor(), 256) > 1e-4
    assert len(u.unique()) == u.numel()


def test_traceable_without_data() -> None:
    with FakeTensorMode():
        zeros = torch.zeros(4, dtype=torch.int64)
        assert race(torch.rand(4, 9), race_noise(zeros, zeros, zeros, 1, 9, torch.float32)).shape == (4,)
