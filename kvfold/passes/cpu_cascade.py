"""Cascade attention of a decode step on a CPU: sequences that share a prefix read its slots together.

A step is bound by the slots that it reads. The segments of a cached prefix are one for all sequences that share it, so
their queries are read against it as the rows of one call (attend/cpu_attention.py), and the rest of each sequence is
read on its own. Both are joined by their log-sum-exp.

    B sequences of a step   b those of a group   H KV heads   G query heads per KV head   Q query heads   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.attend.amx_layout import SLOTS
from kvfold.attend.cpu_attention import cpu_attention
from kvfold.attend.stored_parts import LENGTH, StoredParts, reads_head_dim, stored_parts
from kvfold.core import HAS_AVX512_KERNELS
from kvfold.pages.places import Ints
from kvfold.pages.segment import Segment, segment_table
from kvfold.pages.sequence import SequenceCache

Floats = NDArray[np.float32]

_FEWEST_SEQUENCES = 2


@dataclass(frozen=True, eq=False)
class Group:
    """Sequences that begin with the same `num_shared` segments, by their number in a step; `layers`: their places."""

    index_b: Ints
    num_shared: int
    layers: list[StoredParts]
    is_bf16: bool  # as the model is

    def attend(self, layer: int, q_BQD: Tensor, scale: float, found: tuple[Floats, Floats]) -> None:
        """Add the shared slots to what was found of the others: outputs [B, H, G, D] and log-sum-exps [B, H, G]."""
        out_BHGD, lse_BHG = found
        q_bQD = torch.from_numpy(q_BQD.numpy()[self.index_b])
        q_HGbD = q_bQD.view(len(self.index_b), *out_BHGD.shape[1:]).permute(1, 2, 0, 3)
        between = (q_BQD.shape[-1],) * 2
        call = cpu_attention(q_BQD.shape[-1], self.is_bf16)
        shared_HGbD, shared_HGb = call.attend_parts(q_HGbD, self.layers[layer].part_HP4, scale, between, causal=False)
        shared_bHGD, shared_bHG = shared_HGbD.permute(2, 0, 1, 3).numpy(), shared_HGb.permute(2, 0, 1).numpy()
        out_bHGD, lse_bHG = out_BHGD[self.index_b], lse_BHG[self.index_b]
        joined_bHG = np.logaddexp(lse_bHG, shared_bHG)
        own_bHG, other_bHG = (np.exp(x_bHG - joined_bHG)[..., None] for x_bHG in (lse_bHG, shared_bHG))
        out_BHGD[self.index_b] = own_bHG * out_bHGD + other_bHG * shared_bHGD
        lse_BHG[self.index_b] = joined_bHG


class SharedSlots(NamedTuple):
    """The groups of a step for a kernel that runs all layers (models/avx512_layer.py), one behind the other."""

    row_B: Ints  # of a sequence among those of all groups, or -1
    first_N: Ints  # row of each group, and the end
    part_LNHP4: NDArray[np.int64]  # where slots lie, as in stored_parts.py
    slots_LN: Ints  # of a head
    q_bX: Floats  # room for queries
    out_bX: Floats  # and outputs
    lse_X: Floats  # and log-sum-exps, [KV head, row, query head of it] of each group
    room_2X: NDArray[np.uint16]  # for keys and values as tiles read them


def shared_slots(groups: Sequence[Group], sequences: Sequence[SequenceCache]) -> SharedSlots | None:
    """None where there are groups that such a kernel, whose attention is by AMX tiles, cannot read."""
    spec = sequences[0].spec
    layer, num_layers = spec.layers[0], len(spec.layers)
    if groups and cpu_attention(layer.head_dim, spec.is_bf16).attend_behind is None:
        return None
    row_B = np.full(len(sequences), -1, dtype=np.int64)
    first_N = np.array([0, *accumulate(len(group.index_b) for group in groups)], dtype=np.int64)
    for first, group in zip(first_N, groups, strict=False):
        row_B[group.index_b] = first + np.arange(len(group.index_b))
    most = max((parts.part_HP4.shape[1] for group in groups for parts in group.layers), default=0)
    part_LNHP4 = np.zeros((num_layers, len(groups), layer.num_kv_heads, most, 4), dtype=np.int64)
    for n, group in enumerate(groups):
        for number, parts in enumerate(group.layers):
            part_LNHP4[number, n, :, : parts.part_HP4.shape[1]] = parts.part_HP4
    slots_LN = part_LNHP4[:, :, 0, :, LENGTH].sum(-1)
    num_blocks = -(-int(slots_LN.max(initial=0)) // SLOTS)
    width = layer.num_query_heads * layer.head_dim
    size = layer.num_kv_heads * num_blocks * SLOTS * layer.head_dim
    q_bX, out_bX, lse_X, room_2X = (
        torch.empty(shape, dtype=dtype).numpy()
        for shape, dtype in (
            ((int(first_N[-1]), width), torch.float32),
            ((int(first_N[-1]), width), torch.float32),
            (int(first_N[-1]) * layer.num_query_heads, torch.float32),
            ((2, size), torch.uint16),
        )
    )
    return SharedSlots(row_B, first_N, part_LNHP4, slots_LN, q_bX, out_bX, lse_X, room_2X)


def groups_of(sequences: Sequence[SequenceCache]) -> list[Group]:
    """The groups of a step."""
    if not HAS_AVX512_KERNELS or not reads_head_dim(sequences[0].spec.layers[0].head_dim):
        return []
    found: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        if sequence.segments and sequence.fp_sinks is None:
            found.setdefault(id(sequence.segments[0]), []).append(index)
    groups = []
    for indices in found.values():
        if len(indices) >= _FEWEST_SEQUENCES:
            num_shared = _num_shared([sequences[index].segments for index in indices])
            layers = _parts_of(sequences[indices[0]], num_shared)
            if layers is not None:
                groups.append(Group(np.array(indices), num_shared, layers, sequences[0].spec.is_bf16))
    return groups


def _num_shared(segments: Sequence[Sequence[Segment]]) -> int:
    """From the first one on."""
    alike = (len(set(map(id, level))) == 1 for level in zip(*segments, strict=False))
    return sum(takewhile(bool, alike))


def _parts_of(sequence: SequenceCache, num_shared: int) -> list[StoredParts] | None:
    """The same object while the sequence has these segments; None if a layer of theirs is empty or no floats."""
    segments = sequence.segments[:num_shared]
    tables = tuple(map(segment_table, segments))
    known: tuple[tuple[object, ...], list[StoredParts] | None] | None = sequence.derived.get("cascade")
    if known is None or len(known[0]) != len(tables) or not all(map(is_, known[0], tables)):
        known = sequence.derived["cascade"] = tables, _build(segments, sequence.spec.kv_dtype)
    return known[1]


def _build(segments: Sequence[Segment], dtype: torch.dtype) -> list[StoredParts] | None:
    found = []
    for layer in range(len(segments[0].layers)):
        parts = stored_parts([segment.layers[layer] for segment in segments], dtype)
        if parts is None or not parts.are_even:
            return None
        found.append(parts)
    return found
