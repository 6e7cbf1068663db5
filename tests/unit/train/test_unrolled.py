"""The training-time test's attention by parts equals all scores at once, forward and backward."""

from __future__ import annotations

import pytest
import torch

from slipstream.train.unrolled import unrolled_attention, unrolled_attention_reference


@pytest.mark.parametrize(("steps", "heads", "kv_heads"), [(1, 4, 4), (2, 6, 2), (5, 3, 1)])
def test_unrolled_attention(steps: int, heads: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(steps)

    def random(n: int) -> torch.Tensor:
        return torch.randn(2, 19, n, 16, generator=generator, dtype=torch.float64).requires_grad_()

    q, keys, values = random(heads), [random(kv_heads) for _ in range(steps)], [random(kv_heads) for _ in range(steps)]
    got, want = unrolled_attention(q, keys, values), unrolled_attention_reference(q, keys, values)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    weight = torch.randn(got.shape, generator=generator, dtype=torch.float64)
    leaves = [q, *keys, *values]
    mine = torch.autograd.grad((got * weight).sum(), leaves)
    theirs = torch.autograd.grad((want * weight).sum(), leaves)
    for a, b in zip(mine, theirs, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
