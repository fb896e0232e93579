"""What a page holds: P slots of one KV head of one layer, as fields of fixed width.

Every page has the codec's fields for keys ("k.*") and values ("v.*") and the original position of each slot (int32).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from kvfold.codec.base import Codec, Field, Side
from kvfold.errors import InputError, PolicyError

POSITION = Field("position", torch.int32, 1)
_ALIGNMENT = 64  # bytes: each region of a span starts on one


@dataclass(frozen=True)
class PageClass:
    """The codecs of both sides, the head dim and the page size: everything that fixes a page's bytes."""

    k: Codec
    v: Codec
    head_dim: int
    kv_dtype: torch.dtype
    page_size: int = 16  # slots
    has_positions: bool = True

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size % self.group:
            raise InputError(f"page size {self.page_size} is not a positive multiple of the codec's group {self.group}")
        if self.k.needs_below or self.v.needs_below:
            raise PolicyError(
                "this codec needs the slots of the layer below, which pages do not hand to codecs; use one that stores "
                "a layer by itself, such as int4"
            )

    @property
    def group(self) -> int:
        """Slots that share metadata (1: a slot can be moved alone)."""
        return max(self.k.group("k"), self.v.group("v"))

    @property
    def relocatable(self) -> bool:
        return self.k.relocatable and self.v.relocatable

    def codec(self, side: Side) -> Codec:
        return self.k if side == "k" else self.v

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        sides: list[Field] = []
        for side in ("k", "v"):
            codec = self.codec(side)
            own = codec.fields(side, self.head_dim, self.kv_dtype)
            sides += [replace(item, name=f"{side}.{item.name}") for item in own]
        return (*sides, POSITION) if self.has_positions else tuple(sides)

    def rows_per_page(self, item: Field) -> int:
        if item.per == "slot":
            return self.page_size
        side: Side = "k" if item.name.startswith("k.") else "v"
        return self.page_size // self.codec(side).group(side)

    @cached_property
    def bytes_per_page(self) -> int:
        return sum(item.bytes() * self.rows_per_page(item) for item in self.fields)

    @property
    def bytes_per_slot(self) -> float:
        return self.bytes_per_page / self.page_size

    @staticmethod
    def aligned(num_bytes: int) -> int:
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def regions(self, num_pages: int) -> Iterator[tuple[Field, int]]:
        """The fields of a span in order, with the rows each holds."""
        for item in self.fields:
            yield item, num_pages * self.rows_per_page(item)

    def span_bytes(self, num_pages: int) -> int:
        return sum(self.aligned(rows * item.bytes()) for item, rows in self.regions(num_pages))

    def pages_in(self, num_bytes: int) -> int:
        """The most pages a span of num_bytes can hold."""
        num_pages = num_bytes // self.bytes_per_page
        while num_pages and self.span_bytes(num_pages) > num_bytes:
            num_pages -= 1
        return num_pages

    def pages_for(self, num_slots: int) -> int:
        return -(-num_slots // self.page_size)
