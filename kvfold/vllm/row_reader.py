"""Rows of keys and values out of a block of vLLM's KV cache, in whatever order its backend keeps them.

The inside of a block depends on backend and instruction set. Its order is learned once: the backend's own writer writes
rows whose numbers tell where they come from into a block beside the cache.

    B blocks   N slots of a block   H KV heads   D head dim
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BASE = 128  # numbers below it are exact in every dtype of a cache


class RowReader:
    """For caches like `cache_BHNC` of a layer, whose last axis holds a key and a value."""

    def __init__(self, layer: Any, cache_BHNC: Tensor) -> None:
        _, heads, size, width = cache_BHNC.shape
        self._shape = (2, size, heads, width // 2)
        total = size * heads * width
        number = torch.arange(total)
        found = torch.zeros(total, dtype=torch.int64)
        scale = 1
        while scale < total:
            digit = (number // scale % _BASE).to(cache_BHNC.dtype).view(self._shape)
            scratch_BHNC = torch.zeros((1, *cache_BHNC.shape[1:]), dtype=cache_BHNC.dtype)
            layer.impl.do_kv_cache_update(layer, digit[0], digit[1], scratch_BHNC, torch.arange(size))
            found += scratch_BHNC.flatten().to(torch.int64) * scale
            scale *= _BASE
        self._where = found.argsort()
        assert bool((found[self._where] == number).all()), "the backend's writer writes every number once"

    def read(self, blocks_BHNC: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B * N, H, D] of some blocks."""
        rows = blocks_BHNC.flatten(1)[:, self._where].unflatten(1, self._shape)
        return rows[:, 0].flatten(0, 1), rows[:, 1].flatten(0, 1)
