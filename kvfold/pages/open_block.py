"""The open block (residual buffer): the newest KV slots in the cache's own dtype, until they are committed and sealed.

R slots per head and one fill count for the whole sequence, so all heads append and seal at the same step, known on the
host without a sync. Slots past the commit line (drafts, a cancelled step) roll back.

    | committed … | drafted … | free … |
    0         committed      fill      R
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.codec.native import Native
from kvfold.core import ModelSpec
from kvfold.errors import InputError
from kvfold.pages.arena import Arena, Span
from kvfold.pages.layout import PageClass


class OpenBlock:
    """Keys and values [H, R, D] for every layer, as pages of R slots in the arena."""

    def __init__(self, arena: Arena, spec: ModelSpec, num_slots: int) -> None:
        self.arena = arena
        self.spec = spec
        self.num_slots = num_slots
        self.fill = 0
        self.committed = 0
        self.spans: list[Span] = []
        self._allocate()

    @staticmethod
    def page_class(head_dim: int, kv_dtype: torch.dtype, num_slots: int) -> PageClass:
        return PageClass(Native(), Native(), head_dim, kv_dtype, page_size=num_slots, has_positions=False)

    def _allocate(self) -> None:
        heads: dict[int, int] = defaultdict(int)
        for layer in self.spec.layers:
            heads[layer.head_dim] += layer.num_kv_heads
        by_dim: dict[int, Span] = {}
        try:
            for head_dim, num_heads in heads.items():
                page_class = self.arena.intern(self.page_class(head_dim, self.spec.kv_dtype, self.num_slots))
                by_dim[head_dim] = self.arena.allocate(page_class, num_heads, whole=True)[0]
        finally:
            self.spans = list(by_dim.values())
            if len(by_dim) < len(heads):
                self.release()
        self._first_slots = _first_slots(self.spec, self.num_slots)
        self._span_of = [by_dim[layer.head_dim] for layer in self.spec.layers]

    @cached_property
    def k(self) -> list[Tensor]:
        return self._sides("k.x")

    @cached_property
    def v(self) -> list[Tensor]:
        return self._sides("v.x")

    def _sides(self, name: str) -> list[Tensor]:
        found = []
        for layer, span, first in zip(self.spec.layers, self._span_of, self._first_slots, strict=True):
            shape = (layer.num_kv_heads, self.num_slots, layer.head_dim)
            found.append(span.fields[name][first : first + shape[0] * shape[1]].view(shape))
        return found

    @cached_property
    def addresses(self) -> NDArray[np.int64]:
        """[layers, 2]: bytes from the start of the arena to the keys and to the values of every layer."""
        begin_L2 = np.array([[span.addresses[name] for name in ("k.x", "v.x")] for span in self._span_of])
        width_L = np.array([layer.head_dim for layer in self.spec.layers]) * self.spec.kv_dtype.itemsize
        found_L2: NDArray[np.int64] = begin_L2 + (np.array(self._first_slots) * width_L)[:, None]
        return found_L2

    @property
    def num_bytes(self) -> int:
        return sum(span.num_bytes for span in self.spans)

    @property
    def room(self) -> int:
        return self.num_slots - self.fill

    @property
    def next_room(self) -> int:
        """Slots that the next step may fill without sealing in between; a full block seals first."""
        return self.room or self.committed

    def write(self, layer: int, k_HTD: Tensor, v_HTD: Tensor) -> None:
        """Put T new slots of one layer behind the filled ones; `advance` counts them once all layers have written."""
        end = self.fill + k_HTD.shape[1]
        if end > self.num_slots:
            raise InputError(f"the open block holds {self.num_slots} slots; {end} were to be filled")
        self.k[layer][:, self.fill : end] = k_HTD
        self.v[layer][:, self.fill : end] = v_HTD

    def advance(self, num_tokens: int) -> None:
        self.fill += num_tokens

    def commit(self, num_tokens: int) -> None:
        self.committed = min(self.committed + num_tokens, self.fill)

    def commit_all(self) -> None:
        self.committed = self.fill

    def rollback(self) -> None:
        """Back to the commit line."""
        self.fill = self.committed

    def drop_committed(self) -> None:
        """Committed slots were sealed; drafts behind them move to the front."""
        rest = slice(self.committed, self.fill)
        self.fill -= self.committed
        for block in (*self.k, *self.v) if self.fill else ():
            block[:, : self.fill] = block[:, rest].clone()
        self.committed = 0

    def clear(self) -> None:
        self.fill = self.committed = 0

    def copy_from(self, other: OpenBlock) -> None:
        for mine, theirs in zip((*self.k, *self.v), (*other.k, *other.v), strict=True):
            mine.copy_(theirs)
        self.fill, self.committed = other.fill, other.committed

    def release(self) -> None:
        for span in self.spans:
            self.arena.free(span)
        self.spans = []


def _first_slots(spec: ModelSpec, num_slots: int) -> list[int]:
    """Of each layer, among the slots of the layers that have its head dim."""
    next_slot: dict[int, int] = defaultdict(int)
    found = []
    for layer in spec.layers:
        found.append(next_slot[layer.head_dim])
        next_slot[layer.head_dim] += layer.num_kv_heads * num_slots
    return found
