"""Slots of a range of tokens out of a sequence that keeps everything, and back into an empty one.

Where nothing is evicted and no codec learns, slot i of every head is token i, whatever else was read behind it. Chunks
of several entries then join to one prefix, layer by layer. Positions are not stored: they are the range.

    H KV heads   N tokens of the range   W width of a field
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvfold.codec.base import Field
from kvfold.pages.layer import LayerPages
from kvfold.pages.layout import POSITION, PageClass
from kvfold.pages.sequence import SequenceCache
from kvfold.store.entry import Fields
from kvfold.store.form import Like


def read_slots(sequence: SequenceCache, layer: int, start: int, end: int) -> Fields:
    """Fields [H, N, W] of the tokens start … end, where the sequence has them."""
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


def fill(sequence: SequenceCache, end: int, layers: Iterable[Sequence[Fields]]) -> None:
    """Append the tokens from the sequence's end (nothing is open) up to `end`: of every layer in turn, the fields of
    its chunks, which were checked. Memory for all is found first: OutOfPages."""
    start, tail = sequence.sealed_len, sequence.tail
    tail.reserve([[end - start] * layer.num_heads for layer in tail.layers])
    for pages, chunks in zip(tail.layers, layers, strict=True):
        _append(pages, chunks, start, end)
    sequence.sealed_len = end


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
        fill(found, num_tokens, ([read_slots(sequence, i, 0, num_tokens)] for i in range(sequence.spec.num_layers)))
    except BaseException:
        found.release()
        raise
    return found
