"""A stored prefix in one piece with what is read behind it, so that a hit rounds as the cold run did.

Attention in parts is exact but for rounding, and rounding depends on where the parts end. A cold run attends to all
earlier chunks at once; a run that continues at a chunk's border over slots that are stored as they were computed does
the same when these stand in front of the new ones.

    H KV heads   S stored slots   T new tokens   D head dim
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.pages.read import StoredSlots, stored_slots
from kvfold.pages.sequence import SequenceCache


def prefix_of(sequence: SequenceCache, layer: int, dtype: torch.dtype, chunk_len: int | None) -> StoredSlots | None:
    """The stored slots of a layer, if joining them makes a difference; chunks begin at multiples of `chunk_len`."""
    length = sequence.sealed_len
    if not length or chunk_len is None or length % chunk_len or sequence.policy.position.shifts:
        return None
    pages = sequence.tail.layers[layer].page_class
    is_exact = sequence.spec.layers[layer].compressible and pages.k.lossless and pages.v.lossless
    if not is_exact or pages.has_bias or set(sequence.stored_lens(layer)) != {length}:
        return None
    return stored_slots(sequence, layer, dtype)


def room_behind(stored_HSD: list[Tensor], num_tokens: int) -> Tensor:
    """[H, S + T, D], of which the stored slots are written."""
    shape = (len(stored_HSD), len(stored_HSD[0]) + num_tokens, stored_HSD[0].shape[1])
    joined = torch.empty(shape, dtype=stored_HSD[0].dtype, device=stored_HSD[0].device)
    for row_SD, mine_SD in zip(joined, stored_HSD, strict=True):
        row_SD[: len(mine_SD)] = mine_SD
    return joined
