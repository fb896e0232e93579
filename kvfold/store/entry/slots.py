"""Slots of a range of tokens out of a sequence that keeps everything, and back into an empty one.

Where nothing is evicted and no codec learns, slot i of every head is token i, whatever else was read behind it. Chunks
of several entries then join to one prefix, layer by layer. Positions are not stored: they are the range.

    H KV heads   N tokens of the range   W width of a field
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.codec.base import Field
from kvfold.pages.layer import LayerPages
from kvfold.pages.layout import POSITION, PageClass
from kvfold.pages.sequence import SequenceCache
from kvfold.store.entry.encodings import Like
from kvfold.store.entry.format import Fields


def read_slots(sequence: SequenceCache, layer: int, start: int, end: int) -> Fields:
    """Fields [H, N, W] of the tokens start … end, where the sequence has them."""
    sequence.wait_loaded(layer)
    parts = sequence.layer_parts(layer)
    found: list[dict[str, Tensor]] = []
    first = 0
    for part in parts:
        length = part.lens[0]
        begin, stop = max(start - first, 0), min(end - first, length)
        if begin < stop:
            found.append(_gather(part, begin, stop))
        first += length
    return {item.name: torch.cat([fields[item.name] for fields in found], 1) for item in _stored(parts[0].page_class)}


def _gather(part: LayerPages, begin: int, stop: int) -> Fields:
    device = part.extents[0][0].span.arena.device
    index = torch.arange(begin, stop, device=device)
    codes = part.gather([index] * part.num_heads)
    return {item.name: codes[item.name].unflatten(0, (part.num_heads, -1)) for item in _stored(part.page_class)}


class Filling:
    """The tokens from a sequence's end (nothing is open) up to `end`, which the sequence counts as its own from now on.
    Memory for all is found first: OutOfPages. `num_filled`: layers that hold them already."""

    def __init__(self, sequence: SequenceCache, end: int) -> None:
        self.num_filled = 0
        self.layers = sequence.tail.layers
        self._start, self._end = sequence.sealed_len, end
        sequence.tail.reserve([[end - sequence.sealed_len] * layer.num_heads for layer in self.layers])
        sequence.sealed_len = end

    def fill(self, chunks: Sequence[Fields]) -> None:
        """The next layer, with the fields of its chunks, which were checked."""
        _append(self.layers[self.num_filled], chunks, self._start, self._end)
        self.num_filled += 1


def _append(pages: LayerPages, chunks: Sequence[Fields], start: int, end: int) -> None:
    device = pages.extents[0][0].span.arena.device
    codes = {}
    for item in _stored(pages.page_class):
        x_HNW = torch.cat([fields[item.name].to(device) for fields in chunks], 1)
        codes[item.name] = x_HNW.flatten(0, 1)
    position_N = torch.arange(start, end, dtype=torch.int32, device=device)
    codes[POSITION.name] = position_N.repeat(pages.num_heads).unsqueeze(-1)
    pages.append(codes, [end - start] * pages.num_heads)


def likes_of(pages: LayerPages, num_tokens: int) -> dict[str, Like]:
    """What the fields of a chunk have to be."""
    fields = _stored(pages.page_class)
    return {item.name: Like(item.dtype, (pages.num_heads, num_tokens, item.width)) for item in fields}


def _stored(page_class: PageClass) -> list[Field]:
    return [item for item in page_class.fields if item.name != POSITION.name]


def copy_prefix(sequence: SequenceCache, num_tokens: int) -> SequenceCache:
    """The first tokens of a sequence that keeps everything, as a sequence of its own; raises OutOfPages."""
    found = SequenceCache(sequence.arena, sequence.spec, sequence.policy, sequence.config)
    try:
        filling = Filling(found, num_tokens)
        for layer in range(sequence.spec.num_layers):
            filling.fill([read_slots(sequence, layer, 0, num_tokens)])
    except BaseException:
        found.release()
        raise
    return found
