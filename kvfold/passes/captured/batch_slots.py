"""Batch slots (lanes) of a captured decode step: which sequence has which, and the device tables kernels read for it.

A step that changed nothing costs one comparison per sequence. A seal makes some tasks longer; new pages, or a length
that passes a border between tasks, rewrite the lane's block tables. Many lanes are written in one copy.

    L layers   B lanes   H KV heads   D head dim   E extents of the tail (of all tails)   N tasks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from kvfold.pages.async_copy import sent
from kvfold.pages.open_block import OpenBlock
from kvfold.pages.places import Ints, Places, SegmentTable, is_first
from kvfold.pages.segment import segment_table
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured.block_tables import BlockTables, Layout
from kvfold.passes.captured.observers import BatchObservers
from kvfold.passes.captured.position_shifts import ShiftedQueries, shifts_of, stored_tables
from kvfold.passes.captured.split_kv import (
    LaneTables,
    are_uneven,
    choose_splits,
    cut,
    num_pieces,
    num_processors,
    num_tasks,
    task_capacity,
)

_MANY_LANES = 32
_MOST_ROOM = np.iinfo(np.int64).max  # of tasks that never grow


class OutOfBatchSlots(Exception):
    """A sequence has outgrown its lane's block table; a larger batch has to be captured."""


@dataclass(eq=False)
class _Held:
    """What a lane was written from. Graphs outlive sessions, so the sequence is a weak reference.

    Shared segments never change, and a sequence that shares one has a new tail, so the tail's number stands for all
    pages.
    """

    sequence: ref[SequenceCache]
    number: int
    places: Places
    length_E: Ints
    at_E: Ints  # the row of each extent's last task in the table
    end_E: Ints  # how long the extent may become before that task is not enough


class _Growth(NamedTuple):
    """By how much extents grew, and what was sent to the block tables."""

    by_E: Ints
    at_N: Tensor
    by_N: Tensor
    room: int  # slots that the fullest of their last tasks has left


class _Joined(NamedTuple):
    """Several lanes as one, in the order in which they grew last: usually they grow together again, by as much."""

    held: list[_Held]
    lane_E: Ints
    length_E: Ints
    at_E: Ints
    end_E: Ints
    last: _Growth | None = None

    @classmethod
    def of(cls, lanes: list[int], held: list[_Held]) -> _Joined:
        length_E, at_E, end_E = (
            np.concatenate([getattr(item, name) for item in held]) for name in ("length_E", "at_E", "end_E")
        )
        return cls(held, np.repeat(np.array(lanes), [len(item.at_E) for item in held]), length_E, at_E, end_E)


class BatchSlots:
    """B lanes for sequences of one layout."""

    def __init__(self, layout: Layout, sequences: Sequence[SequenceCache], num_lanes: int) -> None:
        spec, arena = layout.spec, sequences[0].arena
        self.layout, self.num_lanes, self.memory = layout, num_lanes, arena.memory
        self.shifted_queries = ShiftedQueries(sequences, num_lanes) if layout.shifts else None
        parts = self._parts(list(enumerate(sequences)))
        every = [table for part in parts for table in part.tables]
        processors, rows_L = num_processors(arena.device), num_lanes * layout.heads_L
        work = [(c, rows, processors) for c, rows in zip(layout.classes, rows_L.tolist(), strict=True)]
        self.split_L = choose_splits(every, np.array([num_tasks(*shape) for shape in work]))
        first, most_heads = cut(parts, self.split_L), int(layout.heads_L.max())
        unit = 8 if num_lanes > _MANY_LANES else 32
        capacity = task_capacity(first.most, 3 * most_heads, unit)
        num_programs = None
        if any(are_uneven(*shape) for shape in work):
            num_programs = num_lanes * capacity
            if num_lanes > _MANY_LANES:
                in_use = first.most_of_all * num_lanes // len(sequences)
                num_programs = task_capacity(in_use, 2 * most_heads * num_lanes, unit)
        self.observers = BatchObservers(layout, sequences, num_lanes) if layout.observes else None
        self.tables = BlockTables(
            layout,
            num_lanes,
            capacity,
            arena.device,
            num_programs=num_programs,
            num_shifts=1 if self.shifted_queries is None else self.shifted_queries.num_shifts,
            mass_len=0 if self.observers is None else self.observers.row_len,
        )
        self.open_LB2 = torch.zeros(spec.num_layers, num_lanes, 2, dtype=torch.int64, device=arena.device)
        self.sinks_LB2 = torch.zeros_like(self.open_LB2)
        self.sinks_LB = torch.zeros(spec.num_layers, num_lanes, dtype=torch.int64, device=arena.device)
        shapes = [(num_lanes, layer.num_kv_heads, layer.head_dim) for layer in spec.layers]
        self.mean_LBHD = [torch.zeros(shape, device=arena.device) for shape in shapes]
        self._held: list[_Held | None] = [None] * num_lanes
        self._has_sinks = [False] * num_lanes
        self._joined: _Joined | None = None
        self._last: tuple[list[ref[SequenceCache]], list[int]] = [], []

    def place(self, sequences: Sequence[SequenceCache]) -> list[int]:
        """The lane of each sequence; a sequence keeps its lane, and only what changed is written."""
        if [known() for known in self._last[0]] != list(sequences):
            self._last = [ref(sequence) for sequence in sequences], self._assign(list(sequences))
        lanes = self._last[1]
        held = [self._held[lane] for lane in lanes]
        changed = [
            (lane, sequence)
            for lane, sequence, item in zip(lanes, sequences, held, strict=True)
            if item is None or item.number != sequence.tail.changes.number
        ]
        if changed:
            self._write(changed)
        if not self.tables.sort():
            raise OutOfBatchSlots
        if self.observers is not None and not self.observers.place(lanes, sequences):
            raise OutOfBatchSlots
        return lanes

    def _assign(self, sequences: list[SequenceCache]) -> list[int]:
        held = {item.sequence(): lane for lane, item in enumerate(self._held) if item is not None}
        kept = {held[sequence] for sequence in sequences if sequence in held}
        free = [lane for lane in range(self.num_lanes) if lane not in kept]
        given = iter(free)
        lanes = [held[sequence] if sequence in held else next(given) for sequence in sequences]
        left = [lane for lane in free if self._held[lane] is not None]
        for lane in left:
            self._held[lane] = None
        if left:
            self.tables.clear(left)
        return lanes

    def _write(self, changed: list[tuple[int, SequenceCache]]) -> None:
        grown: list[tuple[int, SequenceCache]] = []
        anew: list[tuple[int, SequenceCache]] = []
        lengths: list[Ints] = []
        for lane, sequence in changed:
            held, table = self._held[lane], segment_table(sequence.tail)
            if held is not None and table.places is held.places and self.shifted_queries is None:
                grown.append((lane, sequence))
                lengths.append(table.length_E)
            else:
                anew.append((lane, sequence))
        anew += self._lengthen(grown, lengths) if grown else []
        if anew:
            self._put(anew)

    def _lengthen(self, grown: list[tuple[int, SequenceCache]], lengths: list[Ints]) -> list[tuple[int, SequenceCache]]:
        """Make the last tasks of extents longer; returns the lanes where that is not enough."""
        held = [item for lane, _ in grown if (item := self._held[lane]) is not None]
        joined = self._joined
        if joined is None or joined.held != held:
            joined = _Joined.of([lane for lane, _ in grown], held)
        after_E = np.concatenate(lengths)
        by_E, last, full = after_E - joined.length_E, joined.last, set[int]()
        most = int(by_E.max(initial=0))
        if last is not None and last.room >= most and np.array_equal(by_E, last.by_E):
            last = last._replace(room=last.room - most)
        else:
            at = np.flatnonzero(by_E)
            room_N = joined.end_E[at] - after_E[at]
            full = set(joined.lane_E[at[room_N < 0]].tolist())
            if full:
                its = ~np.isin(joined.lane_E[at], list(full))
                at, room_N = at[its], room_N[its]
            device = self.open_LB2.device
            at_N, by_N = sent(joined.at_E[at], device), sent(by_E[at], device)
            last = _Growth(by_E, at_N, by_N, int(room_N.min(initial=_MOST_ROOM)))
            self._begin(joined, at[joined.length_E[at] == 0])
        self.tables.lengthen(last.at_N, last.by_N)
        for (lane, sequence), item, length_E in zip(grown, held, lengths, strict=True):
            if lane not in full:
                item.number, item.length_E = sequence.tail.changes.number, length_E
        self._joined = None if full else joined._replace(length_E=after_E, last=last)
        return [(lane, sequence) for lane, sequence in grown if lane in full]

    def _begin(self, joined: _Joined, at_N: Ints) -> None:
        """Extents whose tasks had no slots."""
        if len(at_N):
            layer_E, head_E = (
                np.concatenate([getattr(item.places, name) for item in joined.held]) for name in ("layer_E", "head_E")
            )
            self.tables.begin(layer_E[at_N], joined.lane_E[at_N], head_E[at_N])

    def _put(self, anew: list[tuple[int, SequenceCache]]) -> None:
        parts = self._parts(anew)
        tasks = cut(parts, self.split_L)
        shifted = self.shifted_queries
        if tasks.most > self.tables.capacity:
            raise OutOfBatchSlots
        if shifted is not None and not shifted.put({part.lane: part.shifts for part in parts}):
            raise OutOfBatchSlots
        at_N = self.tables.put([lane for lane, _ in anew], tasks)
        at_E = np.append(at_N, 0)[tasks.last_E]  # where there is no task, -1 finds the 0
        self._take_in([(lane, sequence) for lane, sequence in anew if self._is_new(lane)])
        ends = accumulate(sum(len(table.length_E) for table in part.tables) for part in parts)
        for (lane, sequence), part, end in zip(anew, parts, ends, strict=True):
            tail = part.tables[-1]
            mine_E = at_E[end - len(tail.length_E) : end]
            number = sequence.tail.changes.number
            self._held[lane] = _Held(ref(sequence), number, tail.places, tail.length_E, mine_E, self._ends(tail))

    def _ends(self, tail: SegmentTable) -> Ints:
        """Where the last task of each extent ends at the latest."""
        split_E, length_E = self.split_L[tail.places.layer_E], tail.length_E
        has_none_E = length_E <= self.layout.sink_len  # or may have none
        is_reserved_E = (length_E == 0) & ~is_first(tail.places.row_E) & self._reserves
        end_E = np.maximum(num_pieces(length_E, split_E), 1) * split_E
        return np.where(has_none_E & ~is_reserved_E, length_E, end_E)

    @property
    def _reserves(self) -> bool:
        """Where a task does not depend on how many slots its head has before it."""
        return self.shifted_queries is None and not self.layout.mass

    def _parts(self, placed: list[tuple[int, SequenceCache]]) -> list[LaneTables]:
        return [
            LaneTables(
                lane,
                stored_tables(sequence),
                None if self.shifted_queries is None else shifts_of(sequence),
                self.layout.sinks_L if sequence.fp_sinks is not None and sequence.fp_sinks.fill else None,
                self._reserves,
            )
            for lane, sequence in placed
        ]

    def _is_new(self, lane: int) -> bool:
        """Codec states come with the first sealed slots, so before them a lane has no mean keys; full-precision
        sinks may be sealed one by one."""
        held = self._held[lane]
        return held is None or not len(held.length_E) or (self.layout.sink_len > 0 and not self._has_sinks[lane])

    def _take_in(self, added: list[tuple[int, SequenceCache]]) -> None:
        """What never changes of a sequence once it has stored slots: where its open block and its full-precision sinks
        lie, and its mean keys."""
        if not added:
            return
        lane_N = sent(np.array([lane for lane, _ in added]), self.open_LB2.device)
        address_NL2 = np.array([sequence.open.addresses for _, sequence in added])
        address_LN2 = np.ascontiguousarray(address_NL2.swapaxes(0, 1))
        self.open_LB2.index_copy_(1, lane_N, sent(address_LN2, self.open_LB2.device))
        if self.layout.sink_len:
            self._take_in_sinks([lane for lane, _ in added], lane_N, [sequence.fp_sinks for _, sequence in added])
        for index, mean_BHD in enumerate(self.mean_LBHD):
            means = [sequence.tail.layers[index].state.get("k", {}).get("mean") for _, sequence in added]
            zero_HD = mean_BHD.new_zeros(mean_BHD.shape[1:])
            mean_BHD.index_copy_(0, lane_N, torch.stack([zero_HD if mean is None else mean for mean in means]))

    def _take_in_sinks(self, lanes: list[int], lane_N: Tensor, blocks: Sequence[OpenBlock | None]) -> None:
        known = [block for block in blocks if block is not None]  # all: lanes of one layout have them
        address_LN2 = np.ascontiguousarray(np.array([block.addresses for block in known]).swapaxes(0, 1))
        self.sinks_LB2.index_copy_(1, lane_N, sent(address_LN2, lane_N.device))
        filled_N = np.array([bool(block.fill) for block in known])
        for lane, is_filled in zip(lanes, filled_N, strict=True):
            self._has_sinks[lane] = bool(is_filled)
        count_LN = np.ascontiguousarray(self.layout.sinks_L[:, None] * filled_N)
        self.sinks_LB.index_copy_(1, lane_N, sent(count_LN, lane_N.device))
