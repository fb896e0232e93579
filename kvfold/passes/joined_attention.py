"""Causal attention of several short prompts in one call: sequences that begin with these tokens, side by side.

    sequence 0:  | tokens of it          |
    sequence 1:  | tokens of it | padding|

A query sees the tokens before it and itself alone, so nothing that counts sees the padding, and no mask is needed.

    B sequences   N packed tokens   T tokens of the longest   Q query heads   H KV heads   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvfold.pages.async_copy import sent


@dataclass(frozen=True)
class PaddedBatch:
    """Where packed tokens of these lengths stand among padded ones."""

    lens: tuple[int, ...]
    device: torch.device
    _flat_places: dict[int, Tensor] = field(default_factory=dict)
    _positions: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """B, T"""
        return len(self.lens), max(self.lens)

    @cached_property
    def _place_N(self) -> Tensor | None:
        """None where all are of one length."""
        if min(self.lens) == max(self.lens):
            return None
        first = [index * self.shape[1] + np.arange(length) for index, length in enumerate(self.lens)]
        return sent(np.concatenate(first), self.device)

    def padded(self, x_AND: Tensor) -> Tensor:
        """[B, A, T, D] of packed heads [A, N, D]."""
        x_NAD = x_AND.transpose(0, 1)
        if self._place_N is not None:
            num_rows = self.shape[0] * self.shape[1]
            x_NAD = x_NAD.new_zeros(num_rows, *x_NAD.shape[1:]).index_copy_(0, self._place_N, x_NAD)
        found: Tensor = x_NAD.unflatten(0, self.shape).transpose(1, 2).contiguous()
        return found

    def by_sequence(self, x_BATD: Tensor) -> tuple[Tensor, ...]:
        """[A * tokens, D] of each sequence, head after head, without the padding."""
        x_ND, num_heads = x_BATD.flatten(0, 2), x_BATD.shape[1]
        if self._place_N is not None:
            x_ND = x_ND.index_select(0, self._flat_place_N(num_heads))
        found: tuple[Tensor, ...] = x_ND.split([num_heads * length for length in self.lens])
        return found

    def _flat_place_N(self, num_heads: int) -> Tensor:
        found = self._flat_places.get(num_heads)
        if found is None:
            row_X = np.arange(len(self.lens) * num_heads) * self.shape[1]
            lens_X = np.repeat(self.lens, num_heads)
            place_N = np.concatenate([row + np.arange(length) for row, length in zip(row_X, lens_X, strict=True)])
            found = self._flat_places[num_heads] = sent(place_N, self.device)
        return found

    def positions(self, length: int, num_heads: int) -> Tensor:
        """int64 [A * tokens]: 0 to length, for each head."""
        key = length, num_heads
        if key not in self._positions:
            self._positions[key] = torch.arange(length, device=self.device).repeat(num_heads)
        return self._positions[key]

    def packed(self, x_BATD: Tensor) -> Tensor:
        """[A, N, D]"""
        x_NAD = x_BATD.transpose(1, 2).flatten(0, 1)
        if self._place_N is not None:
            x_NAD = x_NAD.index_select(0, self._place_N)
        return x_NAD.transpose(0, 1)


def attend_padded(q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float) -> Tensor:
    """[B, Q, T, D]"""
    out: Tensor = functional.scaled_dot_product_attention(
        q_BQTD, k_BHTD, v_BHTD, is_causal=True, scale=scale, enable_gqa=q_BQTD.shape[1] != k_BHTD.shape[1]
    )
    return out
