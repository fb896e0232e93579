"""Seal the full open blocks of many sequences at once: the host finds places, one launch per page class encodes.

N stretches   O sequences   L layers   D head dim
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvfold.attend.track import Tracked
from kvfold.codec import hadamard
from kvfold.codec.integer import IntegerCodec
from kvfold.codec.native import Native
from kvfold.core import HAS_TRITON
from kvfold.pages.append import Stretches, append_blocks, make_room
from kvfold.pages.layer import LayerPages
from kvfold.pages.layout import PageClass
from kvfold.pages.segment import Segment
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.table import Ints
from kvfold.pages.transfer import sent


def can_seal(sequence: SequenceCache) -> bool:
    """Whether a kernel can do it: there is one for these codecs, and what they have to learn is learnt."""
    if not sequence.arena.memory.is_cuda or not HAS_TRITON or Tracked.of([sequence.policy], decoding=True).mass:
        return False
    return _learnt_by(sequence.tail) is not None


class _Learnt(NamedTuple):
    """What no seal of a tail changes once its codecs have learnt."""

    layers: dict[PageClass, NDArray[np.bool]]  # which layers are of a page class
    mean_L: Ints  # address of the first head's mean key; 0 where none are stored


_learnt: WeakKeyDictionary[Segment, _Learnt] = WeakKeyDictionary()


def _learnt_by(tail: Segment) -> _Learnt | None:
    """None while a kernel cannot seal it."""
    found = _learnt.get(tail)
    if found is None and all(_is_ready(layer) for layer in tail.layers):
        classes = [layer.page_class for layer in tail.layers]
        layers = {mine: np.array([other is mine for other in classes]) for mine in dict.fromkeys(classes)}
        found = _learnt[tail] = _Learnt(layers, np.array([_mean_address(layer) for layer in tail.layers]))
    return found


def _is_ready(layer: LayerPages) -> bool:
    return _knows(layer.page_class) and bool(layer.state or not isinstance(layer.page_class.k, IntegerCodec))


@cache
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
    fitting: list[SequenceCache] = []
    try:
        for sequence in sequences:
            make_room(sequence)
            fitting.append(sequence)
    finally:
        if fitting:
            _encode(fitting)


def _encode(sequences: Sequence[SequenceCache]) -> None:
    start_O = np.array([sequence.sealed_len for sequence in sequences])  # positions of the open blocks' first slots
    stretches = append_blocks(sequences)
    learnt = [item for sequence in sequences if (item := _learnt_by(sequence.tail)) is not None]
    item_N = _items(sequences, learnt, stretches, start_O)
    for page_class, is_its_OL in _layers_of(learnt):
        _launch(sequences, page_class, item_N[is_its_OL[stretches.owner_N, stretches.layer_N]])
    for sequence in sequences:
        sequence.open.drop_committed()


def _layers_of(learnt: Sequence[_Learnt]) -> Iterator[tuple[PageClass, NDArray[np.bool]]]:
    """Each page class, and which layers of which sequences are of it."""
    none_L = np.zeros(len(learnt[0].mean_L), dtype=bool)
    for page_class in dict.fromkeys(page_class for item in learnt for page_class in item.layers):
        yield page_class, np.stack([item.layers.get(page_class, none_L) for item in learnt])


def _items(sequences: Sequence[SequenceCache], learnt: Sequence[_Learnt], stretches: Stretches, start_O: Ints) -> Ints:
    """Rows of seal.py; mean keys by their address, for they lie outside the arena."""
    owner_N, layer_N, head_N, begin_N, count_N, address_NF = stretches
    source_OL2 = np.stack([sequence.open.addresses for sequence in sequences])
    mean_OL = np.stack([item.mean_L for item in learnt])
    open_O = np.array([sequence.open.num_slots for sequence in sequences])
    spec = sequences[0].spec  # an arena serves one model
    width_N = np.array([layer.head_dim for layer in spec.layers])[layer_N]
    slot_N = (head_N * open_O[owner_N] + begin_N) * width_N * spec.kv_dtype.itemsize
    mean_N = mean_OL[owner_N, layer_N] + head_N * width_N * 4
    source_N2 = source_OL2[owner_N, layer_N] + slot_N[:, None]
    return np.column_stack((source_N2, count_N, start_O[owner_N] + begin_N, mean_N, address_NF))


def _mean_address(layer: LayerPages) -> int:
    mean_HD = layer.state["k"].get("mean") if "k" in layer.state else None
    return 0 if mean_HD is None else mean_HD.data_ptr()


def _launch(sequences: Sequence[SequenceCache], page_class: PageClass, item_N: Ints) -> None:
    from kvfold.attend.kernels.seal import MEAN, seal_items  # the file needs triton

    arena = sequences[0].arena
    rotation_DD = hadamard.matrix(page_class.head_dim, arena.device)
    item_N[:, MEAN] = (item_N[:, MEAN] - rotation_DD.data_ptr()) // rotation_DD.itemsize
    seal_items(
        sent(item_N, arena.device),
        rotation_DD,
        arena.memory,
        page_class.kv_dtype,
        page_class.k,
        page_class.v,
        max(sequence.open.num_slots for sequence in sequences),
        page_class.has_bias,
    )
