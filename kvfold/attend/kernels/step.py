"""A decode step over lanes: attention of every layer by two kernels that read nothing but device tables.

All that changes from step to step (tokens, positions, fill counts) comes in as tensors, all that changes from seal to
seal (tasks, open blocks, mean keys) is rewritten in place, so a captured graph stays valid.

    B lanes   T tokens of a lane   H KV heads   G query heads per KV head   Q query heads   D head dim   L layers
    R rows, lane by lane and head by head   X queries of a row, head by head (G * T)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from kvfold.attend.kernels import ops
from kvfold.attend.kernels.formats import CODECS, FLOATS
from kvfold.attend.kernels.tables import LaneTasks, Layout, Tables, choose_splits, lane_tasks, stored_tables
from kvfold.attend.track import Tracked
from kvfold.codec.base import Codec, Field
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.table import SegmentTable, columns, slot_strides
from kvfold.policy.reader import All
from kvfold.policy.registry import term_of

_NAMES = {dtype: name for name, dtype in FLOATS.items()}


_layouts: WeakKeyDictionary[SequenceCache, Layout | None] = WeakKeyDictionary()
_same_layout: dict[Layout, Layout] = {}


def layout_of(sequence: SequenceCache) -> Layout | None:
    """One object for all sequences whose lanes are alike; None where the kernels do not serve a sequence.

    They do if nothing is observed while decoding and every slot is read where it was. Sliding windows, moved positions
    and scorers that watch decoding go the way of `DecodePass`.
    """
    if sequence not in _layouts:
        _layouts[sequence] = _find_layout(sequence)
    return _layouts[sequence]


def _find_layout(sequence: SequenceCache) -> Layout | None:
    policy, spec = sequence.policy, sequence.spec
    classes = tuple(layer.page_class for layer in sequence.tail.layers)
    known = all(_codec_name(codec, c.kv_dtype) in CODECS for c in classes for codec in (c.k, c.v))
    aligned = all(stride * c.page_size % 16 == 0 for c in classes for stride in slot_strides(c))
    plain = isinstance(policy.attend, All) and not policy.position.shifts
    watched = Tracked.of([policy], decoding=True).anything
    if not known or not aligned or not plain or watched or len(spec.compressible_layers) < spec.num_layers:
        return None
    layout = Layout(spec, classes, sequence.config.open_len)
    return _same_layout.setdefault(layout, layout)


class OutOfLanes(Exception):
    """A sequence has outgrown its lane's table; new lanes are needed."""


class _Held(NamedTuple):
    """What a lane's table was made from. The sequence may be gone: graphs outlive sessions."""

    sequence: ref[SequenceCache]
    tables: tuple[SegmentTable, ...]


class Lanes:
    """Sequences in their places, and the tensors of every layer that kernels read for them."""

    def __init__(self, layout: Layout, sequences: Sequence[SequenceCache], num_lanes: int) -> None:
        spec, arena = layout.spec, sequences[0].arena
        self.layout, self.num_lanes, self.memory = layout, num_lanes, arena.memory
        parts = [stored_tables(sequence) for sequence in sequences]
        every = [table for tables in parts for table in tables]
        self.split_L = choose_splits(every, spec.num_layers, _num_processors(arena.device))
        most = max(self._tasks(tables).most(spec.num_layers) for tables in parts)
        self.tables = Tables(layout, num_lanes, _room_for(most, int(layout.heads_L.max())), arena.device)
        self.open_LB2 = torch.zeros(spec.num_layers, num_lanes, 2, dtype=torch.int64, device=arena.device)
        shapes = [(num_lanes, layer.num_kv_heads, layer.head_dim) for layer in spec.layers]
        self.mean_LBHD = [torch.zeros(shape, device=arena.device) for shape in shapes]
        self._held: list[_Held | None] = [None] * num_lanes

    def place(self, sequences: Sequence[SequenceCache]) -> list[int]:
        """The lane of each sequence; those that were here keep theirs, and only what changed is written."""
        held = {item.sequence(): lane for lane, item in enumerate(self._held) if item is not None}
        kept = {held[sequence] for sequence in sequences if sequence in held}
        free = [lane for lane in range(self.num_lanes) if lane not in kept]
        lanes = [held[sequence] if sequence in held else free.pop(0) for sequence in sequences]
        for lane, sequence in zip(lanes, sequences, strict=True):
            self._put(lane, sequence)
        for lane in free:
            if self._held[lane] is not None:
                self.tables.clear(lane)
                self._held[lane] = None
        self.tables.flush()
        return lanes

    def _put(self, lane: int, sequence: SequenceCache) -> None:
        tables, before = stored_tables(sequence), self._held[lane]
        is_new = before is None or before.sequence() is not sequence
        if before is not None and not is_new and _same(tables, before.tables):
            return
        tasks = self._tasks(tables)
        if tasks.most(self.layout.spec.num_layers) > self.tables.capacity:
            raise OutOfLanes
        self.tables.put(lane, tasks)
        if is_new:
            self.open_LB2[:, lane] = torch.tensor(sequence.open.addresses).to(self.open_LB2.device)
            for mean_BHD, layer in zip(self.mean_LBHD, sequence.tail.layers, strict=True):
                mean_BHD[lane] = layer.state.get("k", {}).get("mean", 0.0)
        self._held[lane] = _Held(ref(sequence), tables)

    def _tasks(self, tables: Sequence[SegmentTable]) -> LaneTasks:
        return lane_tasks(tables, self.layout, self.split_L)


class Step:
    """Attention of one step for T tokens in each lane; `fill_B` < 0 marks an empty lane."""

    def __init__(self, lanes: Lanes, fill_B: Tensor, num_tokens: int) -> None:
        self.lanes, self.fill_B, self.num_tokens = lanes, fill_B, num_tokens

    def attend(self, layer: int, q_QND: Tensor, k_HND: Tensor, v_HND: Tensor) -> Tensor:
        """Attention output [N, Q, D] for the packed tokens N, lane by lane; new slots go to the open blocks."""
        lanes, spec = self.lanes, self.lanes.layout.spec.layers[layer]
        page_class = lanes.layout.classes[layer]
        _, k_scale, _, _, v_scale, _ = columns(page_class)
        q_RXD = self._rows(q_QND, spec.num_kv_heads)
        state = {"mean": lanes.mean_LBHD[layer].flatten(0, 1)}
        stored_q_RXD, offset_RX = page_class.k.query(q_RXD, state)
        part_NXD, part_lse_NX = ops.attend_tasks(
            stored_q_RXD.contiguous(),
            offset_RX,
            lanes.memory,
            lanes.tables.task_LBC[layer].flatten(0, 1),
            lanes.tables.num_tasks,
            _codec_name(page_class.k, page_class.kv_dtype),
            _codec_name(page_class.v, page_class.kv_dtype),
            _num_groups(k_scale),
            _num_groups(v_scale),
            spec.scale,
            False,
        )
        out_RXD, _ = ops.merge_rows(
            part_NXD,
            part_lse_NX,
            lanes.tables.rows_LBH[layer, :, : spec.num_kv_heads].flatten(0, 1),
            q_RXD,
            self._rows(k_HND, spec.num_kv_heads),
            self._rows(v_HND, spec.num_kv_heads),
            lanes.memory,
            lanes.open_LB2[layer],
            self.fill_B,
            lanes.layout.open_len,
            _NAMES[page_class.kv_dtype],
            spec.scale,
        )
        out = out_RXD.view(lanes.num_lanes, spec.num_kv_heads, spec.group, self.num_tokens, spec.head_dim)
        return out.permute(0, 3, 1, 2, 4).reshape(-1, spec.num_query_heads, spec.head_dim)

    def _rows(self, x_AND: Tensor, num_heads: int) -> Tensor:
        """[heads, packed tokens, D] as rows [B * H, heads per KV head * T, D]: a view where T is 1."""
        num_lanes, head_dim = self.lanes.num_lanes, x_AND.shape[-1]
        x = x_AND.view(num_heads, -1, num_lanes, self.num_tokens, head_dim)
        return x.permute(2, 0, 1, 3, 4).reshape(num_lanes * num_heads, -1, head_dim).contiguous()


def _codec_name(codec: Codec, kv_dtype: torch.dtype) -> str:
    """As kernels know it; floats go by their dtype."""
    name = term_of(codec).name
    return _NAMES.get(kv_dtype, name) if name == "native" else name


def _num_groups(scale: Field | None) -> int:
    """Channel groups of a slot that have scales of their own; scales that slots share count as one."""
    return scale.width if scale is not None and scale.per == "slot" else 1


def _same(tables: Sequence[SegmentTable], others: Sequence[SegmentTable]) -> bool:
    return len(tables) == len(others) and all(a is b for a, b in zip(tables, others, strict=True))


def _num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def _room_for(num_tasks: int, num_heads: int) -> int:
    """Tasks a lane has room for: every head may grow by one, and a quarter more."""
    return -(-(num_tasks + num_tasks // 4 + num_heads) // 32) * 32
