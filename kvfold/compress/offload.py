"""From what a round of compression evicts to pages on the host.

N slots of one head, in order of position   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.pages.change import LayerChange
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache


class HeadSlots(NamedTuple):
    """Slots of one head that leave the device."""

    k_ND: Tensor
    v_ND: Tensor
    position_N: Tensor


def evicted_slots(sequence: SequenceCache, layer: int, change: LayerChange) -> list[HeadSlots]:
    """Of every head, what the change drops: stored slots as a reader sees them, and new ones. Nothing is moved yet."""
    heads: list[list[HeadSlots]] = [[] for _ in change.counts]
    if change.keep is not None:
        stored = stored_slots(sequence, layer, change.k_ND.dtype)
        rows = zip(heads, change.keep, stored.k, stored.v, stored.position, strict=True)
        for found, keep, k_ND, v_ND, position_N in rows:
            goes_N = torch.ones_like(position_N, dtype=torch.bool)
            goes_N[keep] = False
            found.append(HeadSlots(k_ND[goes_N], v_ND[goes_N], position_N[goes_N]))
    for gone in change.gone:
        columns = zip(*(column.split(gone.counts) for column in gone[:3]), strict=True)
        for found, columns_of_head in zip(heads, columns, strict=True):
            found.append(HeadSlots(*columns_of_head))
    return [_in_order(found) for found in heads if found]


def offload(sequence: SequenceCache, layer: int, heads: Sequence[HeadSlots]) -> None:
    """Write them to the host."""
    assert sequence.offloaded is not None
    offloaded = sequence.offloaded.layers[layer]
    for head, slots in enumerate(heads):
        if len(slots.position_N):
            offloaded.offload(head, *slots, _page_lens(sequence, slots.position_N))


def _page_lens(sequence: SequenceCache, position_N: Tensor) -> list[int]:
    """Slots of each page: full ones and a rest, or sentences."""
    assert sequence.offloaded is not None
    recall, count = sequence.offloaded.recall, len(position_N)
    if recall.unit == "page":
        return [min(recall.page, count - begin) for begin in range(0, count, recall.page)]
    number_N = sequence.sentences.numbers(position_N, recall.page)
    found: list[int] = number_N.unique_consecutive(return_counts=True)[1].tolist()
    return found


def _in_order(parts: Sequence[HeadSlots]) -> HeadSlots:
    """Parts of several rounds of trimming lie between one another; all of them meet on the host."""
    k_ND, v_ND, position_N = (torch.cat([part.to("cpu") for part in column]) for column in zip(*parts, strict=True))
    order_N = position_N.argsort()
    return HeadSlots(k_ND[order_N], v_ND[order_N], position_N[order_N])
