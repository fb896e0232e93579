"""Position shifts of stored keys under `slot` positions (StreamingLLM): by how much each run of slots appears moved.

Stored slot i of n appears n - i before the first token that is not sealed. So the shift is constant while positions are
consecutive, and changes at a *gap*, where tokens were evicted. Positions lie on the device and are read once for all
layers, only if something was evicted.

A captured step has one copy of a head's queries for each shift of its stored keys. A lane has room for V shifts in each
head, so a CUDA graph stays valid while they change. Unused shifts are 0.

    X heads of all layers   E extents of all segments   N gaps   S slots of all heads, head by head   V shifts of a head
    L layers   B lanes   H KV heads   R rows, lane by lane and head by head
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvfold.attend.kernels import ops
from kvfold.core import Rope
from kvfold.pages.async_copy import sent, upload
from kvfold.pages.layout import POSITION
from kvfold.pages.places import Ints, SegmentTable
from kvfold.pages.segment import segment_table
from kvfold.pages.sequence import SequenceCache

MAX_SHIFTS = 32  # of a head: each costs a rotation of its queries, and at least one task
_FEWEST = 2  # shifts of a head: sinks and a window


@dataclass(frozen=True, eq=False)
class PositionShifts:
    """The gaps of one sequence: the first slot of each head, and every slot whose position is not the next."""

    row_N: Ints  # which of the X heads
    slot_N: Ints  # in the head's row of stored slots
    shift_N: Ints  # of this slot and those up to the next gap
    unit_X: Ints  # slots: a stretch that a kernel reads begins at a multiple

    @cached_property
    def shift_id_N(self) -> Ints:
        """0, 1, 2 … within each head."""
        first_X = np.searchsorted(self.row_N, np.arange(len(self.unit_X)))
        return np.arange(len(self.row_N)) - first_X[self.row_N]

    @cached_property
    def most(self) -> int:
        """Shifts of the head that has most."""
        return int(self.shift_id_N.max(initial=0)) + 1

    def table(self, num_shifts: int) -> Ints:
        """[X, V]: the shifts of each head, padded with 0."""
        shift_XV = np.zeros((len(self.unit_X), num_shifts), dtype=np.int64)
        shift_XV[self.row_N, self.shift_id_N] = self.shift_N
        return shift_XV


def shifts_of(sequence: SequenceCache) -> PositionShifts | None:
    """The shifts of a sequence, the same object until slots change; None if a head has more than MAX_SHIFTS."""
    known: tuple[int, PositionShifts | None] | None = sequence.derived.get("shifts")
    number = sequence.tail.changes.number
    if known is None or known[0] != number:
        known = sequence.derived["shifts"] = number, _find(sequence)
    return known[1]


def stored_tables(sequence: SequenceCache) -> tuple[SegmentTable, ...]:
    """What a lane is made of; the same objects until slots or pages change."""
    return tuple(segment_table(segment) for segment in (*sequence.segments, sequence.tail))


def stored_lens(tables: Sequence[SegmentTable], num_rows: int) -> Ints:
    """Slots of each head [X]."""
    row_E = np.concatenate([table.places.row_E for table in tables])
    length_E = np.concatenate([table.length_E for table in tables])
    return np.bincount(row_E, length_E, num_rows).astype(np.int64)


def _find(sequence: SequenceCache) -> PositionShifts | None:
    tables = stored_tables(sequence)
    # Addresses are multiples of 16 bytes at every 16th slot; slots that share scales stay together.
    layers = sequence.tail.layers
    unit_X = np.repeat([max(16, layer.page_class.group) for layer in layers], [layer.num_heads for layer in layers])
    length_X = stored_lens(tables, len(unit_X))
    end_X = np.cumsum(length_X)
    first_X = end_X - length_X
    first_N = first_X[length_X > 0]
    if (length_X == sequence.sealed_len).all():  # nothing was evicted
        at_N, position_N = first_N, np.zeros_like(first_N)
    else:
        at_N, position_N = _gaps(_positions(sequence, tables), first_N, MAX_SHIFTS * len(length_X))
    row_N = np.searchsorted(end_X, at_N, side="right")
    slot_N = at_N - first_X[row_N]
    shift_N = sequence.sealed_len - length_X[row_N] + slot_N - position_N
    shifts = PositionShifts(row_N, slot_N, shift_N, unit_X)
    return shifts if shifts.most <= MAX_SHIFTS else None


def _gaps(position_S: Tensor, first_N: Ints, most: int) -> tuple[Ints, Ints]:
    """Where they are among the slots of all heads, and the positions there; `first_N` begin a head. Of more than
    `most`, one more."""
    is_gap_S = torch.ones_like(position_S, dtype=torch.bool)
    is_gap_S[1:] = position_S.diff() != 1
    is_gap_S[upload(first_N.tolist(), position_S.device)] = True
    at_N = is_gap_S.nonzero().squeeze(-1)[: most + 1]
    found_2N = torch.stack((at_N, position_S[at_N].to(torch.int64))).cpu().numpy()
    return found_2N[0], found_2N[1]


def _positions(sequence: SequenceCache, tables: tuple[SegmentTable, ...]) -> Tensor:
    """int32 [S] of all heads, on the device."""
    row_E = np.concatenate([table.places.row_E for table in tables])
    order_E = np.argsort(row_E, kind="stable")
    length_E = np.concatenate([table.length_E for table in tables])[order_E]
    address_E = np.concatenate([table.places.address_EF[:, -1] for table in tables])[order_E]
    before_E = np.cumsum(length_E) - length_E
    origin_E = address_E // POSITION.bytes() - before_E  # slot s of all lies at its extent's origin + s
    device, num_slots = sequence.arena.device, int(length_E.sum())
    lengths = upload(length_E.tolist(), device)
    origin_S = torch.repeat_interleave(upload(origin_E.tolist(), device), lengths, output_size=num_slots)
    return sequence.arena.memory.view(torch.int32)[origin_S + torch.arange(num_slots, device=device)]


class ShiftedQueries:
    """Shifts of B lanes on the device, with as much room as these sequences need."""

    def __init__(self, sequences: Sequence[SequenceCache], num_lanes: int) -> None:
        most = max(shifts.most for sequence in sequences if (shifts := shifts_of(sequence)) is not None)
        self.num_shifts = 1 << (max(most, _FEWEST) - 1).bit_length()
        device, layers = sequences[0].arena.device, sequences[0].spec.layers
        self._ropes, self._heads = [layer.rope for layer in layers], [layer.num_kv_heads for layer in layers]
        self._period = {rope: rope.inverse_periods(device) for rope in set(self._ropes) if rope is not None}
        self._shift_L = [
            torch.zeros(num_lanes, heads, self.num_shifts, dtype=torch.int32, device=device) for heads in self._heads
        ]

    def put(self, lanes: Mapping[int, PositionShifts | None]) -> bool:
        """Write the shifts of these lanes; False if one of them has too many."""
        shifts = [item for item in lanes.values() if item is not None]
        if max(item.most for item in shifts) > self.num_shifts:
            return False
        shift_BXV = np.stack([item.table(self.num_shifts) for item in shifts]).astype(np.int32)
        lane_B = sent(np.array(list(lanes)), self._shift_L[0].device)
        shift_L = sent(shift_BXV, lane_B.device).split(self._heads, dim=1)
        for mine_BHV, now_BHV in zip(self._shift_L, shift_L, strict=True):
            mine_BHV.index_copy_(0, lane_B, now_BHV)
        return True

    def queries(self, layer: int, q_RXD: Tensor) -> Tensor:
        """[R * V, X, D]: the queries of each row, rotated back by each of its shifts."""
        rope = self._ropes[layer]
        assert isinstance(rope, Rope)  # checked when the session was made
        shift_RV = self._shift_L[layer].flatten(0, 1)
        found: Tensor = ops.rotated_query(q_RXD, shift_RV, self._period[rope], rope.interleaved)
        return found
