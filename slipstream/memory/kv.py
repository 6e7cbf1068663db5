"""Paged KV storage. Page ids come from the host; page 0 is the sink and belongs to nobody."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import ConfigError


class KVPages:
    """Keys and values of all layers, or of those of a kind: one tensor [layers, 2, pages, page_size, K, D].

    Pages are zeroed lazily by the operating system and again when they change hands (`clear`), so a
    masked column never multiplies a number that another request left there.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_pages + 1, page_size, num_kv_heads, head_dim)
        try:
            self.data = (
                lazy_zeros(shape, dtype)
                if device.type == "cpu" and num_layers
                else torch.zeros(shape, dtype=dtype, device=device)
            )
        except (RuntimeError, MemoryError) as e:
            need = self.bytes_for(num_layers, num_pages + 1, page_size, num_kv_heads, head_dim, dtype)
            raise ConfigError(f"no memory for {num_pages} KV pages ({need / 2**20:.0f} MiB); lower num_pages") from e
        self.page_size = page_size
        self.num_pages = num_pages
        self.flat = [
            (layer[0].view(-1, num_kv_heads, head_dim), layer[1].view(-1, num_kv_heads, head_dim))
            for layer in self.data
        ]
        self.paged = [(layer[0], layer[1]) for layer in self.data]

    @staticmethod
    def bytes_for(layers: int, pages: int, page_size: int, kv_heads: int, dim: int, dtype: torch.dtype) -> int:
        return layers * 2 * pages * page_size * kv_heads * dim * dtype.itemsize

    def in_place(self, start: int, tokens: int) -> tuple[Tensor, ...]:
        """One run of cache cells as [1, K, tokens, D] views: layer 0's keys, its values, layer 1's keys ..."""
        layers, two, pages, page_size, kv_heads, dim = self.data.shape
        run = self.data.view(layers * two, 1, pages * page_size, kv_heads, dim).narrow(2, start, tokens)
        return run.transpose(2, 3).unbind(0)

    def write(self, layer: int, cell_R: Tensor, k_RKD: Tensor, v_RKD: Tensor) -> None:
        """Keys and values [R, K, D] of rows to their cells [R] (page * page_size + offset) of a layer."""
        flat_k, flat_v = self.flat[layer]
        flat_k.index_copy_(0, cell_R, k_RKD)
        flat_v.index_copy_(0, cell_R, v_RKD)

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def clear(self, pages_P: Tensor) -> None:
        """Zero pages [P] (int64 ids) that are about to belong to a new owner."""
        self.data.index_fill_(2, pages_P, 0)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose memory the operating system hands out on first use; torch.zeros would touch every page now."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
