"""Observer state of captured decode steps: attention mass and the last queries of every lane, on the device.

A CUDA graph holds addresses, so it writes the observations of a lane to fixed tensors, and the sequence's observer
state has views of them: it is up to date without a copy. A seal, an eager pass or a rollback replaces the tensors of an
observer state; the next captured step then copies the new ones to the lane's place.

A step updates it for one new token per lane, without a host sync. Mass: a kernel computes the weights again, given each
query's log-sum-exp, over the tasks of stored slots and over the open block, which is a task of its own. Last queries:
the earlier ones move up, the new one comes last. Lanes without a sequence (`fill` < 0: also while a step is captured)
are not updated.

    L layers   B lanes   H KV heads   Q query heads   S slots of a row   R open block   W window   D head dim
    C tasks of a lane   X queries of a row
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from kvfold.attend.kernels import ops
from kvfold.attend.kernels.formats import K_CODE, LENGTH, MASS, NUM_COLUMNS, QUERY
from kvfold.pages.observer_state import LayerObserverState
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured.block_tables import BlockTables, Layout

_Observed = tuple[Tensor | None, Tensor | None, Tensor | None]  # mass of stored slots and open block, last queries


class _Held(NamedTuple):
    sequence: ref[SequenceCache]
    places: list[_Observed]  # where the observations of each layer lie


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
        return all(all(map(is_, place, _observed(state))) for place, state in states)

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
            for mine, theirs in zip(place, _observed(state), strict=True):
                if mine is not None and theirs is None:
                    mine.zero_()
                elif mine is not None and theirs is not None and mine.numel():
                    to.append(mine)
                    of.append(theirs[:, -mine.shape[1] :])  # a prompt's scorer may have looked at more queries
            state.mass_HS, state.open_mass_HR, state.last_q_QWD = place
        if to:
            torch._foreach_copy_(to, of)
        sequence.observed.is_live = True
        self._held[lane] = _Held(ref(sequence), places)

    def _place(self, lane: int, layer: int, sequence: SequenceCache) -> _Observed:
        spec, layout = self.layout.spec.layers[layer], self.layout
        heads, queries = spec.num_kv_heads, spec.num_query_heads
        return (
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


def _observed(state: LayerObserverState) -> _Observed:
    return state.mass_HS, state.open_mass_HR, state.last_q_QWD


def _row_len(sequence: SequenceCache, layer: int) -> int:
    """Stored slots of the longest head."""
    return max(sequence.stored_lens(layer))


class StepObserver:
    """Made at the start of a step; `fill_B`: slots of the open blocks before it."""

    def __init__(
        self, observers: BatchObservers, tables: BlockTables, open_LB2: Tensor, memory: Tensor, fill_B: Tensor
    ) -> None:
        self._observers, self._memory, self._layout, self._tables = observers, memory, observers.layout, tables
        is_used_B = fill_B >= 0
        if observers.layout.mass:
            self._row_LBC = (tables.task_LBC[..., QUERY] // tables.num_shifts).to(torch.int32)
            observers.open_tasks.update(open_LB2, fill_B + 1)
            # Behind the fill stands what drafts that rolled back had received.
            slot_R = torch.arange(observers.layout.open_len, device=fill_B.device)
            is_free_BR = (slot_R >= fill_B.unsqueeze(-1)) & is_used_B.unsqueeze(-1)
            observers.open_LBHR.masked_fill_(is_free_BR.unsqueeze(1), 0.0)
        if observers.layout.window:
            number_B = torch.arange(len(fill_B), device=fill_B.device)
            self._lane_B = number_B.masked_fill(~is_used_B, len(fill_B))
            last_LBQWD, is_used = observers.last_LBQWD[:, :-1], is_used_B.view(-1, 1, 1, 1)
            if last_LBQWD.shape[3] > 1:  # drop the oldest query of the lanes in use
                last_LBQWD[..., :-1, :] = torch.where(is_used, last_LBQWD[..., 1:, :], last_LBQWD[..., :-1, :])

    def queries(self, layer: int, q_QBD: Tensor) -> None:
        """The new queries of a layer, one a lane, as the model gave them."""
        if self._layout.window:
            last_BQD = self._observers.last_LBQWD[layer, :, : q_QBD.shape[0], -1, : q_QBD.shape[2]]
            last_BQD.index_copy_(0, self._lane_B, q_QBD.transpose(0, 1).to(last_BQD.dtype))

    def stored_mass(
        self, layer: int, q_RXD: Tensor, offset_RX: Tensor | None, lse_RX: Tensor, codec: str, groups: int
    ) -> None:
        """What the stored slots of a layer received; queries as they met the keys."""
        if self._layout.mass:
            ops.task_mass(
                q_RXD,
                offset_RX,
                self._memory,
                self._tables.task_LBC[layer].flatten(0, 1),
                self._tables.order(layer),
                lse_RX,
                self._row_LBC[layer].flatten(),
                codec,
                groups,
                self._layout.spec.layers[layer].scale,
                self._observers.mass_LBHS[layer].view(-1),
                has_bias=self._layout.classes[layer].has_bias,
                has_skip=self._tables.num_shifts > 1,
            )

    def open_mass(self, layer: int, q_RXD: Tensor, lse_RX: Tensor, kv_dtype: str) -> None:
        """What the open block received, the new slot in it: after it was stored."""
        if self._layout.mass:
            spec = self._layout.spec.layers[layer]
            task_R, mass = self._observers.open_tasks.of(layer), self._observers.open_LBHR[layer].view(-1)
            row_R = self._observers.open_tasks.row_N[: len(task_R)]
            ops.task_mass(q_RXD, None, self._memory, task_R, None, lse_RX, row_R, kv_dtype, 1, spec.scale, mass)
