"""Rows that only grow: filled head by head from the front, shared by copies until one writes where another has.

H heads   C rows there is room for
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_GROWTH = 4  # a quarter more than is needed: rows are moved a few times each


class Shelf:
    """Tensors [H, C, …] by name, of which head h has written the first `lens[h]` rows."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Tensors without rows say what a row is like."""
        self.tensors = dict(tensors)
        self.lens = [0] * len(next(iter(self.tensors.values())))
        self._written = list(self.lens)  # by whoever shares the tensors

    @property
    def capacity(self) -> int:
        return next(iter(self.tensors.values())).shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def append(self, head: int, rows: Mapping[str, Tensor]) -> None:
        """Rows [n, …] of every name behind the head's others."""
        begin = self.lens[head]
        end = begin + len(next(iter(rows.values())))
        if end > self.capacity or self._written[head] != begin:
            self._move(end + end // _GROWTH if end > self.capacity else self.capacity)
        for name, tensor in self.tensors.items():
            tensor[head, begin:end] = rows[name]
        self.lens[head] = self._written[head] = end

    def _move(self, capacity: int) -> None:
        """To tensors of this shelf's own."""
        used = max(self.lens)
        for name, old in self.tensors.items():
            new = torch.zeros(len(old), capacity, *old.shape[2:], dtype=old.dtype, device=old.device)
            new[:, :used] = old[:, :used]
            self.tensors[name] = new
        self._written = list(self.lens)

    def copy(self) -> Shelf:
        """The same rows; the tensors are shared."""
        found = Shelf(self.tensors)
        found.lens, found._written = list(self.lens), self._written
        return found
