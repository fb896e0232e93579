"""Offload to host memory of the slots that a compression round evicts (`recall`).

N slots of one head, in order of position   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.pages.layer import LayerChange
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache


class HeadSlots(NamedTuple):
    """Evicted slots of one head."""

    k_ND: Tensor
    v_ND: Tensor
    position_N: Tensor


def evicted_slots(sequence: SequenceCache, layer: int, change: LayerChange) -> list[HeadSlots]:
    """The slots of every head that the change evicts: stored ones, decoded, and new ones. Nothing is moved yet."""
    heads: list[list[HeadSlots]] = [[] for _ in change.counts]
    if change.keep is not None:
        stored = stored_slots(sequence, layer, change.k_ND.dtype)
        rows = zip(heads, change.keep, stored.k, stored.v, stored.position, strict=True)
        for found, keep, k_ND, v_ND, position_N in rows:
            evicted_N = torch.ones_like(position_N, dtype=torch.bool)
            evicted_N[keep] = False
            found.append(HeadSlots(k_ND[evicted_N], v_ND[evicted_N], position_N[evicted_N]))
    for dropped in change.evicted:
        columns = zip(*(column.split(dropped.counts) for column in dropped[:3]), strict=True)
        for found, columns_of_head in zip(heads, columns, strict=True):
            found.append(HeadSlots(*columns_of_head))
    return [_in_order(found) for found in heads if found]


def offload(sequence: SequenceCache, layer: int, heads: Sequence[HeadSlots]) -> None:
    """Append them to the layer's pages on the host."""
    assert sequence.offloaded is not None
    offloaded = sequence.offloaded.layers[layer]
    for head, slots in enumerate(heads):
        if len(slots.position_N):
            offloaded.offload(head, *slots, _page_lens(sequence, slots.position_N))


def _page_lens(sequence: SequenceCache, position_N: Tensor) -> list[int]:
    """Slots of each page: full pages and a remainder, or one page per sentence."""
    assert sequence.offloaded is not None
    recall, count = sequence.offloaded.recall, len(position_N)
    if recall.unit == "page":
        return [min(recall.page, count - begin) for begin in range(0, count, recall.page)]
    number_N = sequence.sentences.numbers(position_N, recall.page)
    found: list[int] = number_N.unique_consecutive(return_counts=True)[1].tolist()
    return found


def _in_order(parts: Sequence[HeadSlots]) -> HeadSlots:
    """Slots of several trims, copied to the host and sorted by position."""
    k_ND, v_ND, position_N = (torch.cat([part.to("cpu") for part in column]) for column in zip(*parts, strict=True))
    order_N = position_N.argsort()
    return HeadSlots(k_ND[order_N], v_ND[order_N], position_N[order_N])
