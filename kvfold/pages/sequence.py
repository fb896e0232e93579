"""The KV cache of one sequence: shared prefix segments (copy-on-write), a private tail, the open block, observer state.

    tokens   0 ………………………………… sealed_len ………… committed_len ………… logical_len
    memory   segments | tail     | open block: committed | drafted

Logical lengths count tokens seen; stored lengths count slots kept. They never share a name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from kvfold.core import ModelSpec
from kvfold.errors import OutOfPages
from kvfold.pages.arena import Arena
from kvfold.pages.extent import Shifts
from kvfold.pages.host_offload import OffloadedSlots
from kvfold.pages.layer import LayerPages
from kvfold.pages.layout import PageClass
from kvfold.pages.observer_state import LayerObserverState, ObserverState, Sentences
from kvfold.pages.open_block import OpenBlock
from kvfold.pages.page_config import PageConfig, SequenceLayout, codec_fp_sinks, sequence_layout
from kvfold.pages.page_gather import PageList
from kvfold.pages.segment import Segment
from kvfold.policy.policy import Policy


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
    open: OpenBlock = field(init=False)
    fp_sinks: OpenBlock | None = field(init=False, default=None)  # the first slots in full precision, for coarse codecs
    shifts: Shifts = field(init=False, default_factory=Shifts)
    sentences: Sentences = field(init=False, default_factory=Sentences)
    offloaded: OffloadedSlots | None = field(init=False)  # evicted slots on the host, if the policy recalls
    loading: AsyncLoad | None = field(init=False, default=None)  # a stored prefix whose layers are still being loaded
    full_prompt_bytes: int = field(init=False, default=0)  # while a replay is awaited (compression/full_prompt.py)
    is_torn: bool = field(init=False, default=False)  # a change of its pages has begun and not come to its end
    derived: dict[str, Any] = field(init=False, default_factory=dict)  # by captured steps; a fork has its own
    _lists: dict[int, PageList] = field(init=False, default_factory=dict)
    _layout: SequenceLayout = field(init=False)

    def __post_init__(self) -> None:
        self._layout = sequence_layout(self.spec, self.policy, self.config, self.arena)
        self.open = OpenBlock(self.arena, self.spec, self.config.open_len)
        if length := self._layout.num_fp_sinks:
            try:
                self.fp_sinks = OpenBlock(self.arena, self.spec, length)
            except OutOfPages:
                self.open.release()
                raise
        self.offloaded = self._nothing_offloaded()

    @cached_property
    def tail(self) -> Segment:
        return Segment(self.arena, self._layout.empty_layers())

    @cached_property
    def observed(self) -> ObserverState:
        return ObserverState([LayerObserverState() for _ in self.spec.layers])

    def _nothing_offloaded(self) -> OffloadedSlots | None:
        recall, rotates = self.policy.recall, self.policy.position.shifts
        return None if recall is None else OffloadedSlots(recall, self.spec, self.arena.device, rotates)

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
        """The pages of one layer for a reader that selects; the same object until they change."""
        parts, known = self.layer_parts(layer), self._lists.get(layer)
        if known is None or not known.covers(parts):
            known = self._lists[layer] = PageList.of(parts)
        return known

    def stored_lens(self, layer: int) -> list[int]:
        """Sealed slots per head."""
        return [sum(lens) for lens in zip(*(part.lens for part in self.layer_parts(layer)), strict=True)]

    def all_stored_lens(self) -> list[list[int]]:
        """Sealed slots per layer and head."""
        lens = sum((segment.lens_X for segment in self.segments), start=self.tail.lens_X).tolist()
        ends = list(accumulate((layer.num_kv_heads for layer in self.spec.layers), initial=0))
        return [lens[begin:end] for begin, end in pairwise(ends)]

    def positions(self, layer: int, head: int) -> Tensor:
        """Original positions of one head's slots, sealed and open, int64 on the CPU."""
        sealed = [part.positions(head).to("cpu", torch.int64) for part in self.layer_parts(layer)]
        return torch.cat([*sealed, torch.arange(self.sealed_len, self.logical_len)])

    @property
    def resident_bytes(self) -> int:
        """Bytes of this sequence: spans with their padding, open block, observer state, codec states, page tables."""
        held = sum(segment.num_bytes + segment.table_bytes for segment in (*self.segments, self.tail))
        listed = sum(pages.num_bytes for pages in self._lists.values())
        listed += self.shifts.num_bytes + self.sentences.num_bytes
        listed += 0 if self.offloaded is None else self.offloaded.resident_bytes
        return held + listed + self.tail.state_bytes + self.block_bytes + self.observed.num_bytes

    @property
    def block_bytes(self) -> int:
        """The open block and the full-precision sinks."""
        return self.open.num_bytes + (0 if self.fp_sinks is None else self.fp_sinks.num_bytes)

    def num_fp_sinks(self, layer: int) -> int:
        """Sinks of each head of a layer that are read in full precision."""
        wants = self.spec.layers[layer].compressible and codec_fp_sinks(self.policy, self.spec, layer)
        return self.fp_sinks.fill if self.fp_sinks is not None and wants else 0

    @property
    def awaits_fp_sinks(self) -> bool:
        """Whether some, but not all, of the sinks have been sealed."""
        block = self.fp_sinks
        return block is not None and self.sealed_len == block.committed < block.num_slots

    # Changes

    def wait_loaded(self, layer: int | None = None) -> None:
        """Wait until a layer (default: all) and those below it are loaded. PrefixLost if a stored layer turned out bad:
        release the sequence then."""
        if self.loading is not None:
            self.loading.upto(self.spec.num_layers - 1 if layer is None else layer)

    def commit_all(self) -> None:
        """Keep every drafted token."""
        self.open.commit_all()

    def reclaim_tail(self) -> None:
        """The last segment, once its refcount is 1, is the tail again: its slots may move and grow.

        Raises OutOfPages, before anything changes, where the slots of a tail that is not empty find no room in it.
        """
        if not self.segments or self.segments[-1].refs > 1:
            return
        if not self.tail.is_empty:
            if not self._splits_pages:
                return
            self.segments[-1].append_from(self.tail)
        self.tail.release()
        self.tail = self.segments.pop()

    def join_tail(self) -> None:
        """Append the tail to the last segments whose refcount is 1, so that forks that are over leave no segments.

        OutOfPages leaves the rest as they are. Slots that share scales with their neighbours stay where they are.
        """
        if not all(layer.page_class.relocatable for layer in self.tail.layers):
            return
        while self.segments and self.segments[-1].refs == 1:
            if not self.tail.is_empty:
                self.segments[-1].append_from(self.tail)
            self.tail.release()
            self.tail = self.segments.pop()

    def fork(self) -> SequenceCache:
        """A second sequence over the same slots: sealed pages are shared, the open block and observer state copied."""
        self.wait_loaded()
        branch = SequenceCache(self.arena, self.spec, self.policy, self.config)
        try:
            branch.tail = self._freeze_tail()
        except OutOfPages:
            branch.release()
            raise
        branch.open.copy_from(self.open)
        if branch.fp_sinks is not None and self.fp_sinks is not None:
            branch.fp_sinks.copy_from(self.fp_sinks)
        branch.segments = [segment.share() for segment in self.segments]
        branch.observed, branch.sentences = self.observed.copy(), self.sentences.copy()
        branch.sealed_len, branch.last_compressed_len = self.sealed_len, self.last_compressed_len
        branch.pinned = list(self.pinned)
        branch.offloaded = None if self.offloaded is None else self.offloaded.copy()
        return branch

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceCache:
        return self.fork()

    __copy__ = fork

    @property
    def _splits_pages(self) -> bool:
        """Whether a reader ranks pages, which then must end where they would without a fork."""
        layers = self.tail.layers
        ranked = any(layer.page_class.reader.selects for layer in layers)
        return ranked and all(layer.page_class.relocatable for layer in layers)

    def _freeze_tail(self) -> Segment:
        """Make the tail a shared segment, and return a second private tail, for a branch.

        A shared segment never grows, so what was reserved for growth goes back. Where a reader ranks pages, slots of
        the last, half-filled page of a head are copied on write: each branch then fills a page of its own.
        """
        rest = self.tail.partial_pages() if self._splits_pages else None
        tails = [Segment.like(self.tail), Segment.like(self.tail)]
        if rest is not None:
            try:
                for tail in tails:
                    tail.append_codes(*rest)
            except OutOfPages:
                for tail in tails:
                    tail.release()
                raise
            self.tail.drop_last(rest[1])
        for layer in self.tail.layers:
            layer.release_unused()
        self.tail.trim()
        if self.tail.is_empty:
            self.tail.release()
        else:
            self.tail.end_len = self.sealed_len
            self.segments.append(self.tail)
        self.tail, other = tails
        return other

    def check_whole(self) -> None:
        """Raises where a change of the pages was interrupted: tokens and slots may not fit each other."""
        if self.is_torn:
            raise RuntimeError("an earlier change of this sequence stopped halfway; it can only be released")

    def release(self) -> None:
        """Give everything back; the sequence is over. If it raises, a second call gives back what is left."""
        try:
            if self.loading is not None:
                self.loading.close()
        finally:
            self._release_pages()

    def _release_pages(self) -> None:
        while self.segments:
            self.segments.pop().release()
        if tail := vars(self).pop("tail", None):  # the next one is made if anybody asks for it
            tail.release()
        self._lists.clear()
        self.shifts, self.sentences, self.offloaded = Shifts(), Sentences(), self._nothing_offloaded()
        for block in (self.open, self.fp_sinks):
            if block is not None:
                block.release()
                block.clear()
        vars(self).pop("observed", None)
        self.sealed_len = self.last_compressed_len = 0
        self.is_torn = False


class AsyncLoad(Protocol):
    """Asynchronous load of a stored prefix into the pages of a sequence, layer by layer; calls `then` when all are
    loaded.

    The sequence counts the prefix's tokens and has pages for them. A prefill waits for a layer when it attends to it,
    so the first layers run while later ones are read and checked; a decode step and a fork wait for all layers. The
    sequence can be released at any time.
    """

    then: Callable[[], None]

    def upto(self, layer: int) -> None:
        """Wait until this layer and those below it are loaded. PrefixLost if one turned out bad."""

    def close(self) -> None:
        """Stop loading; close files and end threads."""
