"""Write the kept slots of a compression round, all layers and heads of a sequence, one launch per page class.

By plain operations a layer would take some thirty of them in floats, and hundreds in integers.

    L layers   X heads of all layers   E extents   F address columns of pages/places.py
    N stretches: new slots of one head that go to adjacent places of one extent
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvfold.core import HAS_TRITON
from kvfold.pages.async_copy import sent
from kvfold.pages.change import LayerChange
from kvfold.pages.kernels.encodings import knows
from kvfold.pages.layer import LayerPages
from kvfold.pages.layout import BIAS, PageClass
from kvfold.pages.page_allocation import defer_extents
from kvfold.pages.places import Ints, SegmentTable, before_in_group
from kvfold.pages.segment import Segment
from kvfold.pages.segment_table import segment_table

_LONG, _SINGLE = torch.int64.itemsize, torch.float32.itemsize


def mean_address(layer: LayerPages) -> int:
    """Of the first head's mean key; 0 where none are stored."""
    mean_HD = layer.state["k"].get("mean") if "k" in layer.state else None
    return 0 if mean_HD is None else mean_HD.data_ptr()


def can_write(tail: Segment, changes: Sequence[LayerChange]) -> bool:
    """Whether there is a kernel for it: it knows the codecs, and slots lie as it reads them."""
    return tail.arena.memory.is_cuda and HAS_TRITON and all(map(_serves, tail.layers, changes))


def _serves(layer: LayerPages, change: LayerChange) -> bool:
    page_class, sides = layer.page_class, (change.k_ND, change.v_ND)
    is_flat = all(x_ND.is_contiguous() and x_ND.dtype == page_class.kv_dtype for x_ND in sides)
    return knows(page_class) and not layer.bases and is_flat and change.position_N.dtype == torch.int64


def write_new(tail: Segment, changes: Sequence[LayerChange]) -> None:
    """Encode the new slots of every layer behind the stored ones. There is room for them, and codecs have
    their states."""
    table = segment_table(tail)
    places, length_E = table.places, table.length_E.copy()
    extent_N, begin_N, count_N = _stretches(table, np.array([n for change in changes for n in change.counts]))
    layer_N, head_N = places.layer_E[extent_N], places.head_E[extent_N]
    first_X = np.concatenate([np.cumsum(change.counts) - change.counts for change in changes])  # in its layer
    slot_N = first_X[places.row_E[extent_N]] + begin_N
    address_NF = places.address_EF[extent_N] + places.stride_LF[layer_N] * length_E[extent_N, None]
    source_L5, _held = _sources(tail, changes)  # held until the kernels are queued
    for page_class in dict.fromkeys(layer.page_class for layer in tail.layers):
        its = np.array([layer.page_class is page_class for layer in tail.layers])[layer_N].nonzero()[0]
        if len(its):
            width = page_class.head_dim * page_class.kv_dtype.itemsize
            source_N5 = source_L5[layer_N[its]] + slot_N[its, None] * np.array([width, width, _LONG, _SINGLE, 0])
            source_N5[:, -1] += head_N[its] * page_class.head_dim * _SINGLE
            _launch(tail, page_class, count_N[its], np.column_stack((count_N[its], source_N5, address_NF[its])))
    length_E[extent_N] += count_N
    defer_extents(tail, SegmentTable.of(places, length_E))
    if (count_N % tail.group).any():
        tail.changes.rise()  # groups that are closed early end their extents: the table no longer holds


def _stretches(table: SegmentTable, count_X: Ints) -> tuple[Ints, Ints, Ints]:
    """So many new slots of each head: the extents they go to, which of them is the first there, and how many."""
    row_E, room_E = table.places.row_E, table.places.capacity_E - table.length_E
    begin_E = before_in_group(row_E, room_E)  # older extents are filled first
    take_E = np.clip(count_X[row_E] - begin_E, 0, room_E)
    (extent_N,) = take_E.nonzero()
    return extent_N, begin_E[extent_N], take_E[extent_N]


def _sources(tail: Segment, changes: Sequence[LayerChange]) -> tuple[Ints, list[Tensor]]:
    """[L, 5]: where keys, values, positions and biases of each layer's first new slot lie, and its first head's mean
    key, in bytes from the start of the arena; and those of these tensors that are made here."""
    zero_N = torch.zeros(max(sum(change.counts) for change in changes), device=tail.arena.device)
    start, rows, held = tail.arena.memory.data_ptr(), [], [zero_N]
    for layer, change in zip(tail.layers, changes, strict=True):
        position_N = change.position_N.contiguous()
        bias_N = zero_N if change.bias_N is None else change.bias_N.to(BIAS.dtype).contiguous()
        held += [position_N, bias_N]
        lie = [x.data_ptr() for x in (change.k_ND, change.v_ND, position_N, bias_N)]
        rows.append([*lie, mean_address(layer)])
    return np.array(rows) - start, held


def _launch(tail: Segment, page_class: PageClass, count_N: Ints, stretch_N: Ints) -> None:
    from kvfold.pages.kernels.write import write_stretches  # the file needs triton

    arena = tail.arena
    write_stretches(
        sent(stretch_N, arena.device),
        int(count_N.max()),
        arena.memory,
        page_class,
    )
