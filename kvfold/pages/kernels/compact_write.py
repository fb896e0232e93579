"""Write the kept slots of compression rounds, all layers and heads of one sequence or many, one launch per page class.

By plain operations a layer would take some thirty of them in floats, and hundreds in integers.

    L layers   X heads of all layers   E extents
    N stretches: new slots of one head that go to adjacent places of one extent
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvfold.codec.kivi import GROUP
from kvfold.pages.async_copy import sent
from kvfold.pages.kernels import dispatch
from kvfold.pages.layer import LayerChange
from kvfold.pages.layout import BIAS, PageClass
from kvfold.pages.page_allocation import defer_extents
from kvfold.pages.places import Ints, Places, SegmentTable, before_in_group
from kvfold.pages.segment import Segment, segment_table

_SLOTS = GROUP  # of a program, in which spans of keys begin and end


def can_write(tail: Segment, changes: Sequence[LayerChange]) -> bool:
    """Whether there is a kernel for it: it knows the codecs, and slots lie as it reads them."""
    memory, dtype = tail.arena.memory, changes[0].k_ND.dtype
    if not dispatch.is_there(memory) or any(layer.bases for layer in tail.layers):
        return False
    classes = {id(layer.page_class): layer.page_class for layer in tail.layers}.values()
    if not all(serves(page_class, memory, dtype) for page_class in classes):
        return False
    return all(_is_readable(change, dtype, is_aligned=memory.is_cuda) for change in changes)


def serves(page_class: PageClass, memory: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel writes new slots of this dtype."""
    dtypes = (torch.float32, torch.bfloat16) if dispatch.uses_numba(memory) else (page_class.kv_dtype,)
    return dtype in dtypes and dispatch.knows(page_class, memory)


def _is_readable(change: LayerChange, dtype: torch.dtype, *, is_aligned: bool) -> bool:
    if change.position_N.dtype != torch.int64:
        return False
    return all(
        x_ND.dtype == dtype and x_ND.is_contiguous() and not (is_aligned and x_ND.data_ptr() % 16)
        for x_ND in (change.k_ND, change.v_ND)
    )


def write_new(tails: Sequence[tuple[Segment, Sequence[LayerChange]]]) -> None:
    """Encode the new slots of every layer behind the stored ones. There is room for them, in one arena, and codecs have
    their states."""
    arena = tails[0][0].arena
    rows, held, before = [], [], 0  # held until the kernels are queued
    items: dict[tuple[PageClass, torch.dtype], list[Ints]] = defaultdict(list)
    for tail, changes in tails:
        table = segment_table(tail)
        row_E, its_held = _rows_of(tail, table.places, changes)
        for page_class, item_5N in _appended(tail, table, changes):
            item_5N[0] += before
            items[page_class, changes[0].k_ND.dtype].append(item_5N)
        rows.append(row_E)
        held.append(its_held)
        before += len(row_E)
    sent_E = sent(np.concatenate(rows), arena.device)
    for (page_class, dtype), parts in items.items():
        item_5N = np.concatenate(parts, axis=1).astype(np.int32)
        most = int(item_5N[2].max())
        mine = sent(item_5N, arena.device), sent_E, arena.memory, page_class, dtype
        dispatch.write_slots(*mine, block=_SLOTS, most_slots=most)


def _appended(tail: Segment, table: SegmentTable, changes: Sequence[LayerChange]) -> Iterator[tuple[PageClass, Ints]]:
    """Count the new slots of a tail; the items of write.py, by page class, that write them."""
    length_E = table.length_E.copy()
    extent_N, begin_N, count_N = _stretches(table, np.array([n for change in changes for n in change.counts]))
    item_5N = np.stack((extent_N, begin_N, count_N, np.zeros_like(extent_N), length_E[extent_N]))
    length_E[extent_N] += count_N
    defer_extents(tail, SegmentTable.of(table.places, length_E))
    if (count_N % tail.group).any():
        tail.changes.rise()  # groups that are closed early end their extents: the table no longer holds
    for page_class in dict.fromkeys(layer.page_class for layer in tail.layers):
        is_its_L = np.array([layer.page_class is page_class for layer in tail.layers])
        mine_5N = item_5N.compress(is_its_L[table.places.layer_E[extent_N]], axis=1)
        if mine_5N.size:
            yield page_class, mine_5N


def _stretches(table: SegmentTable, count_X: Ints) -> tuple[Ints, Ints, Ints]:
    """So many new slots of each head: the extents they go to, which of them is the first there, and how many."""
    row_E, room_E = table.places.row_E, table.places.capacity_E - table.length_E
    begin_E = before_in_group(row_E, room_E)  # older extents are filled first
    take_E = np.clip(count_X[row_E] - begin_E, 0, room_E)
    (extent_N,) = take_E.nonzero()
    return extent_N, begin_E[extent_N], take_E[extent_N]


def _rows_of(tail: Segment, places: Places, changes: Sequence[LayerChange]) -> tuple[Ints, list[Tensor]]:
    """The extents as rows of write.py, of which each head's new slots are the source; and those tensors of the sources
    that are made here."""
    zero_N = torch.zeros(max(sum(change.counts) for change in changes), device=tail.arena.device)
    sources, widths, held = [], [], [zero_N]
    for layer, change in zip(tail.layers, changes, strict=True):
        position_N = change.position_N.contiguous()
        bias_N = zero_N if change.bias_N is None else change.bias_N.to(BIAS.dtype).contiguous()
        held += [position_N, bias_N]
        sources.append([x.data_ptr() for x in (change.k_ND, change.v_ND, position_N, bias_N)])
        slot_bytes = layer.page_class.head_dim * change.k_ND.itemsize
        widths.append([slot_bytes, slot_bytes, position_N.itemsize, bias_N.itemsize])
    first_X = _first_of_head([change.counts for change in changes])
    source_L4, width_L4 = np.array(sources) - tail.arena.memory.data_ptr(), np.array(widths)
    source_E4 = source_L4[places.layer_E] + first_X[places.row_E, None] * width_L4[places.layer_E]
    return extent_rows(tail, places, source_E4), held


def _first_of_head(counts: Sequence[Sequence[int]]) -> Ints:
    """Of the new slots of its layer, the first of each head."""
    if len(set(map(len, counts))) > 1:
        return np.concatenate([_first_of_head([mine]) for mine in counts])
    count_LH = np.array(counts, dtype=np.int64)
    found_X: Ints = (count_LH.cumsum(1) - count_LH).ravel()
    return found_X


def extent_rows(tail: Segment, places: Places, source_EC: Ints) -> Ints:
    """The extents of a tail as rows of write.py; `source_EC`: keys, values and what else lies in the source."""
    states = [layer.state.get("k", {}).get("mean") for layer in tail.layers]
    mean_L = np.array([0 if mean_HD is None else mean_HD.data_ptr() for mean_HD in states])
    dim_L = np.array([layer.page_class.head_dim for layer in tail.layers])
    layer_E, start = places.layer_E, tail.arena.memory.data_ptr()
    mean_E = mean_L[layer_E] - start + places.head_E * dim_L[layer_E] * torch.float32.itemsize
    return np.column_stack((source_EC[:, :2], mean_E, places.address_EF, source_EC[:, 2:]))
