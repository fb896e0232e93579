"""The first slots of a sequence as they came, beside their codes: attention rests on them, and few bits blur them.

A sink's key differs from the mean key more than others do, so its grid is coarse, and every error of it moves the mass
of nearly every query: with the first four slots exact, int4 and int2 lose a third as much (dev/LOG.md). The slots stay
in pages too, for whoever moves, scores or saves slots; attention reads the copy in their place.

    H KV heads   n exact slots   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from kvfold.pages.async_copy import upload
from kvfold.pages.change import LayerChange
from kvfold.pages.page_config import codec_fp_sinks
from kvfold.pages.sequence import SequenceCache


def num_exact(sequence: SequenceCache, layer: int) -> int:
    """Slots of each head of a layer that are read exact."""
    wants = sequence.spec.layers[layer].compressible and codec_fp_sinks(sequence.policy, sequence.spec, layer)
    return sequence.exact.fill if sequence.exact is not None and wants else 0


def keep_exact(sequence: SequenceCache, changes: Sequence[LayerChange]) -> None:
    """Of the first slots that a sequence seals, in one call or in several. They are read from where all are there: a
    block is read whole. None of them is ever evicted, so they come first in every head."""
    block = sequence.exact
    if block is None or sequence.sealed_len != block.committed:
        return
    layers = sequence.spec.compressible_layers
    first = block.committed
    num_new = min(block.num_slots - first, *(min(changes[i].counts) for i in layers))
    for i in layers if num_new else ():
        change = changes[i]
        begins = accumulate(change.counts[:-1], initial=0)
        place_N = upload([begin + n for begin in begins for n in range(num_new)], change.k_ND.device)
        for block_HnD, new_ND in ((block.k[i], change.k_ND), (block.v[i], change.v_ND)):
            block_HnD[:, first : first + num_new] = new_ND[place_N].unflatten(0, (-1, num_new))
    block.committed += num_new
    block.fill = block.num_slots if block.committed == block.num_slots else 0


def awaits_exact(sequence: SequenceCache) -> bool:
    """Whether some of the first slots, but not all that are to be kept exact, were sealed."""
    return sequence.exact is not None and sequence.sealed_len == sequence.exact.committed < sequence.exact.num_slots
