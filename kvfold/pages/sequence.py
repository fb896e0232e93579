"""The cache of one sequence: shared segments, a private tail, the open block, the sidecar, and the commit line.

    tokens   0 ………………………………… sealed_len ………… committed_len ………… logical_len
    memory   segments | tail     | open block: committed | drafted

Logical lengths count tokens seen; stored lengths count slots kept. They never share a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.codec.base import Side
from kvfold.core import ModelSpec
from kvfold.errors import PolicyError
from kvfold.pages.arena import Arena
from kvfold.pages.layout import PageClass
from kvfold.pages.open_block import OpenBlock
from kvfold.pages.pick import PageList
from kvfold.pages.segment import LayerPages, Segment
from kvfold.pages.sidecar import LayerSidecar, Sidecar
from kvfold.policy.policy import Policy


@dataclass(frozen=True)
class PageConfig:
    """Page size and open block are independent; a codec's group is its own argument."""

    page_size: int = 16
    open_len: int = 32


@dataclass
class LayerChange:
    """What a seal does to one layer: stored slots that stay (None: all), and new slots to encode, head after head.

    `drop_first`: stored slots of every head that a sliding window has left behind. The reader masks them, so they only
    go where that needs no copy of a shared segment.
    """

    k_ND: Tensor
    v_ND: Tensor
    position_N: Tensor
    counts: list[int]
    keep: list[Tensor] | None = None
    drop_first: int = 0


@dataclass
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
    sidecar: Sidecar = field(init=False)
    _lists: dict[int, PageList] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.tail = Segment(self.arena, [self._layer_pages(i) for i in range(self.spec.num_layers)])
        self.open = OpenBlock(self.arena, self.spec, self.config.open_len)
        self.sidecar = Sidecar([LayerSidecar() for _ in self.spec.layers])

    def _layer_pages(self, index: int) -> LayerPages:
        return LayerPages(self.page_class(index), self.spec.layers[index].num_kv_heads)

    def page_class(self, index: int) -> PageClass:
        layer = self.spec.layers[index]
        if layer.compressible:
            k, v = self.policy.codec.sides(index, self.spec.num_layers)
            group = max(k.group("k"), v.group("v"))
            page_size = -(-self.config.page_size // group) * group
            reader = self.policy.attend.at(index)
            return PageClass(k, v, layer.head_dim, self.spec.kv_dtype, page_size, reader=reader)
        native = OpenBlock.page_class(layer.head_dim, self.spec.kv_dtype, 1)
        return PageClass(native.k, native.v, layer.head_dim, self.spec.kv_dtype, self.config.page_size)

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
        return held + listed + self.tail.state_bytes + self.open.num_bytes + self.sidecar.num_bytes

    # Changes

    def rewrite(self, changes: Sequence[LayerChange], num_tokens: int, *, decoding: bool = False) -> None:
        """Seal num_tokens tokens. Memory is reserved first: OutOfPages leaves the sequence as it was."""
        self._require_relocatable(changes)
        if self.segments and any(change.keep is not None for change in changes):
            self._move_survivors(changes)
        else:
            self._compact(changes, decoding)
        self._prepare(changes)
        for layer, change in zip(self.tail.layers, changes, strict=True):
            layer.append(layer.encode(change.k_ND, change.v_ND, change.position_N, change.counts), change.counts)
            if not decoding:
                layer.release_unused()
            elif change.keep is not None:  # budgets of heads come and go; room for one more block stays
                layer.release_unused(self.config.open_len)
        self.tail.trim()
        self.sealed_len += num_tokens

    def _require_relocatable(self, changes: Sequence[LayerChange]) -> None:
        for layer, change in zip(self.tail.layers, changes, strict=True):
            if change.keep is not None and not layer.page_class.relocatable:
                raise PolicyError(
                    "this codec shares scales between neighbouring slots, so stored slots cannot be evicted one by "
                    "one; compress once after the first prompt, or use int4 or int2"
                )

    def _compact(self, changes: Sequence[LayerChange], decoding: bool) -> None:
        """Move survivors of the tail to the front of their own pages: eviction never needs memory for them."""
        keeps = [self._kept_in_tail(i, change) for i, change in enumerate(changes)]
        extra = []
        for layer, change, keep in zip(self.tail.layers, changes, keeps, strict=True):
            gone = [0] * layer.num_heads if keep is None else _lost(layer.lens, keep)
            extra.append([max(0, new - lost) for new, lost in zip(change.counts, gone, strict=True)])
        growing = [i for i, keep in enumerate(keeps) if keep is None] if decoding else []
        self.tail.reserve(extra, growing=growing)
        for layer, keep in zip(self.tail.layers, keeps, strict=True):
            if keep is not None:
                codes = layer.gather(keep)
                layer.truncate()
                layer.append(codes, [len(index) for index in keep])

    def _kept_in_tail(self, index: int, change: LayerChange) -> list[Tensor] | None:
        if change.keep is not None:
            return change.keep  # there are no shared segments
        lens = self.tail.layers[index].lens
        gone = change.drop_first - sum(segment.layers[index].lens[0] for segment in self.segments)
        return [torch.arange(gone, length, device=self.arena.device) for length in lens] if gone > 0 else None

    def _move_survivors(self, changes: Sequence[LayerChange]) -> None:
        """Shared segments never change: survivors of all segments go to a new tail."""
        keeps = [self._kept_of_all(i, change) for i, change in enumerate(changes)]
        tail = Segment.like(self.tail)
        tail.reserve([
            [len(index) + new for index, new in zip(keep, change.counts, strict=True)]
            for keep, change in zip(keeps, changes, strict=True)
        ])  # fmt: skip
        for i, keep in enumerate(keeps):
            start = [0] * len(keep)
            for part in self.layer_parts(i):
                ends = [s + n for s, n in zip(start, part.lens, strict=True)]
                mine = [index[(index >= s) & (index < e)] - s for index, s, e in zip(keep, start, ends, strict=True)]
                tail.layers[i].append(part.gather(mine), [len(index) for index in mine])
                start = ends
        for segment in (*self.segments, self.tail):
            segment.release()
        self.segments, self.tail = [], tail

    def _kept_of_all(self, index: int, change: LayerChange) -> list[Tensor]:
        if change.keep is not None:
            return change.keep
        return [torch.arange(change.drop_first, n, device=self.arena.device) for n in self.stored_lens(index)]

    def _prepare(self, changes: Sequence[LayerChange]) -> None:
        """Let codecs learn from the first slots that are ever sealed."""
        for layer, change in zip(self.tail.layers, changes, strict=True):
            if layer.state or not any(change.counts):
                continue
            device = change.k_ND.device
            count_R = torch.tensor(change.counts, device=device)
            valid_RS = torch.arange(max(change.counts), device=device) < count_R.unsqueeze(-1)
            sides: tuple[tuple[Side, Tensor], ...] = (("k", change.k_ND), ("v", change.v_ND))
            for side, x_ND in sides:
                x_RSD = pad_sequence(list(x_ND.split(change.counts)), batch_first=True)
                layer.state[side] = layer.page_class.codec(side).prepare(side, x_RSD, valid_RS)

    def fork(self) -> SequenceCache:
        """A second sequence over the same slots: sealed pages are shared, the open block and sidecar copied."""
        branch = SequenceCache(self.arena, self.spec, self.policy, self.config)
        branch.open.copy_from(self.open)
        if not self.tail.is_empty:
            self._freeze_tail()
        branch.segments = [segment.share() for segment in self.segments]
        branch.tail = Segment.like(self.tail)
        branch.sidecar = self.sidecar.copy()
        branch.sealed_len, branch.last_compressed_len = self.sealed_len, self.last_compressed_len
        branch.pinned = list(self.pinned)
        return branch

    def _freeze_tail(self) -> None:
        """What was reserved for growth goes back: a shared segment never grows."""
        for layer in self.tail.layers:
            layer.release_unused()
        self.tail.trim()
        self.tail.end_len = self.sealed_len
        self.segments.append(self.tail)
        self.tail = Segment.like(self.tail)

    def release(self) -> None:
        """Give everything back; the sequence is over."""
        for segment in (*self.segments, self.tail):
            segment.release()
        self.segments, self.tail = [], Segment.like(self.tail)
        self._lists.clear()
        self.open.release()
        self.open.clear()
        self.sidecar = Sidecar([LayerSidecar() for _ in self.spec.layers])
        self.sealed_len = self.last_compressed_len = 0


def _lost(lens: Sequence[int], keep: Sequence[Tensor]) -> list[int]:
    return [length - len(index) for length, index in zip(lens, keep, strict=True)]
