"""The cache of one sequence: shared segments, a private tail, the open block, the sidecar, and the commit line.

    tokens   0 ………………………………… sealed_len ………… committed_len ………… logical_len
    memory   segments | tail     | open block: committed | drafted

Logical lengths count tokens seen; stored lengths count slots kept. They never share a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvfold.codec.base import Codec, Side
from kvfold.codec.basis import Basis
from kvfold.codec.lift import Lift
from kvfold.core import ModelSpec
from kvfold.errors import OutOfPages
from kvfold.evicted.recall import recall_of
from kvfold.pages.arena import Arena
from kvfold.pages.arriving import Arriving
from kvfold.pages.demoted import Demoted
from kvfold.pages.exact import exact_len
from kvfold.pages.layout import PageClass
from kvfold.pages.open_block import OpenBlock
from kvfold.pages.pick import PageList
from kvfold.pages.rewrite import LayerChange, Rewrite
from kvfold.pages.segment import LayerPages, Segment
from kvfold.pages.sentences import Sentences
from kvfold.pages.shifts import Shifts
from kvfold.pages.sidecar import LayerSidecar, Sidecar
from kvfold.policy.policy import Policy

__all__ = ["LayerChange", "PageConfig", "SequenceCache"]


@dataclass(frozen=True)
class PageConfig:
    """Page size and open block are independent; a codec's group is its own argument."""

    page_size: int = 16
    open_len: int = 32


@dataclass(eq=False)
class SequenceCache:
    arena: Arena
    spec: ModelSpec
    policy: Policy
    config: PageConfig = field(default_factory=PageConfig)
    segments: list[Segment] = field(default_factory=list)
    sealed_len: int = 0
    last_compressed_len: int = 0
    pinned: list[tuple[int, int]] = field(default_factory=list)
    tail: Segment = field(init=False)
    open: OpenBlock = field(init=False)
    exact: OpenBlock | None = field(init=False, default=None)  # the first slots, where codes are coarse
    sidecar: Sidecar = field(init=False)
    shifts: Shifts = field(init=False, default_factory=Shifts)
    sentences: Sentences = field(init=False, default_factory=Sentences)
    demoted: Demoted | None = field(init=False)  # what was evicted, where the policy recalls
    arriving: Arriving | None = field(init=False, default=None)  # a stored prefix whose layers are not all there
    held_bytes: int = field(init=False, default=0)  # of pages that a pass holds beside it (pages/held.py)
    is_torn: bool = field(init=False, default=False)  # a change of its pages has begun and not come to its end
    _lists: dict[int, PageList] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.tail = Segment(self.arena, [self._layer_pages(i) for i in range(self.spec.num_layers)])
        self.open = OpenBlock(self.arena, self.spec, self.config.open_len)
        if length := exact_len(self.policy, self.spec):
            try:
                self.exact = OpenBlock(self.arena, self.spec, length)
            except OutOfPages:
                self.open.release()
                raise
        self.sidecar = Sidecar([LayerSidecar() for _ in self.spec.layers])
        self.demoted = self._nothing_demoted()

    def _nothing_demoted(self) -> Demoted | None:
        recall = recall_of(self.policy)
        return None if recall is None else Demoted(recall, self.spec, self.arena.device, self.policy.position.shifts)

    def _layer_pages(self, index: int) -> LayerPages:
        num_heads = self.spec.layers[index].num_kv_heads
        return LayerPages(self._page_class(index), num_heads, bases=self._bases(index), lifts=self._lifts(index))

    def _codecs(self, index: int) -> tuple[tuple[Side, Codec], ...]:
        """Of the sides of a layer that has a choice."""
        if not self.spec.layers[index].compressible:
            return ()
        k, v = self.policy.codec.sides(index, self.spec.num_layers)
        return ("k", k), ("v", v)

    def _bases(self, index: int) -> dict[Side, Basis]:
        """Of the sides that a layer stores as latents."""
        codecs = self._codecs(index)
        found = {side: codec.basis(side, self.spec, index, self.arena.device) for side, codec in codecs}
        return {side: basis for side, basis in found.items() if basis is not None}

    def _lifts(self, index: int) -> dict[Side, Lift]:
        """Of the sides that the layer below tells of."""
        codecs = self._codecs(index)
        found = {side: codec.lift(side, self.spec, index, self.arena.device) for side, codec in codecs}
        return {side: lift for side, lift in found.items() if lift is not None}

    def _page_class(self, index: int) -> PageClass:
        layer = self.spec.layers[index]
        if layer.compressible:
            k, v = self.policy.codec.sides(index, self.spec.num_layers)
            group = max(k.group("k"), v.group("v"))
            page_size = -(-self.config.page_size // group) * group
            reader = self.policy.attend.at(index)
            biased = self.policy.prefill.evicted.biased
            widths = {side: basis.width for side, basis in self._bases(index).items()}
            return PageClass(
                k,
                v,
                layer.head_dim,
                self.spec.kv_dtype,
                page_size,
                reader=reader,
                has_bias=biased,
                k_width=widths.get("k"),
                v_width=widths.get("v"),
            )
        native = OpenBlock.page_class(layer.head_dim, self.spec.kv_dtype, 1)
        return PageClass(native.k, native.v, layer.head_dim, self.spec.kv_dtype, self.config.page_size)

    def page_class(self, layer: int) -> PageClass:
        return self.tail.layers[layer].page_class

    # Lengths

    @property
    def logical_len(self) -> int:
        return self.sealed_len + self.open.fill

    @property
    def committed_len(self) -> int:
        return self.sealed_len + self.open.committed

    def layer_parts(self, layer: int) -> list[LayerPages]:
        """The pages of one layer over all segments, oldest first."""
        return [segment.layers[layer] for segment in (*self.segments, self.tail)]

    def page_list(self, layer: int) -> PageList:
        """The pages of one layer for a reader that chooses; the same object until they change."""
        parts, known = self.layer_parts(layer), self._lists.get(layer)
        if known is None or not known.covers(parts):
            known = self._lists[layer] = PageList.of(parts)
        return known

    def stored_lens(self, layer: int) -> list[int]:
        """Sealed slots per head."""
        return [sum(lens) for lens in zip(*(part.lens for part in self.layer_parts(layer)), strict=True)]

    def positions(self, layer: int, head: int) -> Tensor:
        """Original positions of one head's slots, sealed and open, int64 on the CPU."""
        sealed = [part.positions(head).to("cpu", torch.int64) for part in self.layer_parts(layer)]
        return torch.cat([*sealed, torch.arange(self.sealed_len, self.logical_len)])

    @property
    def resident_bytes(self) -> int:
        """All that is held for this sequence: spans with their padding, open block, sidecar, codec states, tables."""
        held = sum(segment.num_bytes + segment.table_bytes for segment in (*self.segments, self.tail))
        listed = sum(pages.num_bytes for pages in self._lists.values())
        listed += self.shifts.num_bytes + self.sentences.num_bytes
        listed += 0 if self.demoted is None else self.demoted.resident_bytes
        return held + listed + self.tail.state_bytes + self.block_bytes + self.sidecar.num_bytes

    @property
    def block_bytes(self) -> int:
        """The open block and the slots that are kept exact."""
        return self.open.num_bytes + (0 if self.exact is None else self.exact.num_bytes)

    # Changes

    def arrive(self, layer: int | None = None) -> None:
        """Wait for the slots of a layer (all) and of those below it, where they are still on their way. PrefixLost if
        they cannot come: the sequence is then to be released."""
        if self.arriving is not None:
            self.arriving.upto(self.spec.num_layers - 1 if layer is None else layer)

    def rewrite(self, changes: Sequence[LayerChange], num_tokens: int, *, decoding: bool = False) -> None:
        """Seal num_tokens tokens. Memory is found first: OutOfPages leaves the sequence as it was."""
        Rewrite(self, changes, decoding=decoding).write(num_tokens)

    def reclaim_tail(self) -> None:
        """The last segment, once nobody shares it any more, is the tail again: what it holds may move and grow."""
        if self.segments and self.segments[-1].refs == 1 and self.tail.is_empty:
            self.tail.release()
            self.tail = self.segments.pop()

    def fork(self) -> SequenceCache:
        """A second sequence over the same slots: sealed pages are shared, the open block and sidecar copied."""
        self.arrive()
        branch = SequenceCache(self.arena, self.spec, self.policy, self.config)
        branch.open.copy_from(self.open)
        if branch.exact is not None and self.exact is not None:
            branch.exact.copy_from(self.exact)
        if not self.tail.is_empty:
            self._freeze_tail()
        branch.segments = [segment.share() for segment in self.segments]
        branch.tail = Segment.like(self.tail)
        branch.sidecar, branch.sentences = self.sidecar.copy(), self.sentences.copy()
        branch.sealed_len, branch.last_compressed_len = self.sealed_len, self.last_compressed_len
        branch.pinned = list(self.pinned)
        branch.demoted = None if self.demoted is None else self.demoted.copy()
        return branch

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceCache:
        return self.fork()

    __copy__ = fork

    def _freeze_tail(self) -> None:
        """What was reserved for growth goes back: a shared segment never grows."""
        for layer in self.tail.layers:
            layer.release_unused()
        self.tail.trim()
        self.tail.end_len = self.sealed_len
        self.segments.append(self.tail)
        self.tail = Segment.like(self.tail)

    def release(self) -> None:
        """Give everything back; the sequence is over. If it raises, a second call gives back what is left."""
        try:
            if self.arriving is not None:
                self.arriving.close()
        finally:
            self._release_pages()

    def _release_pages(self) -> None:
        while self.segments:
            self.segments.pop().release()
        tail, self.tail = self.tail, Segment.like(self.tail)
        tail.release()
        self._lists.clear()
        self.shifts, self.sentences, self.demoted = Shifts(), Sentences(), self._nothing_demoted()
        for block in (self.open, self.exact):
            if block is not None:
                block.release()
                block.clear()
        self.sidecar = Sidecar([LayerSidecar() for _ in self.spec.layers])
        self.sealed_len = self.last_compressed_len = 0
        self.is_torn = False
