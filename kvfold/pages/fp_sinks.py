"""Full-precision copies of the attention sinks (first 4 tokens), read instead of their int4/int2 codes.

A sink's key differs from the mean key more than others do, so its quantisation step is large, and its error moves the
attention mass of nearly every query: with the first 4 slots in full precision, int4 and int2 lose a third as much
(dev/LOG.md). The pages hold their codes too, for eviction, scoring and saving; attention reads the copy.

    H KV heads   n sinks   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from kvfold.pages.async_copy import upload
from kvfold.pages.change import LayerChange
from kvfold.pages.page_config import codec_fp_sinks
from kvfold.pages.sequence import SequenceCache


def layer_fp_sinks(sequence: SequenceCache, layer: int) -> int:
    """Sinks of each head of a layer that are read in full precision."""
    wants = sequence.spec.layers[layer].compressible and codec_fp_sinks(sequence.policy, sequence.spec, layer)
    return sequence.fp_sinks.fill if sequence.fp_sinks is not None and wants else 0


def copy_fp_sinks(sequence: SequenceCache, changes: Sequence[LayerChange]) -> None:
    """Copy the first slots that a sequence seals, in one call or in several; they are read once all are copied. None of
    them is ever evicted, so they come first in every head."""
    block = sequence.fp_sinks
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


def awaits_fp_sinks(sequence: SequenceCache) -> bool:
    """Whether some, but not all, of the sinks have been sealed."""
    return (
        sequence.fp_sinks is not None
        and sequence.sealed_len == sequence.fp_sinks.committed < sequence.fp_sinks.num_slots
    )
