"""Page layout: a page holds P KV slots of one head of one layer, as fields of fixed width.

Every page has the codec's fields for keys ("k.*") and values ("v.*") and the original position of each slot (int32).
Under `fit` (evicted/fit.py) each slot has a log-bias that is added to its scaled scores.
A reader that selects adds summaries of the page or its slots ("page.*"), computed from what the page holds whenever
that changes: they are memory like the rest, but no part of a slot's code, so nothing moves or saves them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch

from kvfold.codec.base import SIDES, Codec, Field, Side
from kvfold.errors import InputError
from kvfold.policy.reader import All, Reader

POSITION = Field("position", torch.int32, 1)
BIAS = Field("bias", torch.float32, 1)  # natural log
SUMMARY = "page."  # prefix of the fields that a reader adds
_ALIGNMENT = 64  # bytes: each region of a span starts on one
_ENTRY_BYTES = 8  # what a reader that selects pages keeps of each: its number and the slots used


@dataclass(frozen=True)
class PageClass:
    """The codecs of both sides, the head dim, the page size and the reader: everything that fixes a page's bytes."""

    k: Codec
    v: Codec
    head_dim: int
    kv_dtype: torch.dtype
    page_size: int = 16  # slots
    has_positions: bool = True
    reader: Reader = field(default_factory=All)
    has_bias: bool = False
    k_width: int | None = None  # channels a codec sees of a slot, where these are latents; None: the head dim
    v_width: int | None = None

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size % self.group:
            raise InputError(f"page size {self.page_size} is not a positive multiple of the codec's group {self.group}")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Worked out once: tables are found by page class many times a step."""
        shape = (self.head_dim, self.kv_dtype, self.page_size, self.has_positions, self.has_bias)
        return hash((self.k, self.v, *shape, self.reader, self.k_width, self.v_width))

    @cached_property
    def group(self) -> int:
        """Slots that share metadata (1: a slot can be moved alone)."""
        return max(self.k.group("k"), self.v.group("v"))

    @property
    def relocatable(self) -> bool:
        return self.k.relocatable and self.v.relocatable

    @cached_property
    def needs_below(self) -> bool:
        """Whether a side is coded against the layer below."""
        return self.k.needs_below or self.v.needs_below

    @cached_property
    def is_plain(self) -> bool:
        """Whether keys and values are rows of floats, all of which are read, and nothing else bears on attention."""
        return self.k.as_floats and self.v.as_floats and not self.has_bias and not self.reader.selects

    def codec(self, side: Side) -> Codec:
        return self.k if side == "k" else self.v

    def width(self, side: Side) -> int:
        """Channels that the codec of a side sees of a slot."""
        width = self.k_width if side == "k" else self.v_width
        return self.head_dim if width is None else width

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        sides = [
            replace(item, name=f"{side}.{item.name}")
            for side in SIDES
            for item in self.codec(side).fields(side, self.width(side), self.kv_dtype)
        ]
        optional = ((POSITION, self.has_positions), (BIAS, self.has_bias))
        return (*sides, *(item for item, is_there in optional if is_there))

    @cached_property
    def summaries(self) -> tuple[Field, ...]:
        """What the reader keeps of each page or slot."""
        own = self.reader.summaries(self.head_dim, self.kv_dtype, self.page_size)
        return tuple(replace(item, name=f"{SUMMARY}{item.name}") for item in own)

    def rows_per_page(self, item: Field) -> int:
        if item.per == "page":
            return 1
        if item.per == "slot":
            return self.page_size
        side: Side = "k" if item.name.startswith("k.") else "v"
        return self.page_size // self.codec(side).group(side)

    @cached_property
    def code_bytes(self) -> int:
        """Of a page, what its slots take."""
        return sum(item.bytes() * self.rows_per_page(item) for item in self.fields)

    @cached_property
    def summary_bytes(self) -> int:
        """Of a page, what its summaries take."""
        return sum(item.bytes() * self.rows_per_page(item) for item in self.summaries)

    @property
    def bytes_per_page(self) -> int:
        return self.code_bytes + self.summary_bytes

    @property
    def entry_bytes(self) -> int:
        """Of a page, what the reader's list of pages takes."""
        return _ENTRY_BYTES if self.reader.selects else 0

    @property
    def bytes_per_slot(self) -> float:
        return (self.bytes_per_page + self.entry_bytes) / self.page_size

    @staticmethod
    def aligned(num_bytes: int) -> int:
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def regions(self, num_pages: int) -> Iterator[tuple[Field, int]]:
        """The fields of a span in order, with the rows each holds."""
        for item in (*self.fields, *self.summaries):
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


@cache
def state_bytes(page_class: PageClass, num_heads: int) -> int:
    """Bytes of the codecs' states in a layer."""
    x_RSD = torch.zeros(num_heads, 1, page_class.head_dim)
    valid_RS = torch.ones(x_RSD.shape[:2], dtype=torch.bool)
    states = [page_class.codec(side).init_state(side, x_RSD, valid_RS) for side in SIDES]
    return sum(tensor.nbytes for state in states for tensor in state.values())
