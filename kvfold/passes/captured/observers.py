"""Observer state of captured decode steps: attention mass and the last queries of every lane, on the device.

A CUDA graph holds addresses, so it writes the observations of a lane to fixed tensors, and the sequence's observer
state has views of them: it is up to date without a copy. A seal, an eager pass or a rollback replaces the tensors of an
observer state; the next captured step then copies the new ones to the lane's place.

    L layers   B lanes   H KV heads   Q query heads   S slots of a row   R open block   W window   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from kvfold.attend.kernels.formats import K_CODE, LENGTH, MASS, NUM_COLUMNS, QUERY
from kvfold.pages.observer_state import LayerObserverState
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured.block_tables import Layout


@dataclass(frozen=True)
class _Place:
    """Where the observations of one layer of one lane lie; the mass of as many stored slots as there are."""

    mass_HS: Tensor | None
    open_mass_HR: Tensor | None
    last_q_QWD: Tensor | None

    def tensors(self) -> list[Tensor | None]:
        return [self.mass_HS, self.open_mass_HR, self.last_q_QWD]


class _Held(NamedTuple):
    sequence: ref[SequenceCache]
    places: list[_Place]


class OpenTasks:
    """Open blocks as split-KV tasks, one for each head of each lane; keys only. MASS counts through a table [B, H,
    open_len] of every layer."""

    def __init__(self, layout: Layout, num_lanes: int, device: torch.device) -> None:
        self._heads = layout.heads_L.tolist()
        most, lane_B1 = max(self._heads), torch.arange(num_lanes, device=device).unsqueeze(-1)
        head_H = torch.arange(most, device=device)
        shape = (len(self._heads), num_lanes, most, NUM_COLUMNS)
        self._task_LBH = torch.zeros(shape, dtype=torch.int64, device=device)
        self._task_LBH[..., MASS] = (lane_B1 * most + head_H) * layout.open_len
        self._task_LBH[..., QUERY] = lane_B1 * torch.tensor(self._heads, device=device).view(-1, 1, 1) + head_H
        sizes = [layout.open_len * layer.head_dim * layout.spec.kv_dtype.itemsize for layer in layout.spec.layers]
        self._byte_L1H = torch.tensor(sizes, device=device).view(-1, 1, 1) * head_H
        self.row_N = torch.arange(num_lanes * most, dtype=torch.int32, device=device)

    def update(self, open_LB2: Tensor, length_B: Tensor) -> None:
        """Where the open blocks lie and how many of their slots count; 0 in lanes without a sequence."""
        self._task_LBH[..., K_CODE] = open_LB2[..., :1] + self._byte_L1H
        self._task_LBH[..., LENGTH] = length_B.unsqueeze(-1)

    def of(self, layer: int) -> Tensor:
        """[B * H, columns]"""
        return self._task_LBH[layer, :, : self._heads[layer]].flatten(0, 1).contiguous()


class BatchObservers:
    """Observer state of B lanes, with room for the slots of these sequences and a quarter more."""

    def __init__(self, layout: Layout, sequences: Sequence[SequenceCache], num_lanes: int) -> None:
        spec, device = layout.spec, sequences[0].arena.device
        self.layout, shape = layout, (spec.num_layers, num_lanes)
        num_heads, num_queries = int(layout.heads_L.max()), max(layer.num_query_heads for layer in spec.layers)
        width = max(layer.head_dim for layer in spec.layers)
        most = max(_row_len(sequence, layer) for sequence in sequences for layer in range(spec.num_layers))
        self.row_len = -(-(most + most // 4 + layout.open_len) // 64) * 64 if layout.mass else 0
        self.mass_LBHS = torch.zeros(*shape, num_heads, self.row_len, device=device)
        self.open_LBHR = torch.zeros(*shape, num_heads, layout.open_len if layout.mass else 0, device=device)
        self.open_tasks = OpenTasks(layout, num_lanes, device)
        # One lane more, for the queries of lanes without a sequence.
        last = (spec.num_layers, num_lanes + 1, num_queries, layout.window, width)
        self.last_LBQWD = torch.zeros(last, dtype=spec.dtype, device=device)
        self._held: list[_Held | None] = [None] * num_lanes

    def place(self, lanes: Sequence[int], sequences: Sequence[SequenceCache]) -> bool:
        """Copy in what was observed elsewhere; False if there is no room for it."""
        added = [item for item in zip(lanes, sequences, strict=True) if not self._has(*item)]
        layers = range(self.layout.spec.num_layers)
        if self.layout.mass and any(_row_len(one, layer) > self.row_len for _, one in added for layer in layers):
            return False
        for lane, sequence in added:
            self._leave(lane)
            self._take(lane, sequence)
        return True

    def _has(self, lane: int, sequence: SequenceCache) -> bool:
        """Whether the sequence's observer state is made of this lane's tensors."""
        held = self._held[lane]
        if held is None or held.sequence() is not sequence:
            return False
        states = zip(held.places, sequence.observed.layers, strict=True)
        return all(all(map(is_, place.tensors(), _observed(state))) for place, state in states)

    def _leave(self, lane: int) -> None:
        """The sequence that had the lane gets copies."""
        held = self._held[lane]
        sequence = held.sequence() if held is not None else None
        if sequence is not None and self._has(lane, sequence):
            sequence.observed = sequence.observed.copy()
        self._held[lane] = None

    def _take(self, lane: int, sequence: SequenceCache) -> None:
        places = [self._place(lane, layer, sequence) for layer in range(self.layout.spec.num_layers)]
        to: list[Tensor] = []
        of: list[Tensor] = []
        for place, state in zip(places, sequence.observed.layers, strict=True):
            for mine, theirs in zip(place.tensors(), _observed(state), strict=True):
                if mine is not None and theirs is None:
                    mine.zero_()
                elif mine is not None and theirs is not None and mine.numel():
                    to.append(mine)
                    of.append(theirs[:, -mine.shape[1] :])  # a prompt's scorer may have looked at more queries
            state.mass_HS, state.open_mass_HR, state.last_q_QWD = place.tensors()
        if to:
            torch._foreach_copy_(to, of)
        sequence.observed.is_live = True
        self._held[lane] = _Held(ref(sequence), places)

    def _place(self, lane: int, layer: int, sequence: SequenceCache) -> _Place:
        spec, layout = self.layout.spec.layers[layer], self.layout
        heads, queries = spec.num_kv_heads, spec.num_query_heads
        return _Place(
            self.mass_LBHS[layer, lane, :heads, : _row_len(sequence, layer)] if layout.mass else None,
            self.open_LBHR[layer, lane, :heads] if layout.mass else None,
            self.last_LBQWD[layer, lane, :queries, :, : spec.head_dim] if layout.window else None,
        )


def has_queries(sequence: SequenceCache, window: int) -> bool:
    """Whether the queries just before the next token are known, as many as the window holds; layers see the same."""
    if not window:
        return True
    state = sequence.observed.layers[0]
    is_whole = state.last_q_QWD is not None and state.last_q_QWD.shape[1] >= window
    return is_whole and state.query_end == sequence.logical_len


def _observed(state: LayerObserverState) -> list[Tensor | None]:
    return [state.mass_HS, state.open_mass_HR, state.last_q_QWD]


def _row_len(sequence: SequenceCache, layer: int) -> int:
    """Stored slots of the longest head."""
    return max(sequence.stored_lens(layer))
