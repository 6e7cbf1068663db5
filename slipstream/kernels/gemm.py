"""Weight-streaming products for up to 128 rows, fused with what stands around them in a decoder layer.

RMSNorm before a product comes in its streaming form (kernels/norm.py): x holds x * gain, sq_TR [T, R] float32 the
tiles' shares of each row's sum of squares, and the product's result is scaled by rsqrt(sum(sq) / K + eps).
Weights [N, K], as checkpoints have them. `partial`, `counters`: a Workspace. With `pdl` the launch is a programmatic
dependent one: it belongs into a chain that `norm_prepare(pdl=True)` opens, with nothing but such launches in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.errors import UnsupportedError
from slipstream.kernels.rope import cache_cells, head_norm, rotate
from slipstream.kernels.tuning import MAX_STREAM_ROWS, Epilogue, GemmConfig, gemm_config, rows_bucket

OP = "slipstream::"


@torch.library.custom_op(OP + "stream_linear", mutates_args=("partial", "counters"))
def stream_linear(
    x_RK: Tensor, w_NK: Tensor, bias_N: Tensor | None, sq_TR: Tensor | None, eps: float, partial: Tensor,
    counters: Tensor, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """rstd * (x @ w^T) + bias, [R, N] in x's dtype; rstd 1 without sq_TR."""
    y_RN = _product(x_RK, w_NK, sq_TR, eps)
    return (y_RN if bias_N is None else y_RN + bias_N.to(y_RN.dtype)).to(x_RK.dtype)


@torch.library.custom_op(OP + "stream_swiglu", mutates_args=("partial", "counters"))
def stream_swiglu(
    x_RK: Tensor, w_NK: Tensor, sq_TR: Tensor | None, eps: float, partial: Tensor, counters: Tensor, pdl: bool = False
) -> Tensor:
    """silu(gate) * up, [R, N / 2] in x's dtype; w holds the gate rows, then the up rows."""
    gate, up = _product(x_RK, w_NK, sq_TR, eps).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x_RK.dtype)


@torch.library.custom_op(OP + "stream_residual", mutates_args=("partial", "counters"))
def stream_residual(
    x_RK: Tensor, w_NK: Tensor, residual_RN: Tensor, gain_N: Tensor, partial: Tensor, counters: Tensor,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """h = residual + x @ w^T, h * gain (both [R, N] in x's dtype), and the shares sq [T, R] of h's squares."""
    h_RN = (residual_RN.to(_wide(x_RK)) + _product(x_RK, w_NK, None, 0.0)).to(x_RK.dtype)
    wide = h_RN.to(_wide(x_RK))
    bn = _config(Epilogue.RESIDUAL, x_RK, w_NK).bn
    tiles = _tiles(w_NK.shape[0], bn)
    squares = torch.nn.functional.pad(wide.square(), (0, tiles * bn - w_NK.shape[0]))
    return h_RN, (wide * gain_N.to(wide.dtype)).to(x_RK.dtype), squares.view(-1, tiles, bn).sum(-1).T.contiguous()


@torch.library.custom_op(OP + "stream_head", mutates_args=("partial", "counters"))
def stream_head(
    x_RK: Tensor, w_VK: Tensor, sq_TR: Tensor | None, eps: float, partial: Tensor, counters: Tensor,
    store: bool = True, pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Logits [R, V] float32, and per tile of the vocabulary the best logit [T, R] and its lowest id [T, R] int32.

    store=False leaves the logits' memory unwritten: for a greedy frame, where only the argmax is wanted.
    """
    logits_RV = _product(x_RK, w_VK, sq_TR, eps)
    return logits_RV, *_best_of_tiles(logits_RV, x_RK, w_VK)


@torch.library.custom_op(OP + "markov_head", mutates_args=("partial", "counters"))
def markov_head(
    x_BR: Tensor, w_VR: Tensor, base_BKV: Tensor, step: int, partial: Tensor, counters: Tensor, store: bool = True,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`stream_head` of base[:, step] + x @ w^T: a draft's logits with a bias of low rank. base_BKV: float32."""
    logits_BV = base_BKV[:, step].to(_wide(x_BR)) + _product(x_BR, w_VR, None, 0.0)
    return logits_BV, *_best_of_tiles(logits_BV, x_BR, w_VR)


@torch.library.custom_op(OP + "stream_rope", mutates_args=("k_PSKD", "v_PSKD", "partial", "counters"))
def stream_rope(
    x_RH: Tensor, w_MH: Tensor, bias_M: Tensor | None, sq_TR: Tensor | None, eps: float, k_PSKD: Tensor,
    v_PSKD: Tensor, cos_LD: Tensor, sin_LD: Tensor, q_gain_D: Tensor | None, k_gain_D: Tensor | None, qk_eps: float,
    table_SP: Tensor, slot_R: Tensor, rope_pos_R: Tensor, kv_pos_R: Tensor, heads: int, partial: Tensor,
    counters: Tensor, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """`stream_linear` of the qkv weights, then `rope_kv_write` (kernels/rope.py) of its result: q [R, heads, D]."""
    kv_heads, dim = k_PSKD.shape[2], k_PSKD.shape[3]
    qkv = _product(x_RH, w_MH, sq_TR, eps)
    qkv_RND = (qkv if bias_M is None else qkv + bias_M.to(qkv.dtype)).view(x_RH.shape[0], -1, dim)
    q_RND, k_RKD = qkv_RND[:, :heads], qkv_RND[:, heads : heads + kv_heads]
    if q_gain_D is not None and k_gain_D is not None:
        q_RND, k_RKD = head_norm(q_RND, q_gain_D, qk_eps), head_norm(k_RKD, k_gain_D, qk_eps)
    at_R = rope_pos_R.long().clamp(0, cos_LD.shape[0] - 1)
    cos, sin = cos_LD[at_R].unsqueeze(1), sin_LD[at_R].unsqueeze(1)
    page_R, cell_R = cache_cells(table_SP, slot_R, kv_pos_R, k_PSKD.shape[1])
    k_PSKD[page_R, cell_R] = rotate(k_RKD, cos, sin).to(k_PSKD.dtype)
    v_PSKD[page_R, cell_R] = qkv_RND[:, heads + kv_heads :].to(v_PSKD.dtype)
    return rotate(q_RND, cos, sin).to(x_RH.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _product(x_RK: Tensor, w_NK: Tensor, sq_TR: Tensor | None, eps: float) -> Tensor:
    y_RN = x_RK.to(_wide(x_RK)) @ w_NK.to(_wide(x_RK)).T
    if sq_TR is None:
        return y_RN
    return y_RN * torch.rsqrt(sq_TR.sum(0).to(y_RN.dtype) / x_RK.shape[1] + eps).unsqueeze(1)


def _best_of_tiles(logits_RV: Tensor, x_RK: Tensor, w_VK: Tensor) -> tuple[Tensor, Tensor]:
    bn = _config(Epilogue.HEAD, x_RK, w_VK).bn
    tiles = _tiles(w_VK.shape[0], bn)
    padded = torch.nn.functional.pad(logits_RV, (0, tiles * bn - w_VK.shape[0]), value=float("-inf"))
    best, where = padded.view(-1, tiles, bn).max(-1)
    where = where + torch.arange(tiles, device=where.device) * bn
    return best.T.contiguous(), where.T.to(torch.int32).contiguous()


def _tiles(n: int, bn: int) -> int:
    return -(-n // bn)


def _config(epilogue: Epilogue, x_RK: Tensor, w_NK: Tensor) -> GemmConfig:
    n = w_NK.shape[0] // 2 if epilogue is Epilogue.SILU else w_NK.shape[0]
    return gemm_config(epilogue, n, x_RK.shape[1], x_RK.shape[0], x_RK.element_size())


def _checked(epilogue: Epilogue, x_RK: Tensor, w_NK: Tensor, partial: Tensor, counters: Tensor) -> GemmConfig:
    """The launch's configuration; raises UnsupportedError where the kernel cannot take the tensors."""
    rows = x_RK.shape[0]
    if not 1 <= rows <= MAX_STREAM_ROWS:
        raise UnsupportedError(f"a weight-streaming product takes 1 to {MAX_STREAM_ROWS} rows, not {rows}")
    if x_RK.dtype not in (torch.bfloat16, torch.float16, torch.float32) or w_NK.dtype != x_RK.dtype:
        raise UnsupportedError(f"weights {w_NK.dtype} with rows {x_RK.dtype}: use one of bfloat16, float16, float32")
    if not (x_RK.is_contiguous() and w_NK.is_contiguous()):
        raise UnsupportedError("a weight-streaming product takes contiguous rows and weights")
    c = _config(epilogue, x_RK, w_NK)
    planes = 2 if epilogue in (Epilogue.SILU, Epilogue.ROPE) else 1
    tiles = _tiles(w_NK.shape[0] // planes, c.bn)
    need = tiles * c.split * planes * c.bn * rows_bucket(rows) if c.split > 1 else 0
    if need > partial.numel() or (c.split > 1 and tiles > counters.numel()):
        raise UnsupportedError(
            f"the workspace has {partial.numel()} floats and {counters.numel()} counters; this product needs "
            f"{need} and {tiles}"
        )
    return c


@stream_linear.register_fake
def _(
    x_RK: Tensor, w_NK: Tensor, bias_N: Tensor | None, sq_TR: Tensor | None, eps: float, partial: Tensor,
    counters: Tensor, pdl: bool = False,
) -> Tensor:  # fmt: skip
    return x_RK.new_empty(x_RK.shape[0], w_NK.shape[0])


@stream_swiglu.register_fake
def _(
    x_RK: Tensor, w_NK: Tensor, sq_TR: Tensor | None, eps: float, partial: Tensor, counters: Tensor, pdl: bool = False
) -> Tensor:
    return x_RK.new_empty(x_RK.shape[0], w_NK.shape[0] // 2)


@stream_residual.register_fake
def _(
    x_RK: Tensor, w_NK: Tensor, residual_RN: Tensor, gain_N: Tensor, partial: Tensor, counters: Tensor,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n, rows = w_NK.shape[0], x_RK.shape[0]
    h_RN = x_RK.new_empty(rows, n)
    sq = x_RK.new_empty(_tiles(n, _config(Epilogue.RESIDUAL, x_RK, w_NK).bn), rows, dtype=_wide(x_RK))
    return h_RN, torch.empty_like(h_RN), sq


@stream_head.register_fake
def _(
    x_RK: Tensor, w_VK: Tensor, sq_TR: Tensor | None, eps: float, partial: Tensor, counters: Tensor,
    store: bool = True, pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _empty_head(x_RK, w_VK)


@markov_head.register_fake
def _(
    x_BR: Tensor, w_VR: Tensor, base_BKV: Tensor, step: int, partial: Tensor, counters: Tensor, store: bool = True,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _empty_head(x_BR, w_VR)


def _empty_head(x_RK: Tensor, w_VK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the logits, the tiles' best and their ids."""
    n, rows, wide = w_VK.shape[0], x_RK.shape[0], _wide(x_RK)
    best_TR = x_RK.new_empty(_tiles(n, _config(Epilogue.HEAD, x_RK, w_VK).bn), rows, dtype=wide)
    return x_RK.new_empty(rows, n, dtype=wide), best_TR, torch.empty_like(best_TR, dtype=torch.int32)


@stream_rope.register_fake
def _(
    x_RH: Tensor, w_MH: Tensor, bias_M: Tensor | None, sq_TR: Tensor | None, eps: float, k_PSKD: Tensor,
    v_PSKD: Tensor, cos_LD: Tensor, sin_LD: Tensor, q_gain_D: Tensor | None, k_gain_D: Tensor | None, qk_eps: float,
    table_SP: Tensor, slot_R: Tensor, rope_pos_R: Tensor, kv_pos_R: Tensor, heads: int, partial: Tensor,
    counters: Tensor, pdl: bool = False,
) -> Tensor:  # fmt: skip
    return x_RH.new_empty(x_RH.shape[0], heads, k_PSKD.shape[3])


@stream_linear.register_kernel("cuda")
def _(
    x_RK: Tensor, w_NK: Tensor, bias_N: Tensor | None, sq_TR: Tensor | None, eps: float, partial: Tensor,
    counters: Tensor, pdl: bool = False,
) -> Tensor:  # fmt: skip
    from slipstream.kernels.jit import gemm

    c = _checked(Epilogue.STORE, x_RK, w_NK, partial, counters)
    out_RN = x_RK.new_empty(x_RK.shape[0], w_NK.shape[0])
    gemm.launch_stream_gemm(
        x_RK, w_NK, out_RN, epi=gemm.STORE, config=c, bias=bias_N, sq_in=sq_TR, eps=eps, ws=partial,
        counters=counters, pdl=pdl,
    )  # fmt: skip
    return out_RN


@stream_swiglu.register_kernel("cuda")
def _(
    x_RK: Tensor, w_NK: Tensor, sq_TR: Tensor | None, eps: float, partial: Tensor, counters: Tensor, pdl: bool = False
) -> Tensor:
    from slipstream.kernels.jit import gemm

    c = _checked(Epilogue.SILU, x_RK, w_NK, partial, counters)
    out_RI = x_RK.new_empty(x_RK.shape[0], w_NK.shape[0] // 2)
    gemm.launch_stream_gemm(
        x_RK, w_NK, out_RI, epi=gemm.SILU, config=c, pair=w_NK.shape[0] // 2, sq_in=sq_TR, eps=eps, ws=partial,
        counters=counters, pdl=pdl,
    )  # fmt: skip
    return out_RI


@stream_residual.register_kernel("cuda")
def _(
    x_RK: Tensor, w_NK: Tensor, residual_RN: Tensor, gain_N: Tensor, partial: Tensor, counters: Tensor,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from slipstream.kernels.jit import gemm

    c = _checked(Epilogue.RESIDUAL, x_RK, w_NK, partial, counters)
    h_RN = x_RK.new_empty(x_RK.shape[0], w_NK.shape[0])
    scaled_RN = torch.empty_like(h_RN)
    sq_TR = x_RK.new_empty(_tiles(w_NK.shape[0], c.bn), x_RK.shape[0], dtype=torch.float32)
    gemm.launch_stream_gemm(
        x_RK, w_NK, h_RN, epi=gemm.RESIDUAL, config=c, res=residual_RN, gain=gain_N, scaled=scaled_RN, sq_out=sq_TR,
        ws=partial, counters=counters, pdl=pdl,
    )  # fmt: skip
    return h_RN, scaled_RN, sq_TR


@stream_head.register_kernel("cuda")
def _(
    x_RK: Tensor, w_VK: Tensor, sq_TR: Tensor | None, eps: float, partial: Tensor, counters: Tensor,
    store: bool = True, pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from slipstream.kernels.jit import gemm

    c = _checked(Epilogue.HEAD, x_RK, w_VK, partial, counters)
    logits_RV, best_TR, where_TR = _empty_head(x_RK, w_VK)
    gemm.launch_stream_gemm(
        x_RK, w_VK, logits_RV, epi=gemm.HEAD, config=c, sq_in=sq_TR, eps=eps, best=best_TR, where=where_TR, ws=partial,
        counters=counters, store_out=store, pdl=pdl,
    )  # fmt: skip
    return logits_RV, best_TR, where_TR


@markov_head.register_kernel("cuda")
def _(
    x_BR: Tensor, w_VR: Tensor, base_BKV: Tensor, step: int, partial: Tensor, counters: Tensor, store: bool = True,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from slipstream.kernels.jit import gemm

    assert base_BKV.dtype == torch.float32 and base_BKV.is_contiguous(), "base logits are float32 and contiguous"
    c = _checked(Epilogue.HEAD, x_BR, w_VR, partial, counters)
    logits_BV, best_TB, where_TB = _empty_head(x_BR, w_VR)
    gemm.launch_stream_gemm(
        x_BR, w_VR, logits_BV, epi=gemm.HEAD, config=c, res=base_BKV[:, step], pair=base_BKV.shape[1], best=best_TB,
        where=where_TB, ws=partial, counters=counters, store_out=store, pdl=pdl,
    )  # fmt: skip
    return logits_BV, best_TB, where_TB


@stream_rope.register_kernel("cuda")
def _(
    x_RH: Tensor, w_MH: Tensor, bias_M: Tensor | None, sq_TR: Tensor | None, eps: float, k_PSKD: Tensor,
    v_PSKD: Tensor, cos_LD: Tensor, sin_LD: Tensor, q_gain_D: Tensor | None, k_gain_D: Tensor | None, qk_eps: float,
    table_SP: Tensor, slot_R: Tensor, rope_pos_R: Tensor, kv_pos_R: Tensor, heads: int, partial: Tensor,
    counters: Tensor, pdl: bool = False,
) -> Tensor:  # fmt: skip
    from slipstream.kernels.jit import gemm

    c = _checked(Epilogue.ROPE, x_RH, w_MH, partial, counters)
    dim = k_PSKD.shape[3]
    if q_gain_D is not None and c.bn % (dim // 2):
        raise UnsupportedError(f"qk-norm fused with the qkv product needs a head size that divides 128, not {dim}")
    q_RND = x_RH.new_empty(x_RH.shape[0], heads, dim)
    rope = gemm.Rope(
        k=k_PSKD, v=v_PSKD, cos=cos_LD, sin=sin_LD, q_gain=q_gain_D, k_gain=k_gain_D, table=table_SP,
        slot=slot_R.contiguous(), rope_pos=rope_pos_R.contiguous(), kv_pos=kv_pos_R.contiguous(), heads=heads,
        eps=qk_eps,
    )  # fmt: skip
    gemm.launch_stream_gemm(
        x_RH, w_MH, q_RND, epi=gemm.ROPE, config=c, bias=bias_M, sq_in=sq_TR, eps=eps, ws=partial, counters=counters,
        rope=rope, pdl=pdl,
    )  # fmt: skip
    return q_RND
