"""KV slots of a token range read from a lossless sequence, and appended to another one layer by layer.

Without eviction and fitted codecs, slot i of every head is token i, whatever follows it, so chunks of several entries
join to one prefix. Positions are not stored: they are the range.

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
from kvfold.store.entry.encodings import TensorSpec
from kvfold.store.entry.format import Fields


def read_slots(sequence: SequenceCache, layer: int, start: int, end: int) -> Fields:
    """Fields [H, N, W] of the tokens start … end."""
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


class LayerwiseAppend:
    """Appends tokens up to `end` to a sequence with an empty open block, layer by layer; the sequence counts them at
    once. Pages of all layers are allocated first: OutOfPages. `num_loaded`: layers appended so far."""

    def __init__(self, sequence: SequenceCache, end: int) -> None:
        self.num_loaded = 0
        self.layers = sequence.tail.layers
        self._start, self._end = sequence.sealed_len, end
        sequence.tail.reserve([[end - sequence.sealed_len] * layer.num_heads for layer in self.layers])
        sequence.sealed_len = end

    def append(self, chunks: Sequence[Fields]) -> None:
        """The checked fields of the next layer's chunks."""
        _append(self.layers[self.num_loaded], chunks, self._start, self._end)
        self.num_loaded += 1


def _append(pages: LayerPages, chunks: Sequence[Fields], start: int, end: int) -> None:
    device = pages.extents[0][0].span.arena.device
    codes = {}
    for item in _stored(pages.page_class):
        x_HNW = torch.cat([fields[item.name].to(device) for fields in chunks], 1)
        codes[item.name] = x_HNW.flatten(0, 1)
    position_N = torch.arange(start, end, dtype=torch.int32, device=device)
    codes[POSITION.name] = position_N.repeat(pages.num_heads).unsqueeze(-1)
    pages.append(codes, [end - start] * pages.num_heads)


def chunk_specs(pages: LayerPages, num_tokens: int) -> dict[str, TensorSpec]:
    """Expected dtypes and shapes of a chunk's fields."""
    fields = _stored(pages.page_class)
    return {item.name: TensorSpec(item.dtype, (pages.num_heads, num_tokens, item.width)) for item in fields}


def _stored(page_class: PageClass) -> list[Field]:
    return [item for item in page_class.fields if item.name != POSITION.name]


def copy_prefix(sequence: SequenceCache, num_tokens: int) -> SequenceCache:
    """A new sequence with the first tokens of a lossless sequence, copied; raises OutOfPages."""
    found = SequenceCache(sequence.arena, sequence.spec, sequence.policy, sequence.config)
    try:
        target = LayerwiseAppend(found, num_tokens)
        for layer in range(sequence.spec.num_layers):
            target.append([read_slots(sequence, layer, 0, num_tokens)])
    except BaseException:
        found.release()
        raise
    return found
