"""Cut what sequences have stored into tasks of even work.

A *lane* is a place in the batch of a decode step. A *task* is a stretch of at most `split` slots of one head, adjacent
in memory. Splitting by slots, not by heads, gives every processor the same work although heads differ in length.

    N tasks   E extents   L layers   F address columns
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfold.attend.kernels.moves import Moves
from kvfold.attend.kernels.pieces import pieces_of
from kvfold.pages.table import Ints, SegmentTable, before_in_group, is_first

_ALIGNMENT = 128  # slots: tasks begin at multiples, so that tiles and groups of slots are whole


class Part(NamedTuple):
    """What is stored for one lane; `moves`: how far it appears moved, where positions close up."""

    lane: int
    tables: tuple[SegmentTable, ...]
    moves: Moves | None = None
    exact_L: Ints | None = None  # first slots of every head that are read elsewhere
    reserves: bool = False  # a task of no slots for pages that were given ahead, so that they can fill without a cut


class Tasks(NamedTuple):
    """Tasks of some lanes: lane by lane, layer by layer, head by head, oldest slots first."""

    lane_N: Ints
    layer_N: Ints
    head_N: Ints
    nth_N: Ints  # among the tasks of its lane and layer
    length_N: Ints  # with what is skipped
    skip_N: Ints
    turn_N: Ints
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


def cut(parts: Sequence[Part], split_L: Ints) -> Tasks:
    """Cut what every lane stores."""
    found = [pieces_of(part.tables, part.moves) for part in parts]
    counts = [len(pieces.length_P) for pieces in found]
    lane_P = np.repeat(np.array([part.lane for part in parts]), counts)
    layer_P, head_P, length_P, skip_P, turn_P, address_PF, _ = (
        np.concatenate(column) for column in zip(*found, strict=True)
    )
    row_P = (lane_P * len(split_L) + layer_P) * (head_P.max(initial=0) + 1) + head_P
    order_P = np.argsort(row_P, kind="stable")  # a head's pieces stay oldest first
    reserves_P = np.repeat([part.reserves for part in parts], counts)
    reserved_P = reserves_P & (length_P == 0) & ~_is_first(row_P, order_P)
    wanted = [np.zeros_like(split_L) if part.exact_L is None else part.exact_L for part in parts]
    wanted_P = np.stack(wanted)[np.repeat(np.arange(len(parts)), counts), layer_P]
    exact_P = np.where(_is_first(row_P, order_P[length_P[order_P] > 0]), wanted_P, 0)
    length_P = np.where(length_P > exact_P, length_P, 0)
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
    exact_N = np.where(begin_N == 0, exact_P[of_N], 0)
    address_NF, further = address_PF[of_N], np.flatnonzero(begin_N)
    address_NF[further] += begin_N[further, None] * parts[0].tables[0].places.stride_LF[layer_N[further]]
    return Tasks(
        lane_N,
        layer_N,
        head_P[of_N],
        _place_in_group(lane_N * len(split_L) + layer_N),
        length_N,
        skip_N + exact_N,
        turn_P[of_N],
        before_in_group(row_P[of_N], length_N - skip_N) - skip_N,
        address_NF,
        np.concatenate([np.append(mine_P, -1)[pieces.last_E] for pieces, mine_P in zip(found, ends, strict=True)]),
    )


def _is_first(row_P: Ints, used_P: Ints) -> NDArray[np.bool_]:
    """Whether a piece is the first of its head among some, which are given head by head."""
    found_P = np.zeros(len(row_P), dtype=bool)
    found_P[used_P[is_first(row_P[used_P])]] = True
    return found_P


def _place_in_group(group_N: Ints) -> Ints:
    """0, 1, 2 … in each stretch of equal numbers."""
    return before_in_group(group_N, np.ones_like(group_N))
