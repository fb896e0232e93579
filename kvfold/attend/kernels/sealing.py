"""Seal the full open blocks of many sequences at once: the host finds places, one launch per page class encodes.

N stretches   D head dim
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvfold.attend.kernels.formats import has_triton
from kvfold.attend.kernels.tables import sent
from kvfold.attend.track import Tracked
from kvfold.codec import hadamard
from kvfold.codec.integer import IntegerCodec
from kvfold.codec.native import Native
from kvfold.pages.append import Stretch, append_block
from kvfold.pages.layer import LayerPages
from kvfold.pages.layout import PageClass
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.registry import term_of


def can_seal(sequence: SequenceCache) -> bool:
    """Whether a kernel can do it: there is one for these codecs, and what they have to learn is learnt."""
    if not sequence.arena.memory.is_cuda or not has_triton() or Tracked.of([sequence.policy], decoding=True).mass:
        return False
    return all(
        _knows(layer.page_class) and bool(layer.state or not isinstance(layer.page_class.k, IntegerCodec))
        for layer in sequence.tail.layers
    )


def _knows(page_class: PageClass) -> bool:
    """Floats as they are, and integers with one scale for the whole head, of a width that fills tiles."""
    codecs = page_class.k, page_class.v
    whole = all(
        isinstance(codec, Native) or (isinstance(codec, IntegerCodec) and codec.group_size is None) for codec in codecs
    )
    return whole and not page_class.summaries and page_class.head_dim & (page_class.head_dim - 1) == 0


def seal_blocks(sequences: Sequence[SequenceCache]) -> None:
    """Encode the committed slots of every open block behind the stored ones; nothing is evicted.

    OutOfPages leaves the sequence that did not fit, and those after it, as they were.
    """
    work = _Work()
    try:
        for sequence in sequences:
            start = sequence.sealed_len
            work.add(sequence, append_block(sequence), start)
    finally:
        work.launch()
        for sequence in work.sequences:
            sequence.open.drop_committed()


class _Work:
    """Items by page class, and the mean keys they refer to."""

    def __init__(self) -> None:
        self.sequences: list[SequenceCache] = []
        self.items: dict[PageClass, list[tuple[int, ...]]] = defaultdict(list)
        self.means: dict[PageClass, list[Tensor]] = defaultdict(list)

    def add(self, sequence: SequenceCache, stretches: Sequence[Stretch], start: int) -> None:
        """`start`: the position of the open block's first slot."""
        self.sequences.append(sequence)
        block, layers = sequence.open, sequence.tail.layers
        first_row = [self._note_mean(layer) for layer in layers]
        items = [self.items[layer.page_class] for layer in layers]
        widths = [layer.page_class.head_dim * layer.page_class.kv_dtype.itemsize for layer in layers]
        for layer, head, begin, count, places in stretches:
            slot = (head * block.num_slots + begin) * widths[layer]
            k, v = block.addresses[layer]
            items[layer].append((k + slot, v + slot, count, start + begin, first_row[layer] + head, *places))

    def _note_mean(self, layer: LayerPages) -> int:
        """The row of the layer's first head among the mean keys of its class; of no use where none are stored."""
        means = self.means[layer.page_class]
        if "k" in layer.state and "mean" in layer.state["k"]:
            means.append(layer.state["k"]["mean"])
        return layer.num_heads * max(0, len(means) - 1)

    def launch(self) -> None:
        if not self.items:
            return
        from kvfold.attend.kernels.seal import seal_items  # the file needs triton

        arena = self.sequences[0].arena
        open_len = max(sequence.open.num_slots for sequence in self.sequences)
        for page_class, items in self.items.items():
            rotation_DD = hadamard.matrix(page_class.head_dim, arena.device)
            means = self.means[page_class]
            seal_items(
                sent(np.array(items, dtype=np.int64), arena.device),
                torch.cat(means) if means else rotation_DD,
                rotation_DD,
                arena.memory,
                page_class.kv_dtype,
                term_of(page_class.k).name,
                term_of(page_class.v).name,
                open_len,
            )
