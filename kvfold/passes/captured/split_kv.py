"""Split-KV (FlashDecoding): the stored slots of every lane, cut into tasks of equal work.

A *lane* is a batch slot of a decode step. A *task* is a run of at most `split` slots of one head, adjacent in memory.
Splitting by slots, not by heads, gives every SM the same work although heads differ in length.

    N tasks   E extents   L layers   F address columns
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvfold.pages.layout import PageClass
from kvfold.pages.places import Ints, SegmentTable, before_in_group, is_first
from kvfold.passes.captured.position_shifts import PositionShifts, stored_lens

_ALIGNMENT = 128  # slots: tasks begin at multiples, so that tiles and groups of slots are whole


class LaneTables(NamedTuple):
    """The page tables of one lane, and under `slot` positions its position shifts."""

    lane: int
    tables: tuple[SegmentTable, ...]
    shifts: PositionShifts | None = None
    sinks_L: Ints | None = None  # full-precision sinks of every head, which are read elsewhere
    reserves: bool = False  # an empty task for pages allocated ahead, so that they fill without a new split


class Tasks(NamedTuple):
    """Tasks of some lanes: lane by lane, layer by layer, head by head, oldest slots first."""

    lane_N: Ints
    layer_N: Ints
    head_N: Ints
    nth_N: Ints  # among the tasks of its lane and layer
    length_N: Ints  # with what is skipped
    skip_N: Ints
    shift_id_N: Ints
    first_N: Ints  # the first slot, skipped or not, in the head's row of stored slots
    address_NF: Ints
    last_E: Ints  # the last task of each extent, in the order of the tables; of no use where an extent is empty

    @property
    def most(self) -> int:
        """Tasks of the fullest layer of any lane."""
        return int(self.nth_N.max(initial=-1)) + 1

    @property
    def most_of_all(self) -> int:
        """Tasks that have slots, of the layer that has most in all lanes."""
        return int(np.bincount(self.layer_N[self.length_N > 0], minlength=1).max())


def choose_splits(tables: Sequence[SegmentTable], tasks_L: Ints) -> Ints:
    """Slots per task of each layer, so that it has at most `tasks_L` tasks, or the least multiple that heads allow.

    A processor with one task more than the others is waited for; so tasks that begin an extent are counted in.
    """
    slots_L, extents_L = np.zeros_like(tasks_L), np.zeros_like(tasks_L)
    for table in tables:
        layer_E = table.places.layer_E
        slots_L += np.bincount(layer_E, table.length_E, len(tasks_L)).astype(np.int64)
        extents_L += np.bincount(layer_E, table.length_E > 0, len(tasks_L)).astype(np.int64)
    rounds_L = np.maximum(1, -(-2 * extents_L // tasks_L))
    pieces_L = rounds_L * tasks_L - extents_L
    return np.asarray(np.maximum(1, -(-slots_L // (pieces_L * _ALIGNMENT))) * _ALIGNMENT)


def num_pieces(length_E: Ints, split_E: Ints) -> Ints:
    """Tasks of each extent."""
    return -(-length_E // split_E)


def cut(parts: Sequence[LaneTables], split_L: Ints) -> Tasks:
    """The tasks of all lanes."""
    found = [pieces_of(part.tables, part.shifts) for part in parts]
    counts = [len(pieces.length_P) for pieces in found]
    lane_P = np.repeat(np.array([part.lane for part in parts]), counts)
    layer_P, head_P, length_P, skip_P, shift_id_P, address_PF, _ = (
        np.concatenate(column) for column in zip(*found, strict=True)
    )
    row_P = (lane_P * len(split_L) + layer_P) * (head_P.max(initial=0) + 1) + head_P
    order_P = np.argsort(row_P, kind="stable")  # a head's pieces stay oldest first
    reserves_P = np.repeat([part.reserves for part in parts], counts)
    reserved_P = reserves_P & (length_P == 0) & ~_is_first(row_P, order_P)
    wanted = [np.zeros_like(split_L) if part.sinks_L is None else part.sinks_L for part in parts]
    wanted_P = np.stack(wanted)[np.repeat(np.arange(len(parts)), counts), layer_P]
    sinks_P = np.where(_is_first(row_P, order_P[length_P[order_P] > 0]), wanted_P, 0)
    length_P = np.where(length_P > sinks_P, length_P, 0)
    tasks_P = (num_pieces(length_P, split_L[layer_P]) + reserved_P)[order_P]
    end_P = np.cumsum(tasks_P)
    of_N = np.repeat(order_P, tasks_P)
    layer_N, lane_N = layer_P[of_N], lane_P[of_N]
    begin_N = (np.arange(len(of_N)) - np.repeat(end_P - tasks_P, tasks_P)) * split_L[layer_N]
    last_P = np.empty_like(end_P)
    last_P[order_P] = end_P - 1
    ends = np.split(last_P, np.cumsum(counts)[:-1])
    length_N = np.minimum(length_P[of_N] - begin_N, split_L[layer_N])
    skip_N = np.where(begin_N == 0, skip_P[of_N], 0)
    sinks_N = np.where(begin_N == 0, sinks_P[of_N], 0)
    address_NF, further = address_PF[of_N], np.flatnonzero(begin_N)
    address_NF[further] += begin_N[further, None] * parts[0].tables[0].places.stride_LF[layer_N[further]]
    return Tasks(
        lane_N,
        layer_N,
        head_P[of_N],
        before_in_group(lane_N * len(split_L) + layer_N, np.ones_like(lane_N)),
        length_N,
        skip_N + sinks_N,
        shift_id_P[of_N],
        before_in_group(row_P[of_N], length_N - skip_N) - skip_N,
        address_NF,
        np.concatenate([np.append(mine_P, -1)[pieces.last_E] for pieces, mine_P in zip(found, ends, strict=True)]),
    )


def _is_first(row_P: Ints, used_P: Ints) -> NDArray[np.bool_]:
    """Whether a piece is the first of its head among some, which are given head by head."""
    found_P = np.zeros(len(row_P), dtype=bool)
    found_P[used_P[is_first(row_P[used_P])]] = True
    return found_P


class Pieces(NamedTuple):
    """Oldest first within a head. `last_E`: the last piece of each extent, -1 where it has none."""

    layer_P: Ints
    head_P: Ints
    length_P: Ints  # with what is skipped
    skip_P: Ints
    shift_id_P: Ints
    address_PF: Ints
    last_E: Ints


def pieces_of(tables: Sequence[SegmentTable], shifts: PositionShifts | None) -> Pieces:
    """Of one sequence."""
    layer_E, head_E, row_E, address_EF = (
        np.concatenate([getattr(table.places, name) for table in tables])
        for name in ("layer_E", "head_E", "row_E", "address_EF")
    )
    length_E = np.concatenate([table.length_E for table in tables])
    if shifts is None:
        none_E = np.zeros_like(length_E)
        return Pieces(layer_E, head_E, length_E, none_E, none_E, address_EF, np.arange(len(length_E)))
    order_E = np.argsort(row_E, kind="stable")
    order_E = order_E[length_E[order_E] > 0]
    end_E = np.cumsum(length_E[order_E])  # slots of all heads, counted head by head
    start_E = end_E - length_E[order_E]
    length_X = stored_lens(tables, len(shifts.unit_X))
    gap_N = shifts.slot_N + (np.cumsum(length_X) - length_X)[shifts.row_N]
    start_P = np.union1d(start_E, gap_N)
    end_P = np.append(start_P[1:], end_E[-1:])
    within_P = np.searchsorted(start_E, start_P, side="right") - 1
    of_P = order_E[within_P]
    skip_P = (start_P - start_E[within_P]) % shifts.unit_X[row_E[of_P]]
    begin_P = start_P - start_E[within_P] - skip_P
    last_E = np.full_like(length_E, -1)
    last_E[of_P] = np.arange(len(of_P))
    return Pieces(
        layer_E[of_P],
        head_E[of_P],
        end_P - start_P + skip_P,
        skip_P,
        shifts.shift_id_N[np.searchsorted(gap_N, start_P, side="right") - 1],
        address_EF[of_P] + begin_P[:, None] * tables[0].places.stride_LF[layer_E[of_P]],
        last_E,
    )


def num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def num_tasks(page_class: PageClass, num_rows: int, processors: int) -> int:
    """Tasks of a layer: at least as many as run at once, 4 on a processor or 8 of codes, which are bound by unpacking.

    The numbers were measured on an H200.
    """
    if are_uneven(page_class, num_rows, processors):
        return processors * 24
    return processors * (4 if _bytes_per_channel(page_class) > 3 and num_rows <= processors // 2 else 8)


def are_uneven(page_class: PageClass, num_rows: int, processors: int) -> bool:
    """Many rows end in many tasks that are shorter than the others, so processors would have unequal work; small tasks,
    the longest first, even that out. It pays for codes of 4 bits and fewer, not for 8 and 16."""
    return num_rows > processors // 2 and _bytes_per_channel(page_class) < 1.5


def _bytes_per_channel(page_class: PageClass) -> float:
    """Of both sides."""
    return page_class.bytes_per_slot / page_class.head_dim


def task_capacity(num_used: int, num_extents: int, unit: int) -> int:
    """Tasks there is room for: a quarter more, and those of extents to come, which every head gets whenever pages are
    added (after an eighth of what it holds). A table that is full costs a capture, so few lanes get more than that; an
    empty task costs the time to see that it is, a nanosecond on an H200, and many lanes have thousands of them."""
    return -(-(num_used + num_used // 4 + num_extents) // unit) * unit
