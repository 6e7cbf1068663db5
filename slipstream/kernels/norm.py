"""RMSNorm with and without residual, its streaming form, and SiLU * mul. Source: Zhang & Sennrich (2019).

The streaming form splits RMSNorm in two: norm(x) * g @ W^T = rstd * ((x * g) @ W^T). `norm_prepare` and
`residual_prepare` give x * g and the row's sum of squares; a product of kernels/gemm.py applies rstd to its result
itself, after a library product `silu_mul` or `rope_kv_write` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

OP = "slipstream::"


@torch.library.custom_op(OP + "rms_norm", mutates_args=())
def rms_norm(x_RH: Tensor, gain_H: Tensor, eps: float, pdl: bool = False) -> Tensor:
    """x / rms(x) * gain, [R, H] in x's dtype, computed in float32 (float64 for float64)."""
    wide = _wide(x_RH)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain_H.to(wide.dtype)).to(x_RH.dtype)


@torch.library.custom_op(OP + "residual_norm", mutates_args=())
def residual_norm(
    x_RH: Tensor, residual_RH: Tensor, gain_H: Tensor, eps: float, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """h = x + residual, and its RMSNorm; both [R, H] in x's dtype."""
    h_RH = (_wide(x_RH) + _wide(residual_RH)).to(x_RH.dtype)
    return h_RH, rms_norm(h_RH, gain_H, eps)


@torch.library.custom_op(OP + "norm_prepare", mutates_args=())
def norm_prepare(x_RH: Tensor, gain_H: Tensor, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """x * gain [R, H] in x's dtype, and the sums of squares [1, R] float32: the first half of RMSNorm.

    With pdl this kernel opens a chain of dependent launches: what is written before it is complete for all of them.
    """
    wide = _wide(x_RH)
    return (wide * gain_H.to(wide.dtype)).to(x_RH.dtype), wide.square().sum(-1).unsqueeze(0)


@torch.library.custom_op(OP + "residual_prepare", mutates_args=())
def residual_prepare(
    x_RH: Tensor, residual_RH: Tensor, gain_H: Tensor, pdl: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """h = x + residual, then `norm_prepare` of it: h, h * gain, both [R, H] in x's dtype, and h's squares [1, R]."""
    h_RH = (_wide(x_RH) + _wide(residual_RH)).to(x_RH.dtype)
    return h_RH, *norm_prepare(h_RH, gain_H)


@torch.library.custom_op(OP + "silu_mul", mutates_args=())
def silu_mul(
    x_RI: Tensor, sq_TR: Tensor | None = None, width: int = 1, eps: float = 0.0, pdl: bool = False
) -> Tensor:  # fmt: skip
    """silu(gate) * up [R, I]; x_RI [R, 2 I] holds gate, then up.

    With sq_TR x is scaled first by rstd = rsqrt(sum(sq) / width + eps).
    """
    wide = _wide(x_RI) if sq_TR is None else _wide(x_RI) * rstd(sq_TR, width, eps, _wide(x_RI).dtype)
    gate, up = wide.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x_RI.dtype)


def rstd(sq_TR: Tensor, width: int, eps: float, dtype: torch.dtype) -> Tensor:
    """1 / rms of rows of `width` values, [R, 1], from the tiles' shares of the sums of squares [T, R]."""
    return torch.rsqrt(sq_TR.sum(0).to(dtype) / width + eps).unsqueeze(1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


@rms_norm.register_fake
def _(x_RH: Tensor, gain_H: Tensor, eps: float, pdl: bool = False) -> Tensor:
    return torch.empty_like(x_RH)


@residual_norm.register_fake
def _(x_RH: Tensor, residual_RH: Tensor, gain_H: Tensor, eps: float, pdl: bool = False) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_RH), torch.empty_like(x_RH)


@norm_prepare.register_fake
def _(x_RH: Tensor, gain_H: Tensor, pdl: bool = False) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if x_RH.dtype == torch.float64 else torch.float32
    return torch.empty_like(x_RH), x_RH.new_empty(1, x_RH.shape[0], dtype=dtype)


@residual_prepare.register_fake
def _(x_RH: Tensor, residual_RH: Tensor, gain_H: Tensor, pdl: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if x_RH.dtype == torch.float64 else torch.float32
    return torch.empty_like(x_RH), torch.empty_like(x_RH), x_RH.new_empty(1, x_RH.shape[0], dtype=dtype)


@silu_mul.register_fake
def _(x_RI: Tensor, sq_TR: Tensor | None = None, width: int = 1, eps: float = 0.0, pdl: bool = False) -> Tensor:
    return x_RI.new_empty(x_RI.shape[0], x_RI.shape[1] // 2)


@rms_norm.register_kernel("cuda")
def _(x_RH: Tensor, gain_H: Tensor, eps: float, pdl: bool = False) -> Tensor:
    from slipstream.kernels.jit import norm

    out_RH = torch.empty_like(x_RH)
    norm.launch_residual_norm(x_RH.contiguous(), None, gain_H, None, out_RH, None, eps=eps, pdl=pdl)
    return out_RH


@residual_norm.register_kernel("cuda")
def _(x_RH: Tensor, residual_RH: Tensor, gain_H: Tensor, eps: float, pdl: bool = False) -> tuple[Tensor, Tensor]:
    from slipstream.kernels.jit import norm

    h_RH, out_RH = torch.empty_like(x_RH), torch.empty_like(x_RH)
    norm.launch_residual_norm(x_RH.contiguous(), residual_RH.contiguous(), gain_H, h_RH, out_RH, None, eps=eps, pdl=pdl)
    return h_RH, out_RH


@norm_prepare.register_kernel("cuda")
def _(x_RH: Tensor, gain_H: Tensor, pdl: bool = False) -> tuple[Tensor, Tensor]:
    from slipstream.kernels.jit import norm

    out_RH = torch.empty_like(x_RH)
    squares = x_RH.new_empty(1, x_RH.shape[0], dtype=torch.float32)
    norm.launch_residual_norm(x_RH.contiguous(), None, gain_H, None, out_RH, squares, eps=0.0, pdl=pdl)
    return out_RH, squares


@residual_prepare.register_kernel("cuda")
def _(x_RH: Tensor, residual_RH: Tensor, gain_H: Tensor, pdl: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    from slipstream.kernels.jit import norm

    h_RH, out_RH = torch.empty_like(x_RH), torch.empty_like(x_RH)
    squares = x_RH.new_empty(1, x_RH.shape[0], dtype=torch.float32)
    norm.launch_residual_norm(
        x_RH.contiguous(), residual_RH.contiguous(), gain_H, h_RH, out_RH, squares, eps=0.0, pdl=pdl
    )
    return h_RH, out_RH, squares


@silu_mul.register_kernel("cuda")
def _(x_RI: Tensor, sq_TR: Tensor | None = None, width: int = 1, eps: float = 0.0, pdl: bool = False) -> Tensor:
    from slipstream.kernels.jit import norm

    out_RI = x_RI.new_empty(x_RI.shape[0], x_RI.shape[1] // 2)
    norm.launch_silu_mul(x_RI.contiguous(), out_RI, sq=sq_TR, width=width, eps=eps, pdl=pdl)
    return out_RI
