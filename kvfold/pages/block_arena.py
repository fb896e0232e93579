"""KV blocks of another engine as an arena: heads of different lengths, in pages of any codec, inside its block tables.

An engine gives a document whole blocks of the same bytes in every layer, and never looks inside. Here each block is a
span of pages (pages/arena.py). The first one begins with what a layer has once: codec states and full-precision sinks.
Heads follow one another, each from a new page on, and go over the end of a block where they have to.

    block 0: | states | sinks | head 0 | head 1 …    block 1: … head 1 | head 2 | free |

    B blocks   H KV heads   D head dim
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.codec.base import SIDES, Codec
from kvfold.errors import InputError
from kvfold.pages.arena import Arena, Span
from kvfold.pages.extent import Extent
from kvfold.pages.layer import LayerPages
from kvfold.pages.layout import PageClass
from kvfold.pages.scatter import Place, write
from kvfold.pages.serialize import field_rows

_PAGE = 8  # slots: their scales, 2 bytes each, are the 16 bytes that kernels' addresses are multiples of
_UNIT = 64  # bytes that blocks are multiples of


class BlockArena(Arena):
    """The KV cache [B, …] of one layer of an engine, which allocates its blocks itself."""

    def __init__(self, cache: Tensor) -> None:
        inside = cache[0]
        reach = 1 + sum((size - 1) * stride for size, stride in zip(inside.shape, inside.stride(), strict=True))
        self.block_bytes, self.stride_bytes = inside.nbytes, cache.stride(0) * cache.itemsize
        if reach != inside.numel() or self.block_bytes % _UNIT or self.stride_bytes % _UNIT:
            raise InputError(
                f"a block of {tuple(inside.shape)} elements is no dense memory; use another KV-cache layout"
            )
        size = (len(cache) - 1) * self.stride_bytes + self.block_bytes
        raw = torch.empty(0, dtype=torch.uint8, device=cache.device)
        self.memory = raw.set_(cache.untyped_storage(), cache.storage_offset() * cache.itemsize, (size,), (1,))
        self.device = cache.device
        self.superblock_bytes = _UNIT
        self.num_superblocks = size // _UNIT
        self.peak_bytes = 0
        self._free = []  # nothing is allocated here
        self._interned = {}


class Piece(NamedTuple):
    """Slots of a head in one block."""

    head: int
    block: int  # of the document
    first: int  # page of that block
    num_pages: int
    num_slots: int


@dataclass(frozen=True)
class BlockLayout:
    """How a layer lies in blocks of `block_bytes`."""

    page_class: PageClass
    num_heads: int
    num_sinks: int
    block_bytes: int

    @classmethod
    def of(
        cls, codecs: tuple[Codec, Codec], num_heads: int, head_dim: int, kv_dtype: torch.dtype, block_len: int,
        *, num_sinks: int = 0, has_bias: bool = False,
    ) -> BlockLayout:  # fmt: skip
        """For blocks of `block_len` tokens in the engine's own KV dtype; InputError if they are too small."""
        k, v = codecs
        page_size = max(_PAGE, k.group("k"), v.group("v"))
        page_class = PageClass(k, v, head_dim, kv_dtype, page_size, has_positions=False, has_bias=has_bias)
        found = cls(page_class, num_heads, num_sinks, block_len * num_heads * 2 * head_dim * kv_dtype.itemsize)
        if found.block_bytes < found.once_bytes or not page_class.pages_in(found.block_bytes):
            raise InputError(f"blocks of {block_len} tokens have no room for a page; use a larger block size")
        return found

    @cached_property
    def once(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Tensors that a layer has once: dtypes and shapes by the names of pages/serialize.py."""
        head_dim = self.page_class.head_dim
        some_RSD, valid_RS = torch.zeros(self.num_heads, 1, head_dim), torch.ones(self.num_heads, 1, dtype=torch.bool)
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for side in SIDES:
            state = self.page_class.codec(side).init_state(side, some_RSD, valid_RS)
            found |= {f"state.{side}.{name}": (x.dtype, tuple(x.shape)) for name, x in state.items()}
        if self.num_sinks:
            shape = (self.num_heads, self.num_sinks, head_dim)
            found |= {f"exact.{side}": (self.page_class.kv_dtype, shape) for side in SIDES}
        return found

    @property
    def once_bytes(self) -> int:
        return sum(PageClass.aligned(_num_bytes(*item)) for item in self.once.values())

    def pages_in(self, block: int) -> int:
        return self.page_class.pages_in(self.block_bytes - (0 if block else self.once_bytes))

    def pieces(self, lens: Sequence[int]) -> Iterator[Piece]:
        """Heads of these lengths, one after the other."""
        block = page = 0
        for head, left in enumerate(lens):
            while left:
                if page == self.pages_in(block):
                    block, page = block + 1, 0
                    continue
                taken = min(self.pages_in(block) - page, self.page_class.pages_for(left))
                num_slots = min(left, taken * self.page_class.page_size)
                yield Piece(head, block, page, taken, num_slots)
                page, left = page + taken, left - num_slots

    def num_blocks(self, lens: Sequence[int]) -> int:
        return 1 + max((piece.block for piece in self.pieces(lens)), default=0)

    def used_bytes(self, lens: Sequence[int]) -> int:
        """Of the blocks, what pages and the tensors above take."""
        pages = sum(self.page_class.pages_for(length) for length in lens)
        return self.once_bytes + pages * self.page_class.bytes_per_page

    def check(self, lens: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """InputError for the first tensor that does not fit; rows of fields lie head after head."""
        if len(lens) != self.num_heads or min(lens) < self.num_sinks:
            raise InputError(
                f"lengths {list(lens)} are not those of {self.num_heads} heads with {self.num_sinks} sinks"
            )
        wanted = dict(self.once)
        for item in self.page_class.fields:
            rows = sum(field_rows(self.page_class, item, length) for length in lens)
            wanted[item.name] = (item.dtype, (rows, item.width))
        for name, (dtype, shape) in wanted.items():
            found = tensors.get(name)
            if found is None or found.dtype != dtype or tuple(found.shape) != shape:
                told = "missing" if found is None else f"{found.dtype} {tuple(found.shape)}"
                raise InputError(f"{name} is {told}, not {dtype} {shape}")


def _num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


@dataclass
class BlockPages:
    """A layer of a document in these blocks of an arena."""

    layout: BlockLayout
    lens: Sequence[int]
    arena: BlockArena
    blocks: Sequence[int]
    derived: dict[str, Any] = field(default_factory=dict, repr=False)  # by kernels

    @cached_property
    def once(self) -> dict[str, Tensor]:
        """Views of the first block."""
        found, offset = {}, self.blocks[0] * self.arena.stride_bytes
        for name, (dtype, shape) in self.layout.once.items():
            num_bytes = _num_bytes(dtype, shape)
            found[name] = self.arena.memory[offset : offset + num_bytes].view(dtype).view(shape)
            offset += PageClass.aligned(num_bytes)
        return found

    @cached_property
    def sinks(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values [H, sinks, D] that are read instead of their codes."""
        return (self.once["exact.k"], self.once["exact.v"]) if self.layout.num_sinks else None

    @cached_property
    def pages(self) -> LayerPages:
        found = LayerPages(self.layout.page_class, self.layout.num_heads)
        for side in SIDES:
            prefix = f"state.{side}."
            found.state[side] = {n.removeprefix(prefix): x for n, x in self.once.items() if n.startswith(prefix)}
        for piece in self.layout.pieces(self.lens):
            extent = Extent(self._spans[piece.block], piece.first, piece.num_pages, piece.num_slots)
            found.extents[piece.head].append(extent)
        found.changes.rise()
        return found

    @cached_property
    def _spans(self) -> list[Span]:
        found = []
        for number, block in enumerate(self.blocks):
            once = 0 if number else self.layout.once_bytes
            start, size = (block * self.arena.stride_bytes + once) // _UNIT, (self.arena.block_bytes - once) // _UNIT
            found.append(Span(self.arena, self.layout.page_class, start, size, self.layout.pages_in(number)))
        return found

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill the blocks with checked tensors."""
        page_class, moved = self.layout.page_class, {name: x.to(self.arena.device) for name, x in tensors.items()}
        for name, view in self.once.items():
            view.copy_(moved[name])
        places = []
        for piece in self.layout.pieces(self.lens):
            whole = -(-piece.num_slots // page_class.group) * page_class.group
            places.append(Place(self._spans[piece.block], piece.first * page_class.page_size, whole))
        write(page_class, moved, places)
