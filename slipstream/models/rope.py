"""Rotary positions (RoFormer, arXiv 2104.09864, section 3.4) and the scalings that stretch them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelLoadError, UnsupportedError

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions become angles.

    theta: the frequency base. kind: one of KINDS. factor, low_freq_factor, high_freq_factor,
    original_max_position: the scaling's parameters (llama3: Llama 3.1 release; yarn: arXiv 2309.00071).
    attention_factor: both tables are multiplied by it (yarn), None for the formula's own value.
    divisors: one per frequency, divides it on top of all else (GGUF `rope_freqs`), or empty.
    partial: the share of a head's dimensions that turn, its first ones; the others pass as they are.
    sections: pairs that turn by a token's position in time, height and width (arXiv 2409.12191); empty: a token has one
    position. interleaved: pairs take turns (Qwen3-VL), else each section is a run.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    partial: float = 1.0
    sections: tuple[int, ...] = ()
    interleaved: bool = True

    def turned(self, head_dim: int) -> int:
        """How many of a head's dimensions turn. ModelLoadError when they are no pairs."""
        turned = int(head_dim * self.partial)
        if not 0 < turned <= head_dim or turned % 2:
            raise ModelLoadError(
                f"model config: partial_rotary_factor={self.partial} of head_dim={head_dim} turns {turned} dimensions; "
                f"it must be an even number of at most {head_dim}"
            )
        return turned


def rope_values(values: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """What `parse_rope` reads, for layers of one kind ("full_attention", "sliding_attention") of an HF config.

    Newer configs have an entry for each kind in `rope_parameters`; older ones of Gemma 3 `rope_local_base_freq` for
    layers with a window, which are never scaled. Where neither is there all layers are alike.
    """
    params = values.get("rope_parameters")
    if isinstance(params, Mapping) and kind in params:
        return {"rope_parameters": params[kind]}
    if values.get("model_type") == "gemma3_text":
        if kind == "sliding_attention":
            return {"rope_theta": values.get("rope_local_base_freq", 10_000.0)}
        return {"rope_theta": 1_000_000.0, **values}
    return values


def parse_rope(values: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeConfig:
    """RopeConfig from an HF config: `rope_theta` + `rope_scaling`, or the newer `rope_parameters`."""
    params = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(params, Mapping):
        raise ModelLoadError(f"model config: rope_scaling={params!r} must be an object")
    theta = _number("rope_theta", params.get("rope_theta", values.get("rope_theta", 10000.0)))
    kind = params.get("rope_type", params.get("type", "default"))
    partial = params.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    partial = _number("partial_rotary_factor", partial)
    if kind not in (*KINDS, "mrope"):
        raise UnsupportedError(f"rope scaling {kind!r} is not supported; the known ones are {', '.join(KINDS)}")
    sections, interleaved = _sections(params, head_dim, partial)
    if kind == "default" or kind == "mrope":
        return RopeConfig(theta=theta, partial=partial, sections=sections, interleaved=interleaved)
    if sections:
        raise UnsupportedError(f"mrope_section together with rope scaling {kind!r} is not supported")
    if partial != 1.0:
        raise UnsupportedError(f"partial_rotary_factor={partial} is not supported together with rope scaling {kind!r}")
    if "factor" not in params:
        raise ModelLoadError(f"model config: rope scaling {kind!r} lacks 'factor'")
    factor = _number("rope factor", params["factor"])
    original = params.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            if name not in params:
                raise ModelLoadError(f"model config: rope scaling 'llama3' lacks {name!r}")
        if original is None:
            raise ModelLoadError("model config: rope scaling 'llama3' lacks 'original_max_position_embeddings'")
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=factor,
            low_freq_factor=_number("low_freq_factor", params["low_freq_factor"]),
            high_freq_factor=_number("high_freq_factor", params["high_freq_factor"]),
            original_max_position=int(_number("original_max_position_embeddings", original)),
        )
    attention = params.get("attention_factor")
    for name in ("mscale", "mscale_all_dim"):
        if params.get(name):
            raise UnsupportedError(f"rope scaling 'yarn' with {name}={params[name]} is not supported")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=int(_number("original_max_position_embeddings", original or max_positions)),
        attention_factor=None if attention is None else _number("attention_factor", attention),
        beta_fast=_number("beta_fast", params.get("beta_fast") or 32.0),
        beta_slow=_number("beta_slow", params.get("beta_slow") or 1.0),
        truncate=bool(params.get("truncate", True)),
    )


def _sections(params: Mapping[str, Any], head_dim: int, partial: float) -> tuple[tuple[int, ...], bool]:
    sections = params.get("mrope_section")
    if sections is None:
        return (), True
    pairs = RopeConfig(partial=partial).turned(head_dim) // 2
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(n) is int and n >= 0 for n in sections):
        raise ModelLoadError(f"model config: mrope_section={sections!r} must be three whole numbers")
    if sum(sections) != pairs:
        raise ModelLoadError(f"model config: mrope_section={sections} must add up to the {pairs} pairs that turn")
    return tuple(sections), bool(params.get("mrope_interleaved", False))


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0 or math.isinf(value):
        raise ModelLoadError(f"model config: {name}={value!r} must be a number above 0")
    return float(value)


def inverse_frequencies(rope: RopeConfig, head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, float]:
    """Angle per position of each of the pairs that turn, [D/2] of them or fewer, and the factor on both tables.

    float32 repeats the arithmetic of the reference implementations, which round the frequencies there;
    a float64 model uses the same float32 frequencies so that both agree on what the angle is.
    """
    turned = rope.turned(head_dim)
    exponent = torch.arange(0, turned, 2, dtype=torch.int64).to(dtype) / turned
    inv = 1.0 / (rope.theta**exponent)
    attention = 1.0
    if rope.kind == "linear":
        inv = inv / rope.factor
    elif rope.kind == "llama3":
        inv = _llama3(inv, rope)
    elif rope.kind == "yarn":
        inv = _yarn(inv, rope, head_dim)
        attention = rope.attention_factor or (0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0)
    if rope.divisors:
        if len(rope.divisors) != turned // 2:
            raise ModelLoadError(f"rope_freqs has {len(rope.divisors)} values; head_dim={head_dim} needs half of it")
        inv = inv / torch.tensor(rope.divisors, dtype=dtype)
    return inv, attention


def _llama3(inv: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between are blended."""
    wavelength = 2 * math.pi / inv
    turns = rope.original_max_position / wavelength
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - share) * inv / rope.factor + share * inv
    scaled = torch.where(turns < rope.low_freq_factor, inv / rope.factor, blended)
    return torch.where(turns > rope.high_freq_factor, inv, scaled)


def _yarn(inv: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """YaRN, section 3.2: a ramp over the pairs from kept (fast) to divided by `factor` (slow)."""

    def pair_with_turns(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step, without dividing by zero
    pairs = torch.arange(head_dim // 2, dtype=inv.dtype, device=inv.device)
    slow = ((pairs - low) / (high - low)).clamp(0, 1)
    return inv / rope.factor * slow + inv * (1 - slow)


def pair_axes(rope: RopeConfig) -> list[int]:
    """The axis that each pair turns by: 0 time, 1 height, 2 width."""
    time, height, width = rope.sections
    if not rope.interleaved:
        return [0] * time + [1] * height + [2] * width
    axes = [0] * (time + height + width)
    for axis, count in ((1, height), (2, width)):
        axes[axis : 3 * count : 3] = [axis] * len(axes[axis : 3 * count : 3])
    return axes


def axis_of_pairs(rope: RopeConfig, device: torch.device) -> Tensor:
    """`pair_axes` as a tensor [pairs]."""
    return torch.tensor(pair_axes(rope), device=device)


def by_axis(rows: Tensor, axis_T: Tensor) -> Tensor:
    """From values [3, ..., T] by position in time, height and width those of each pair's own axis, [..., T]."""
    time, height, width = rows.unbind(0)
    return torch.where(axis_T == 1, height, torch.where(axis_T == 2, width, time))


class RotaryTable:
    """Cosines and signed sines of every position, computed once.

    table [max_positions, 2, 1, T]: [:, 0] is (cos, cos), [:, 1] is (-sin, sin), so that rotating a head x is
    x * cos + roll(x, T/2) * sin: two kernels, and no slices where all of a head turns (T = D).
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_positions: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        inv, attention = inverse_frequencies(rope, head_dim)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        angles = torch.outer(torch.arange(max_positions, dtype=exact), inv.to(exact))
        cos, sin = angles.cos() * attention, angles.sin() * attention
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        self._turned = rope.turned(head_dim)
        self._half, self._all = self._turned // 2, self._turned == head_dim
        self._last = max_positions - 1
        self.axis_T: Tensor | None = None
        if rope.sections:
            axis_D = axis_of_pairs(rope, device)
            self.axis_T = torch.cat((axis_D, axis_D))
        self.table = table.unsqueeze(2).to(device=device, dtype=dtype)

    def at(self, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [R, 1, T] of the rows; positions beyond the table take its last row.

        positions_R: [R], or [3, R] in time, height and width for a table with sections.
        """
        rows = self.table[positions_R.clamp(0, self._last)]
        if positions_R.dim() == 2:
            assert self.axis_T is not None, "positions on three axes for a model that has one"
            rows = by_axis(rows, self.axis_T)
        return rows[:, 0], rows[:, 1]

    def rotate(self, x_RND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self._all:
            return torch.addcmul(x_RND * cos, x_RND.roll(self._half, -1), sin)
        turning, rest = x_RND[..., : self._turned], x_RND[..., self._turned :]
        return torch.cat((torch.addcmul(turning * cos, turning.roll(self._half, -1), sin), rest), -1)
