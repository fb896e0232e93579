"""Compaction of KV pages: evict stored slots and append new ones, in two steps: allocate pages, then write.

Allocation changes nothing else, so a batch allocates for all its sequences before it writes the first. Kept slots of a
private tail move to the front of their own pages. Shared segments are copy-on-write: if slots of one are evicted, the
kept slots of all segments are copied to a new tail.

    N flat slots, head after head   R rows (KV heads)   S slots of a row   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.codec.base import Side
from kvfold.errors import PolicyError
from kvfold.pages.async_copy import upload
from kvfold.pages.change import LayerChange
from kvfold.pages.dequantize import latest_below
from kvfold.pages.fp_sinks import copy_fp_sinks
from kvfold.pages.kernels.compact_write import can_write, write_new
from kvfold.pages.layer import LayerPages
from kvfold.pages.segment import Segment
from kvfold.pages.sequence import SequenceCache
from kvfold.yielding import yield_point


class PageRewrite:
    """One change of one sequence. The constructor allocates pages or raises OutOfPages; then `write` or `cancel` it."""

    def __init__(self, sequence: SequenceCache, changes: Sequence[LayerChange], *, decoding: bool) -> None:
        self.sequence = sequence
        self.changes = changes
        self.decoding = decoding
        _require_relocatable(sequence, changes)
        sequence.reclaim_tail()
        copies = bool(sequence.segments) and any(change.keep is not None for change in changes)
        self._kept: _KeptSlots = _Copied(sequence, changes) if copies else _InPlace(sequence, changes, decoding)

    def cancel(self) -> None:
        self._kept.cancel()

    def write(self, num_tokens: int) -> None:
        """Compact the kept slots, then encode the new ones: num_tokens tokens are sealed."""
        self.sequence.is_torn = True
        self._kept.apply()
        copy_fp_sinks(self.sequence, self.changes)
        tail = self.sequence.tail
        _write_new(tail, _merged_below(tail.layers, self.changes))
        for layer, change in zip(tail.layers, self.changes, strict=True):
            if not self.decoding:
                layer.release_unused()
            elif change.keep is not None:  # budgets of heads vary; keep room for one more block
                layer.release_unused(self.sequence.config.open_len)
        tail.trim()
        self.sequence.sealed_len += num_tokens
        self.sequence.is_torn = False


def rewrite(
    sequence: SequenceCache, changes: Sequence[LayerChange], num_tokens: int, *, decoding: bool = False
) -> None:
    """Seal num_tokens tokens. Pages are allocated first: OutOfPages leaves the sequence as it was."""
    PageRewrite(sequence, changes, decoding=decoding).write(num_tokens)


class _KeptSlots(Protocol):
    """Kept stored slots, and room for new ones behind them."""

    def cancel(self) -> None: ...

    def apply(self) -> None: ...


class _InPlace:
    """Kept slots of the tail move to the front of their own pages: eviction allocates nothing for them."""

    def __init__(self, sequence: SequenceCache, changes: Sequence[LayerChange], decoding: bool) -> None:
        self._tail = tail = sequence.tail
        self._keeps = [_kept_in_tail(sequence, i, change) for i, change in enumerate(changes)]
        extra = []
        for layer, change, keep in zip(tail.layers, changes, self._keeps, strict=True):
            gone = [0] * layer.num_heads if keep is None else _lost(layer.lens, keep)
            extra.append([max(0, new - lost) for new, lost in zip(change.counts, gone, strict=True)])
        grows = decoding and not sequence.policy.decode.holds_bytes  # unused room counts as bytes
        growing = [i for i, keep in enumerate(self._keeps) if keep is None] if grows else []
        self._room = tail.find_room(extra, growing=growing)

    def cancel(self) -> None:
        self._room.cancel()

    def apply(self) -> None:
        self._tail.take(self._room)
        for layer, keep in zip(self._tail.layers, self._keeps, strict=True):
            if keep is not None:
                codes = layer.gather(keep)
                layer.truncate()
                layer.append(codes, [len(index) for index in keep])


class _Copied:
    """Copy-on-write: kept slots of all segments are copied to a new tail."""

    def __init__(self, sequence: SequenceCache, changes: Sequence[LayerChange]) -> None:
        self._sequence = sequence
        self._keeps = [_kept_of_all(sequence, i, change) for i, change in enumerate(changes)]
        self._tail = Segment.like(sequence.tail)
        self._tail.reserve([
            [len(index) + new for index, new in zip(keep, change.counts, strict=True)]
            for keep, change in zip(self._keeps, changes, strict=True)
        ])  # fmt: skip

    def cancel(self) -> None:
        self._tail.release()

    def apply(self) -> None:
        sequence = self._sequence
        for i, keep in enumerate(self._keeps):
            start = [0] * len(keep)
            for part in sequence.layer_parts(i):
                ends = [s + n for s, n in zip(start, part.lens, strict=True)]
                mine = [index[(index >= s) & (index < e)] - s for index, s, e in zip(keep, start, ends, strict=True)]
                self._tail.layers[i].append(part.gather(mine), [len(index) for index in mine])
                start = ends
        for segment in (*sequence.segments, sequence.tail):
            segment.release()
        sequence.segments, sequence.tail = [], self._tail


def _require_relocatable(sequence: SequenceCache, changes: Sequence[LayerChange]) -> None:
    for layer, change in zip(sequence.tail.layers, changes, strict=True):
        if change.keep is not None and not layer.page_class.relocatable:
            raise PolicyError(
                "this codec shares scales between neighbouring slots, so stored slots cannot be evicted one by "
                "one; compress once after the first prompt, or use int4 or int2"
            )


def _kept_in_tail(sequence: SequenceCache, index: int, change: LayerChange) -> list[Tensor] | None:
    if change.keep is not None:
        return change.keep  # there are no shared segments
    lens = sequence.tail.layers[index].lens
    gone = change.drop_first - sum(segment.layers[index].lens[0] for segment in sequence.segments)
    return [torch.arange(gone, length, device=sequence.arena.device) for length in lens] if gone > 0 else None


def _kept_of_all(sequence: SequenceCache, index: int, change: LayerChange) -> list[Tensor]:
    if change.keep is not None:
        return change.keep
    return [torch.arange(change.drop_first, n, device=sequence.arena.device) for n in sequence.stored_lens(index)]


def _lost(lens: Sequence[int], keep: Sequence[Tensor]) -> list[int]:
    return [length - len(index) for length, index in zip(lens, keep, strict=True)]


def _merged_below(layers: Sequence[LayerPages], changes: Sequence[LayerChange]) -> list[LayerChange]:
    """The changes, with the layer below merged where a cross-layer codec (MiniCache) asks for it."""
    found = list(changes)
    for i in reversed(range(1, len(layers))):
        upper, lower, counts = found[i], found[i - 1], found[i].counts
        if layers[i].page_class.needs_below and any(counts):
            k_ND = layers[i].merge_below("k", lower.k_ND, upper.k_ND, counts)
            v_ND = layers[i].merge_below("v", lower.v_ND, upper.v_ND, counts)
            found[i - 1] = replace(lower, k_ND=k_ND, v_ND=v_ND)
    return found


def _write_new(tail: Segment, changes: Sequence[LayerChange]) -> None:
    """New slots of every layer, behind the stored ones."""
    at_once = can_write(tail, changes)
    for layer, change in zip(tail.layers, changes, strict=True):
        _init_state(layer, change)
        if not at_once:
            yield_point(may_end=False)
            below = latest_below(layer, change.counts)
            codes = layer.encode(change.k_ND, change.v_ND, change.position_N, change.counts, change.bias_N, below)
            layer.append(codes, change.counts)
    if at_once:
        write_new(tail, changes)


def _init_state(layer: LayerPages, change: LayerChange) -> None:
    """Compute the codecs' states from the first slots that are sealed."""
    if layer.state or not any(change.counts):
        return
    sides: tuple[tuple[Side, Tensor], ...] = (("k", change.k_ND), ("v", change.v_ND))
    for side, x_ND in sides:
        codec = layer.page_class.codec(side)
        layer.state[side] = codec.init_state(side, *_by_row(x_ND, change.counts)) if codec.has_state(side) else {}


def _by_row(x_ND: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Slots [R, S, D], rows padded with 0, and which of them exist."""
    valid_RS = torch.arange(max(counts), device=x_ND.device) < upload(counts, x_ND.device).unsqueeze(-1)
    return pad_sequence(list(x_ND.split(counts)), batch_first=True), valid_RS
