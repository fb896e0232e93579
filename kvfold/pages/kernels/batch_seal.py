"""Batched seal: quantise and append the open blocks of many sequences, one kernel launch per page class.

N plan   E extents   O sequences   L layers   D head dim
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.pages.append import AllPlaces, AppendPlan, append_blocks, joined_places, reserve_ahead, reserve_pages
from kvfold.pages.async_copy import sent
from kvfold.pages.kernels import dispatch
from kvfold.pages.kernels.compact_write import extent_rows
from kvfold.pages.layer import LayerPages
from kvfold.pages.layout import PageClass
from kvfold.pages.places import Ints, Places, SegmentTable
from kvfold.pages.segment import Segment, segment_table
from kvfold.pages.sequence import SequenceCache

_BLOCKS_AHEAD = 12


def can_seal(sequence: SequenceCache) -> bool:
    """Whether a kernel can seal it: it knows these codecs, and their states (mean keys) are there."""
    memory = sequence.arena.memory
    if not dispatch.is_there(memory) or sequence.policy.observes_mass or sequence.awaits_fp_sinks:
        return False
    if not memory.is_cuda and any(layer.sliding_window is not None for layer in sequence.spec.layers):
        return False  # the plain seal drops what the window has passed
    return _layers_by_class(sequence.tail) is not None


def _layers_by_class(tail: Segment) -> dict[PageClass, NDArray[np.bool]] | None:
    """Which layers are of a page class; None while a kernel cannot seal the tail."""
    found: dict[PageClass, NDArray[np.bool]] | None = tail.derived.get("seal")
    if found is None and all(_is_ready(layer, tail.arena.memory) for layer in tail.layers):
        classes = [layer.page_class for layer in tail.layers]
        found = {mine: np.array([other is mine for other in classes]) for mine in dict.fromkeys(classes)}
        tail.derived["seal"] = found
    return found


def _is_ready(layer: LayerPages, memory: Tensor) -> bool:
    return dispatch.knows(layer.page_class, memory) and bool(layer.state or not layer.page_class.k.has_state("k"))


def seal_blocks(sequences: Sequence[SequenceCache]) -> None:
    """Encode the committed slots of every open block behind the stored ones; nothing is evicted.

    OutOfPages leaves the sequence that did not fit, and those after it, as they were.
    """
    tables: list[SegmentTable] = []
    try:
        for sequence in sequences:
            tables.append(reserve_pages(sequence))
    finally:
        if tables:
            _encode(sequences[: len(tables)], tables)


def _encode(sequences: Sequence[SequenceCache], tables: Sequence[SegmentTable]) -> None:
    start_O = np.array([sequence.sealed_len for sequence in sequences])  # positions of the open blocks' first slots
    plan = append_blocks(sequences, tables)
    extents = _extents_of(sequences, plan.places)
    if extents.extent_N is plan.extent_N:
        for item_5N in extents.items:  # those of the last seal: counts stay, positions and lengths advance by them
            item_5N[3:] += item_5N[2]
    else:
        extents.items = list(_items(plan, start_O, extents, sequences[0].arena.device))
        extents.extent_N = plan.extent_N
    most, memory = max(sequence.open.num_slots for sequence in sequences), sequences[0].arena.memory
    for (page_class, _), item_5N in zip(extents.classes, extents.items, strict=True):
        source = page_class.kv_dtype
        dispatch.write_slots(item_5N, extents.row_E, memory, page_class, source, block=most, most_slots=most)
    for sequence in sequences:
        sequence.open.drop_committed()


def _items(plan: AppendPlan, start_O: Ints, extents: _Extents, device: torch.device) -> Iterator[Tensor]:
    """Of each page class, as rows of write.py."""
    places, extent_N, begin_N, count_N, filled_N = plan
    item_5N = np.empty((5, len(extent_N)), dtype=np.int32)
    item_5N[0], item_5N[1], item_5N[2], item_5N[4] = extent_N, begin_N, count_N, filled_N
    np.add(start_O[places.owner_E[extent_N]], begin_N, out=item_5N[3], casting="same_kind")
    for _, is_its_E in extents.classes:
        yield sent(item_5N if is_its_E is None else item_5N.compress(is_its_E[extent_N], axis=1), device)


@dataclass(eq=False)
class _Extents:
    """What is known on the device of the extents of many tails."""

    classes: list[tuple[PageClass, NDArray[np.bool] | None]]  # which extents are of a page class; None: all
    row_E: Tensor  # of write.py, which no seal changes
    items: list[Tensor] = field(default_factory=list)  # of the last seal, by page class
    extent_N: Ints | None = None  # the extents that they go to


def _extents_of(sequences: Sequence[SequenceCache], places: AllPlaces) -> _Extents:
    """Kept as long as the places are: a tail that another sequence takes over was shared, which gave it new ones."""
    found: _Extents | None = places.derived.get("extents")
    if found is None:
        row_E = np.concatenate([_rows_of(*item) for item in zip(sequences, places.each, strict=True)])
        classes = list(_classes_of(sequences, places))
        found = places.derived["extents"] = _Extents(classes, sent(row_E, sequences[0].arena.device))
    return found


def _rows_of(sequence: SequenceCache, places: Places) -> Ints:
    """The extents of one tail as rows of write.py, kept as long as the places are."""
    found: Ints | None = places.derived.get("rows")
    if found is None:
        block, spec = sequence.open, sequence.spec
        head_bytes_L = np.array([layer.head_dim for layer in spec.layers]) * block.num_slots * spec.kv_dtype.itemsize
        source_E2 = block.addresses[places.layer_E] + (places.head_E * head_bytes_L[places.layer_E])[:, None]
        found = places.derived["rows"] = extent_rows(sequence.tail, places, source_E2)
    return found


def expect_seal(sequences: Sequence[SequenceCache]) -> None:
    """These are the next to seal, in one launch: send their page tables to the device now."""
    if sequences:
        _extents_of(sequences, joined_places(tuple(segment_table(sequence.tail).places for sequence in sequences)))


def reserve_pages_ahead(sequence: SequenceCache) -> None:
    """Allocate the pages of the next seal of this sequence before it is due. OutOfPages leaves that to the seal. Short
    sequences get pages for several seals: new pages of hundreds of them would take longer than their decode steps."""
    reserve_ahead(sequence, _BLOCKS_AHEAD)
    _rows_of(sequence, segment_table(sequence.tail).places)


def _classes_of(
    sequences: Sequence[SequenceCache], places: AllPlaces
) -> Iterator[tuple[PageClass, NDArray[np.bool] | None]]:
    known = [item for sequence in sequences if (item := _layers_by_class(sequence.tail)) is not None]
    none_L = np.zeros(sequences[0].spec.num_layers, dtype=bool)
    for page_class in dict.fromkeys(page_class for item in known for page_class in item):
        is_its_OL = np.stack([item.get(page_class, none_L) for item in known])
        yield page_class, None if is_its_OL.all() else is_its_OL[places.owner_E, places.layer_E]
